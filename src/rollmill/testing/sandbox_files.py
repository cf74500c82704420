"""Files of fake sandboxes: a dictionary that keeps the rules of a file system, links aside."""

from __future__ import annotations

import os.path
from collections.abc import Mapping

from rollmill.errors import SandboxExhausted, SandboxFileError
from rollmill.sandboxes.records import FileInfo, Limits, check_words


class FakeFiles:
    """The files of one sandbox.

    Args:
        limits: of bytes and inodes.
        like: files to begin with, copied.
    """

    def __init__(self, limits: Limits, *, like: FakeFiles | None = None) -> None:
        self._limits = limits
        self.content: dict[str, bytes] = {} if like is None else dict(like.content)
        self._modes: dict[str, int] = {} if like is None else dict(like._modes)
        self._words: dict[str, dict[str, str]] = {} if like is None else dict(like._words)
        self._directories = {"/", "/tmp", "/root", "/workspace"} if like is None else set(like._directories)

    @property
    def disk_bytes(self) -> int:
        """Return what they take."""
        return sum(map(len, self.content.values()))

    @property
    def inodes(self) -> int:
        """Return how many there are, directories with them."""
        return len(self.content) + len(self._directories)

    def read(self, path: str) -> bytes:
        """Return a file's content."""
        _absolute(path)
        if path not in self.content:
            found = "is a directory" if path in self._directories else "is missing"
            raise SandboxFileError(f"{path} {found}")
        return self.content[path]

    def write(self, path: str, data: bytes, *, mode: int) -> None:
        """Write a file, and make the directories above it."""
        _absolute(path)
        if path in self._directories:
            raise SandboxFileError(f"{path} is a directory")
        parents = self._missing(_parents(path))
        self._check_room(path, inodes=len(parents) + (path not in self.content), data=data)
        self._directories |= parents
        self.content[path] = data
        self._modes[path] = mode

    def _missing(self, directories: list[str]) -> set[str]:
        missing = {one for one in directories if one not in self._directories}
        if files := sorted(missing & set(self.content)):
            raise SandboxFileError(f"{files[0]} is a file, and nothing can be below it")
        return missing

    def _check_room(self, path: str, *, inodes: int, data: bytes = b"") -> None:
        inodes += self.inodes
        size = self.disk_bytes - len(self.content.get(path, b"")) + len(data)
        if inodes > self._limits.inodes or size > self._limits.disk_bytes:
            raise SandboxExhausted(
                f"no room for {path}: {inodes} of {self._limits.inodes} inodes, {size} of {self._limits.disk_bytes} "
                "bytes"
            )

    def list_dir(self, path: str) -> tuple[FileInfo, ...]:
        """Return a directory's entries by name."""
        _absolute(path)
        if path not in self._directories:
            raise SandboxFileError(f"{path} is missing or no directory")
        return tuple(self.stat(one) for one in sorted(self._inside(path)))

    def _inside(self, path: str) -> list[str]:
        return [one for one in {*self._directories, *self.content} - {"/"} if os.path.dirname(one) == path]

    def stat(self, path: str) -> FileInfo:
        """Return what is at a path."""
        _absolute(path)
        if path not in self._directories and path not in self.content:
            raise SandboxFileError(f"{path} is missing")
        return FileInfo(
            name=os.path.basename(path) or "/",
            kind="directory" if path in self._directories else "file",
            size_bytes=len(self.content.get(path, b"")),
            mode=self._modes.get(path, 0o755),
            modified_s=0.0,
            attributes=dict(self._words.get(path, {})),
        )

    def set_attributes(self, path: str, group: str, words: Mapping[str, str]) -> None:
        """Put words on a file."""
        check_words(group, words)
        if self.stat(path).kind != "file":
            raise SandboxFileError(f"{path} is not a regular file")
        kept = {name: text for name, text in self._words.get(path, {}).items() if not name.startswith(f"{group}.")}
        self._words[path] = {**kept, **{f"{group}.{name}": text for name, text in words.items()}}

    def make_dir(self, path: str, *, mode: int) -> bool:
        """Make a directory and those above it; `False` if it is there."""
        _absolute(path)
        if path in self._directories:
            return False
        made = self._missing([path, *_parents(path)])
        self._check_room(path, inodes=len(made))
        self._directories |= made
        self._modes[path] = mode
        return True

    def rename(self, path: str, target: str) -> None:
        """Give a file or a directory another name."""
        _absolute(target)
        found = self.stat(path)
        if target in self._directories:
            if found.kind == "file" or self._inside(target):
                raise SandboxFileError(f"{target} is a directory, or one that is not empty")
        elif target in self.content and found.kind == "directory":
            raise SandboxFileError(f"{target} is a file, and {path} is a directory")
        if target.startswith(f"{path}/"):
            raise SandboxFileError(f"{path} cannot be moved below itself")
        self._directories |= self._missing(_parents(target))

        def moved(one: str) -> str:
            return target + one[len(path) :] if one == path or one.startswith(f"{path}/") else one

        self.content = {moved(one): data for one, data in self.content.items() if one != target}
        self._modes = {moved(one): mode for one, mode in self._modes.items() if one != target}
        self._words = {moved(one): words for one, words in self._words.items() if one != target}
        self._directories = {moved(one) for one in self._directories}

    def remove(self, path: str, *, recursive: bool) -> None:
        """Remove a file or a directory."""
        if self.stat(path).kind == "directory" and self._inside(path) and not recursive:
            raise SandboxFileError(f"{path} is a directory that is not empty")
        for one in [one for one in {*self.content, *self._directories} if one == path or one.startswith(f"{path}/")]:
            self.content.pop(one, None)
            self._modes.pop(one, None)
            self._words.pop(one, None)
            self._directories.discard(one)


def _absolute(path: str) -> None:
    if not path.startswith("/") or "\0" in path:
        raise SandboxFileError(f"{path!r} is no absolute path inside the sandbox")


def _parents(path: str) -> list[str]:
    found = []
    while path != "/":
        path = os.path.dirname(path)
        found.append(path)
    return found
