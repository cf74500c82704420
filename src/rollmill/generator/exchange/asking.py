"""The side of an exchange that asks: many requests of one process over one call of gRPC.

| wait | ends after |
|---|---|
| for the exchange to open, and for an answer | the request's `timeout_s`; the connection's keepalive, without a peer |
| for the other side to take a frame | `_STALL_S` |

An exchange that broke is opened anew by the next request. Requests that fit into no frame, and those to a service that
has no exchange, get a call of their own; such a service is asked again every `_LOOK_AGAIN_S`.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from rollmill.errors import SlowReader
from rollmill.generator.exchange.frames import FRAME_BYTES_KEY, ITEM_BYTES, FrameWriter
from rollmill.generator.proto import policy_inference_pb2 as pb

SERVICE = pb.DESCRIPTOR.services_by_name["PolicyInference"].full_name
METHOD = f"/{SERVICE}/Exchange"
_STALL_S = 60.0
_LOOK_AGAIN_S = 60.0
_LONGEST_S = 7 * 24 * 3600.0
"""A timeout beyond this, or that is no number, is taken as this."""
Hear = Callable[[bytes], None]


class CallFailed(Exception):
    """A request ended with a status other than OK.

    Attributes:
        status: name of the gRPC status.
        details: message of the other side.
        metadata: trailing metadata.
    """

    def __init__(self, status: str, details: str, *, metadata: Mapping[str, str] | None = None) -> None:
        super().__init__(f"{status}: {details}")
        self.status, self.details, self.metadata = status, details, metadata or {}

    @classmethod
    def of(cls, error: grpc.aio.AioRpcError) -> CallFailed:
        """Return what a call of gRPC ended with."""
        metadata = {str(key): str(value) for key, value in error.trailing_metadata() or ()}
        return cls(error.code().name, error.details() or "", metadata=metadata)

    def again(self) -> CallFailed:
        """Return the same for another request, which has a traceback of its own."""
        return CallFailed(self.status, self.details, metadata=self.metadata)


class AskingExchange:
    """Requests to one service.

    Args:
        channel: to it; whoever opened it closes it, after this.
        metadata: of the calls.

    Attributes:
        alone: requests that had a call of their own.
    """

    def __init__(self, channel: grpc.aio.Channel, *, metadata: Any = None) -> None:
        self._method = channel.stream_stream(METHOD)
        self._generate = channel.unary_unary(f"/{SERVICE}/Generate")
        self._stream = channel.unary_stream(f"/{SERVICE}/GenerateStream")
        self._metadata = metadata
        self._link: _Link | None = None
        self._closed = False
        self.alone = 0

    async def reply(self, data: bytes, *, timeout_s: float) -> bytes:
        """Return the serialized reply to a serialized request.

        Raises:
            CallFailed: with what a call of its own would have ended with.

        Cancellation:
            cancels the request there.
        """
        async with self._until(timeout_s) as until_s:
            reply = await self._asked(data, hear=None)
            if reply is None:
                self.alone += 1
                reply = await self._generate(data, timeout=_left_s(until_s), metadata=self._metadata)
            return reply

    async def events(self, data: bytes, *, hear: Hear, timeout_s: float) -> None:
        """Hand the serialized events of a request to `hear`, whose errors end it.

        Raises:
            CallFailed: with what a call of its own would have ended with.

        Cancellation:
            cancels the request there.
        """
        async with self._until(timeout_s) as until_s:
            if await self._asked(data, hear=hear) is None:
                await self._stream_alone(data, hear=hear, timeout_s=_left_s(until_s))

    async def close(self) -> None:
        """Cancel the requests of the exchange; they end with `CANCELLED`, as others do when the channel closes."""
        self._closed = True
        if self._link is not None:
            await self._link.close()

    async def _asked(self, data: bytes, *, hear: Hear | None) -> bytes | None:
        link = self._link_at(asyncio.get_running_loop().time())
        await link.opened.wait()
        return await link.ask(data, hear=hear)

    async def _stream_alone(self, data: bytes, *, hear: Hear, timeout_s: float) -> None:
        self.alone += 1
        call = self._stream(data, timeout=timeout_s, metadata=self._metadata)
        try:
            async for event in call:
                hear(event)
        finally:
            call.cancel()

    @contextlib.asynccontextmanager
    async def _until(self, timeout_s: float) -> AsyncIterator[float]:
        """Bound a request, give the time of the loop at which it ends, and say in one way how its call ended."""
        until_s = asyncio.get_running_loop().time() + (timeout_s if timeout_s < _LONGEST_S else _LONGEST_S)
        try:
            async with asyncio.timeout_at(until_s):
                yield until_s
        except TimeoutError:
            raise CallFailed("DEADLINE_EXCEEDED", f"no answer within {timeout_s:g} s") from None
        except grpc.aio.AioRpcError as error:
            raise CallFailed.of(error) from error
        except asyncio.CancelledError:
            # A channel that is closed cancels its calls, not those who wait for them.
            task = asyncio.current_task()
            if not self._closed or (task is not None and task.cancelling()):
                raise
            raise CallFailed("CANCELLED", "the connection was closed on this side") from None

    def _link_at(self, now_s: float) -> _Link:
        """Return the exchange, a new one if it has ended; one that is not there is asked for again after a while."""
        if self._link is None or now_s >= self._link.replaced_from_s:
            self._link = _Link(self._method(metadata=self._metadata))
        return self._link


def _left_s(until_s: float) -> float:
    return max(0.0, until_s - asyncio.get_running_loop().time())


class _Link:
    """One call of gRPC, for as long as it lives.

    Attributes:
        failure: what it ended with.
        opened: set once frames can be sent, or it has failed.
        replaced_from_s: time of the loop from which another one is worth opening.
    """

    def __init__(self, call: Any) -> None:
        self.failure: CallFailed | None = None
        self.opened = asyncio.Event()
        self.replaced_from_s = math.inf
        self._call = call
        self._writer = FrameWriter[pb.Ask](self._write, stall_s=_STALL_S, frame_bytes=0)
        self._number = 0
        self._pending: dict[int, tuple[asyncio.Future[bytes], Hear | None]] = {}
        self._running = asyncio.get_running_loop().create_task(self._run(), name="exchange")

    async def ask(self, data: bytes, *, hear: Hear | None) -> bytes | None:
        """Return the reply, or nothing after the events of a stream; `None` if the request needs a call of its own."""
        if self._none_there():
            return None
        if self.failure is not None:
            raise self.failure.again()
        if len(data) + ITEM_BYTES > self._writer.frame_bytes:
            return None
        self._number += 1
        number, answered = self._number, asyncio.get_running_loop().create_future()
        self._pending[number] = (answered, hear)
        self._put(
            pb.Ask(call=number, generate=data) if hear is None else pb.Ask(call=number, stream=data), nbytes=len(data)
        )
        try:
            return await answered
        finally:
            if self._pending.pop(number, None) is not None:  # whoever asked has left
                self._put(pb.Ask(call=number, cancel=True))

    async def close(self) -> None:
        self._running.cancel()
        await asyncio.wait({self._running})

    # -- the call

    async def _run(self) -> None:
        failure = CallFailed("CANCELLED", "the exchange was closed on this side")
        try:
            failure = await self._until_over()
        finally:
            self._call.cancel()
            self.failure = failure
            ended_s = asyncio.get_running_loop().time()
            self.replaced_from_s = ended_s + (_LOOK_AGAIN_S if self._none_there() else 0.0)
            self.opened.set()
            for answered, _ in self._pending.values():
                if not answered.done():
                    answered.set_exception(failure.again())
            self._pending.clear()

    def _none_there(self) -> bool:
        """Return whether the service has no exchange."""
        return self.failure is not None and self.failure.status == grpc.StatusCode.UNIMPLEMENTED.name

    async def _until_over(self) -> CallFailed:
        """Return what the call ended with."""
        try:
            await self._open()
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._writer.run(), name="frames of an exchange")
                tasks.create_task(self._read(), name="answers of an exchange")
        except grpc.aio.AioRpcError as error:
            return CallFailed.of(error)
        except BaseExceptionGroup as group:
            return await self._failure(group.exceptions[0])
        raise AssertionError("an exchange is read until it fails")

    async def _open(self) -> None:
        metadata = {str(key): value for key, value in await self._call.initial_metadata() or ()}
        if FRAME_BYTES_KEY not in metadata:  # it failed, and reading says how
            await self._call.read()
        self._writer.frame_bytes = int(metadata.get(FRAME_BYTES_KEY, 0))
        self.opened.set()

    async def _failure(self, error: BaseException) -> CallFailed:
        if isinstance(error, grpc.aio.AioRpcError):
            return CallFailed.of(error)
        if isinstance(error, CallFailed):
            return error
        if isinstance(error, SlowReader):
            return CallFailed("UNAVAILABLE", str(error))
        if isinstance(error, asyncio.InvalidStateError) and self._call.done():  # written to after its end
            return CallFailed((await self._call.code()).name, await self._call.details() or "")
        return CallFailed("UNKNOWN", f"{type(error).__name__}: {error}")

    async def _write(self, asks: list[pb.Ask]) -> None:
        await self._call.write(pb.AskFrame(asks=asks).SerializeToString())

    async def _read(self) -> None:
        while (data := await self._call.read()) is not grpc.aio.EOF:  # pyright: ignore[reportAttributeAccessIssue]
            try:
                frame = pb.AnswerFrame.FromString(data)
            except DecodeError as error:
                raise CallFailed("INTERNAL", f"{len(data)} bytes that are no AnswerFrame came: {error}") from error
            for answer in frame.answers:
                self._take(answer)
        raise CallFailed("UNAVAILABLE", "the service ended the exchange, as it does when it stops")

    # -- requests

    def _take(self, answer: pb.Answer) -> None:
        answered, hear = self._pending.get(answer.call, (None, None))
        if answered is None or answered.done():  # whoever asked has left meanwhile
            return
        match answer.WhichOneof("answer"):
            case "event":
                self._hear(answer, answered=answered, hear=hear)
                return
            case "reply":
                answered.set_result(answer.reply)
            case "ended":
                answered.set_result(b"")
            case "failure":
                found = answer.failure
                answered.set_exception(CallFailed(found.status, found.details, metadata=dict(found.metadata)))
            case _:
                answered.set_exception(CallFailed("INTERNAL", "an answer of a kind that is not known here came"))
        del self._pending[answer.call]

    def _hear(self, answer: pb.Answer, *, answered: asyncio.Future[bytes], hear: Hear | None) -> None:
        if hear is None:
            answered.set_exception(CallFailed("INTERNAL", "an event came for a request that is no stream"))
            return
        try:
            hear(answer.event)
        except Exception as error:  # of whoever hears it, and theirs to handle
            answered.set_exception(error)

    def _put(self, ask: pb.Ask, *, nbytes: int = 0) -> None:
        if self.failure is None:
            self._writer.put(ask, nbytes=nbytes)
