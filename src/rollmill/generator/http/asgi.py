"""One HTTP exchange over ASGI: its body within limits, its answer, its client leaving. Knows nothing of what is asked.

| wait | ends after |
|---|---|
| for the whole body | `HttpLimits.body_s` |
| for the reader to take a piece of a stream | `LimitSettings.stream_stall_s`; then the connection is cut |
| for the client to leave | never by itself: it runs beside the answer and ends with it |
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine, MutableMapping
from typing import Any, TypeVar

import msgspec

from rollmill.errors import RollmillError
from rollmill.generator.http.problems import RequestProblem, headers_of, reply_of, status_of

T = TypeVar("T")
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

JSON = "application/json"
ABORT_KEY = "rollmill.abort"
"""In the scope's state: cuts the connection at once, with what is still to be sent."""
_LINGER_S = 5.0
"""A client that sends a body which is too large does not read before it has sent it."""


class HttpLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds that only HTTP needs; those of requests are `generator.limits`.

    Attributes:
        header_s: longest wait for the head of a request once its connection is open or its first byte is there.
        body_s: longest wait for a whole body.
        keep_alive_s: an idle connection is closed after this.
        connections: open at once; more are answered with 503.
    """

    header_s: float = 10.0
    body_s: float = 60.0
    keep_alive_s: float = 75.0
    connections: int = 8192


class Exchange:
    """A request and the way to answer it.

    Attributes:
        method, path: what is asked.
        headers: names in lower case; of several with one name the last.
        always: headers of every answer.
        started: whether the head of the answer was sent.
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        self.always: dict[str, str] = {}
        self.started = False
        self._abort: Callable[[], None] | None = (scope.get("state") or {}).get(ABORT_KEY)
        self._receive, self._send = receive, send

    async def body(self, *, max_bytes: int, deadline_s: float) -> bytes:
        """Return the whole body.

        Raises:
            RequestProblem: if it is too large (413) or too slow (408).
            ClientLeft: if the client left before its end.
        """
        announced = self.headers.get("content-length", "")
        if announced.isdecimal() and int(announced) > max_bytes:
            raise self._too_large(int(announced), max_bytes=max_bytes)
        pieces, size = [], 0
        try:
            async with asyncio.timeout(deadline_s):
                more = True
                while more:
                    message = await self._receive()
                    if message["type"] == "http.disconnect":
                        raise ClientLeft
                    pieces.append(message.get("body", b""))
                    size += len(pieces[-1])
                    more = message.get("more_body", False)
                    if size > max_bytes:
                        raise self._too_large(size, max_bytes=max_bytes)
        except TimeoutError:
            raise RequestProblem(
                f"{size} bytes of the body came within {deadline_s:g} s and it is not complete; send it faster",
                code="request_timeout",
                status=408,
                headers={"connection": "close"},
            ) from None
        return b"".join(pieces)

    async def gone(self) -> None:
        """Return when the client has left; call it once the body was read."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def unless_gone(self, work: Coroutine[Any, Any, T]) -> T:
        """Return what the work gives; cancel it if the client leaves.

        Raises:
            ClientLeft: if it left.
        """
        task = asyncio.ensure_future(work)
        watch = asyncio.ensure_future(self.gone())
        try:
            await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise ClientLeft
            return task.result()
        finally:
            await cancelled(task, watch)

    async def answer(
        self, body: bytes, *, status: int = 200, kind: str = JSON, headers: dict[str, str] | None = None
    ) -> None:
        """Send a whole answer."""
        await self._head(status, kind=kind, headers={**(headers or {}), "content-length": str(len(body))})
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    async def answer_json(
        self, reply: msgspec.Struct | dict[str, Any], *, status: int = 200, headers: dict[str, str] | None = None
    ) -> None:
        """Send a record as JSON."""
        await self.answer(msgspec.json.encode(reply), status=status, headers=headers)

    async def fail(self, error: RollmillError) -> None:
        """Send an error; the rest of a body that was too large is taken first, so that its client reads the answer."""
        body, headers = msgspec.json.encode(reply_of(error)), headers_of(error)
        if status_of(error) == 413:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LINGER_S):
                    while (await self._receive()).get("more_body", False):
                        pass
        await self.answer(body, status=status_of(error), headers=headers)

    async def begin_stream(self, *, kind: str, headers: dict[str, str]) -> None:
        """Send the head of an answer that comes in pieces."""
        await self._head(200, kind=kind, headers=headers)

    async def send_piece(self, piece: bytes, *, last: bool = False) -> None:
        """Send a piece of a stream; returns once it is on its way, or the client has left."""
        await self._send({"type": "http.response.body", "body": piece, "more_body": not last})

    def cut(self) -> None:
        """Cut the connection, whatever is still to be sent."""
        if self._abort is not None:
            self._abort()

    async def _head(self, status: int, *, kind: str, headers: dict[str, str]) -> None:
        self.started = True
        fields = {"content-type": kind, **self.always, **headers}
        # What callers named may hold anything; a header holds one line of ASCII.
        raw = [
            (name.encode("ascii"), value.strip().encode("ascii", "replace"))
            for name, value in fields.items()
            if value.strip().isprintable()
        ]
        await self._send({"type": "http.response.start", "status": status, "headers": raw})

    def _too_large(self, size: int, *, max_bytes: int) -> RequestProblem:
        return RequestProblem(
            f"the body has {size} bytes or more, and generator.limits.max_body_bytes is {max_bytes}; send less at "
            "once, or raise it",
            code="request_too_large",
            status=413,
            headers={"connection": "close"},
        )


class ClientLeft(Exception):
    """The client left; nobody is there to be answered."""


async def cancelled(*tasks: asyncio.Future[Any]) -> None:
    """Cancel tasks and return once they have ended; what they raise is nobody's any more."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
