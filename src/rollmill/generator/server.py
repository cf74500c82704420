"""gRPC face of one replica: messages to records and back, errors to status codes.

| call | waits for | gives up after |
|---|---|---|
| Generate, GenerateStream | its turns | the request's deadline (the engine returns what there is); the client leaves |
| LoadWeights | pull, swap, proof | the load deadline; goes on if the client leaves |
| Drain | requests that run | the deadline in the call; the rest is aborted and counted |
| others | the end of the engine's current step | the client's deadline |

Translates; what is refused and why is the service's.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeVar

import grpc
import numpy as np
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from rollmill.errors import RollmillError
from rollmill.generator.proto import policy_inference_pb2 as pb
from rollmill.generator.proto import policy_inference_pb2_grpc as pb_grpc
from rollmill.generator.service import InferenceService
from rollmill.generator.state import ReplicaState
from rollmill.generator.wire import (
    chunk_to_message,
    error_to_status,
    finished_to_message,
    prompt_from_message,
    report_to_message,
    request_from_message,
    status_to_message,
    turns_to_message,
)
from rollmill.types import GenerateRequest, TokenChunk, Turn

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
        service: what is served.
    """

    def __init__(self, service: InferenceService) -> None:
        self.service = service
        self.health = health.aio.HealthServicer()  # pyright: ignore[reportAttributeAccessIssue]
        service.on_standing = self.publish_health

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> pb.GenerateReply:
        """Sample turns."""
        return await self._answer(context, lambda: self._generate(request))

    async def GenerateStream(self, request: pb.GenerateRequest, context: Context) -> AsyncIterator[pb.GenerateEvent]:
        """Sample turns, token by token."""
        events: asyncio.Queue[pb.GenerateEvent | None] = asyncio.Queue()
        async with asyncio.TaskGroup() as tasks:
            work = tasks.create_task(self._stream(request, events=events))
            while (event := await events.get()) is not None:
                yield event
        error = work.result()
        if error is not None:
            await self._fail(context, error)

    async def Abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortReply:
        """Abort exactly the named request."""
        return pb.AbortReply(found=await self._answer(context, lambda: self.service.abort(request.request_id)))

    async def Score(self, request: pb.ScoreRequest, context: Context) -> pb.ScoreReply:
        """Return log-probs of given tokens."""
        ids = np.array(request.token_ids, dtype=np.int64)
        logprobs, version = await self._answer(context, lambda: self.service.score(ids))
        return pb.ScoreReply(logprobs=logprobs.tolist(), policy_version=version)

    async def LoadWeights(self, request: pb.LoadWeightsRequest, context: Context) -> pb.LoadWeightsReply:
        """Serve another version."""
        report = await self._answer(context, lambda: self.service.load_weights(request.policy_version))
        return report_to_message(report)

    async def Drain(self, request: pb.DrainRequest, context: Context) -> pb.DrainReply:
        """Finish what runs, take nothing new."""
        drain = self.service.drain
        unfinished = await self._answer(context, lambda: drain(request.deadline_s, reason="asked to drain"))
        return pb.DrainReply(unfinished=unfinished)

    async def Status(self, request: pb.StatusRequest, context: Context) -> pb.StatusReply:
        """Return standing, weights and load."""
        return status_to_message(self.service.status())

    async def publish_health(self) -> None:
        """Tell the standard health service whether this replica takes requests."""
        serving = self.service.replica.standing.state is ReplicaState.SERVING
        kinds = health_pb2.HealthCheckResponse
        for name in ("", SERVICE_NAME):
            await self.health.set(name, kinds.SERVING if serving else kinds.NOT_SERVING)

    async def _generate(self, message: pb.GenerateRequest) -> pb.GenerateReply:
        request, rendered = self._request(message)
        turns = await self.service.generate(request, siblings=message.siblings or 1)
        return turns_to_message(
            turns,
            request_id=request.request_id,
            prompt_ids=request.prompt_ids if rendered else None,
            texts=[self._text(turn) for turn in turns] if rendered else None,
        )

    async def _stream(
        self, message: pb.GenerateRequest, *, events: asyncio.Queue[pb.GenerateEvent | None]
    ) -> RollmillError | None:
        """Put the events of a request into the queue, `None` last; an error is a value, so that it comes after them."""
        try:
            request, rendered = self._request(message)
            if rendered:
                first = pb.GenerateEvent(request_id=request.request_id, prompt_ids=request.prompt_ids.tolist())
                events.put_nowait(first)
            listener = _Events(events, request_id=request.request_id, text=self._text if rendered else None)
            await self.service.generate(request, siblings=message.siblings or 1, listener=listener)
        except RollmillError as error:
            return error
        finally:
            events.put_nowait(None)
        return None

    def _request(self, message: pb.GenerateRequest) -> tuple[GenerateRequest, bool]:
        """Return the request, and whether its prompt was rendered here."""
        prompt = prompt_from_message(message)
        rendered = not isinstance(prompt, np.ndarray)
        codec = self.service.codec
        stops = codec.stop_token_ids if rendered and codec is not None else ()
        ids = self.service.encode(prompt)
        return request_from_message(message, prompt_ids=ids, stop_token_ids=stops), rendered

    def _text(self, turn: Turn) -> str:
        codec = self.service.codec
        return "" if codec is None else codec.decode(turn.output_ids)

    async def _answer(self, context: Context, work: Callable[[], Awaitable[T]]) -> T:
        try:
            return await work()
        except RollmillError as error:
            await self._fail(context, error)
            raise

    async def _fail(self, context: Context, error: RollmillError) -> None:
        await self.service.take_note(error)
        name, details, metadata = error_to_status(error)
        await context.abort(grpc.StatusCode[name], details, tuple(metadata.items()))


class _Events:
    """Makes events of a stream out of what a call of the service lets hear."""

    def __init__(
        self, events: asyncio.Queue[pb.GenerateEvent | None], *, request_id: str, text: Callable[[Turn], str] | None
    ) -> None:
        self._events, self._request_id, self._text = events, request_id, text

    def tokens(self, index: int, chunk: TokenChunk) -> None:
        self._events.put_nowait(chunk_to_message(chunk, request_id=self._request_id, index=index))

    def finished(self, index: int, turn: Turn) -> None:
        text = None if self._text is None else self._text(turn)
        self._events.put_nowait(finished_to_message(turn, request_id=self._request_id, index=index, text=text))


def new_server(servicer: PolicyInferenceServicer) -> grpc.aio.Server:
    """Return a server with the inference and the health service, not yet bound."""
    server = grpc.aio.server(options=(*CHANNEL_OPTIONS, ("grpc.so_reuseport", 0)))
    pb_grpc.add_PolicyInferenceServicer_to_server(servicer, server)
    health_pb2_grpc.add_HealthServicer_to_server(servicer.health, server)
    return server
