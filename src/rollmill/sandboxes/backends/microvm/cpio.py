"""Archives in the form that a kernel unpacks at its start (cpio, "newc"). Pure."""

from __future__ import annotations

import stat

_MAGIC = "070701"
_END = "TRAILER!!!"
_BLOCK = 512


class Archive:
    """Entries one after another; directories must come before what is in them.

    Example:
        >>> archive = Archive()
        >>> archive.directory("dev")
        >>> archive.file("init", b"x", mode=0o755)
        >>> len(archive.close()) % 512
        0
    """

    def __init__(self) -> None:
        self._data = bytearray()
        self._number = 0

    def directory(self, name: str, *, mode: int = 0o755) -> None:
        """Add a directory."""
        self._add(name, b"", mode=stat.S_IFDIR | mode)

    def file(self, name: str, data: bytes, *, mode: int = 0o644) -> None:
        """Add a file."""
        self._add(name, data, mode=stat.S_IFREG | mode)

    def device(self, name: str, *, major: int, minor: int) -> None:
        """Add a character device."""
        self._add(name, b"", mode=stat.S_IFCHR | 0o600, device=(major, minor))

    def close(self) -> bytes:
        """Return the whole archive."""
        self._add(_END, b"", mode=0)
        self._data += bytes(-len(self._data) % _BLOCK)
        return bytes(self._data)

    def _add(self, name: str, data: bytes, *, mode: int, device: tuple[int, int] = (0, 0)) -> None:
        self._number += 1
        text = name.encode() + b"\0"
        # number, mode, uid, gid, links, time, size, device of the archive, device of the entry, name, check sum
        fields = (self._number, mode, 0, 0, 1, 0, len(data), 0, 0, *device, len(text), 0)
        self._data += _MAGIC.encode() + b"".join(b"%08X" % one for one in fields) + text
        self._data += bytes(-len(self._data) % 4)
        self._data += data
        self._data += bytes(-len(self._data) % 4)
