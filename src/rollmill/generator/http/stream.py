"""A reply token by token, as server-sent events; a reader that does not read loses its request.

The events that wait for the reader are bounded in number, and so is the wait for it to take them. The answer begins
with the first event, not before: until then a refusal still has its own status. An error after that is an event, and
the stream ends without `[DONE]`.

| wait | ends after |
|---|---|
| for the next event | production, which the request's deadline bounds; the client leaves |
| for the reader to take a piece | `LimitSettings.stream_stall_s`; then the connection is cut |
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable

import msgspec
from starlette.requests import ClientDisconnect
from starlette.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from rollmill.errors import RollmillError, SlowReader
from rollmill.generator.http.exchange import gone
from rollmill.generator.http.problems import reply_of
from rollmill.generator.http.protocol import ABORT_KEY

_log = logging.getLogger(__name__)
DONE = b"data: [DONE]\n\n"
_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


def event(reply: msgspec.Struct) -> bytes:
    """Return a record as a server-sent event."""
    return b"data: " + msgspec.json.encode(reply) + b"\n\n"


class EventStream(StreamingResponse):
    """An answer of events while they are produced.

    Args:
        produce: puts all events with the function that it gets; an error of ours that it raises becomes the last one,
            or the answer if it is the first. Cancelled when the client leaves or is too slow.
        request_id: for messages.
        limit: as many events may wait; at one more the reader is too slow.
        stall_s: longest wait for the reader to take a piece.
        take_note: hears what a stream that had begun ended with.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        produce: Callable[[Callable[[bytes], None]], Awaitable[None]],
        *,
        request_id: str,
        limit: int,
        stall_s: float,
        take_note: Callable[[RollmillError], Awaitable[None]],
    ) -> None:
        self._events = self._pieces()
        super().__init__(self._events, headers=_HEADERS)
        self._produce, self._take_note = produce, take_note
        self._request_id, self._limit, self._stall_s = request_id, limit, stall_s
        self._waiting: list[bytes] = []
        self._change = asyncio.Event()
        self._begun = self._ended = False
        self._error: RollmillError | None = None
        self._producing: asyncio.Task[None] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer.

        Raises:
            RollmillError: what production raised before the first event; nothing was sent then.

        Cancellation:
            cancels production.
        """
        async with asyncio.TaskGroup() as tasks:
            self._producing = tasks.create_task(self._produce_all(), name=f"stream {self._request_id}")
            try:
                with contextlib.suppress(ClientDisconnect):  # servers differ in how they say that a client left
                    await super().__call__(scope, receive, send)
                if not self._ended:
                    _log.debug("the client of request %s left", self._request_id)
            except SlowReader as error:
                self._error = error
                scope["state"][ABORT_KEY]()
                await gone(receive)
            self._ended = True
            self._producing.cancel()
        if self._error is None:
            return
        if not self._begun:
            raise self._error
        _log.warning("the stream of request %s ended early: %s", self._request_id, self._error)
        await self._take_note(self._error)

    async def stream_response(self, send: Send) -> None:
        """Send the events, once there is one; nothing if there is none."""
        now_s = asyncio.get_running_loop().time
        await self._change.wait()
        if not self._begun:
            return
        try:
            async with contextlib.aclosing(self._events), asyncio.timeout(None) as deadline:

                async def send_in_time(message: Message) -> None:
                    deadline.reschedule(now_s() + self._stall_s)
                    await send(message)
                    deadline.reschedule(None)

                await super().stream_response(send_in_time)
        except TimeoutError:
            raise SlowReader(
                f"the reader of request {self._request_id} took nothing for {self._stall_s:g} s "
                "(generator.limits.stream_stall_s): the request was aborted and the connection cut"
            ) from None

    async def _pieces(self) -> AsyncGenerator[bytes, None]:
        """Give all events that wait as one piece, until the end."""
        while self._waiting or not self._ended:
            await self._change.wait()
            piece = b"".join(self._waiting)
            self._waiting.clear()
            self._change.clear()
            yield piece

    async def _produce_all(self) -> None:
        try:
            await self._produce(self._put)
        except RollmillError as error:  # a value, so that it comes after the events before it
            self._end(error)
        else:
            self._end()

    def _put(self, piece: bytes) -> None:
        """Add an event; what comes after the end is nobody's any more."""
        if self._ended:
            return
        if len(self._waiting) < self._limit:
            self._begun = True
            self._waiting.append(piece)
            self._change.set()
            return
        self._waiting.clear()
        self._end(
            SlowReader(
                f"the reader of request {self._request_id} is {self._limit} events behind "
                "(generator.limits.stream_events): the request was aborted, so that memory stays bounded. Read faster, "
                "or ask without stream"
            )
        )
        if self._producing is not None:
            self._producing.cancel()

    def _end(self, error: RollmillError | None = None) -> None:
        """Say that no more will come; an error is the last event, unless it would be the first."""
        if self._ended:
            return
        self._ended, self._error = True, error
        if error is not None and self._begun:
            self._waiting.append(event(reply_of(error)))
        self._change.set()
