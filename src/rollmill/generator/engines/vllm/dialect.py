"""The words of vLLM's HTTP interface: requests into JSON, replies and metrics out of it.

Pure. Refuses a reply that would make a wrong sample (a token without a log-prob, spans that do not cover the output, a
label that is no version) instead of repairing it. Knows vLLM 0.32 and 0.33.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import msgspec
import numpy as np

from rollmill.errors import EngineError, LengthMismatch
from rollmill.generator.engines.remote.port import Delta
from rollmill.types import GenerateRequest, StopReason, VersionSpan, check_spans

SERVER_PREFIX = "generate-tokens-"
"""The server puts this before the ids of its token interface, and aborts by the id with it."""

MISSING_LOGPROB = -9999.0
"""What the server writes where a log-prob is missing, infinite or not a number."""

_REASONS = {"stop": StopReason.STOP, "length": StopReason.LENGTH, "abort": StopReason.ABORT}
_SEED_BITS = (1 << 63) - 1


GENERATE = "/inference/v1/generate"
HEALTH = "/health"
METRICS = "/metrics"


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """One control call.

    Attributes:
        met_by: what this side of the transport does while the server answers, where it takes part.
    """

    path: str
    body: dict[str, Any] | None = None
    parameters: dict[str, str] | None = None
    method: str = "POST"
    met_by: Literal["join", "send"] | None = None


PAUSE = Step(path="/pause", parameters={"mode": "keep", "clear_cache": "false"})
"""Freezes what runs, with its KV. Returns when no token can be produced."""
FORGET_KV = Step(path="/pause", parameters={"mode": "keep", "clear_cache": "true"})
"""In a pause: throws all KV away; what is frozen is computed anew, under the weights of then, when it goes on."""
RESUME = Step(path="/resume")
WHICH_VERSION = Step(path="/weight_info", method="GET")
"""Goes through the same queue as an abort, and is answered after it was carried out."""


def abort_step(server_id: str) -> Step:
    """Return the call that aborts exactly this request."""
    return Step(path="/abort_requests", body={"request_ids": [SERVER_PREFIX + server_id]})


def update_steps(info: Mapping[str, Any], *, policy_version: int) -> tuple[Step, ...]:
    """Return the calls that load weights, in a pause.

    Args:
        info: what the transport says of them.
    """
    return (
        Step(path="/start_weight_update"),
        Step(path="/update_weights", body={"update_info": dict(info)}, met_by="send"),
        Step(path="/finish_weight_update", body={"weight_version": str(policy_version)}),
    )


def load_adapter_step(folder: str, *, server_name: str) -> Step:
    """Return the call that loads an adapter from a folder as PEFT writes it, under a name that is not in use."""
    return Step(path="/v1/load_lora_adapter", body={"lora_name": server_name, "lora_path": folder})


def unload_adapter_step(server_name: str) -> Step:
    """Return the call after which a name is unknown; what runs under it goes on."""
    return Step(path="/v1/unload_lora_adapter", body={"lora_name": server_name})


def end_half_done_step() -> Step:
    """Return the call that ends an update that was begun and not finished, so that another can begin."""
    return Step(path="/finish_weight_update", body={"weight_version": "half done"})


def first_steps(init: Mapping[str, Any], info: Mapping[str, Any], *, policy_version: int) -> tuple[Step, ...]:
    """Return the calls after which a server that was just started serves these weights.

    Args:
        init: what the transport says when the server connects.
        info: what it says of the weights.
    """
    connect = Step(path="/init_weight_transfer_engine", body={"init_info": dict(init)}, met_by="join")
    return (connect, PAUSE, *update_steps(info, policy_version=policy_version), RESUME)


def read_version(body: bytes) -> str:
    """Return the label of the weights that the server serves."""
    try:
        return str(json.loads(body)["weight_version"])
    except (ValueError, KeyError, TypeError) as error:
        raise _not_understood("weight_info", body, error) from error


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """A whole generation, of a request that was not streamed.

    Attributes:
        output_ids: int32 [output_tokens].
        logprobs: float32 [output_tokens].
        spans: partition of the output by policy version, the server's own record.
        reason: why it ended.
        cached_tokens: prompt tokens found in the prefix cache.
    """

    output_ids: np.ndarray
    logprobs: np.ndarray
    spans: tuple[VersionSpan, ...]
    reason: StopReason
    cached_tokens: int


class Metrics(msgspec.Struct, frozen=True, kw_only=True):
    """What the server's metrics say of its load, over all its ranks.

    Attributes:
        kv_used: share of the KV blocks in use, 0 to 1.
        kv_capacity_tokens: tokens that the KV blocks hold; 0 where it does not say.
    """

    running: int = 0
    waiting: int = 0
    kv_used: float = 0.0
    kv_capacity_tokens: int = 0
    output_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    preemptions: int = 0


def generate_body(request: GenerateRequest, *, server_id: str, max_tokens: int, salt: str) -> dict[str, Any]:
    """Return the body of a generation request.

    Args:
        request: its adapter, if any, by the name that the server knows.
        server_id: the id that the server knows it by.
        max_tokens: cap of the output, with the context taken into account.
        salt: separates prefix caches: a request never hits KV that was made under another one.
    """
    sampling = request.sampling
    return {
        "request_id": server_id,
        "token_ids": np.asarray(request.prompt_ids).tolist(),
        "sampling_params": {
            "max_tokens": max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "seed": sampling.seed & _SEED_BITS,
            "stop_token_ids": list(sampling.stop_token_ids),
            # What ends a turn comes with the request; the model's own list would end others too.
            "ignore_eos": True,
            "logprobs": 0,
            "detokenize": False,
        },
        "cache_salt": salt,
        "stream": True,
        "stream_options": {"include_usage": True},
        **_under(request.adapter),
    }


def score_body(token_ids: Sequence[int], *, server_id: str, salt: str, adapter: str = "") -> dict[str, Any]:
    """Return the body of a request for the log-probs of given tokens; it goes before all others.

    Args:
        adapter: by the name that the server knows; empty for the base alone.
    """
    return {
        "request_id": server_id,
        "token_ids": list(token_ids),
        "sampling_params": {
            "max_tokens": 1,
            "temperature": 0.0,
            "ignore_eos": True,
            "prompt_logprobs": 0,
            "detokenize": False,
        },
        "cache_salt": salt,
        "stream": False,
        "priority": -1,
        **_under(adapter),
    }


def _under(adapter: str) -> dict[str, str]:
    return {"model": adapter} if adapter else {}


def warm_up_body() -> dict[str, Any]:
    """Return the body of a short request with log-probs."""
    return {
        "request_id": "0",
        "token_ids": [0],
        "sampling_params": {
            "max_tokens": 2,
            "temperature": 1.0,
            "ignore_eos": True,
            "logprobs": 0,
            "seed": 0,
        },
        "stream": False,
    }


def read_reply(body: bytes, *, server_id: str) -> Reply:
    """Return a reply of the token interface.

    Raises:
        EngineError: if it is no such reply, or would make a wrong sample.
    """
    try:
        data = json.loads(body)
        (choice,) = data["choices"]
        ids, logprobs = _tokens(choice, server_id=server_id)
        reason = _reason(choice["finish_reason"], server_id=server_id)
        spans = _spans(choice.get("weight_versions"), n_tokens=len(ids), server_id=server_id)
        cached = _cached(data.get("usage"))
    except (ValueError, KeyError, TypeError) as error:
        raise _not_understood(server_id, body, error) from error
    return Reply(output_ids=ids, logprobs=logprobs, spans=spans, reason=reason, cached_tokens=cached)


def read_delta(line: str, *, server_id: str, n_before: int) -> Delta | None:
    """Return the piece that a line of a stream holds; `None` for a line without one.

    The last piece of an output has its reason; one without tokens follows, that tells what was found in the cache.

    Args:
        n_before: tokens of the pieces before it.

    Raises:
        EngineError: if it is no such piece, reports an error, or would make a wrong sample.
    """
    if not line.startswith("data: ") or line == "data: [DONE]":
        return None
    text = line.removeprefix("data: ")
    try:
        data = json.loads(text)
        if "error" in data:
            raise EngineError(f"request {server_id} failed inside the server: {data['error']}")
        if not data["choices"]:
            ids, logprobs = _tokens({"token_ids": [], "logprobs": None}, server_id=server_id)
            return Delta(output_ids=ids, logprobs=logprobs, cached_tokens=_cached(data.get("usage")))
        (choice,) = data["choices"]
        ids, logprobs = _tokens(choice, server_id=server_id)
        if choice["finish_reason"] is None:
            return Delta(output_ids=ids, logprobs=logprobs)
        record = _spans(choice.get("weight_versions"), n_tokens=n_before + len(ids), server_id=server_id)
        reason = _reason(choice["finish_reason"], server_id=server_id)
        return Delta(output_ids=ids, logprobs=logprobs, reason=reason, record=record)
    except (ValueError, KeyError, TypeError) as error:
        raise _not_understood(server_id, text.encode(), error) from error


def read_scores(body: bytes, *, token_ids: Sequence[int], server_id: str) -> np.ndarray:
    """Return float32 [n - 1]: the log-prob of each given token but the first.

    Raises:
        EngineError: if the reply lacks one.
    """
    try:
        entries = json.loads(body)["prompt_logprobs"]
        if len(entries) != len(token_ids):
            raise ValueError(f"{len(entries)} entries for {len(token_ids)} tokens")
        scores = [float(entry[str(token)]["logprob"]) for entry, token in zip(entries[1:], token_ids[1:], strict=True)]
    except (ValueError, KeyError, TypeError) as error:
        raise _not_understood(server_id, body, error) from error
    if any(score <= MISSING_LOGPROB for score in scores):
        raise EngineError(
            f"score {server_id}: the server has no finite log-prob for a given token; the weights may hold NaN"
        )
    return np.array(scores, dtype=np.float32)


def read_error(body: bytes) -> str:
    """Return the message of an error reply, in whichever of the server's forms it comes."""
    try:
        data = json.loads(body)
    except ValueError:
        return body.decode(errors="replace")[:500]
    if not isinstance(data, dict):
        return str(data)[:500]
    found = data.get("error", data.get("detail", data))
    return str(found.get("message", found) if isinstance(found, dict) else found)[:500]


def read_metrics(text: str) -> Metrics:
    """Return the load from the server's metrics in Prometheus text form; what is absent counts as nothing.

    Example:
        >>> read_metrics('vllm:num_requests_running{engine="0"} 3.0').running
        3
    """
    sums: dict[str, float] = {}
    used: list[float] = []
    capacity = 0
    for name, labels, value in _samples(text):
        if name == "vllm:kv_cache_usage_perc":
            used.append(value)
        elif name == "vllm:cache_config_info":
            capacity += _whole(labels.get("num_gpu_blocks")) * _whole(labels.get("block_size"))
        else:
            sums[name] = sums.get(name, 0.0) + value

    def total(name: str) -> int:
        return int(sums.get(f"vllm:{name}_total", sums.get(f"vllm:{name}", 0.0)))

    return Metrics(
        running=total("num_requests_running"),
        waiting=total("num_requests_waiting"),
        kv_used=sum(used) / len(used) if used else 0.0,
        kv_capacity_tokens=capacity,
        output_tokens=total("generation_tokens"),
        prompt_tokens=total("prompt_tokens"),
        cached_tokens=total("prompt_tokens_cached"),
        preemptions=total("num_preemptions"),
    )


_SAMPLE = re.compile(r"^(vllm:\w+)(?:\{(.*)\})?\s+(\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


def _samples(text: str) -> Iterator[tuple[str, Mapping[str, str], float]]:
    for line in text.splitlines():
        found = _SAMPLE.match(line)
        if found is not None:
            yield found[1], dict(_LABEL.findall(found[2] or "")), float(found[3])


def _whole(text: str | None) -> int:
    return int(text) if text is not None and text.isdigit() else 0


def _tokens(choice: Mapping[str, Any], *, server_id: str) -> tuple[np.ndarray, np.ndarray]:
    ids = choice["token_ids"] or []
    content = (choice["logprobs"] or {"content": []})["content"] or []
    if [entry["token_id"] for entry in content] != ids:
        raise ValueError(f"{len(content)} log-probs that do not belong to its {len(ids)} tokens")
    logprobs = [float(entry["logprob"]) for entry in content]
    for token, logprob in zip(ids, logprobs, strict=True):
        if not MISSING_LOGPROB < logprob <= 1e-4:
            raise EngineError(
                f"request {server_id}: the server gives {logprob:g} as the log-prob of sampled token {token}: it has "
                "none. The weights may hold NaN; look at the canary and at the server's log"
            )
    return np.array(ids, dtype=np.int32), np.array(logprobs, dtype=np.float32)


def _reason(word: Any, *, server_id: str) -> StopReason:
    if word not in _REASONS:
        raise EngineError(f"request {server_id} ended inside the server with {word!r}; see the server's log")
    return _REASONS[word]


def _spans(entries: Any, *, n_tokens: int, server_id: str) -> tuple[VersionSpan, ...]:
    if n_tokens == 0:
        return ()
    spans = tuple(VersionSpan(int(entry["start"]), int(entry["end"]), int(entry["version"])) for entry in entries or [])
    try:
        check_spans(spans, n_tokens=n_tokens)
    except LengthMismatch as error:
        raise EngineError(
            f"request {server_id}: the server's record of versions does not cover its {n_tokens} tokens ({error}); "
            "the reply is refused, because nobody could say which policy sampled it"
        ) from error
    return spans


def _cached(usage: Any) -> int:
    details = (usage or {}).get("prompt_tokens_details") or {}
    return int(details.get("cached_tokens") or 0)


def _not_understood(server_id: str, body: bytes, error: Exception) -> EngineError:
    return EngineError(
        f"request {server_id}: the server's reply is not what vLLM 0.32 and 0.33 send ({error!r}): "
        f"{body[:300].decode(errors='replace')}"
    )
