"""A reply token by token, as server-sent events; a reader that does not read loses its request.

The events that wait for the reader are bounded in number, and so is the wait for it to take them. The answer begins
with the first event, not before: until then a refusal still has its own status. An error after that is an event, and
the stream ends without `[DONE]`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import msgspec

from rollmill.config.schema import LimitSettings
from rollmill.errors import RollmillError, SlowReader
from rollmill.generator.http.asgi import ClientLeft, Exchange, cancelled
from rollmill.generator.http.problems import reply_of

DONE = b"data: [DONE]\n\n"
_STREAM = "text/event-stream; charset=utf-8"
_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


def event(reply: msgspec.Struct) -> bytes:
    """Return a record as a server-sent event."""
    return b"data: " + msgspec.json.encode(reply) + b"\n\n"


class Events:
    """Events that wait for their reader.

    Args:
        limit: as many may wait; at one more the reader is too slow.
    """

    def __init__(self, *, limit: int) -> None:
        self._limit = limit
        self._waiting: list[bytes] = []
        self._change = asyncio.Event()
        self._ended = False
        self.overrun = False
        self.on_overrun: Callable[[], object] = lambda: None

    def put(self, piece: bytes) -> None:
        """Add an event; what comes after an overrun is nobody's any more."""
        if self.overrun:
            return
        if len(self._waiting) >= self._limit:
            self.overrun = True
            self._waiting.clear()
            self.on_overrun()
        else:
            self._waiting.append(piece)
        self._change.set()

    def end(self) -> None:
        """Say that no more will come."""
        self._ended = True
        self._change.set()

    async def take(self) -> bytes:
        """Return all events that wait, as one piece, once there are some; nothing at the end."""
        while not self._waiting and not self._ended:
            self._change.clear()
            await self._change.wait()
        piece = b"".join(self._waiting)
        self._waiting.clear()
        return piece


async def stream(
    exchange: Exchange,
    events: Events,
    *,
    produce: Callable[[], Awaitable[None]],
    request_id: str,
    limits: LimitSettings,
) -> RollmillError | None:
    """Answer with events while they are produced; return the error that the stream ended with.

    Args:
        produce: puts all events; an error of ours that it raises becomes the last event, or the answer if it is the
            first.
        request_id: for messages.
        limits: of a stream.

    Raises:
        RollmillError: what `produce` raised before the first event; nothing was sent then.
        ClientLeft: if the client left; production was cancelled.

    Cancellation:
        cancels production.
    """
    producing = asyncio.ensure_future(_produce(produce, events=events))
    leaving = asyncio.ensure_future(exchange.gone())
    events.on_overrun = producing.cancel
    leaving.add_done_callback(lambda _: events.end())
    writer = _Writer(exchange, stall_s=limits.stream_stall_s)
    try:
        while (piece := await events.take()) and not leaving.done():
            await writer.write(piece)
        if writer.stalled:
            return _stalled(request_id, limits=limits)
        if leaving.done():
            raise ClientLeft
        await asyncio.wait({producing})
        error = _overrun(request_id, limits=limits) if events.overrun else producing.result()
        if error is not None and not exchange.started:
            raise error
        await writer.write(b"" if error is None else event(reply_of(error)), last=True)
        return _stalled(request_id, limits=limits) if writer.stalled else error
    finally:
        writer.close()
        await cancelled(producing, leaving)


class _Writer:
    """Writes pieces, the head of the answer before the first; cuts the connection if one is not taken for too long.

    One timer for the whole stream: a deadline around each of thousands of pieces would cost as much as writing them.
    """

    def __init__(self, exchange: Exchange, *, stall_s: float) -> None:
        self._exchange, self._stall_s = exchange, stall_s
        self._loop = asyncio.get_running_loop()
        self._since_s: float | None = None
        self._timer = self._loop.call_later(stall_s, self._look)
        self.stalled = False

    async def write(self, piece: bytes, *, last: bool = False) -> None:
        """Write; returns once the piece is on its way, or the connection is gone."""
        self._since_s = self._loop.time()
        if not self._exchange.started:
            await self._exchange.begin_stream(kind=_STREAM, headers=_HEADERS)
        await self._exchange.send_piece(piece, last=last)
        self._since_s = None

    def close(self) -> None:
        """Look no more."""
        self._timer.cancel()

    def _look(self) -> None:
        now_s = self._loop.time()
        due_s = (now_s if self._since_s is None else self._since_s) + self._stall_s
        if due_s > now_s:
            self._timer = self._loop.call_at(due_s, self._look)
        else:
            self.stalled = True
            self._exchange.cut()  # what waits for the reader goes on, and finds that it is gone


def _stalled(request_id: str, *, limits: LimitSettings) -> SlowReader:
    return SlowReader(
        f"the reader of request {request_id} took nothing for {limits.stream_stall_s:g} s "
        "(generator.limits.stream_stall_s): the request was aborted and the connection cut"
    )


def _overrun(request_id: str, *, limits: LimitSettings) -> SlowReader:
    return SlowReader(
        f"the reader of request {request_id} is {limits.stream_events} events behind "
        "(generator.limits.stream_events): the request was aborted, so that memory stays bounded. Read faster, or ask "
        "without stream"
    )


async def _produce(produce: Callable[[], Awaitable[None]], *, events: Events) -> RollmillError | None:
    """Produce; an error is a value, so that it comes after the events before it."""
    try:
        await produce()
    except RollmillError as error:
        return error
    finally:
        events.end()
    return None
