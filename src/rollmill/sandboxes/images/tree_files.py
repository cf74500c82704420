"""Files below one directory, by descriptors: no name is ever resolved from anywhere else, no symbolic link followed.

Where the kernel has `openat2` it is asked to stay beneath; else the path is walked one component at a time.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import stat
import struct
from collections.abc import Sequence
from pathlib import Path

_OPENAT2 = 437
_RESOLVE_NO_MAGICLINKS, _RESOLVE_NO_SYMLINKS, _RESOLVE_BENEATH = 2, 4, 8
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def open_root(path: Path) -> int:
    """Return a descriptor of a directory that is no symbolic link."""
    return os.open(path, _DIRECTORY)


def open_beneath(root: int, parts: Sequence[bytes]) -> int:
    """Return a descriptor of a directory below `root`.

    Raises:
        OSError: ELOOP or ENOTDIR if one of the components is no directory of its own, ENOENT if it is missing.
    """
    if not parts:
        return os.open(".", _DIRECTORY, dir_fd=root)
    if has_openat2():
        return _openat2(root, b"/".join(parts))
    return _walk(root, parts)


def _openat2(root: int, path: bytes) -> int:
    how = struct.pack("QQQ", _DIRECTORY, 0, _RESOLVE_BENEATH | _RESOLVE_NO_SYMLINKS | _RESOLVE_NO_MAGICLINKS)
    result = _libc.syscall(
        ctypes.c_long(_OPENAT2), ctypes.c_long(root), ctypes.c_char_p(path), ctypes.c_char_p(how), ctypes.c_long(24)
    )
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), os.fsdecode(path))
    return result


@functools.cache
def has_openat2() -> bool:
    """Return whether the kernel has the call, and lets this process use it."""
    root = os.open("/", _DIRECTORY)
    try:
        os.close(_openat2(root, b"."))
    except OSError:
        return False  # older than 5.6, or hidden by a container's seccomp profile
    finally:
        os.close(root)
    return True


def _walk(root: int, parts: Sequence[bytes]) -> int:
    here = os.dup(root)
    try:
        for part in parts:
            if part in (b"", b".", b"..") or b"/" in part:
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), os.fsdecode(part))
            below = os.open(part, _DIRECTORY, dir_fd=here)
            os.close(here)
            here = below
    except OSError:
        os.close(here)
        raise
    return here


def set_attribute(parent: int, name: bytes, attribute: bytes, value: bytes, *, directory: bool = False) -> None:
    """Set an extended attribute of a file or directory of `parent`, never of what a link points to."""
    descriptor = os.open(name, _DIRECTORY if directory else os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
    try:
        os.setxattr(descriptor, attribute, value)
    finally:
        os.close(descriptor)


def flush(path: Path) -> None:
    """Have everything that was written to the file system of `path` reach the disk: one call for a whole tree."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if _libc.syncfs(descriptor) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), os.fspath(path))
    finally:
        os.close(descriptor)


def flush_directory(path: Path) -> None:
    """Have the names in one directory reach the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_whole(path: Path, data: bytes, *, durable: bool) -> None:
    """Write a file whole or not at all."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(4).hex()}")
    descriptor = os.open(scratch, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    try:
        with open(descriptor, "wb") as stream:
            stream.write(data)
            if durable:
                stream.flush()
                os.fsync(descriptor)
        os.rename(scratch, path)
    except BaseException:
        scratch.unlink(missing_ok=True)
        raise
    if durable:
        flush_directory(path.parent)


def remove_tree(path: Path) -> int:
    """Remove a directory with all that is in it, or a file; return how many entries went.

    Links are removed, not followed. What is closed to its owner is opened first.
    """
    parent = os.open(path.parent, _DIRECTORY)
    try:
        return _remove(parent, os.fsencode(path.name))
    finally:
        os.close(parent)


def _remove(parent: int, name: bytes) -> int:
    try:
        os.unlink(name, dir_fd=parent)
    except IsADirectoryError:
        pass
    except PermissionError:
        if not is_directory(parent, name):
            raise
    except FileNotFoundError:
        return 0  # somebody else removes the same tree
    else:
        return 1
    try:
        here = _open_own(parent, name)
    except FileNotFoundError:
        return 0
    try:
        removed = sum(_remove(here, os.fsencode(one)) for one in os.listdir(here))
    finally:
        os.close(here)
    try:
        os.rmdir(name, dir_fd=parent)
    except FileNotFoundError:
        return removed
    return removed + 1


def _open_own(parent: int, name: bytes) -> int:
    """Open a directory to empty it, giving its owner back what its mode refuses."""
    try:
        here = os.open(name, _DIRECTORY, dir_fd=parent)
    except PermissionError:
        os.chmod(name, 0o700, dir_fd=parent)
        return os.open(name, _DIRECTORY, dir_fd=parent)
    if os.fstat(here).st_mode & 0o700 != 0o700:
        os.fchmod(here, 0o700)
    return here


def is_directory(parent: int, name: bytes) -> bool:
    """Return whether a name is a directory itself; links are none."""
    return stat.S_ISDIR(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode)
