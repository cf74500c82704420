"""One request while it lives in an engine.

Keeps what was sampled, under which version each token was sampled, and the stamps; decides only whether it is over.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np

from rollmill.errors import DataError, ModelError
from rollmill.generator.engines.protocol import ADAPTERS, OnTokens, Reward, engines_with
from rollmill.types import GenerateRequest, StopReason, TokenChunk, Turn, TurnTimings, VersionSpan

Deliver = Callable[[Turn | Exception], None]


class Sequence:
    """A request with its output so far."""

    __slots__ = (
        "_logprobs",
        "_output",
        "_stop_ids",
        "_versions",
        "arrived_s",
        "cached_tokens",
        "capacity",
        "count",
        "deadline_s",
        "deliver",
        "first_token_s",
        "on_tokens",
        "prefill_s",
        "prefill_started_s",
        "prompt",
        "prompt_key",
        "request",
        "restored_tokens",
        "reward",
    )

    def __init__(
        self,
        request: GenerateRequest,
        *,
        max_model_len: int,
        now_s: float,
        deliver: Deliver,
        on_tokens: OnTokens | None = None,
    ) -> None:
        self.request = request
        self.deliver = deliver
        self.on_tokens = on_tokens
        self.prompt = np.ascontiguousarray(request.prompt_ids, dtype=np.int64)
        self.prompt_key = self.prompt.tobytes()
        self.capacity = min(request.sampling.max_new_tokens, max_model_len - len(self.prompt))
        self.count = 0
        self.arrived_s = now_s
        self.deadline_s = now_s + request.deadline_s
        self.prefill_started_s: float | None = None
        self.first_token_s: float | None = None
        self.prefill_s = 0.0
        self.cached_tokens = self.restored_tokens = 0
        self.reward: Reward | None = None
        self._output = np.empty(self.capacity, dtype=np.int32)
        self._logprobs = np.empty(self.capacity, dtype=np.float32)
        self._versions = np.empty(self.capacity, dtype=np.int64)
        self._stop_ids = frozenset(request.sampling.stop_token_ids)

    @property
    def kv_tokens(self) -> int:
        """Tokens whose KV is there: all but the newest, which is fed next."""
        return len(self.prompt) + self.count - 1

    @property
    def last_token(self) -> int:
        """The newest sampled token."""
        return int(self._output[self.count - 1])

    def kv_ids(self) -> np.ndarray:
        """Return int64 [kv_tokens], the tokens whose KV is there."""
        return np.concatenate([self.prompt, self._output[: self.count - 1].astype(np.int64)])

    def all_ids(self) -> np.ndarray:
        """Return int64 [n], every token: their KV and the logits behind the last one are what it goes on from."""
        return np.append(self.kv_ids(), self.last_token) if self.count else self.prompt

    def output_since(self, start: int) -> list[int]:
        """Return the sampled tokens from `start` on."""
        return self._output[start : self.count].tolist()

    def append(self, token: int, *, logprob: float, policy_version: int) -> None:
        """Take one sampled token; its version is fixed here, when it is sampled."""
        at = self.count
        self._output[at], self._logprobs[at], self._versions[at] = token, logprob, policy_version
        self.count = at + 1
        if self.on_tokens is not None:
            self.on_tokens(self._chunk(at))

    def _chunk(self, start: int) -> TokenChunk:
        """Return the tokens from `start` on; all of one version."""
        return TokenChunk(
            start_token=start,
            output_ids=self._output[start : self.count].copy(),
            behavior_logprobs=self._logprobs[start : self.count].copy(),
            policy_version=int(self._versions[start]),
        )

    def stop_reason(self) -> StopReason | None:
        """Return why the sequence is over, or `None` if it goes on."""
        if self.reward is not None:
            return StopReason.STOP
        if self.count and self.last_token in self._stop_ids:
            return StopReason.STOP
        return StopReason.LENGTH if self.count >= self.capacity else None

    def turn(self, reason: StopReason, *, now_s: float) -> Turn:
        """Return the turn with what was sampled so far."""
        queued_until = now_s if self.prefill_started_s is None else self.prefill_started_s
        decode_from = now_s if self.first_token_s is None else self.first_token_s
        return Turn(
            request_id=self.request.request_id,
            prompt_ids=self.prompt.astype(np.int32),
            output_ids=self._output[: self.count].copy(),
            behavior_logprobs=self._logprobs[: self.count].copy(),
            version_spans=spans_of(self._versions[: self.count]),
            stop_reason=reason,
            timings=TurnTimings(
                queued_s=queued_until - self.arrived_s, prefill_s=self.prefill_s, decode_s=now_s - decode_from
            ),
            cached_tokens=self.cached_tokens,
        )


def spans_of(versions: np.ndarray) -> tuple[VersionSpan, ...]:
    """Return the runs of equal versions.

    Example:
        >>> [(s.start_token, s.end_token, s.policy_version) for s in spans_of(np.array([7, 7, 8]))]
        [(0, 2, 7), (2, 3, 8)]
    """
    if len(versions) == 0:
        return ()
    edges = [0, *(np.flatnonzero(np.diff(versions)) + 1).tolist(), len(versions)]
    return tuple(VersionSpan(start, end, int(versions[start])) for start, end in itertools.pairwise(edges))


def check_request(
    request: GenerateRequest, *, vocabulary_size: int, max_model_len: int, adapters: bool = False
) -> None:
    """Refuse a request that cannot be served.

    Args:
        request: as it came.
        vocabulary_size: of the model.
        max_model_len: longest prompt plus output, tokens.
        adapters: whether the engine serves adapters beside its weights.

    Raises:
        DataError: with the numbers, if the prompt or the sampling parameters do not fit.
        ModelError: if it asks for an adapter and the engine serves none, naming the engines that do.
    """
    ids, sampling, name = request.prompt_ids, request.sampling, request.request_id
    if request.adapter and not adapters:
        raise ModelError(
            f"request {name} asks for adapter {request.adapter!r}, and this engine serves its weights alone. Engines "
            f"that can serve adapters beside them: {engines_with(ADAPTERS)}, started with them"
        )
    if len(ids) == 0:
        raise DataError(f"request {name} has an empty prompt; a policy needs at least one token to go on from")
    if len(ids) >= max_model_len:
        raise DataError(
            f"the prompt of request {name} has {len(ids)} tokens, and max_model_len {max_model_len} leaves no room for "
            "an answer; raise generator.max_model_len or shorten the prompt"
        )
    low, high = int(np.min(ids)), int(np.max(ids))
    if low < 0 or high >= vocabulary_size:
        raise DataError(
            f"the prompt of request {name} holds token ids {low}..{high} outside the vocabulary of {vocabulary_size}; "
            "the tokenizer does not belong to this model"
        )
    problems = [
        text
        for bad, text in (
            (sampling.max_new_tokens < 1, f"max_new_tokens {sampling.max_new_tokens} is below 1"),
            (
                not 0 <= sampling.temperature < math.inf,
                f"temperature {sampling.temperature} is not a number of 0 or more",
            ),
            (not 0 < sampling.top_p <= 1, f"top_p {sampling.top_p} is outside (0, 1]"),
            (sampling.top_k < 0, f"top_k {sampling.top_k} is negative"),
            (not request.deadline_s > 0, f"deadline_s {request.deadline_s} is not positive"),
        )
        if bad
    ]
    if problems:
        raise DataError(f"request {name} cannot be served: {'; '.join(problems)}")
