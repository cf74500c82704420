"""File calls of a namespace sandbox: what its agent is asked, piece by piece, so that no answer is large or late."""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Mapping
from typing import Any

import msgspec

from rollmill.errors import SandboxExhausted, SandboxFileError
from rollmill.sandboxes.backends.namespaces.channel import Message
from rollmill.sandboxes.guest.frames import CHUNK_BYTES
from rollmill.sandboxes.protocol import DEFAULT_READ_BYTES
from rollmill.sandboxes.records import FileInfo, check_words


class FileCalls:
    """The calls; who has them says how the agent is asked."""

    async def _ask(self, head: dict[str, Any], payload: bytes | memoryview = b"") -> tuple[Message, bytes]:
        """Ask the agent and wait for its answer; raises if the sandbox is paused or has ended."""
        raise NotImplementedError

    async def read(self, path: str, *, max_bytes: int = DEFAULT_READ_BYTES) -> bytes:
        """Return a file's content."""
        _check_path(path)
        found = bytearray()
        while True:
            # One byte beyond tells a file that is too large, also one whose size reads as 0, as in /proc.
            length = min(CHUNK_BYTES, max_bytes + 1 - len(found))
            head = {"op": "read", "path": path, "offset": len(found), "length": length}
            message, data = await self._ask(head)
            found += data
            if len(found) > max_bytes:
                raise SandboxFileError(
                    f"{path} holds more than {max_bytes} bytes (size {message.size}); raise max_bytes, or take it in "
                    "pieces with read_stream"
                )
            if not data:
                return bytes(found)

    async def read_stream(self, path: str, *, offset: int = 0) -> AsyncIterator[bytes]:
        """Yield a file's content in pieces, from an offset to its end."""
        _check_path(path)
        if offset < 0:
            raise SandboxFileError(f"a file cannot be read from offset {offset}; the first byte is at 0")
        while True:
            _, data = await self._ask({"op": "read", "path": path, "offset": offset, "length": CHUNK_BYTES})
            if not data:
                return
            yield data
            offset += len(data)

    async def write(self, path: str, data: bytes, *, mode: int = 0o644, user: str | None = None) -> None:
        """Write a file, and make the directories above it."""
        await self._write(path, data, offset=0, mode=mode, user=user)

    async def write_stream(
        self, path: str, pieces: AsyncIterable[bytes], *, mode: int = 0o644, user: str | None = None
    ) -> int:
        """Write a file from pieces as they come, and make the directories above it; return its size."""
        await self._write(path, b"", offset=0, mode=mode, user=user)
        size = 0
        async for piece in pieces:
            if piece:
                await self._write(path, piece, offset=size, mode=mode, user=user)
                size += len(piece)
        return size

    async def _write(self, path: str, data: bytes, *, offset: int, mode: int, user: str | None) -> None:
        _check_path(path)
        view = memoryview(data)
        for start in range(0, max(1, len(data)), CHUNK_BYTES):
            head = {"op": "write", "path": path, "offset": offset + start, "mode": mode, "user": user}
            await self._ask(head, view[start : start + CHUNK_BYTES])

    async def list_dir(self, path: str) -> tuple[FileInfo, ...]:
        """Return a directory's entries by name, 10,000 at most."""
        _check_path(path)
        message, data = await self._ask({"op": "list", "path": path})
        entries = msgspec.json.decode(data, type=tuple[FileInfo, ...])
        if message.truncated:
            raise SandboxExhausted(f"{path} has more than {len(entries)} entries; list it inside, in parts")
        return entries

    async def stat(self, path: str) -> FileInfo:
        """Return what is at a path; a link is told of itself."""
        _check_path(path)
        _, data = await self._ask({"op": "stat", "path": path})
        return msgspec.json.decode(data, type=FileInfo)

    async def make_dir(self, path: str, *, mode: int = 0o755, user: str | None = None) -> bool:
        """Make a directory and those above it; `False` if it is there already."""
        _check_path(path)
        message, _ = await self._ask({"op": "make_dir", "path": path, "mode": mode, "user": user})
        return message.changed

    async def set_attributes(self, path: str, group: str, words: Mapping[str, str], *, user: str | None = None) -> None:
        """Put words on a file."""
        _check_path(path)
        check_words(group, words)
        await self._ask({"op": "attributes", "path": path, "group": group, "words": dict(words), "user": user})

    async def rename(self, path: str, target: str, *, user: str | None = None) -> None:
        """Give something another name, and make the directories above that."""
        _check_path(path)
        _check_path(target)
        await self._ask({"op": "rename", "path": path, "target": target, "user": user})

    async def remove(self, path: str, *, recursive: bool = False) -> None:
        """Remove a file, a link itself, or a directory; with what is in it if `recursive`."""
        _check_path(path)
        while True:
            message, _ = await self._ask({"op": "remove", "path": path, "recursive": recursive})
            if message.changed:
                return


def _check_path(path: str) -> None:
    if not path.startswith("/") or "\0" in path:
        raise SandboxFileError(f"{path!r} is no absolute path inside the sandbox")
