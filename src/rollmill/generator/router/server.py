"""gRPC face of the router: the same service as a replica's, so that clients need not know which of them they talk to.

| call | waits for | gives up after |
|---|---|---|
| Generate, GenerateStream, each request of Exchange | its turns | the request's deadline; the client leaves |
| one event of a stream, one frame of an exchange | its reader | `limits.stream_stall_s`: its requests are aborted |
| Score | the least loaded replica | the client's deadline, or `SCORE_S` |
| LoadWeights | each replica, a few at a time | `load_deadline_s` for each; goes on if the client leaves |
| Drain | requests that run | the deadline in the call; the rest is aborted and counted |

Generate and its stream are passed on as bytes; only what the law needs is read.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from rollmill.errors import DataError, RollmillError
from rollmill.generator.exchange.answering import Exchanges, Put
from rollmill.generator.interceptors import TokenInterceptor, abort_with
from rollmill.generator.proto import policy_inference_pb2 as pb
from rollmill.generator.proto import rl_inference_pb2_grpc as rl_pb_grpc
from rollmill.generator.router.fleet import ReplicaLoad, joined_report
from rollmill.generator.router.service import RouterService
from rollmill.generator.router.writer import StreamWriter
from rollmill.generator.security import Access
from rollmill.generator.server import (
    MINIMAL_SERVICE_NAME,
    SERVICE_NAME,
    MinimalServicer,
    calls_at_once,
    server_options,
)
from rollmill.generator.state import ReplicaState
from rollmill.generator.wire import report_to_message

T = TypeVar("T")
Context = grpc.aio.ServicerContext
SCORE_S = 60.0


class RouterServicer:
    """Answers the calls of `policy_inference.proto` for a fleet.

    Args:
        service: what is served.
        tasks: owns updates that outlive their call.
    """

    def __init__(self, service: RouterService, *, tasks: asyncio.TaskGroup) -> None:
        self.service = service
        self.health = health.aio.HealthServicer()  # pyright: ignore[reportAttributeAccessIssue]
        self.exchanges = Exchanges(self, limits=service.limits, calls=calls_at_once(service.limits))
        self._tasks = tasks

    def handlers(self) -> grpc.GenericRpcHandler:
        """Return the handlers of the service, those of the data path without any parsing."""
        methods: dict[str, Any] = {
            "Generate": grpc.unary_unary_rpc_method_handler(self.generate),
            "GenerateStream": grpc.unary_stream_rpc_method_handler(self.generate_stream),
            "Exchange": grpc.stream_stream_rpc_method_handler(self.exchange),
            "Score": grpc.unary_unary_rpc_method_handler(self.score),
            "Abort": self._typed(self.abort, pb.AbortRequest),
            "LoadWeights": self._typed(self.load_weights, pb.LoadWeightsRequest),
            "Drain": self._typed(self.drain, pb.DrainRequest),
            "Status": self._typed(self.status, pb.StatusRequest),
        }
        return grpc.method_handlers_generic_handler(SERVICE_NAME, methods)

    def _typed(self, method: Callable[[Any], Awaitable[Message]], kind: type[Message]) -> grpc.RpcMethodHandler:
        """Return a handler that reads its message itself, so that what is no message gets a typed error."""

        async def handle(data: bytes, context: Context) -> bytes:
            async def work() -> bytes:
                return (await method(kind.FromString(data))).SerializeToString()

            return await self._answer(context, work)

        return grpc.unary_unary_rpc_method_handler(handle)

    async def generate(self, data: bytes, context: Context) -> bytes:
        """Sample turns."""
        return await self._answer(context, lambda: self.service.generate_bytes(data))

    async def generate_stream(self, data: bytes, context: Context) -> None:
        """Sample turns, token by token."""
        writer = StreamWriter(context.write, stall_s=self.service.limits.stream_stall_s)

        async def work() -> None:
            with writer.watched():
                await self.service.stream_bytes(data, emit=writer.emit)

        await self._answer(context, work)

    async def exchange(self, frames: AsyncIterator[bytes], context: Context) -> None:
        """Sample turns for one caller of many requests."""
        await context.send_initial_metadata(self.exchanges.metadata)

        async def write(frame: pb.AnswerFrame) -> None:
            await context.write(frame.SerializeToString())

        await self._answer(context, lambda: self.exchanges.serve(_ask_frames(frames), write=write))

    async def reply(self, data: bytes) -> bytes:
        """Return the serialized reply to a request of an exchange."""
        return await self.service.generate_bytes(data)

    async def events(self, data: bytes, *, put: Put) -> None:
        """Hand the serialized events of a request of an exchange to `put`."""

        async def emit(event: pb.GenerateEvent, raw: bytes | None) -> None:
            put(event.SerializeToString() if raw is None else raw)

        await self.service.stream_bytes(data, emit=emit)

    async def abort(self, request: pb.AbortRequest) -> pb.AbortReply:
        """Abort exactly the named request, wherever it is."""
        return pb.AbortReply(found=await self.service.abort(request.request_id))

    async def score(self, data: bytes, context: Context) -> bytes:
        """Return log-probs of given tokens."""
        left_s = context.time_remaining()
        timeout_s = SCORE_S if left_s is None else min(left_s, SCORE_S)
        return await self._answer(context, lambda: self.service.score_bytes(data, timeout_s=timeout_s))

    async def load_weights(self, request: pb.LoadWeightsRequest) -> pb.LoadWeightsReply:
        """Have the replicas serve another version, a few at a time; goes on if the caller leaves."""
        update = self._tasks.create_task(self._load(request), name=f"update to {request.policy_version}")
        found = await asyncio.shield(update)
        if isinstance(found, RollmillError):
            raise found
        return found

    async def _load(self, request: pb.LoadWeightsRequest) -> pb.LoadWeightsReply | RollmillError:
        """Load; an error is a value here, so that it reaches its caller and not the task group."""
        try:
            load = self.service.load_weights
            loads = await load(request.policy_version, job=request.job, adapter=request.adapter)
            reply = report_to_message(joined_report(loads, policy_version=request.policy_version))
        except RollmillError as error:
            return error
        reply.replicas.extend(_load_message(one) for one in loads)
        return reply

    async def drain(self, request: pb.DrainRequest) -> pb.DrainReply:
        """Finish what runs, take nothing new."""
        return pb.DrainReply(
            unfinished=await self.service.drain(request.deadline_s, reason="the router was asked to drain")
        )

    async def status(self, request: pb.StatusRequest) -> pb.StatusReply:
        """Return the fleet: its sums, and each replica."""
        return self.service.status_message()

    async def publish_health(self) -> None:
        """Tell the standard health service for ever whether requests are taken."""
        kinds = health_pb2.HealthCheckResponse
        while True:
            self.service.changed.clear()
            state, _ = self.service.standing()
            for name in ("", SERVICE_NAME):
                serving = state is ReplicaState.SERVING
                await self.health.set(name, kinds.SERVING if serving else kinds.NOT_SERVING)
            await self.service.changed.wait()

    async def _answer(self, context: Context, work: Callable[[], Awaitable[T]]) -> T:
        try:
            return await work()
        except RollmillError as error:
            await abort_with(error, context=context)
            raise
        except DecodeError as error:
            await abort_with(_not_a_message(error), context=context)
            raise


async def _ask_frames(frames: AsyncIterator[bytes]) -> AsyncIterator[pb.AskFrame]:
    async for data in frames:
        yield pb.AskFrame.FromString(data)


def _not_a_message(error: DecodeError) -> DataError:
    return DataError(
        f"the request is no message of {SERVICE_NAME}: {error}. Generate the client from the router's proto"
    )


def _load_message(load: ReplicaLoad) -> pb.ReplicaLoad:
    return pb.ReplicaLoad(
        replica=load.replica,
        result=load.result.value,
        error="" if load.error is None else str(load.error),
        digest="" if load.report is None else load.report.digest,
        pause_s=0.0 if load.report is None else load.report.pause_s,
    )


def new_router_server(
    service: RouterService, *, tasks: asyncio.TaskGroup, access: Access | None = None
) -> tuple[grpc.aio.Server, RouterServicer]:
    """Return a server with both inference services, health and reflection, not yet bound, and who answers its calls.

    Args:
        service: what is served.
        tasks: owns what outlives its call.
        access: what callers must show.
    """
    token = None if access is None else access.token
    server = grpc.aio.server(
        interceptors=() if token is None else (TokenInterceptor(token),), options=server_options(service.limits)
    )
    servicer = RouterServicer(service, tasks=tasks)
    server.add_generic_rpc_handlers((servicer.handlers(),))
    # It asks no more of a service than what both kinds have.
    minimal = MinimalServicer(service)  # pyright: ignore[reportArgumentType]
    rl_pb_grpc.add_PolicyInferenceServicer_to_server(minimal, server)
    health_pb2_grpc.add_HealthServicer_to_server(servicer.health, server)
    names = (SERVICE_NAME, MINIMAL_SERVICE_NAME, health.SERVICE_NAME, reflection.SERVICE_NAME)
    reflection.enable_server_reflection(names, server)
    return server, servicer
