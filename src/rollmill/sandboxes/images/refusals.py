"""What can be wrong with an image: one kind for each refusal, so that callers need not read messages."""

from __future__ import annotations

import enum

from rollmill.errors import ImageError


class Refusal(enum.Enum):
    """Kinds of refusal; `ImageError.reason` is the value of one of these."""

    UNKNOWN = "unknown_image"
    TOO_LARGE = "too_large"
    TOO_MANY = "too_many_entries"
    BOMB = "decompression_bomb"
    DIGEST = "digest_mismatch"
    TRAVERSAL = "path_traversal"
    NAME = "impossible_name"
    DUPLICATE = "duplicate_entry"
    HARD_LINK = "hard_link_outside"
    DEVICE = "device_node"
    SETUID = "setuid_program"
    ATTRIBUTE = "forbidden_attribute"
    SPARSE = "sparse_file"
    TRUNCATED = "truncated"
    MALFORMED = "malformed"
    MEDIA_TYPE = "unsupported_media_type"
    RECIPE = "malformed_recipe"
    BUILD = "build_failed"
    BOOTSTRAP = "bootstrap_failed"
    CHANGED = "changed_while_read"
    DAMAGED = "damaged_store"
    IN_USE = "in_use"
    MACHINE = "not_possible_here"


def refused(kind: Refusal, message: str) -> ImageError:
    """Return the error of one refusal, to be raised."""
    return ImageError(message, reason=kind.value)


def shown(raw: bytes, *, most: int = 120) -> str:
    """Return a name from an image for a message: readable, bounded, and never able to move the cursor."""
    text = raw if len(raw) <= most else raw[: most // 2] + b"..." + raw[-most // 2 :]
    return repr(text.decode("utf-8", "backslashreplace"))
