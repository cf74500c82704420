"""Client of one replica: typed records in and out, typed errors, a deadline on every call."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import grpc
import numpy as np

from rollmill.errors import EngineError, RollmillError
from rollmill.generator.engines.protocol import OnTokens
from rollmill.generator.proto import policy_inference_pb2 as pb
from rollmill.generator.proto import policy_inference_pb2_grpc as pb_grpc
from rollmill.generator.wire import (
    LoadReport,
    ReplicaStatus,
    TurnAssembler,
    chunk_from_message,
    error_from_status,
    report_from_message,
    request_to_message,
    status_from_message,
    turns_from_message,
)
from rollmill.types import GenerateRequest, Turn

M = TypeVar("M")

MESSAGE_BYTES = 64 * 1024 * 1024


class GeneratorClient:
    """One replica, over gRPC.

    Args:
        address: `host:port`.
        control_deadline_s: deadline of `abort`, `score` and `status`.
        grace_s: added to a request's own deadline, so that the engine's partial turn arrives before the call ends.

    Raises:
        EngineDead: from every call, if the replica cannot be reached.
        DeadlineExceeded: from every call that got no answer in time.
        RollmillError: whatever class the replica raised, with its message.
    """

    def __init__(self, address: str, *, control_deadline_s: float = 30.0, grace_s: float = 5.0) -> None:
        self.address = address
        self._control_deadline_s = control_deadline_s
        self._grace_s = grace_s
        self._channel = grpc.aio.insecure_channel(
            address,
            options=(
                ("grpc.max_send_message_length", MESSAGE_BYTES),
                ("grpc.max_receive_message_length", MESSAGE_BYTES),
                ("grpc.enable_http_proxy", 0),
            ),
        )
        self._stub = pb_grpc.PolicyInferenceStub(self._channel)

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
        reply = await self._call(
            self._stub.Generate,
            request_to_message(request, siblings=siblings),
            deadline_s=request.deadline_s + self._grace_s,
        )
        return turns_from_message(reply, prompt_ids=request.prompt_ids, siblings=siblings)

    async def _stream(self, request: GenerateRequest, *, on_tokens: OnTokens) -> Turn:
        assembler = TurnAssembler(request.request_id, prompt_ids=request.prompt_ids)
        call = self._stub.GenerateStream(request_to_message(request), timeout=request.deadline_s + self._grace_s)
        try:
            async for event in call:
                if event.HasField("tokens"):
                    chunk = chunk_from_message(event.tokens)
                    assembler.add(chunk)
                    on_tokens(chunk)
                elif event.HasField("finished"):
                    return assembler.finish(event.finished)
        except grpc.aio.AioRpcError as error:
            raise self._typed(error, asked="GenerateStream") from error
        finally:
            call.cancel()
        raise EngineError(
            f"the stream of request {request.request_id} from the generator at {self.address} ended without its "
            "finish; some of its tokens may be lost. Send the request again"
        )

    async def abort(self, request_id: str) -> bool:
        """Abort exactly this request; return whether it was there."""
        message = pb.AbortRequest(request_id=request_id)
        return (await self._call(self._stub.Abort, message, deadline_s=self._control_deadline_s)).found

    async def score(self, token_ids: np.ndarray) -> np.ndarray:
        """Return float32 [n - 1] log-probs under temperature 1."""
        message = pb.ScoreRequest(token_ids=token_ids.tolist())
        reply = await self._call(self._stub.Score, message, deadline_s=self._control_deadline_s)
        return np.array(reply.logprobs, dtype=np.float32)

    async def load_weights(self, policy_version: int, *, deadline_s: float) -> LoadReport:
        """Make the replica serve this version.

        Raises:
            WeightMismatch: if a digest or the canary disagrees.
            WeightError: if the version cannot be had; the old one is served.
        """
        message = pb.LoadWeightsRequest(policy_version=policy_version)
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
        """Close the channel; calls in flight end with `RequestAborted`."""
        await self._channel.close()

    async def _call(self, method: Callable[..., Awaitable[M]], message: Any, *, deadline_s: float) -> M:
        try:
            return await method(message, timeout=deadline_s)
        except grpc.aio.AioRpcError as error:
            raise self._typed(error, asked=type(message).__name__) from error

    def _typed(self, error: grpc.aio.AioRpcError, *, asked: str) -> RollmillError:
        metadata = {str(key): str(value) for key, value in error.trailing_metadata() or ()}
        return error_from_status(
            error.code().name,
            error.details() or "",
            metadata=metadata,
            where=f"{asked} to the generator at {self.address}",
        )
