"""Builders for tests of exchanges: both sides in one process, on a virtual clock, over a wire that can be cut."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc

from rollmill.clock import VirtualClock
from rollmill.config.serving import LimitSettings
from rollmill.errors import DataError, EngineDead, NotServing, RollmillError
from rollmill.generator.exchange.answering import Exchanges, Put
from rollmill.generator.exchange.asking import AskingExchange
from rollmill.generator.interceptors import error_to_status
from rollmill.generator.proto import policy_inference_pb2 as pb

ERRORS = {kind.__name__: kind for kind in (DataError, EngineDead, NotServing, ValueError)}


class Answering:
    """Answers a request as it says itself: after a while with its own bytes, in so many events, or with an error."""

    def __init__(self) -> None:
        self.began: list[str] = []
        self.ended: list[str] = []
        self.cancelled: list[str] = []

    async def reply(self, data: bytes) -> bytes:
        with self._books(data) as plan:
            await asyncio.sleep(plan.deadline_s)
            self._fail(plan)
            return b"reply to " + plan.request_id.encode()

    async def events(self, data: bytes, *, put: Put) -> None:
        with self._books(data) as plan:
            for index in range(plan.siblings):
                await asyncio.sleep(plan.deadline_s / plan.siblings)
                put(f"{plan.request_id} {index}".encode())
            self._fail(plan)

    def _fail(self, plan: pb.GenerateRequest) -> None:
        if plan.model:
            raise ERRORS[plan.model]("as was asked for")

    @contextlib.contextmanager
    def _books(self, data: bytes) -> Iterator[pb.GenerateRequest]:
        plan = pb.GenerateRequest.FromString(data)
        self.began.append(plan.request_id)
        try:
            yield plan
        except asyncio.CancelledError:
            self.cancelled.append(plan.request_id)
            raise
        finally:
            self.ended.append(plan.request_id)


def plan(name: str, *, seconds: float = 0.0, events: int = 1, error: str = "", padding: int = 0) -> bytes:
    """Return a request that says how `Answering` shall answer it."""
    return pb.GenerateRequest(
        request_id=name, deadline_s=seconds, siblings=events, model=error, group_key="x" * padding
    ).SerializeToString()


class Wire:
    """A channel to exchanges in this process; counts frames and can be cut.

    Attributes:
        asked, answered: frames so far, by the number of items in each.
        opened: calls of an exchange so far.
        alone: the time that each request with a call of its own was given.
        none_there: whether the service has no exchange.
        gate: a call of an exchange opens once this is set.
    """

    def __init__(self, exchanges: Exchanges, *, answering: Answering) -> None:
        self.exchanges, self.answering = exchanges, answering
        self.asked: list[int] = []
        self.answered: list[int] = []
        self.opened = 0
        self.alone: list[float] = []
        self.none_there = False
        self.gate = asyncio.Event()
        self.gate.set()
        self.calls: list[_Call] = []
        self.reading = asyncio.Event()
        self.reading.set()

    def stream_stream(self, method: str) -> Any:
        def call(*, metadata: Any = None) -> _Call:
            self.opened += 1
            self.calls.append(_Call(self))
            if self.none_there:
                self.calls[-1].fail(grpc.StatusCode.UNIMPLEMENTED, "no such method")
            return self.calls[-1]

        return call

    def unary_unary(self, method: str) -> Any:
        def call(data: bytes, *, timeout: float, metadata: Any = None) -> Any:
            self.alone.append(timeout)
            return self.answering.reply(data)

        return call

    def unary_stream(self, method: str) -> Any:
        def call(data: bytes, *, timeout: float, metadata: Any = None) -> _Alone:
            self.alone.append(timeout)
            return _Alone(self.answering, data)

        return call

    def cut(self) -> None:
        """Lose the connection: both sides hear of it."""
        for call in self.calls:
            call.fail(grpc.StatusCode.UNAVAILABLE, "connection lost")


class _Call:
    """What both sides see of one call of gRPC."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._asks: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._answers: asyncio.Queue[bytes | grpc.aio.AioRpcError | Any] = asyncio.Queue()
        self._over = False
        self._serving = asyncio.get_running_loop().create_task(self._serve())

    async def _serve(self) -> None:
        try:
            await self._wire.exchanges.serve(self._frames(), write=self._answer)
        except RollmillError as error:
            status, details, _ = error_to_status(error)
            self.fail(grpc.StatusCode[status], details)
        except asyncio.CancelledError:
            pass
        else:
            self._answers.put_nowait(grpc.aio.EOF)  # pyright: ignore[reportAttributeAccessIssue]

    async def _frames(self) -> AsyncIterator[pb.AskFrame]:
        while (data := await self._asks.get()) is not None:
            yield pb.AskFrame.FromString(data)

    async def _answer(self, frame: pb.AnswerFrame) -> None:
        await self._wire.reading.wait()
        self._wire.answered.append(len(frame.answers))
        self._answers.put_nowait(frame.SerializeToString())

    def fail(self, code: grpc.StatusCode, details: str) -> None:
        if not self._over:
            self._over = True
            self._serving.cancel()
            nothing = grpc.aio.Metadata()
            self._answers.put_nowait(grpc.aio.AioRpcError(code, nothing, nothing, details))

    # -- the asking side

    async def initial_metadata(self) -> Any:
        await self._wire.gate.wait()
        return () if self._over else self._wire.exchanges.metadata

    async def read(self) -> Any:
        found = await self._answers.get()
        if isinstance(found, grpc.aio.AioRpcError):
            self._answers.put_nowait(found)
            raise found
        return found

    async def write(self, data: bytes) -> None:
        if self._over:
            raise asyncio.InvalidStateError("the call is over")
        self._wire.asked.append(len(pb.AskFrame.FromString(data).asks))
        self._asks.put_nowait(data)

    def cancel(self) -> None:
        self._over = True
        self._serving.cancel()

    def done(self) -> bool:
        return self._over

    async def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.UNAVAILABLE

    async def details(self) -> str:
        return "connection lost"


class _Alone:
    """A stream of one request, over a call of its own."""

    def __init__(self, answering: Answering, data: bytes) -> None:
        self._heard: list[bytes] = []
        self._serving = asyncio.get_running_loop().create_task(answering.events(data, put=self._heard.append))

    async def __aiter__(self) -> AsyncIterator[bytes]:
        await self._serving
        for event in self._heard:
            yield event

    def cancel(self) -> None:
        self._serving.cancel()


class Pair:
    """Both sides of an exchange.

    Args:
        calls: requests at once.
        limits: of the answering side.
    """

    def __init__(self, clock: VirtualClock, *, calls: int = 1000, **limits: Any) -> None:
        self.clock = clock
        self.answering = Answering()
        self.exchanges = Exchanges(self.answering, limits=LimitSettings(**limits), calls=calls)
        self.wire = Wire(self.exchanges, answering=self.answering)
        self.asking = AskingExchange(self.wire)  # pyright: ignore[reportArgumentType]

    async def reply(self, name: str, *, timeout_s: float = 600.0, **how: Any) -> bytes:
        return await self.asking.reply(plan(name, **how), timeout_s=timeout_s)

    async def events(self, name: str, *, timeout_s: float = 600.0, **how: Any) -> list[bytes]:
        heard: list[bytes] = []
        await self.asking.events(plan(name, **how), hear=heard.append, timeout_s=timeout_s)
        return heard
