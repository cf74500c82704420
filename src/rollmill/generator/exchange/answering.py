"""The side of an exchange that answers: requests of one caller, side by side, over one call of gRPC.

| wait | ends after |
|---|---|
| for the next frame of the caller | the caller leaves, or the server ends its exchanges |
| for a request's answer | whoever answers it: the request's deadline |
| for the caller to take a frame | `limits.stream_stall_s`: the exchange ends, and its requests with it |

Each request ends by itself, with an answer or a failure. Only what concerns the exchange as a whole ends all of them:
frames that are none, a number used twice, a reader that is stuck.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Protocol

from google.protobuf.message import DecodeError

from rollmill.config.serving import LimitSettings
from rollmill.errors import DataError, Overloaded, RollmillError, SlowReader
from rollmill.generator.exchange.frames import FRAME_BYTES, FRAME_BYTES_KEY, FrameWriter
from rollmill.generator.proto import policy_inference_pb2 as pb
from rollmill.generator.statuses import error_to_status

_log = logging.getLogger(__name__)

Put = Callable[[bytes], None]
Write = Callable[[pb.AnswerFrame], Awaitable[None]]


class Answerer(Protocol):
    """Whoever serves the requests."""

    async def reply(self, data: bytes) -> bytes:
        """Return the serialized reply to a serialized request."""
        ...

    async def events(self, data: bytes, *, put: Put) -> None:
        """Hand the serialized events of a serialized request to `put`."""
        ...


class Exchanges:
    """All exchanges of a server.

    Args:
        answerer: serves their requests.
        limits: of frames, readers and requests at once.
        calls: requests that one exchange may have at once.
    """

    def __init__(self, answerer: Answerer, *, limits: LimitSettings, calls: int) -> None:
        self._answerer, self._limits, self._calls = answerer, limits, calls
        self._open: set[_Exchange] = set()
        self._ending = False

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What a caller has to know first."""
        return ((FRAME_BYTES_KEY, str(min(self._limits.max_body_bytes, FRAME_BYTES))),)

    async def serve(self, frames: AsyncIterator[pb.AskFrame], *, write: Write) -> None:
        """Answer one caller until it has said that there is no more, or `end` was called.

        Raises:
            DataError: if the caller breaks the rules of an exchange.
            SlowReader: if it does not read.

        Cancellation:
            cancels its requests.
        """
        exchange = _Exchange(self._answerer, limits=self._limits, calls=self._calls, write=write)
        self._open.add(exchange)
        try:
            await exchange.run(_none() if self._ending else frames)
        finally:
            self._open.discard(exchange)

    def end(self) -> None:
        """Take no more asks; exchanges end once their requests have ended."""
        self._ending = True
        for exchange in self._open:
            exchange.end()


class _Exchange:
    def __init__(self, answerer: Answerer, *, limits: LimitSettings, calls: int, write: Write) -> None:
        self._answerer, self._limits, self._calls = answerer, limits, calls
        self._writer = FrameWriter[pb.Answer](
            lambda answers: write(pb.AnswerFrame(answers=answers)), stall_s=limits.stream_stall_s
        )
        self._running: dict[int, asyncio.Task[None]] = {}
        self._newest = 0
        self._behind: set[int] = set()
        self._reading: asyncio.Task[None] | None = None

    async def run(self, frames: AsyncIterator[pb.AskFrame]) -> None:
        try:
            async with asyncio.TaskGroup() as writing:
                writing.create_task(self._writer.run(), name="frames of an exchange")
                async with asyncio.TaskGroup() as requests:
                    self._reading = requests.create_task(self._read(frames, requests=requests))
                self._writer.close()
        except BaseExceptionGroup as group:  # the others were cancelled because of the first
            raise _first(group) from group

    def end(self) -> None:
        if self._reading is not None:
            self._reading.cancel()

    async def _read(self, frames: AsyncIterator[pb.AskFrame], *, requests: asyncio.TaskGroup) -> None:
        async for frame in frames:
            for ask in frame.asks:
                self._take(ask, requests=requests)

    def _take(self, ask: pb.Ask, *, requests: asyncio.TaskGroup) -> None:
        kind = ask.WhichOneof("ask")
        if kind == "cancel":
            if (task := self._running.get(ask.call)) is not None:
                task.cancel()
            return
        if ask.call <= self._newest:
            raise DataError(
                f"ask {ask.call} of an exchange came after ask {self._newest}; number the requests of an exchange "
                "upwards from 1"
            )
        self._newest = ask.call
        if len(self._running) >= self._calls:
            self._fail(ask.call, _too_many(self._calls))
            return
        task = requests.create_task(self._serve(ask.call, kind, getattr(ask, kind) if kind else b""))
        self._running[ask.call] = task
        task.add_done_callback(lambda _: self._running.pop(ask.call))

    async def _serve(self, call: int, kind: str | None, data: bytes) -> None:
        try:
            match kind:
                case "generate":
                    reply = await self._answerer.reply(data)
                    self._put(pb.Answer(call=call, reply=reply), nbytes=len(reply))
                case "stream":
                    await self._answerer.events(data, put=lambda event: self._put_event(call, event))
                    self._put(pb.Answer(call=call, ended=True))
                case _:
                    raise DataError("an ask of a kind that is not known here: is the caller of a newer version?")
        except RollmillError as error:
            self._fail(call, error)
        except DecodeError as error:
            self._fail(call, DataError(f"these bytes are no GenerateRequest: {error}. Use the published .proto"))
        except Exception as error:  # a fault of ours in one request is no reason to end the others
            _log.exception("request %d of an exchange failed", call)
            self._fail(call, RollmillError(f"{type(error).__name__}: {error}"))
        except asyncio.CancelledError:
            if call not in self._behind:
                raise
            self._behind.remove(call)
            self._fail(call, self._slow())

    def _put_event(self, call: int, event: bytes) -> None:
        """Send an event; a request whose reader is too far behind ends instead, for whoever calls this must go on."""
        if call in self._behind:
            return
        if self._writer.backlog < self._limits.stream_events * len(self._running):
            self._put(pb.Answer(call=call, event=event), nbytes=len(event))
        else:
            self._behind.add(call)
            self._running[call].cancel()

    def _slow(self) -> SlowReader:
        return SlowReader(
            f"the reader of an exchange is {self._writer.backlog} events behind (generator.limits.stream_events for "
            "each of its requests): the request was aborted, so that memory stays bounded. Read faster"
        )

    def _fail(self, call: int, error: RollmillError) -> None:
        status, details, metadata = error_to_status(error)
        failure = pb.Failure(status=status, details=details, metadata=metadata)
        self._put(pb.Answer(call=call, failure=failure), nbytes=failure.ByteSize())

    def _put(self, answer: pb.Answer, *, nbytes: int = 0) -> None:
        self._writer.put(answer, nbytes=nbytes)


def _too_many(calls: int) -> Overloaded:
    return Overloaded(
        f"{calls} requests of this exchange wait or run, and no more are taken. Ask again in 1 s, or raise "
        "generator.limits.max_requests",
        retry_after_s=1.0,
    )


def _first(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


async def _none() -> AsyncIterator[pb.AskFrame]:
    return
    yield
