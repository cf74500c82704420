"""Entries of a layer, and the laws over their names.

Pure. Names are bytes, as file systems have them. A name that has passed `split_path` has no way out of the directory
it is used in, unless something there is a symbolic link: that is what `tree_files` is for.
"""

from __future__ import annotations

import enum

import msgspec

from rollmill.sandboxes.images.refusals import Refusal, refused, shown

MOST_NAME_BYTES = 255
# The kernel's own bound, less one for the closing zero.
MOST_PATH_BYTES = 4095
MOST_DEPTH = 200
WHITEOUT = b".wh."
OPAQUE = b".wh..wh..opq"
_RESERVED = b".wh..wh."


class Kind(enum.Enum):
    """What an entry is."""

    FILE = "file"
    DIRECTORY = "directory"
    SYMBOLIC_LINK = "symbolic_link"
    HARD_LINK = "hard_link"
    FIFO = "fifo"
    CHARACTER_DEVICE = "character_device"
    BLOCK_DEVICE = "block_device"


DEVICES = (Kind.CHARACTER_DEVICE, Kind.BLOCK_DEVICE)


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of a layer.

    Attributes:
        path: as it stands in the source, not yet checked.
        kind: what it is.
        mode: permission bits with setuid, setgid and sticky.
        uid: owner inside the image.
        gid: group inside the image.
        mtime_ns: time of change, nanoseconds since 1970.
        size: bytes of content that follow; 0 for all but files.
        link: target of a link: any text for a symbolic one, a path of the same layer for a hard one.
        xattrs: extended attributes, sorted by name.
        device: major and minor number of a device.
    """

    path: bytes
    kind: Kind
    mode: int = 0o644
    uid: int = 0
    gid: int = 0
    mtime_ns: int = 0
    size: int = 0
    link: bytes = b""
    xattrs: tuple[tuple[bytes, bytes], ...] = ()
    device: tuple[int, int] = (0, 0)


def split_path(raw: bytes, *, what: str = "path") -> tuple[bytes, ...]:
    """Return the components of a path relative to the layer's root; empty for the root itself.

    Raises:
        ImageError: if it is absolute, leads upwards, is too long or too deep, or holds a zero byte.
    """
    if not raw or b"\0" in raw:
        raise refused(Refusal.NAME, f"a {what} in the layer is empty or holds a zero byte: {shown(raw)}")
    if raw.startswith(b"/"):
        raise refused(Refusal.TRAVERSAL, f"the {what} {shown(raw)} in the layer is absolute; layers hold relative ones")
    if len(raw) > MOST_PATH_BYTES:
        raise refused(
            Refusal.NAME, f"a {what} in the layer has {len(raw)} bytes, most is {MOST_PATH_BYTES}: {shown(raw)}"
        )
    parts = tuple(part for part in raw.split(b"/") if part not in (b"", b"."))
    if b".." in parts:
        raise refused(Refusal.TRAVERSAL, f"the {what} {shown(raw)} in the layer leads upwards")
    if len(parts) > MOST_DEPTH:
        raise refused(Refusal.NAME, f"a {what} in the layer is {len(parts)} deep, most is {MOST_DEPTH}: {shown(raw)}")
    for part in parts:
        if len(part) > MOST_NAME_BYTES:
            what = f"a name in the layer has {len(part)} bytes, most is {MOST_NAME_BYTES}: {shown(part)}"
            raise refused(Refusal.NAME, what)
    return parts


class Marker(enum.Enum):
    """What a whiteout says about the layers below."""

    HIDE = "hide"
    OPAQUE = "opaque"
    FOREIGN = "foreign"


def marker_of(name: bytes) -> tuple[Marker, bytes] | None:
    """Return what a name of OCI's form says, and about which sibling; `None` for an ordinary name.

    `FOREIGN` are names of one union file system's own books, which mean nothing here.

    Raises:
        ImageError: if it hides nothing that could have that name.
    """
    if not name.startswith(WHITEOUT):
        return None
    if name == OPAQUE:
        return Marker.OPAQUE, b""
    if name.startswith(_RESERVED):
        return Marker.FOREIGN, b""
    hidden = name.removeprefix(WHITEOUT)
    if hidden in (b"", b".", b".."):
        raise refused(Refusal.NAME, f"the whiteout {shown(name)} in the layer hides nothing that has a name")
    return Marker.HIDE, hidden


class Attribute(enum.Enum):
    """What becomes of an extended attribute."""

    KEEP = "keep"
    DROP = "drop"
    FORBID = "forbid"


def attribute_law(name: bytes) -> Attribute:
    """Return what becomes of an attribute.

    The overlay's own are forbidden: with them a layer could point at files of another layer. `user.` attributes are
    kept. The rest (file capabilities, labels of security modules, the host's lists of access) has no effect in a
    sandbox, where nothing gains privileges, and is dropped and counted.
    """
    for prefix in (b"user.overlay.", b"trusted.overlay.", b"user.fuseoverlayfs.", b"user.containers."):
        if name.startswith(prefix):
            return Attribute.FORBID
    return Attribute.KEEP if name.startswith(b"user.") else Attribute.DROP
