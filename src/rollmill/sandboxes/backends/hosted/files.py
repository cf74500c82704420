"""File calls of a hosted sandbox: the vendor's own where it has them, scripts for the rest."""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Coroutine, Mapping
from typing import Any, TypeVar

from rollmill.errors import SandboxExhausted, SandboxFileError, SandboxUnsupported
from rollmill.sandboxes.backends.hosted.driver import Guest
from rollmill.sandboxes.backends.hosted.shell import (
    APPEND,
    EXISTS,
    MAKE_DIR,
    MOST_ENTRIES,
    READ_PIECE,
    REMOVE,
    RENAME,
    STAT,
    Ran,
    file_error,
    parse_stat,
)
from rollmill.sandboxes.protocol import DEFAULT_READ_BYTES
from rollmill.sandboxes.records import FileInfo, Usage

T = TypeVar("T")

_PIECE_BYTES = 256 * 1024


class HostedFileCalls:
    """The calls; who has them says what is inside and how long an answer may take."""

    async def _ready(self) -> Guest:
        raise NotImplementedError

    async def _bounded(self, answer: Coroutine[Any, Any, T], what: str) -> T:
        raise NotImplementedError

    async def read(self, path: str, *, max_bytes: int = DEFAULT_READ_BYTES) -> bytes:
        """Return a file's content."""
        check_path(path)
        data = await self._bounded((await self._ready()).read(path, max_bytes=max_bytes), "a file to be read")
        if len(data) > max_bytes:
            raise SandboxFileError(
                f"{path} holds more than {max_bytes} bytes; raise max_bytes, or take it in pieces with read_stream"
            )
        return data

    async def write(self, path: str, data: bytes, *, mode: int = 0o644, user: str | None = None) -> None:
        """Write a file, and make the directories above it."""
        check_path(path)
        await self._bounded((await self._ready()).write(path, data, mode=mode, user=user or ""), "a file to be written")

    async def read_stream(self, path: str, *, offset: int = 0) -> AsyncIterator[bytes]:
        """Yield a file's content in pieces, from an offset to its end."""
        check_path(path)
        if offset < 0:
            raise SandboxFileError(f"a file cannot be read from offset {offset}; the first byte is at 0")
        while data := (await self._script(READ_PIECE, path, str(offset + 1), str(_PIECE_BYTES))).out:
            yield data
            offset += len(data)

    async def write_stream(
        self, path: str, pieces: AsyncIterable[bytes], *, mode: int = 0o644, user: str | None = None
    ) -> int:
        """Write a file from pieces as they come, and make the directories above it; return its size."""
        await self.write(path, b"", mode=mode, user=user)
        size = 0
        async for piece in pieces:
            if piece:
                await self._script(APPEND, path, stdin=piece)
                size += len(piece)
        return size

    async def list_dir(self, path: str) -> tuple[FileInfo, ...]:
        """Return a directory's entries by name."""
        check_path(path)
        found = await self._bounded((await self._ready()).list_dir(path), "a directory to be listed")
        if len(found) > MOST_ENTRIES:
            raise SandboxExhausted(f"{path} has more than {MOST_ENTRIES} entries; list it inside, in parts")
        return found

    async def stat(self, path: str) -> FileInfo:
        """Return what is at a path; a link is told of itself."""
        return parse_stat(path, (await self._script(STAT, path)).out)

    async def make_dir(self, path: str, *, mode: int = 0o755, user: str | None = None) -> bool:
        """Make a directory and those above it; `False` if it is there already."""
        return (await self._script(MAKE_DIR, path, f"{mode:o}", user or "")).code != EXISTS

    async def set_attributes(self, path: str, group: str, words: Mapping[str, str], *, user: str | None = None) -> None:
        """Refuse: scripts of any image cannot."""
        raise SandboxUnsupported("files carry no words here; keep them in a file beside it", capability="attributes")

    async def rename(self, path: str, target: str, *, user: str | None = None) -> None:
        """Give something another name. Directories that are made for it belong to root, whoever `user` is."""
        check_path(target)
        await self._script(RENAME, path, target)

    async def remove(self, path: str, *, recursive: bool = False) -> None:
        """Remove a file, a link itself, or a directory."""
        await self._script(REMOVE, path, "1" if recursive else "0")

    async def usage(self) -> Usage:
        """Return what it uses now."""
        return await self._bounded((await self._ready()).usage(), "its usage")

    async def _script(self, script: str, path: str, *arguments: str, stdin: bytes = b"") -> Ran:
        check_path(path)
        run = (await self._ready()).run_script(script, path, *arguments, stdin=stdin)
        ran = await self._bounded(run, f"a call on {path}")
        if ran.code not in (0, EXISTS):
            raise file_error(path, ran)
        return ran


def check_path(path: str) -> None:
    """Refuse a path that is not one inside a sandbox.

    Raises:
        SandboxFileError: if it is relative or holds a NUL.
    """
    if not path.startswith("/") or "\0" in path:
        raise SandboxFileError(f"{path!r} is no absolute path inside the sandbox")
