"""The words of SGLang's HTTP interface: requests into JSON, replies out of it.

Pure. Refuses a reply that would make a wrong sample (a token without a log-prob, spans that do not cover the output, a
label that is no version) instead of repairing it. Written against SGLang 0.5.23.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rollmill.errors import DataError, EngineError, LengthMismatch
from rollmill.generator.engines.remote.port import Delta, Figures
from rollmill.types import GenerateRequest, SamplingParams, StopReason, VersionSpan, check_spans

GENERATE = "/generate"
ABORT = "/abort_request"
PAUSE = "/pause_generation"
CONTINUE = "/continue_generation"
UPDATE = "/update_weights_from_disk"
SERVER_INFO = "/server_info"
LOADS = "/v1/loads"
READY = "/ready"

SCORE_PRIORITY, ROLLOUT_PRIORITY = 1000, 0
"""A score comes before whatever waits."""

_REASONS = {"stop": StopReason.STOP, "length": StopReason.LENGTH, "abort": StopReason.ABORT}
_SEED_BITS = (1 << 63) - 1
_HIGHEST_LOGPROB = 1e-4
"""Arithmetic may end a little above 0."""


def is_filtered(sampling: SamplingParams) -> bool:
    """Return whether tokens are drawn from less than the whole distribution, so that its log-probs are others.

    Greedy sampling is not: its log-probs are those of the whole distribution at temperature 1, as in every engine.
    """
    return sampling.temperature > 0 and (sampling.top_p < 1 or sampling.top_k > 0)


def generate_body(
    request: GenerateRequest, *, server_id: str, max_tokens: int, salt: str, vocabulary_size: int
) -> dict[str, Any]:
    """Return the body of a generation request.

    Args:
        server_id: the id that the server knows it by. An abort matches by prefix, and the server aborts an id again two
            seconds after its stream has ended: ids are of one length and never used twice.
        max_tokens: cap of the output, with the context taken into account.
        salt: separates prefix caches: a request never hits KV that was made under another one.
        vocabulary_size: what `top_k` says where all tokens are kept and the log-probs of what was kept are wanted.
    """
    sampling = request.sampling
    parameters: dict[str, Any] = {
        "max_new_tokens": max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "sampling_seed": sampling.seed & _SEED_BITS,
        # Not `ignore_eos`, which would switch these off as well: the model folder of the server names no end token.
        "stop_token_ids": list(sampling.stop_token_ids),
    }
    if sampling.top_k > 0:
        parameters["top_k"] = sampling.top_k
    body: dict[str, Any] = {
        "rid": server_id,
        "input_ids": np.asarray(request.prompt_ids).tolist(),
        "sampling_params": parameters,
        "return_logprob": True,
        "stream": True,
        "extra_key": salt,
        "priority": ROLLOUT_PRIORITY,
    }
    if is_filtered(sampling):
        # The log-probs of the whole distribution say nothing about a filtered draw.
        body["return_sampling_mask"] = True
        parameters["top_k"] = min(sampling.top_k or vocabulary_size, vocabulary_size)
    return body


def score_body(token_ids: Sequence[int], *, server_id: str) -> dict[str, Any]:
    """Return the body of a request for the log-probs of given tokens, computed anew, before all others."""
    return {
        "rid": server_id,
        "input_ids": list(token_ids),
        "sampling_params": {"max_new_tokens": 1, "temperature": 0.0},
        "return_logprob": True,
        "logprob_start_len": 0,
        "stream": False,
        "extra_key": f"score.{server_id}",
        "priority": SCORE_PRIORITY,
    }


def probe_body(*, server_id: str, vocabulary_size: int) -> dict[str, Any]:
    """Return the body of a first request: it warms the server up and finds out whether it returns sampling masks."""
    return {
        "rid": server_id,
        "input_ids": [0],
        "sampling_params": {"max_new_tokens": 2, "temperature": 1.0, "top_p": 0.5, "top_k": vocabulary_size},
        "return_logprob": True,
        "return_sampling_mask": True,
        "stream": False,
        "extra_key": "probe",
        "priority": SCORE_PRIORITY,
    }


def update_body(folder: str, *, policy_version: int, flush: bool) -> dict[str, Any]:
    """Return the body of a weight update from a folder.

    Args:
        flush: whether the prefix cache is emptied; refused, after the weights were changed, while anything runs.
    """
    return {
        "model_path": folder,
        "load_format": "safetensors",
        "weight_version": str(policy_version),
        "flush_cache": flush,
    }


def read_delta(line: str, *, server_id: str, n_before: int, filtered: bool) -> Delta | None:
    """Return the piece that a line of a stream holds; `None` for a line without one.

    Args:
        n_before: tokens of the pieces before it.
        filtered: whether the log-probs of the sampling mask are the ones that count.

    Raises:
        DataError: if the server finds the request wrong.
        EngineError: if it is no such piece, reports an error, or would make a wrong sample.
    """
    if not line.startswith("data: ") or line == "data: [DONE]":
        return None
    text = line.removeprefix("data: ")
    try:
        data = json.loads(text)
        if "error" in data:
            raise _failure(server_id, data["error"])
        meta = data["meta_info"]
        reason = _reason(meta["finish_reason"], server_id=server_id)
        total = int(meta["completion_tokens"])
        ids, logprobs = _tokens(data, server_id=server_id, n_before=n_before, total=total, filtered=filtered)
        record = None if reason is None else _record(meta.get("weight_versions"), n_tokens=total, server_id=server_id)
        cached = meta.get("cached_tokens")
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise _not_understood(server_id, text, error) from error
    return Delta(
        output_ids=ids,
        logprobs=logprobs,
        reason=reason,
        record=record,
        cached_tokens=None if cached is None else int(cached),
    )


def read_scores(body: bytes, *, token_ids: Sequence[int], server_id: str) -> np.ndarray:
    """Return float32 [n - 1]: the log-prob of each given token but the first.

    Raises:
        EngineError: if the reply lacks one.
    """
    try:
        entries = json.loads(body)["meta_info"]["input_token_logprobs"]
        if [entry[1] for entry in entries] != list(token_ids):
            raise ValueError(f"log-probs of {len(entries)} other tokens than the {len(token_ids)} that were given")
        scores = [float(entry[0]) for entry in entries[1:]]
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise _not_understood(server_id, body.decode(errors="replace"), error) from error
    if not all(map(math.isfinite, scores)):
        raise EngineError(
            f"score {server_id}: the server has no finite log-prob for a given token; the weights may hold NaN"
        )
    return np.array(scores, dtype=np.float32)


def returns_masks(body: bytes) -> bool:
    """Return whether the reply to a probe holds the log-probs of the filtered distribution."""
    try:
        meta = json.loads(body)["meta_info"]
        return len(meta["output_token_sampling_logprobs"]) == int(meta["completion_tokens"])
    except (ValueError, KeyError, TypeError):
        return False


def read_labels(body: bytes) -> set[str]:
    """Return the labels of the weights that the server's schedulers serve, by their own word.

    Raises:
        EngineError: if it does not say.
    """
    try:
        return {str(state["weight_version"]) for state in json.loads(body)["internal_states"]}
    except (ValueError, KeyError, TypeError) as error:
        raise _not_understood("server_info", body.decode(errors="replace"), error) from error


def read_figures(body: bytes) -> Figures:
    """Return what the server says of its memory for keys and values; what is absent counts as nothing.

    Example:
        >>> read_figures(b'{"loads": [{"num_used_tokens": 3, "max_total_num_tokens": 8}]}').kv_capacity_tokens
        8
    """
    try:
        loads = json.loads(body)["loads"]
        return Figures(
            kv_used_tokens=sum(int(load.get("num_used_tokens", 0)) for load in loads),
            kv_capacity_tokens=sum(int(load.get("max_total_num_tokens", 0)) for load in loads),
        )
    except (ValueError, KeyError, TypeError, AttributeError):
        return Figures()


def read_error(body: bytes) -> str:
    """Return the message of an error reply, in whichever of the server's forms it comes."""
    try:
        data = json.loads(body)
    except ValueError:
        return body.decode(errors="replace")[:500]
    found = data.get("error", data.get("message", data.get("detail", data))) if isinstance(data, dict) else data
    return str(found.get("message", found) if isinstance(found, dict) else found)[:500]


def _tokens(
    data: Mapping[str, Any], *, server_id: str, n_before: int, total: int, filtered: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Return what is new in a piece.

    A piece holds the last tokens of `total`, mostly those that are new; the last piece of a request that was aborted in
    the queue repeats one, with the log-probs of all.
    """
    meta, new = data["meta_info"], total - n_before
    if new < 0:
        raise ValueError(f"{total} tokens after {n_before}")
    if new == 0:
        return np.empty(0, dtype=np.int32), np.empty(0, dtype=np.float32)
    entries = meta["output_token_logprobs"]
    values = meta.get("output_token_sampling_logprobs") if filtered else [entry[0] for entry in entries]
    if values is None:
        raise EngineError(
            f"request {server_id}: the server returned no sampling mask, hence no log-probs of the filtered "
            "distribution. Use top_p 1 and top_k 0, or an engine with top_p and top_k: embedded, vllm, fake"
        )
    ids, values = _last(data["output_ids"], new), _last(values, new)
    if [entry[1] for entry in _last(entries, new)] != ids:
        raise ValueError("log-probs that do not belong to its tokens")
    for token, logprob in zip(ids, values, strict=True):
        if not -math.inf < float(logprob) <= _HIGHEST_LOGPROB:
            raise EngineError(
                f"request {server_id}: the server gives {logprob} as the log-prob of sampled token {token}. The "
                "weights may hold NaN; look at the canary and at the server's log"
            )
    return np.array(ids, dtype=np.int32), np.array(values, dtype=np.float32)


def _last(entries: Sequence[Any], count: int) -> list[Any]:
    if len(entries) < count:
        raise ValueError(f"{len(entries)} entries where {count} tokens are new")
    return list(entries[len(entries) - count :])


def _reason(found: Any, *, server_id: str) -> StopReason | None:
    if found is None:
        return None
    kind = found["type"]
    if kind not in _REASONS or found.get("status_code") is not None:
        raise _failure(server_id, found)
    return _REASONS[kind]


def _failure(server_id: str, found: Any) -> DataError | EngineError:
    details = found if isinstance(found, dict) else {}
    message = f"request {server_id}: the server says: {details.get('message', found)}"
    code = details.get("status_code", details.get("code"))
    return DataError(message) if code == 400 else EngineError(message)


def _record(entries: Any, *, n_tokens: int, server_id: str) -> tuple[VersionSpan, ...]:
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


def _not_understood(server_id: str, text: str, error: Exception) -> EngineError:
    return EngineError(
        f"request {server_id}: the server's reply is not what SGLang 0.5.23 sends ({error!r}): {text[:300]}"
    )
