"""File calls of the agent. Paths are the sandbox's own: whatever links they follow, they end inside it.

Nothing here may block the agent: files are opened without waiting, and what is neither file nor directory is refused.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from contextlib import suppress
from itertools import chain
from typing import Any

from rollmill.sandboxes.guest import kernel
from rollmill.sandboxes.guest.jobs import User

MOST_ENTRIES = 10_000
DEEPEST = 256
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# Of names and targets in one list. As JSON they take six times as much at most, and a reply has 8 MiB.
MOST_NAME_BYTES = 1024 * 1024
_WORDS = "user."
_MOST_WORDS, _MOST_WORD_BYTES = 64, 4096
_KINDS = ((stat.S_ISREG, "file"), (stat.S_ISDIR, "directory"), (stat.S_ISLNK, "link"))


class NotAFile(OSError):
    """The path is a pipe, a socket, a device or a directory."""


def read(path: str, *, offset: int, length: int) -> tuple[bytes, int]:
    """Return one piece of a file and the file's size."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    try:
        found = _regular(descriptor, path)
        return os.pread(descriptor, length, offset), found.st_size
    finally:
        os.close(descriptor)


def write(path: str, data: bytes, *, offset: int, mode: int, owner: User) -> None:
    """Write one piece of a file; the one at offset 0 makes the file and the directories above, or empties it.

    For a user other than root it is written with that user's rights, so that no link of theirs leads to what only root
    may write. Where these are too small, root writes: but through no link, and not to a file with a second name.
    """
    first = offset == 0
    # An old file is emptied only when it is known to be one.
    flags = os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY | (os.O_CREAT if first else 0)
    descriptor = _open_to_write(path, flags, mode, owner=owner)
    try:
        _regular(descriptor, path)
        if first:
            os.ftruncate(descriptor, 0)
            os.fchmod(descriptor, mode)
            if owner.uid or owner.gid:
                os.fchown(descriptor, owner.uid, owner.gid)
        view = memoryview(data)
        while view:
            count = os.pwrite(descriptor, view, offset)
            view, offset = view[count:], offset + count
    finally:
        os.close(descriptor)


def _regular(descriptor: int, path: str) -> os.stat_result:
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode):
        raise NotAFile(f"{path} is not a regular file")
    return found


def _open_to_write(path: str, flags: int, mode: int, *, owner: User) -> int:
    directory = os.path.dirname(path)
    if not (owner.uid or owner.gid):
        return _open_below(directory, path, flags, mode)
    try:
        with kernel.acting_as(owner.uid, owner.gid):
            return _open_below(directory, path, flags, mode)
    except PermissionError:
        if flags & os.O_CREAT:
            _make_dirs(directory, owner)
        descriptor = kernel.open_without_links(path, flags, mode)
        if os.fstat(descriptor).st_nlink > 1:
            os.close(descriptor)
            raise
        return descriptor


def _open_below(directory: str, path: str, flags: int, mode: int) -> int:
    if flags & os.O_CREAT:
        for one in _missing(directory):
            os.mkdir(one)
    return os.open(path, flags, mode)


def _missing(directory: str) -> list[str]:
    """Return the directories that are not there, the uppermost first."""
    missing: list[str] = []
    while directory and not os.path.lexists(directory):
        missing.insert(0, directory)
        directory = os.path.dirname(directory)
    return missing


def _make_dirs(directory: str, owner: User, *, mode: int | None = None) -> None:
    """Make a directory and those above it that are missing; `mode` is that of the last one.

    As a write does: with the owner's rights, and if these are too small with root's and through no link. It
    goes by descriptors, since others may exchange names meanwhile.
    """
    if owner.uid or owner.gid:
        with suppress(PermissionError), kernel.acting_as(owner.uid, owner.gid):
            _make_each(directory, owner, os.open, mode=mode)
            return
        _make_each(directory, owner, kernel.open_without_links, mode=mode)
    else:
        _make_each(directory, owner, os.open, mode=mode)


def _make_each(directory: str, owner: User, open_one: Callable[[str, int], int], *, mode: int | None) -> None:
    missing = _missing(directory)
    if not missing:
        return
    inside = open_one(os.path.dirname(missing[0]) or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for one in missing:
            name = os.path.basename(one)
            os.mkdir(name, dir_fd=inside)
            above, inside = inside, os.open(name, _DIRECTORY, dir_fd=inside)
            os.close(above)
            if owner.uid or owner.gid:
                os.fchown(inside, owner.uid, owner.gid)
        if mode is not None:
            os.fchmod(inside, mode)
    finally:
        os.close(inside)


def list_dir(path: str) -> tuple[list[dict[str, Any]], bool]:
    """Return the entries of a directory by name, and whether some were left out."""
    entries: list[dict[str, Any]] = []
    room = MOST_NAME_BYTES
    with os.scandir(path) as found:
        for entry in found:
            if len(entries) == MOST_ENTRIES or room < 0:
                return sorted(entries, key=_name), True
            try:
                entries.append(_describe(entry.name, entry.path, entry.stat(follow_symlinks=False)))
            except FileNotFoundError:
                continue  # removed meanwhile
            told = entries[-1]
            room -= len(told["name"]) + len(told["target"]) + sum(map(len, chain(*told["attributes"].items())))
    return sorted(entries, key=_name), False


def _name(entry: dict[str, Any]) -> str:
    return entry["name"]


def describe(path: str) -> dict[str, Any]:
    """Return what is at a path; a link is described itself."""
    return _describe(os.path.basename(path.rstrip("/")) or "/", path, os.lstat(path))


def make_dir(path: str, *, mode: int, owner: User) -> bool:
    """Make a directory and those above it; `False` if it is there."""
    path = path.rstrip("/") or "/"
    if os.path.lexists(path):
        if os.path.isdir(path):
            return False
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
    _make_dirs(path, owner, mode=mode)
    return True


def set_attributes(path: str, group: str, words: dict[str, str], *, owner: User) -> None:
    """Put words on a regular file, in place of all of their group."""
    descriptor = _open_to_write(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY, 0, owner=owner)
    try:
        _regular(descriptor, path)
        start = f"{_WORDS}{group}."
        wanted = {start + name: text.encode() for name, text in words.items()}
        for name in os.listxattr(descriptor):
            if name.startswith(start) and name not in wanted:
                os.removexattr(descriptor, name)
        for name, text in wanted.items():
            os.setxattr(descriptor, name, text)
    finally:
        os.close(descriptor)


def rename(path: str, target: str, *, owner: User) -> None:
    """Give something another name, and make the directories above that."""
    os.lstat(path)
    _make_dirs(os.path.dirname(target.rstrip("/")), owner)
    os.rename(path, target)


def remove(path: str, *, recursive: bool, budget: int) -> bool:
    """Remove what is at a path, a link itself; `False` if more than `budget` entries are below it, to be called again.

    Raises:
        OSError: if a directory is not empty and it is not `recursive`, or is nested deeper than `DEEPEST`.
    """
    path = path.rstrip("/") or "/"
    try:
        os.unlink(path)
        return True
    except IsADirectoryError:
        if not recursive:
            os.rmdir(path)
            return True
    directory = os.open(path, _DIRECTORY)
    try:
        left = _empty(directory, budget, depth=0)
    finally:
        os.close(directory)
    if left > 0:
        os.rmdir(path)
    return left > 0


def _empty(directory: int, budget: int, *, depth: int) -> int:
    """Remove the entries of a directory; return what is left of the budget."""
    if depth > DEEPEST:
        raise OSError(errno.ENAMETOOLONG, f"directories are nested deeper than {DEEPEST}; remove them inside")
    for name in os.listdir(directory):
        if budget <= 0:
            break
        budget -= 1
        try:
            os.unlink(name, dir_fd=directory)
            continue
        except FileNotFoundError:
            continue  # removed meanwhile
        except IsADirectoryError:
            inner = os.open(name, _DIRECTORY, dir_fd=directory)
        try:
            budget = _empty(inner, budget, depth=depth + 1)
        finally:
            os.close(inner)
        if budget > 0:
            os.rmdir(name, dir_fd=directory)
    return budget


def _describe(name: str, path: str, found: os.stat_result) -> dict[str, Any]:
    kind = next((word for test, word in _KINDS if test(found.st_mode)), "other")
    target = ""
    attributes = _words(path) if kind in ("file", "directory") else {}
    if kind == "link":
        try:
            target = _shown(os.readlink(path))
        except OSError:
            kind = "other"  # exchanged meanwhile
    return {"name": _shown(name), "kind": kind, "size_bytes": found.st_size, "mode": stat.S_IMODE(found.st_mode),
            "modified_s": found.st_mtime, "uid": found.st_uid, "gid": found.st_gid, "target": target,
            "attributes": attributes}  # fmt: skip


def _words(path: str) -> dict[str, str]:
    """Return the words on a file that are text, of as many as are told at all."""
    found: dict[str, str] = {}
    try:
        names = [one for one in os.listxattr(path, follow_symlinks=False) if one.startswith(_WORDS)]
        for name in names[:_MOST_WORDS]:
            value = os.getxattr(path, name, follow_symlinks=False)
            if len(value) <= _MOST_WORD_BYTES:
                with suppress(UnicodeDecodeError):
                    found[_shown(name.removeprefix(_WORDS))] = value.decode()
    except OSError:
        return found  # exchanged meanwhile, or this file system has none
    return found


def _shown(name: str) -> str:
    """Return a name as text: what does not decode is shown with replacement marks."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
