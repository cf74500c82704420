"""A small HTTP/1.1 server for fakes of vendors, on loopback or a Unix socket, with failures on order.

It gives handlers what a framework hides: the raw connection, to cut it, to be slow, or to make it a stream of bytes.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit


@dataclasses.dataclass
class Request:
    """One request, read whole."""

    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    body: bytes
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    def json(self) -> Any:
        return json.loads(self.body or b"null")


@dataclasses.dataclass
class Answer:
    """One answer; a body of pieces goes out as they come."""

    status: int = 200
    body: bytes | AsyncIterator[bytes] = b""
    headers: dict[str, str] = dataclasses.field(default_factory=dict)


class Taken(Exception):
    """The handler has used the connection for itself."""


Handler = Callable[[Request], Awaitable[Answer]]


def answer_json(value: Any, status: int = 200, **headers: str) -> Answer:
    named = {name.replace("_", "-"): one for name, one in headers.items()}
    return Answer(status, json.dumps(value).encode(), {"content-type": "application/json", **named})


@dataclasses.dataclass
class Fault:
    """What happens to the next matching requests.

    Attributes:
        match: beginning of `METHOD /path`.
        answer: sent instead of carrying it out.
        cut: `before` or `after` carrying it out, the connection is closed without an answer.
        delay_s: before carrying it out.
        times: how many requests it strikes.
    """

    match: str
    answer: Answer | None = None
    cut: str = ""
    delay_s: float = 0.0
    times: int = 1


class LoopbackServer:
    """The server."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.faults: list[Fault] = []
        self.seen: list[Request] = []
        self.url = ""

    async def start(self, socket: str = "") -> None:
        if socket:
            self._server = await asyncio.start_unix_server(self._connected, socket)
        else:
            self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
            self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            while await self._one(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError, Taken):
            return
        except asyncio.CancelledError:
            return  # stop() cancels; the stream protocol would report it as an error
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        request = await _read(reader, writer)
        if request is None:
            return False
        self.seen.append(request)
        fault = self._strike(f"{request.method} {request.path}")
        if fault is not None:
            await asyncio.sleep(fault.delay_s)
            if fault.answer is not None:
                await _send(writer, fault.answer)
                return True
            if fault.cut == "before":
                return False
        answer = await self._handler(request)
        if fault is not None and fault.cut == "after":
            return False
        await _send(writer, answer)
        return request.headers.get("connection", "").lower() != "close"

    def _strike(self, line: str) -> Fault | None:
        for fault in self.faults:
            if line.startswith(fault.match):
                fault.times -= 1
                if fault.times == 0:
                    self.faults.remove(fault)
                return fault
        return None


async def _read(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Request | None:
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return None
    first, *lines = head.decode("latin-1").split("\r\n")
    method, target, _ = first.split(" ", 2)
    headers = {}
    for line in filter(None, lines):
        name, _, value = line.partition(":")
        headers[name.lower()] = value.strip()
    if headers.get("transfer-encoding", "").lower() == "chunked":
        body = b""
        while size := int(await reader.readline(), 16):
            body += (await reader.readexactly(size + 2))[:-2]
        await reader.readline()
    else:
        body = await reader.readexactly(int(headers.get("content-length", 0)))
    parts = urlsplit(target)
    headers["x-raw-query"] = parts.query
    query = dict(parse_qsl(parts.query, keep_blank_values=True))
    return Request(method, unquote(parts.path), query, headers, body, reader, writer)


async def _send(writer: asyncio.StreamWriter, answer: Answer) -> None:
    head = f"HTTP/1.1 {answer.status} X\r\n" + "".join(f"{name}: {value}\r\n" for name, value in answer.headers.items())
    if isinstance(answer.body, bytes):
        length = "" if answer.status == 204 else f"content-length: {len(answer.body)}\r\n"
        writer.write(f"{head}{length}\r\n".encode() + answer.body)
        await writer.drain()
        return
    writer.write(f"{head}transfer-encoding: chunked\r\n\r\n".encode())
    try:
        async for piece in answer.body:
            if piece:
                writer.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
                await writer.drain()
    finally:
        await answer.body.aclose()  # type: ignore[attr-defined]
    writer.write(b"0\r\n\r\n")
    await writer.drain()
