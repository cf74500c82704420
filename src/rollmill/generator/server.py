"""gRPC face of one replica.

| call | waits for | gives up after |
|---|---|---|
| Generate | its turn | the request's deadline (the engine returns what there is); the client's cancellation |
| LoadWeights | pull, swap, proof | the load deadline; goes on if the client leaves, because half a swap helps nobody |
| Drain | requests that run | the deadline in the call; the rest is aborted and counted |
| others | the end of the engine's current step | the client's deadline |

Translates and refuses; decides nothing about batching or weights.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import grpc
import numpy as np
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from rollmill.errors import EngineDead, EngineError, RollmillError
from rollmill.generator.loading import Replica
from rollmill.generator.proto import policy_inference_pb2 as pb
from rollmill.generator.proto import policy_inference_pb2_grpc as pb_grpc
from rollmill.generator.state import ReplicaState, move, refusal
from rollmill.generator.wire import (
    ReplicaStatus,
    error_to_status,
    report_to_message,
    request_from_message,
    status_to_message,
    turn_to_message,
)

T = TypeVar("T")
Context = grpc.aio.ServicerContext

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["PolicyInference"].full_name
MESSAGE_BYTES = 64 * 1024 * 1024
"""Largest message; token ids of a million-token turn fit."""
CHANNEL_OPTIONS = (
    ("grpc.max_send_message_length", MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MESSAGE_BYTES),
)


class PolicyInferenceServicer(pb_grpc.PolicyInferenceServicer):
    """Answers the calls of `policy_inference.proto` for one replica.

    Args:
        replica: the engine, its standing and its loader.
        tasks: owns loads that outlive their call.
    """

    def __init__(self, replica: Replica, *, tasks: asyncio.TaskGroup) -> None:
        self.replica = replica
        self.engine_died = asyncio.Event()
        self.health = health.aio.HealthServicer()  # pyright: ignore[reportAttributeAccessIssue]
        self._tasks = tasks
        self._active = 0
        self._idle = asyncio.Event()
        self._idle.set()

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> pb.GenerateReply:
        """Sample one turn."""
        return await self._answer(context, lambda: self._generate(request))

    async def Abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortReply:
        """Abort exactly the named request."""
        found = await self._answer(context, lambda: self.replica.engine.abort(request.request_id))
        return pb.AbortReply(found=found)

    async def Score(self, request: pb.ScoreRequest, context: Context) -> pb.ScoreReply:
        """Return log-probs of given tokens."""
        return await self._answer(context, lambda: self._score(request))

    async def LoadWeights(self, request: pb.LoadWeightsRequest, context: Context) -> pb.LoadWeightsReply:
        """Serve another version."""
        load = self._tasks.create_task(self._load(request.policy_version), name=f"load {request.policy_version}")

        async def outcome() -> pb.LoadWeightsReply:
            result = await asyncio.shield(load)
            if isinstance(result, RollmillError):
                raise result
            return result

        return await self._answer(context, outcome)

    async def Drain(self, request: pb.DrainRequest, context: Context) -> pb.DrainReply:
        """Finish what runs, take nothing new."""
        unfinished = await self._answer(context, lambda: self.drain(request.deadline_s, reason="asked to drain"))
        return pb.DrainReply(unfinished=unfinished)

    async def Status(self, request: pb.StatusRequest, context: Context) -> pb.StatusReply:
        """Return standing, weights and load."""
        return status_to_message(self.status())

    def status(self) -> ReplicaStatus:
        """Return standing, weights and load."""
        engine, standing = self.replica.engine, self.replica.standing
        info, load = engine.info(), engine.load()
        return ReplicaStatus(
            state=standing.state,
            reason=standing.reason,
            policy_version=info.policy_version,
            digest=info.digest,
            running=load.running,
            waiting=load.waiting,
            kv_used_tokens=load.kv_used_tokens,
            kv_capacity_tokens=load.kv_capacity_tokens,
            output_tokens=load.output_tokens,
            prefill_tokens=load.prefill_tokens,
            cached_tokens=load.cached_tokens,
            wall_s=load.wall_s,
            seconds=load.seconds,
            max_slots=info.max_slots,
            max_model_len=info.max_model_len,
            dtype=info.dtype,
        )

    async def drain(self, deadline_s: float, *, reason: str) -> int:
        """Take nothing new, wait for what runs, abort the rest; return how many were aborted."""
        replica = self.replica
        if replica.standing.state is not ReplicaState.DEAD:
            replica.standing = move(replica.standing, ReplicaState.DRAINING, reason=reason)
        await self.publish_health()
        try:
            async with asyncio.timeout(deadline_s):
                await self._idle.wait()
        except TimeoutError:
            unfinished = self._active
            if replica.standing.state is not ReplicaState.DEAD:
                await replica.engine.pause("abort")
            return unfinished
        return 0

    async def publish_health(self) -> None:
        """Tell the standard health service whether this replica takes requests."""
        serving = self.replica.standing.state is ReplicaState.SERVING
        kinds = health_pb2.HealthCheckResponse
        for name in ("", SERVICE_NAME):
            await self.health.set(name, kinds.SERVING if serving else kinds.NOT_SERVING)

    async def _generate(self, message: pb.GenerateRequest) -> pb.GenerateReply:
        if (why := refusal(self.replica.standing, to_generate=True)) is not None:
            raise EngineError(f"request {message.request_id} refused: {why}")
        self._active += 1
        self._idle.clear()
        try:
            return turn_to_message(await self.replica.engine.generate(request_from_message(message)))
        finally:
            self._active -= 1
            if not self._active:
                self._idle.set()

    async def _score(self, message: pb.ScoreRequest) -> pb.ScoreReply:
        engine = self.replica.engine
        version = engine.info().policy_version
        logprobs = await engine.score(np.array(message.token_ids, dtype=np.int64))
        if engine.info().policy_version != version:
            raise EngineError("the weights were swapped while these tokens were scored; score them again")
        return pb.ScoreReply(logprobs=logprobs.tolist(), policy_version=version)

    async def _load(self, policy_version: int) -> pb.LoadWeightsReply | RollmillError:
        """Load; an error is a value here, so that it reaches its caller and not the task group."""
        try:
            return report_to_message(await self.replica.load(policy_version))
        except RollmillError as error:
            return error
        finally:
            await self.publish_health()

    async def _answer(self, context: Context, work: Callable[[], Awaitable[T]]) -> T:
        try:
            return await work()
        except RollmillError as error:
            self.replica.take_note(error)
            await self.publish_health()
            if isinstance(error, EngineDead):
                self.engine_died.set()
            name, details, metadata = error_to_status(error)
            await context.abort(grpc.StatusCode[name], details, tuple(metadata.items()))
            raise


def new_server(servicer: PolicyInferenceServicer) -> grpc.aio.Server:
    """Return a server with the inference and the health service, not yet bound."""
    server = grpc.aio.server(options=(*CHANNEL_OPTIONS, ("grpc.so_reuseport", 0)))
    pb_grpc.add_PolicyInferenceServicer_to_server(servicer, server)
    health_pb2_grpc.add_HealthServicer_to_server(servicer.health, server)
    return server
