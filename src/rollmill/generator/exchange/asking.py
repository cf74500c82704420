"""The side of an exchange that asks: many requests of one process over one call of gRPC.

| wait | ends after |
|---|---|
| for the exchange to open, and for an answer | the request's `timeout_s`; the connection's keepalive, without a peer |
| for the other side to take a frame | `_STALL_S` |

An exchange that broke is opened anew by the next request. A service that has none is asked once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from rollmill.errors import SlowReader
from rollmill.generator.exchange.frames import FRAME_BYTES_KEY, ITEM_BYTES, FrameWriter
from rollmill.generator.proto import policy_inference_pb2 as pb

METHOD = f"/{pb.DESCRIPTOR.services_by_name['PolicyInference'].full_name}/Exchange"
_STALL_S = 60.0
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
        metadata: of the call.
    """

    def __init__(self, channel: grpc.aio.Channel, *, metadata: Any = None) -> None:
        self._method = channel.stream_stream(METHOD)
        self._metadata = metadata
        self._link: _Link | None = None
        self._none_there = False

    async def reply(self, data: bytes, *, timeout_s: float) -> bytes | None:
        """Return the serialized reply to a serialized request; `None` if it needs a call of its own.

        Raises:
            CallFailed: with what a call of its own would have ended with.

        Cancellation:
            cancels the request there.
        """
        return await self._asked(data, hear=None, timeout_s=timeout_s)

    async def events(self, data: bytes, *, hear: Hear, timeout_s: float) -> bool:
        """Hand the serialized events of a request to `hear`, whose errors end it; false if it needs a call of its own.

        Raises:
            CallFailed: with what a call of its own would have ended with.

        Cancellation:
            cancels the request there.
        """
        return await self._asked(data, hear=hear, timeout_s=timeout_s) is not None

    async def close(self) -> None:
        """Cancel all requests, which end with the status `CANCELLED`."""
        if self._link is not None:
            await self._link.close()

    async def _asked(self, data: bytes, *, hear: Hear | None, timeout_s: float) -> bytes | None:
        if self._none_there:
            return None
        try:
            async with asyncio.timeout(timeout_s if timeout_s < _LONGEST_S else _LONGEST_S):
                link = self._living_link()
                await link.opened.wait()
                if link.failure is not None and link.failure.status == grpc.StatusCode.UNIMPLEMENTED.name:
                    self._none_there = True
                    return None
                return await link.ask(data, hear=hear)
        except TimeoutError:
            raise CallFailed("DEADLINE_EXCEEDED", f"no answer within {timeout_s:g} s") from None

    def _living_link(self) -> _Link:
        if self._link is None or self._link.failure is not None:
            self._link = _Link(self._method(metadata=self._metadata))
        return self._link


class _Link:
    """One call of gRPC, for as long as it lives.

    Attributes:
        failure: what it ended with.
        opened: set once frames can be sent, or it has failed.
    """

    def __init__(self, call: Any) -> None:
        self.failure: CallFailed | None = None
        self.opened = asyncio.Event()
        self._call = call
        self._writer = FrameWriter[pb.Ask](self._write, stall_s=_STALL_S, frame_bytes=0)
        self._number = 0
        self._pending: dict[int, tuple[asyncio.Future[bytes], Hear | None]] = {}
        self._running = asyncio.get_running_loop().create_task(self._run(), name="exchange")

    async def ask(self, data: bytes, *, hear: Hear | None) -> bytes | None:
        """Return the reply, or nothing after the events of a stream; `None` if the request fits into no frame."""
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
            self.opened.set()
            for answered, _ in self._pending.values():
                if not answered.done():
                    answered.set_exception(failure.again())
            self._pending.clear()

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
