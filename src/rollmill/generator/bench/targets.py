"""Services that a load can be put on: ours over gRPC, and all that speak OpenAI's completions over HTTP."""

from __future__ import annotations

import asyncio
import re
import time
from typing import Any, Protocol

import msgspec
import numpy as np

from rollmill.errors import DeadlineExceeded, EngineError, RollmillError
from rollmill.generator.bench.cases import Answered, Asked, Standing
from rollmill.generator.bench.http_client import HttpConnections
from rollmill.generator.client import GeneratorClient
from rollmill.generator.security import TlsFiles
from rollmill.types import GenerateRequest, SamplingParams, StopReason, TokenChunk

_EVENT = b"data: "
_DONE = b"[DONE]"


class Target(Protocol):
    """A service under load."""

    async def ask(self, asked: Asked) -> Answered:
        """Return what came of a request; an error of the service is one of the answers.

        Cancellation:
            gives the request up.
        """
        ...

    async def look(self) -> Standing | None:
        """Return how busy the service is, or `None` if it does not say."""
        ...

    async def close(self) -> None:
        """Close all connections."""
        ...


class GrpcTarget:
    """A replica or a router, over gRPC.

    Args:
        stream: whether answers come token by token.
    """

    def __init__(
        self, address: str, *, stream: bool = True, token: str | None = None, tls: TlsFiles | None = None
    ) -> None:
        self._client = GeneratorClient(address, token=token, tls=tls)
        self._stream = stream

    async def ask(self, asked: Asked) -> Answered:
        """Return what came of a request."""
        request = GenerateRequest(
            request_id=asked.request_id,
            prompt_ids=np.array(asked.prompt_ids, dtype=np.int32),
            sampling=SamplingParams(max_new_tokens=asked.new_tokens, seed=asked.seed),
            group_key=asked.group_key,
            deadline_s=asked.deadline_s,
        )
        began_s = time.perf_counter()
        first_s: float | None = None
        count = 0

        def hear(chunk: TokenChunk) -> None:
            nonlocal first_s, count
            first_s = time.perf_counter() - began_s if first_s is None else first_s
            count += len(chunk.output_ids)

        try:
            turn = await self._client.generate(request, on_tokens=hear if self._stream else None)
        except RollmillError as error:
            return Answered(tokens=count, latency_s=time.perf_counter() - began_s, first_s=first_s, error=error.code)
        latency_s = time.perf_counter() - began_s
        tokens = len(turn.output_ids)
        if first_s is None and tokens:  # in one piece: what the replica says of itself
            first_s = max(0.0, latency_s - turn.timings.decode_s)
        broken = turn.stop_reason in (StopReason.ABORT, StopReason.ERROR)
        return Answered(
            tokens=tokens,
            latency_s=latency_s,
            first_s=first_s,
            error=f"ended with {turn.stop_reason.value}" if broken else None,
        )

    async def look(self) -> Standing | None:
        """Return how busy the replica is."""
        try:
            status = await self._client.status()
        except RollmillError:
            return None
        capacity = status.kv_capacity_tokens
        return Standing(
            running=status.running,
            waiting=status.waiting,
            kv_usage=status.kv_used_tokens / capacity if capacity else 0.0,
        )

    async def close(self) -> None:
        """Close the channel."""
        await self._client.close()


class HttpTarget:
    """Anything that serves `POST /v1/completions` with token ids as prompt.

    Args:
        url: `http://HOST:PORT`, or `https://HOST:PORT`.
        model: name in the requests; may be left out with ours.
        stream: whether answers come token by token.
        plain: whether to send the fields of OpenAI alone; without `ignore_eos` answers may be shorter than asked for,
            and without `group_key` only a prefix cache shares prompts.
    """

    def __init__(
        self,
        url: str,
        *,
        model: str | None = None,
        stream: bool = True,
        plain: bool = False,
        token: str | None = None,
        tls: TlsFiles | None = None,
    ) -> None:
        self._connections = HttpConnections(url, token=token, tls=tls)
        self._model, self._stream, self._plain = model, stream, plain

    async def ask(self, asked: Asked) -> Answered:
        """Return what came of a request."""
        began_s = time.perf_counter()
        seen = _Seen()
        try:
            async with asyncio.timeout(asked.deadline_s):
                await self._ask(asked, seen=seen, began_s=began_s)
        except TimeoutError:
            seen.error = DeadlineExceeded.code
        except RollmillError as error:
            seen.error = error.code
        return Answered(
            tokens=seen.tokens, latency_s=time.perf_counter() - began_s, first_s=seen.first_s, error=seen.error
        )

    async def _ask(self, asked: Asked, *, seen: _Seen, began_s: float) -> None:
        answer = await self._connections.request("POST", "/v1/completions", body=msgspec.json.encode(self._body(asked)))
        if answer.status != 200:
            await answer.read()
            seen.error = f"HTTP {answer.status}"
            return
        if not self._stream:
            seen.take(msgspec.json.decode(await answer.read()))
            return
        waiting = b""
        async for piece in answer.pieces():
            *events, waiting = (waiting + piece).split(b"\n\n")
            for event in events:
                content = event.removeprefix(_EVENT)
                if content != _DONE:
                    seen.take(msgspec.json.decode(content), at_s=time.perf_counter() - began_s)

    def _body(self, asked: Asked) -> dict[str, Any]:
        body: dict[str, Any] = {
            "prompt": list(asked.prompt_ids),
            "max_tokens": asked.new_tokens,
            "temperature": 1.0,
            "seed": asked.seed,
        }
        if self._model is not None:
            body["model"] = self._model
        if self._stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        if not self._plain:
            body |= {"ignore_eos": True, "group_key": asked.group_key}
        return body

    async def look(self) -> Standing | None:
        """Return how busy the server is, from the names of vLLM on its /metrics, which ours has as well."""
        try:
            answer = await self._connections.request("GET", "/metrics")
            page = (await answer.read()).decode()
        except RollmillError:
            return None
        found = {name: _sum_of(page, f"vllm:{name}") for name in _LOOKED_AT}
        if answer.status != 200 or None in found.values():
            return None
        running, waiting, usage = (value or 0.0 for value in found.values())
        return Standing(running=running, waiting=waiting, kv_usage=usage)

    async def close(self) -> None:
        """Close the connections."""
        self._connections.close()


_LOOKED_AT = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")


class _Seen:
    """What has come of an answer so far."""

    def __init__(self) -> None:
        self.tokens = 0
        self.first_s: float | None = None
        self.error: str | None = None

    def take(self, reply: dict[str, Any], *, at_s: float | None = None) -> None:
        if error := reply.get("error"):
            self.error = str(error.get("code") or EngineError.code)
        if self.first_s is None and reply.get("choices"):
            self.first_s = at_s
        if usage := reply.get("usage"):
            self.tokens = int(usage["completion_tokens"])


def _sum_of(page: str, name: str) -> float | None:
    """Return the sum of a metric over its labels."""
    values = re.findall(rf"^{re.escape(name)}(?:{{[^}}]*}})? (\S+)", page, flags=re.MULTILINE)
    return sum(map(float, values)) if values else None
