"""Firecracker's control interface: HTTP over a unix socket, one request at a time, each with a deadline."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from rollmill.errors import SandboxError

_MOST_ANSWER_BYTES = 1024 * 1024
_LOOK_S = 0.005


class ApiError(SandboxError):
    """Firecracker refused a request, or is gone.

    Attributes:
        status: of HTTP, 0 if there was no answer.
    """

    def __init__(self, message: str, *, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class Api:
    """The interface of one machine.

    Args:
        path: of its socket.
        answer_s: how long an answer may take.
    """

    def __init__(self, path: Path, *, answer_s: float) -> None:
        self._path = path
        self._answer_s = answer_s

    async def wait(self) -> None:
        """Wait until it answers.

        Raises:
            ApiError: if it does not in time.
        """
        deadline = asyncio.get_running_loop().time() + self._answer_s
        while True:
            try:
                await self("GET", "/")
                return
            except ApiError as error:
                if error.status or asyncio.get_running_loop().time() >= deadline:
                    raise
            await asyncio.sleep(_LOOK_S)

    async def __call__(self, method: str, target: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """Send one request and return what the answer holds.

        Raises:
            ApiError: if it is refused, not answered in time, or the machine has ended.
        """
        what = f"{method} {target}"
        try:
            async with asyncio.timeout(self._answer_s):
                status, data = await self._exchange(method, target, body)
        except TimeoutError:
            raise ApiError(f"Firecracker did not answer {what!r} within {self._answer_s:g} s") from None
        except (OSError, EOFError) as error:
            raise ApiError(f"Firecracker cannot be asked to {what!r}: {error}") from error
        try:
            found = json.loads(data) if data else {}
        except ValueError as error:
            raise ApiError(f"Firecracker answered {what!r} with what is no JSON: {error}", status=status) from error
        if not 200 <= status < 300:
            fault = found.get("fault_message", "") if isinstance(found, dict) else ""
            raise ApiError(f"Firecracker refused {what!r} ({status}): {fault or 'it did not say why'}", status=status)
        return found

    async def _exchange(self, method: str, target: str, body: dict[str, Any] | None) -> tuple[int, bytes]:
        reader, writer = await asyncio.open_unix_connection(self._path, limit=_MOST_ANSWER_BYTES)
        try:
            data = b"" if body is None else json.dumps(body).encode()
            head = f"{method} {target} HTTP/1.1\r\nHost: localhost\r\nAccept: application/json\r\n"
            if data:
                head += "Content-Type: application/json\r\n"
            writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode("ascii") + data)
            await writer.drain()
            return await _answer(reader)
        finally:
            writer.close()


async def _answer(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    except asyncio.LimitOverrunError as error:
        raise EOFError("the head of its answer has no end") from error
    first, *lines = head.split("\r\n")
    words = first.split(" ", 2)
    if len(words) < 2 or not words[1].isdigit():
        raise EOFError(f"it answered {first!r}, which is no HTTP")
    length = 0
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip().lower() == "content-length" and value.strip().isdigit():
            length = int(value)
    if length > _MOST_ANSWER_BYTES:
        raise EOFError(f"its answer has {length} bytes, and {_MOST_ANSWER_BYTES} are read")
    return int(words[1]), await reader.readexactly(length)
