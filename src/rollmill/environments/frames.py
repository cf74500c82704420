"""Length-prefixed MessagePack between the controller and a scoring process.

Decides nothing. A frame is four bytes (little-endian length) and a body. Nothing is pickled.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

HEADER_BYTES = 4
LARGEST_FRAME_BYTES = 64 * 2**20


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """Controller to process: score this reply."""

    number: int
    text: str
    reference: dict[str, Any]


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """Process to controller.

    Attributes:
        number: the job's; 0 for the first frame, which says whether the scorer could be built.
        kind: `ready`, `refused` (the scorer cannot be built), `score`, or `raised`.
        value: the score; `None` where the scorer returned no number.
        text: what was raised or refused.
    """

    number: int
    kind: Literal["ready", "refused", "score", "raised"]
    value: float | None = None
    text: str = ""


def frame(record: Any) -> bytes:
    """Return the record as one frame.

    Raises:
        ValueError: if it is larger than a frame may be.
    """
    body = msgspec.msgpack.encode(record)
    if len(body) > LARGEST_FRAME_BYTES:
        raise ValueError(f"a frame of {len(body)} bytes is over the limit of {LARGEST_FRAME_BYTES}")
    return len(body).to_bytes(HEADER_BYTES, "little") + body


def body_bytes(header: bytes) -> int:
    """Return the length that a header announces.

    Raises:
        ValueError: if it is over the limit, as when something else wrote to the stream.
    """
    length = int.from_bytes(header, "little")
    if length > LARGEST_FRAME_BYTES:
        raise ValueError(f"a frame announces {length} bytes, over the limit of {LARGEST_FRAME_BYTES}")
    return length
