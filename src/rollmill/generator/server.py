"""gRPC face of one replica: messages to records and back, errors to status codes.

| call | waits for | gives up after |
|---|---|---|
| Generate, GenerateStream, a request of Exchange | its turns | its deadline, with what there is; the client leaves |
| one event of a stream | its reader | `generator.limits.stream_stall_s`; earlier if too many events wait |
| LoadWeights | pull, swap, proof | the load deadline; goes on if the client leaves |
| Drain | requests that run | the deadline in the call; the rest is aborted and counted |
| others | the end of the engine's current step | the client's deadline |

Translates; what is refused and why is the service's.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeVar

import grpc
import msgspec
import numpy as np
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from rollmill.config.serving import LimitSettings
from rollmill.errors import ConfigError, DataError, InvariantViolation, RollmillError
from rollmill.generator.event_stream import EventMaker, EventStream
from rollmill.generator.exchange.answering import Exchanges, Put
from rollmill.generator.interceptors import abort_with, interceptors
from rollmill.generator.proto import policy_inference_pb2 as pb
from rollmill.generator.proto import policy_inference_pb2_grpc as pb_grpc
from rollmill.generator.proto import rl_inference_pb2 as rl_pb
from rollmill.generator.proto import rl_inference_pb2_grpc as rl_pb_grpc
from rollmill.generator.security import Access
from rollmill.generator.service import InferenceService
from rollmill.generator.state import ReplicaState
from rollmill.generator.wire import (
    DEFAULT_DEADLINE_S,
    LONG_TEXT_CHARS,
    MAX_CHARS_PER_TOKEN,
    Prompt,
    chars_of,
    prompt_from_message,
    report_to_message,
    request_from_message,
    reward_to_message,
    seed_of,
    status_to_message,
    turns_to_message,
)
from rollmill.types import GenerateRequest, SamplingParams, Turn

T = TypeVar("T")
Context = grpc.aio.ServicerContext

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["PolicyInference"].full_name
MINIMAL_SERVICE_NAME = rl_pb.DESCRIPTOR.services_by_name["PolicyInference"].full_name
HEALTH_SERVICE_NAME = health.SERVICE_NAME
MESSAGE_BYTES = 64 * 1024 * 1024
"""Largest message of a channel of ours; token ids of a million-token turn fit."""
CHANNEL_OPTIONS = (
    ("grpc.max_send_message_length", MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MESSAGE_BYTES),
)
_CONTROL_CALLS = 64
"""Calls beside requests (status, health, abort, load) that one connection has room for when all places are taken."""


class PolicyInferenceServicer(pb_grpc.PolicyInferenceServicer):
    """Answers the calls of `policy_inference.proto` for one replica.

    Args:
        service: what is served.
    """

    def __init__(self, service: InferenceService) -> None:
        self.service = service
        self.health = health.aio.HealthServicer()  # pyright: ignore[reportAttributeAccessIssue]
        self.exchanges = Exchanges(self, limits=service.limits, calls=calls_at_once(service.limits))
        service.on_standing = self.publish_health

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> pb.GenerateReply:
        """Sample turns."""
        return await self._answer(context, lambda: self._generate(request))

    async def GenerateStream(self, request: pb.GenerateRequest, context: Context) -> None:
        """Sample turns, token by token."""
        await self._answer(context, lambda: self._stream(request, context))

    async def Exchange(self, request_iterator: AsyncIterator[pb.AskFrame], context: Context) -> None:
        """Sample turns for one caller of many requests."""
        await context.send_initial_metadata(self.exchanges.metadata)
        await self._answer(context, lambda: self.exchanges.serve(request_iterator, write=context.write))

    async def reply(self, data: bytes) -> bytes:
        """Return the serialized reply to a request of an exchange."""
        async with noted(self.service):
            return (await self._generate(pb.GenerateRequest.FromString(data))).SerializeToString()

    async def events(self, data: bytes, *, put: Put) -> None:
        """Hand the serialized events of a request of an exchange to `put`."""
        message = pb.GenerateRequest.FromString(data)
        async with noted(self.service):
            request, rendered = await self._request(message)
            maker = EventMaker(
                request,
                text=self._text if rendered else None,
                chunk_tokens=message.chunk_tokens,
                put=lambda event: put(event.SerializeToString()),
            )
            maker.begin()
            try:
                await self.service.generate(request, siblings=message.siblings or 1, listener=maker)
            finally:
                maker.flush()

    async def Abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortReply:
        """Abort exactly the named request."""
        return pb.AbortReply(found=await self._answer(context, lambda: self.service.abort(request.request_id)))

    async def Score(self, request: pb.ScoreRequest, context: Context) -> pb.ScoreReply:
        """Return log-probs of given tokens, or a reward."""
        return await self._answer(context, lambda: self._score(request))

    async def LoadWeights(self, request: pb.LoadWeightsRequest, context: Context) -> pb.LoadWeightsReply:
        """Serve another version."""
        load, adapter = self.service.load_weights, request.adapter
        report = await self._answer(context, lambda: load(request.policy_version, adapter=adapter))
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
        for name in ("", SERVICE_NAME, MINIMAL_SERVICE_NAME):
            await self.health.set(name, kinds.SERVING if serving else kinds.NOT_SERVING)

    async def _generate(self, message: pb.GenerateRequest) -> pb.GenerateReply:
        request, rendered = await self._request(message)
        turns = await self.service.generate(request, siblings=message.siblings or 1)
        return turns_to_message(
            turns,
            request_id=request.request_id,
            prompt_ids=request.prompt_ids if rendered else None,
            texts=[self._text(turn) for turn in turns] if rendered else None,
        )

    async def _stream(self, message: pb.GenerateRequest, context: Context) -> None:
        request, rendered = await self._request(message)
        stream = EventStream(
            request,
            siblings=message.siblings or 1,
            limits=self.service.limits,
            text=self._text if rendered else None,
            chunk_tokens=message.chunk_tokens,
        )
        await stream.run(self.service, write=context.write)

    async def _score(self, message: pb.ScoreRequest) -> pb.ScoreReply:
        ids = np.array(message.token_ids, dtype=np.int64)
        match message.what:
            case "" | "logprobs":
                logprobs, version = await self.service.score(ids, adapter=message.adapter)
                return pb.ScoreReply(logprobs=logprobs.tolist(), policy_version=version)
            case "reward":
                return reward_to_message(await self.service.reward(ids))
            case other:
                raise DataError(f"Score was asked for {other!r}; it gives `logprobs` or `reward`")

    async def _request(self, message: pb.GenerateRequest) -> tuple[GenerateRequest, bool]:
        """Return the request, and whether its prompt was rendered here."""
        self.service.check_model(message.model)
        prompt = prompt_from_message(message)
        rendered = not isinstance(prompt, np.ndarray)
        codec = self.service.codec
        stops = codec.stop_token_ids if rendered and codec is not None else ()
        ids = await self._ids(prompt)
        cap = self.service.limits.max_new_tokens
        request = request_from_message(message, prompt_ids=ids, stop_token_ids=stops, max_new_tokens=cap)
        if not request.adapter and self.service.is_adapter(message.model):
            request = msgspec.structs.replace(request, adapter=message.model)
        return request, rendered

    async def _ids(self, prompt: Prompt) -> np.ndarray:
        """Return a prompt as ids; a long text becomes them beside the loop, and one that is too long not at all."""
        if isinstance(prompt, np.ndarray):
            return self.service.encode(prompt)
        chars = chars_of(prompt)
        longest = self.service.replica.engine.info().max_model_len
        if chars > longest * MAX_CHARS_PER_TOKEN:
            raise DataError(
                f"the prompt has {chars} characters, which no {longest} tokens hold (max_model_len); raise "
                "generator.max_model_len or shorten the prompt"
            )
        if chars <= LONG_TEXT_CHARS:
            return self.service.encode(prompt)
        return await asyncio.to_thread(self.service.encode, prompt)

    def _text(self, turn: Turn) -> str:
        codec = self.service.codec
        return "" if codec is None else codec.decode(turn.output_ids)

    async def _answer(self, context: Context, work: Callable[[], Awaitable[T]]) -> T:
        return await answer(self.service, context=context, work=work)


class MinimalServicer(rl_pb_grpc.PolicyInferenceServicer):
    """Answers the minimal published interface, `rl_inference.proto`, for the same replica.

    Args:
        service: what is served.
    """

    def __init__(self, service: InferenceService) -> None:
        self.service = service

    async def Generate(self, request: rl_pb.GenerateRequest, context: Context) -> rl_pb.GenerateResponse:
        """Sample one continuation of token ids."""
        return await answer(self.service, context=context, work=lambda: self._generate(request))

    async def _generate(self, message: rl_pb.GenerateRequest) -> rl_pb.GenerateResponse:
        codec = self.service.codec
        asked = GenerateRequest(
            request_id=message.request_id,
            prompt_ids=np.array(message.prompt_ids, dtype=np.int64),
            sampling=SamplingParams(
                max_new_tokens=message.max_new_tokens,
                seed=seed_of(message.request_id),
                stop_token_ids=() if codec is None else tuple(codec.stop_token_ids),
            ),
            deadline_s=DEFAULT_DEADLINE_S,
        )
        turn = (await self.service.generate(asked))[0]
        return rl_pb.GenerateResponse(
            request_id=message.request_id,
            output_ids=turn.output_ids.tolist(),
            logprob_sum=float(turn.behavior_logprobs.sum(dtype=np.float64)),
            num_generated_tokens=len(turn.output_ids),
        )


async def answer(service: InferenceService, *, context: Context, work: Callable[[], Awaitable[T]]) -> T:
    """Return what the work gives; end the call with its status if it raises one of our errors."""
    try:
        async with noted(service):
            return await work()
    except RollmillError as error:
        await abort_with(error, context=context)
        raise


@contextlib.asynccontextmanager
async def noted(service: InferenceService) -> AsyncIterator[None]:
    """Have the service take note of an error of ours, and raise it on."""
    try:
        yield
    except RollmillError as error:
        await service.take_note(error)
        raise


def new_server(
    service: InferenceService, *, access: Access | None = None
) -> tuple[grpc.aio.Server, PolicyInferenceServicer]:
    """Return a server with both inference services, health and reflection, not yet bound, and who answers its calls.

    Args:
        service: what is served; its limits bound messages, streams and silent connections.
        access: what callers must show.
    """
    token = None if access is None else access.token
    limits = service.limits
    server = grpc.aio.server(
        interceptors=interceptors(token=token),
        options=server_options(limits),
        # A reader that is stuck holds its call, but no place and no KV: twice the places, and then it is refused.
        maximum_concurrent_rpcs=calls_at_once(limits),
    )
    servicer = PolicyInferenceServicer(service)
    pb_grpc.add_PolicyInferenceServicer_to_server(servicer, server)
    rl_pb_grpc.add_PolicyInferenceServicer_to_server(MinimalServicer(service), server)
    health_pb2_grpc.add_HealthServicer_to_server(servicer.health, server)
    names = (SERVICE_NAME, MINIMAL_SERVICE_NAME, HEALTH_SERVICE_NAME, reflection.SERVICE_NAME)
    reflection.enable_server_reflection(names, server)
    return server, servicer


def calls_at_once(limits: LimitSettings) -> int:
    """Return how many calls are taken at once, requests that will be refused for want of a place included."""
    return 2 * limits.max_requests + _CONTROL_CALLS


def server_options(limits: LimitSettings) -> tuple[tuple[str, int], ...]:
    """Return the options of a server: bounds on messages and streams, and an end for connections that went silent."""
    return (
        ("grpc.max_send_message_length", -1),
        ("grpc.max_receive_message_length", limits.max_body_bytes),
        # A call too many is refused. If the connection had no stream left for it, it would be held back instead.
        ("grpc.max_concurrent_streams", calls_at_once(limits) + _CONTROL_CALLS),
        # gRPC cancels calls beyond 1,000 to 3,000 that we have not looked at yet; a full router sees that many at once.
        ("grpc.server.max_pending_requests", calls_at_once(limits) + _CONTROL_CALLS),
        ("grpc.server.max_pending_requests_hard_limit", calls_at_once(limits) + _CONTROL_CALLS),
        ("grpc.keepalive_time_ms", round(limits.keepalive_s * 1000)),
        ("grpc.keepalive_timeout_ms", round(limits.keepalive_timeout_s * 1000)),
        # Without this one, an unanswered ping closes the connection only after a minute.
        ("grpc.http2.ping_timeout_ms", round(limits.keepalive_timeout_s * 1000)),
        ("grpc.keepalive_permit_without_calls", 1),
        # Clients may ping too, ours every 30 s; more often than this is answered with GOAWAY.
        ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.so_reuseport", 0),
    )


def bind(server: grpc.aio.Server, address: str, *, access: Access | None = None) -> int:
    """Bind a server, with TLS where the access says so, and return the port.

    Args:
        address: `host:port`; port 0 lets the system choose.

    Raises:
        ConfigError: if the address cannot be bound, or a TLS file cannot be used.
    """
    try:
        if access is None or access.tls is None:
            return server.add_insecure_port(address)
        files = access.tls.read()
        if files.key is None or files.cert is None:
            raise InvariantViolation("an access with TLS has a certificate and a key; it was checked when it was made")
        credentials = grpc.ssl_server_credentials(
            [(files.key, files.cert)], root_certificates=files.ca, require_client_auth=access.mutual
        )
        return server.add_secure_port(address, credentials)
    except RuntimeError as error:
        raise ConfigError(
            f"{address} cannot be bound: {error}. Is the port taken by another process, the host an address of this "
            "machine, and the certificate that of the key? Port 0 lets the system choose"
        ) from error
