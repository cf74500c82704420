"""Client of one replica: typed records in and out, typed errors, a deadline on every call."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, TypeVar

import grpc
import numpy as np

from rollmill.errors import EngineDead, EngineError, RollmillError
from rollmill.generator.engines.protocol import OnTokens, Reward
from rollmill.generator.exchange.asking import AskingExchange, CallFailed
from rollmill.generator.proto import policy_inference_pb2 as pb
from rollmill.generator.proto import policy_inference_pb2_grpc as pb_grpc
from rollmill.generator.security import TlsFiles, bearer
from rollmill.generator.statuses import error_from_status
from rollmill.generator.wire import (
    LoadReport,
    ReplicaStatus,
    TurnAssembler,
    chunk_from_message,
    report_from_message,
    request_to_message,
    reward_from_message,
    status_from_message,
    turns_from_message,
)
from rollmill.types import GenerateRequest, Turn

M = TypeVar("M")

MESSAGE_BYTES = 64 * 1024 * 1024


def open_channel(
    address: str, *, tls: TlsFiles | None = None, keepalive_s: float = 30.0, keepalive_timeout_s: float = 10.0
) -> grpc.aio.Channel:
    """Return a channel to a generator, to be closed by the caller.

    Args:
        keepalive_s: while calls wait, a connection that was silent for this long is asked whether it lives. A replica
            takes one such question in 10 s.
        keepalive_timeout_s: without an answer in this time the connection is given up, and its calls end.

    Raises:
        ConfigError: if a TLS file cannot be read.
    """
    timeout_ms = round(keepalive_timeout_s * 1000)
    options: list[tuple[str, int | str]] = [
        ("grpc.max_send_message_length", MESSAGE_BYTES),
        ("grpc.max_receive_message_length", MESSAGE_BYTES),
        ("grpc.enable_http_proxy", 0),
        ("grpc.keepalive_time_ms", round(keepalive_s * 1000)),
        ("grpc.keepalive_timeout_ms", timeout_ms),
        ("grpc.http2.ping_timeout_ms", timeout_ms),
        ("grpc.http2.max_pings_without_data", 0),
    ]
    if tls is None:
        return grpc.aio.insecure_channel(address, options=options)
    if tls.server_name:
        options.append(("grpc.ssl_target_name_override", tls.server_name))
    files = tls.read()
    credentials = grpc.ssl_channel_credentials(files.ca, files.key, files.cert)
    return grpc.aio.secure_channel(address, credentials, options=options)


class GeneratorClient:
    """One replica or a router, over gRPC: one exchange for all its requests, where the service has that.

    Args:
        address: `host:port`.
        control_deadline_s: deadline of `abort`, `score` and `status`.
        grace_s: added to a request's own deadline, so that the engine's partial turn arrives before the call ends.
        token: what the replica asks for, if it asks for one.
        tls: encrypts the channel: `TlsFiles()` trusts the system's authorities, `ca` names another one, and `cert` and
            `key` are this client's own (mTLS). `None` does not encrypt.

    Raises:
        ConfigError: at once, if a TLS file cannot be read.
        Unauthenticated: from every call, if the replica asks for another token.
        EngineDead: from every call, if the replica cannot be reached.
        DeadlineExceeded: from every call that got no answer in time.
        RollmillError: whatever class the replica raised, with its message.
    """

    def __init__(
        self,
        address: str,
        *,
        control_deadline_s: float = 30.0,
        grace_s: float = 5.0,
        token: str | None = None,
        tls: TlsFiles | None = None,
    ) -> None:
        self.address = address
        self._control_deadline_s = control_deadline_s
        self._grace_s = grace_s
        self._metadata: tuple[tuple[str, str], ...] = () if token is None else (("authorization", bearer(token)),)
        self._channel = open_channel(address, tls=tls)
        self._closed = False
        self._stub = pb_grpc.PolicyInferenceStub(self._channel)
        self._exchange = AskingExchange(self._channel, metadata=self._metadata)

    async def generate(self, request: GenerateRequest, *, on_tokens: OnTokens | None = None) -> Turn:
        """Return the finished turn, or the partial one with `StopReason.ABORT` past the request's deadline.

        Args:
            on_tokens: hears the tokens as they come.

        Raises:
            DataError: if the prompt or its parameters do not fit.
            EngineError: if the replica refuses: dirty, draining, too old, or the id is in use.
            LengthMismatch: if the reply's arrays disagree.

        Cancellation:
            cancels the call, which frees the request's KV in the replica.
        """
        if on_tokens is None:
            return (await self.generate_group(request, siblings=1))[0]
        return await self._stream(request, on_tokens=on_tokens)

    async def generate_group(self, request: GenerateRequest, *, siblings: int) -> list[Turn]:
        """Return one turn for each of several siblings, which share the prefill of their prompt.

        Raises:
            RollmillError: as `generate`.

        Cancellation:
            cancels the call, which frees the KV of all of them.
        """
        self._refuse_if_closed("GenerateRequest")
        message = request_to_message(request, siblings=siblings)
        deadline_s = request.deadline_s + self._grace_s
        with self._errors("GenerateRequest"):
            data = await self._exchange.reply(message.SerializeToString(), timeout_s=deadline_s)
        reply = pb.GenerateReply.FromString(data)
        return turns_from_message(reply, prompt_ids=request.prompt_ids, siblings=siblings)

    async def _stream(self, request: GenerateRequest, *, on_tokens: OnTokens) -> Turn:
        self._refuse_if_closed("GenerateStream")
        message, heard = request_to_message(request), _Heard(request, on_tokens=on_tokens)
        timeout_s = request.deadline_s + self._grace_s
        with self._errors("GenerateStream"):
            await self._exchange.events(message.SerializeToString(), hear=heard.take, timeout_s=timeout_s)
        if heard.turn is None:
            raise EngineError(
                f"the stream of request {request.request_id} from the generator at {self.address} ended without its "
                "finish; some of its tokens may be lost. Send the request again"
            )
        return heard.turn

    async def abort(self, request_id: str) -> bool:
        """Abort exactly this request; return whether it was there."""
        message = pb.AbortRequest(request_id=request_id)
        return (await self._call(self._stub.Abort, message, deadline_s=self._control_deadline_s)).found

    async def score(self, token_ids: np.ndarray, *, adapter: str = "") -> np.ndarray:
        """Return float32 [n - 1] log-probs under temperature 1, those of an adapter if one is named."""
        message = pb.ScoreRequest(token_ids=token_ids.tolist(), adapter=adapter)
        reply = await self._call(self._stub.Score, message, deadline_s=self._control_deadline_s)
        return np.array(reply.logprobs, dtype=np.float32)

    async def reward(self, token_ids: np.ndarray) -> Reward:
        """Return what the replica's reward head says of a whole sequence.

        Raises:
            EngineError: if its engine serves no reward head, naming those that can.
        """
        message = pb.ScoreRequest(token_ids=token_ids.tolist(), what="reward")
        return reward_from_message(await self._call(self._stub.Score, message, deadline_s=self._control_deadline_s))

    async def load_weights(
        self, policy_version: int, *, deadline_s: float, adapter: str = "", job: str = ""
    ) -> LoadReport:
        """Make the replica serve this version.

        Args:
            policy_version: of the weights, or of the adapter; of that 0 means the newest.
            deadline_s: longest wait.
            adapter: name of the adapter whose version it is; nobody else is touched then.
            job: of a router: whose replicas.

        Raises:
            WeightMismatch: if a digest or the canary disagrees.
            WeightError: if the version cannot be had; the old one is served.
            ModelError: if the adapter is unknown there.
        """
        message = pb.LoadWeightsRequest(policy_version=policy_version, adapter=adapter, job=job)
        return report_from_message(await self._call(self._stub.LoadWeights, message, deadline_s=deadline_s))

    async def status(self) -> ReplicaStatus:
        """Return standing, weights and load."""
        reply = await self._call(self._stub.Status, pb.StatusRequest(), deadline_s=self._control_deadline_s)
        return status_from_message(reply)

    async def drain(self, deadline_s: float) -> int:
        """Let the replica finish what runs within the deadline; return how many requests it aborted."""
        message = pb.DrainRequest(deadline_s=deadline_s)
        return (await self._call(self._stub.Drain, message, deadline_s=deadline_s + self._grace_s)).unfinished

    async def close(self) -> None:
        """Close the channel; calls in flight end with `RequestAborted`, later ones with `EngineDead`."""
        self._closed = True
        await self._exchange.close()
        await self._channel.close()

    async def _call(self, method: Callable[..., Awaitable[M]], message: Any, *, deadline_s: float) -> M:
        self._refuse_if_closed(type(message).__name__)
        with self._errors(type(message).__name__):
            return await method(message, timeout=deadline_s, metadata=self._metadata)

    @contextlib.contextmanager
    def _errors(self, asked: str) -> Iterator[None]:
        try:
            yield
        except grpc.aio.AioRpcError as error:
            raise self._typed(CallFailed.of(error), asked=asked) from error
        except CallFailed as error:
            raise self._typed(error, asked=asked) from error

    def _refuse_if_closed(self, asked: str) -> None:
        """A replica that was given up may still be asked by who has not heard of it."""
        if self._closed:
            raise EngineDead(
                f"{asked} to the generator at {self.address} was not sent: its client was closed, because the replica "
                "was lost or left. Ask another one"
            )

    def _typed(self, error: CallFailed, *, asked: str) -> RollmillError:
        where = f"{asked} to the generator at {self.address}"
        return error_from_status(error.status, error.details, metadata=error.metadata, where=where)


class _Heard:
    """Makes a turn out of the events of a stream, and lets its tokens be heard.

    Attributes:
        turn: once the stream has its finish.
    """

    def __init__(self, request: GenerateRequest, *, on_tokens: OnTokens) -> None:
        self.turn: Turn | None = None
        self._assembler = TurnAssembler(request.request_id, prompt_ids=request.prompt_ids)
        self._on_tokens = on_tokens

    def take(self, data: bytes) -> None:
        """Hear a serialized event."""
        event = pb.GenerateEvent.FromString(data)
        if event.HasField("tokens"):
            chunk = chunk_from_message(event.tokens)
            self._assembler.add(chunk)
            self._on_tokens(chunk)
        elif event.HasField("finished"):
            self.turn = self._assembler.finish(event.finished)
