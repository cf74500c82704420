"""Laying one layer of an overlay over another, as files: how chains of snapshots are made short, and stored on disk.

What is copied was written by a sandbox. So nothing is reached by a path: each directory is opened below the one before
it, and no link is followed. Nobody writes to either side meanwhile, so that `..` leads back to where one came from, and
no depth takes more than a few descriptors.
"""

from __future__ import annotations

import errno
import os
import stat

_OPAQUE, _PRIVATE = "user.overlay.opaque", "user.overlay."
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_COPY_BYTES = 8 * 1024 * 1024


def lay(source: int, target: int) -> None:
    """Lay a layer over another, so that `target` alone is below a sandbox what both would be.

    Kept are content (with its holes), whiteouts, opaque directories, owners, modes, times, extended attributes, and
    hard links within the source.

    Args:
        source: descriptor of the directory of the upper one.
        target: descriptor of the directory of the lower one, empty for a plain copy.

    Raises:
        OSError: if there is no room (ENOSPC).
    """
    _Laying(target).run(source)


def is_whiteout(found: os.stat_result) -> bool:
    """Return whether this is an overlay's mark that a name is gone."""
    return stat.S_ISCHR(found.st_mode) and found.st_rdev == 0


class _Laying:
    def __init__(self, target: int) -> None:
        self._root = target
        self._path: list[str] = []
        self._first_names: dict[tuple[int, int], tuple[str, ...]] = {}

    def run(self, source: int) -> None:
        upper, lower = os.dup(source), os.dup(self._root)
        names = [os.listdir(upper)]
        try:
            while names:
                if names[-1]:
                    name = names[-1].pop()
                    found = os.stat(name, dir_fd=upper, follow_symlinks=False)
                    if not stat.S_ISDIR(found.st_mode):
                        self._other(upper, lower, name=name, found=found)
                        continue
                    _make_directory(upper, lower, name)
                    upper, lower = _go(upper, name), _go(lower, name)
                    self._path.append(name)
                    names.append(os.listdir(upper))
                    continue
                _copy_attributes(upper, lower)
                names.pop()
                if names:
                    self._path.pop()
                    upper, lower = _go(upper, ".."), _go(lower, "..")
        finally:
            os.close(upper)
            os.close(lower)

    def _other(self, upper: int, lower: int, *, name: str, found: os.stat_result) -> None:
        if _stat(name, lower) is not None:
            remove(name, lower)
        if found.st_nlink > 1 and not is_whiteout(found) and self._link(lower, name=name, found=found):
            return
        if stat.S_ISREG(found.st_mode):
            _copy_file(upper, lower, name=name)
            return
        if stat.S_ISLNK(found.st_mode):
            os.symlink(os.readlink(name, dir_fd=upper), name, dir_fd=lower)
        elif stat.S_ISFIFO(found.st_mode) or stat.S_ISSOCK(found.st_mode) or is_whiteout(found):
            os.mknod(name, found.st_mode, found.st_rdev, dir_fd=lower)
        else:
            raise OSError(errno.EPERM, f"a device ({found.st_rdev:#x}) is in a layer, where none can be made")
        _own(lower, name, found)

    def _link(self, lower: int, *, name: str, found: os.stat_result) -> bool:
        """Make a further name of a file that was copied before; `False` for the first one."""
        here = (*self._path, name)
        *above, first = self._first_names.setdefault((found.st_dev, found.st_ino), here)
        if (*above, first) == here:
            return False
        directory = os.dup(self._root)
        for one in above:
            directory = _go(directory, one)
        try:
            os.link(first, name, src_dir_fd=directory, dst_dir_fd=lower, follow_symlinks=False)
        finally:
            os.close(directory)
        return True


def _go(directory: int, name: str) -> int:
    """Return the descriptor of a neighbour, in place of this one."""
    try:
        return os.open(name, _DIRECTORY, dir_fd=directory)
    finally:
        os.close(directory)


def _make_directory(upper: int, lower: int, name: str) -> None:
    """See that the target has a directory of this name; what it must hide is removed, and hidden from below too."""
    before = _stat(name, lower)
    if before is not None and stat.S_ISDIR(before.st_mode):
        source = os.open(name, _DIRECTORY, dir_fd=upper)
        try:
            if not _is_opaque(source):
                return
        finally:
            os.close(source)
    if before is not None:
        remove(name, lower)
    os.mkdir(name, 0o700, dir_fd=lower)
    if before is not None:
        made = os.open(name, _DIRECTORY, dir_fd=lower)
        try:
            os.setxattr(made, _OPAQUE, b"y")
        finally:
            os.close(made)


def _stat(name: str, directory: int) -> os.stat_result | None:
    try:
        return os.stat(name, dir_fd=directory, follow_symlinks=False)
    except FileNotFoundError:
        return None


def _is_opaque(directory: int) -> bool:
    try:
        return os.getxattr(directory, _OPAQUE) == b"y"
    except OSError as error:
        if error.errno in (errno.ENODATA, errno.EOPNOTSUPP):
            return False
        raise


def remove(name: str, directory: int) -> None:
    """Remove an entry of a directory, and what is below it at any depth; no link is followed."""
    try:
        os.unlink(name, dir_fd=directory)
        return
    except IsADirectoryError:
        here = os.open(name, _DIRECTORY, dir_fd=directory)
    path: list[str] = []
    try:
        left = [_remove_files(here)]
        while left:
            if left[-1]:
                path.append(left[-1].pop())
                here = _go(here, path[-1])
                left.append(_remove_files(here))
                continue
            left.pop()
            if path:
                here = _go(here, "..")
                os.rmdir(path.pop(), dir_fd=here)
    finally:
        os.close(here)
    os.rmdir(name, dir_fd=directory)


def _remove_files(directory: int) -> list[str]:
    """Remove what is no directory; return the names of the directories that are left."""
    left = []
    for name in os.listdir(directory):
        try:
            os.unlink(name, dir_fd=directory)
        except IsADirectoryError:
            left.append(name)
    return left


def _copy_file(source: int, target: int, *, name: str) -> None:
    upper = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=source)
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        lower = os.open(name, flags, 0o600, dir_fd=target)
        try:
            _copy_data(upper, lower)
            _copy_attributes(upper, lower)
        finally:
            os.close(lower)
    finally:
        os.close(upper)


def _copy_data(source: int, target: int) -> None:
    """Copy the parts of a file that hold data: a file may be said to be larger than the disk."""
    size = os.fstat(source).st_size
    os.truncate(target, size)
    offset = 0
    while offset < size:
        try:
            offset = os.lseek(source, offset, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:
                return  # nothing but a hole up to the end
            raise
        end = os.lseek(source, offset, os.SEEK_HOLE)
        while offset < end:
            data = os.pread(source, min(_COPY_BYTES, end - offset), offset)
            if not data:
                return
            view = memoryview(data)
            while view:
                count = os.pwrite(target, view, offset)
                view, offset = view[count:], offset + count


def _copy_attributes(source: int, target: int) -> None:
    """Copy owner, mode, extended attributes and times of what is open; of the overlay's own marks only opaqueness."""
    found, before = os.fstat(source), os.fstat(target)
    if (found.st_uid, found.st_gid) != (before.st_uid, before.st_gid):
        os.fchown(target, found.st_uid, found.st_gid)
    os.fchmod(target, stat.S_IMODE(found.st_mode))
    wanted = {name for name in _attributes(source) if not name.startswith(_PRIVATE)}
    for name in _attributes(target):
        if name not in wanted and not name.startswith(_PRIVATE):
            os.removexattr(target, name)
    for name in wanted:
        os.setxattr(target, name, os.getxattr(source, name))
    if stat.S_ISDIR(found.st_mode) and _is_opaque(source):
        os.setxattr(target, _OPAQUE, b"y")
    os.utime(target, ns=(found.st_atime_ns, found.st_mtime_ns))


def _attributes(descriptor: int) -> list[str]:
    try:
        found = os.listxattr(descriptor)
    except OSError as error:
        if error.errno == errno.EOPNOTSUPP:
            return []
        raise
    return [name for name in found if name.startswith(("user.", "system.posix_acl_"))]


def _own(directory: int, name: str, found: os.stat_result) -> None:
    """Give owner, mode and times to what cannot be opened."""
    made = os.stat(name, dir_fd=directory, follow_symlinks=False)
    if (found.st_uid, found.st_gid) != (made.st_uid, made.st_gid):
        os.chown(name, found.st_uid, found.st_gid, dir_fd=directory, follow_symlinks=False)
    if not stat.S_ISLNK(found.st_mode):
        os.chmod(name, stat.S_IMODE(found.st_mode), dir_fd=directory)
    os.utime(name, ns=(found.st_atime_ns, found.st_mtime_ns), dir_fd=directory, follow_symlinks=False)
