"""Equal files of different layers as one: a pool of hard links, named by content and appearance; and seals of trees.

A file's inode carries its owner, mode, time and attributes, so only files that agree in all of them are shared.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from contextlib import suppress
from pathlib import Path

Attributes = tuple[tuple[bytes, bytes], ...]

# Smaller ones share a disk block at most; making them hard links would save nothing that counts.
LEAST_SHARED_BYTES = 4096
_SCRATCH = b".rollmill-shared"
# What a full inode, another file system, or a sweep that was quicker say: the file stays a copy of its own.
_NOT_SHARED = (errno.EMLINK, errno.EXDEV, errno.ENOENT, errno.EEXIST, errno.EPERM, errno.ENOSPC, errno.EDQUOT)


def object_key(told: os.stat_result, *, content: bytes, xattrs: Attributes) -> str:
    """Return the name of a file by everything that its inode holds.

    Args:
        told: of the file.
        content: sha256 of its content.
        xattrs: sorted.
    """
    head = (stat.S_IMODE(told.st_mode), told.st_uid, told.st_gid, told.st_mtime_ns, told.st_size)
    return hashlib.sha256(repr((head, content, xattrs)).encode()).hexdigest()


class ObjectPool:
    """Files that more than one layer may hold.

    Args:
        directory: of the same file system as the layers.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def wants(self, size: int) -> bool:
        """Return whether a file of this size is worth sharing."""
        return size >= LEAST_SHARED_BYTES

    def path(self, key: str) -> Path:
        """Return where a file is."""
        return self._directory / key[:2] / key[2:]

    def replace(self, key: str, parent: int, name: bytes, *, size: int) -> bool:
        """Put the pool's file in the place of an equal one; `False` if the pool has none, or no link to spare."""
        path = self.path(key)
        try:
            if path.lstat().st_size != size:
                return False  # damaged; the layer keeps its own
            os.link(path, _SCRATCH, dst_dir_fd=parent, follow_symlinks=False)
        except OSError as error:
            if error.errno not in _NOT_SHARED:
                raise
            return False
        os.rename(_SCRATCH, name, src_dir_fd=parent, dst_dir_fd=parent)
        return True

    def publish(self, key: str, parent: int, name: bytes) -> None:
        """Offer a file of a layer to later ones; its content must have reached the disk."""
        path = self.path(key)
        try:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            os.link(name, path, src_dir_fd=parent, follow_symlinks=False)
        except OSError as error:
            if error.errno not in _NOT_SHARED:
                raise

    def drop_unused(self) -> int:
        """Remove files that no layer holds any more; return how many."""
        dropped = 0
        for shard in self._directory.iterdir():
            for entry in os.scandir(shard):
                with suppress(FileNotFoundError):  # another collection is at it too
                    if entry.stat(follow_symlinks=False).st_nlink == 1:
                        os.unlink(entry.path)
                        dropped += 1
        return dropped


def seal_line(
    path: bytes, told: os.stat_result, *, owners: bool, content: bytes = b"", xattrs: Attributes = ()
) -> bytes:
    """Return all that a seal says of one entry.

    Args:
        path: relative to the tree.
        told: of the entry.
        owners: whether its owner is the image's; else it is whoever unpacked it.
        content: sha256 of a file, target of a link.
        xattrs: sorted.
    """
    owner = (told.st_uid, told.st_gid) if owners else ()
    size = told.st_size if stat.S_ISREG(told.st_mode) else 0
    return repr((path, told.st_mode, owner, told.st_mtime_ns, size, told.st_rdev, content, xattrs)).encode()


class Seal:
    """A sum over the entries of a tree, whatever their order: it finds damage, and is no defence against forgers."""

    def __init__(self) -> None:
        self._sum = 0

    def add(self, line: bytes) -> None:
        """Take an entry in."""
        self._sum = (self._sum + int.from_bytes(hashlib.sha256(line).digest(), "big")) % 2**256

    def text(self) -> str:
        """Return the sum."""
        return f"{self._sum:064x}"
