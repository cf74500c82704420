"""One request while it lives in the adapter: what came of it so far, what its listener may hear, what may go out.

Decides what of a reply is sound. An update is proven by a score, and the server can score only while it runs; what it
samples between an update and the end of the pause is therefore held back until the pause ends, and cut off if it never
does. No I/O, no clock.
"""

from __future__ import annotations

import asyncio

import numpy as np

from rollmill.generator.engines.protocol import OnTokens
from rollmill.generator.engines.vllm.dialect import Delta, Reply
from rollmill.types import GenerateRequest, StopReason, TokenChunk, Turn, TurnTimings, VersionSpan


class Live:
    """A request of a caller.

    Args:
        server_id: the id that the server knows it by.
        capacity: cap of its output.
        now_s: when it came.
    """

    def __init__(
        self, request: GenerateRequest, *, server_id: str, capacity: int, now_s: float, on_tokens: OnTokens | None
    ) -> None:
        self.request = request
        self.server_id = server_id
        self.capacity = capacity
        self.arrived_s = now_s
        self.sent_s: float | None = None
        self.first_token_s: float | None = None
        self.gave_up = False
        self.over = asyncio.Event()
        self.stream = None if on_tokens is None else Stream(on_tokens)

    def turn(self, reply: Reply | None, *, now_s: float) -> Turn:
        """Return the turn of a reply, or of a request that was never sent."""
        if reply is None:
            nothing = np.empty(0)
            reply = Reply(
                output_ids=nothing.astype(np.int32),
                logprobs=nothing.astype(np.float32),
                spans=(),
                reason=StopReason.ABORT,
                cached_tokens=0,
            )
        sent_s = now_s if self.sent_s is None else self.sent_s
        first_s = sent_s if self.first_token_s is None else self.first_token_s
        return Turn(
            request_id=self.request.request_id,
            prompt_ids=np.ascontiguousarray(self.request.prompt_ids, dtype=np.int32),
            output_ids=reply.output_ids,
            behavior_logprobs=reply.logprobs,
            version_spans=reply.spans,
            stop_reason=reply.reason,
            timings=TurnTimings(
                queued_s=sent_s - self.arrived_s, prefill_s=first_s - sent_s, decode_s=max(0.0, now_s - first_s)
            ),
            cached_tokens=reply.cached_tokens,
        )


class Stream:
    """What the listener of a request may hear, and when.

    The server tells versions at the end only. Until the first update that a request lives through there is no doubt
    about them; tokens that come after it are told at the end, when the server's own record is known.
    """

    def __init__(self, on_tokens: OnTokens) -> None:
        self._on_tokens = on_tokens
        self._ids: list[np.ndarray] = []
        self._logprobs: list[np.ndarray] = []
        self._count = self._told = 0
        self._doubtful = False

    def take(self, delta: Delta) -> None:
        """Keep a piece of the reply."""
        self._ids.append(delta.output_ids)
        self._logprobs.append(delta.logprobs)
        self._count += len(delta.output_ids)

    @property
    def count(self) -> int:
        """Tokens so far."""
        return self._count

    def doubt(self) -> None:
        """Weights are about to change: of what comes now, the version is not certain before the end."""
        self._doubtful = True

    def tell(self, *, policy_version: int) -> None:
        """Tell what has come, where its version is certain."""
        if not self._doubtful and self._told < self._count:
            self._tell(self._told, self._count, policy_version)

    def tell_rest(self, spans: tuple[VersionSpan, ...]) -> None:
        """Tell what has not been told, by the record of the whole output (or of what is left of it)."""
        for span in spans:
            start = max(span.start_token, self._told)
            if start < span.end_token:
                self._tell(start, span.end_token, span.policy_version)

    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """Return int32 ids and float32 log-probs of all tokens."""
        if not self._ids:
            return np.empty(0, dtype=np.int32), np.empty(0, dtype=np.float32)
        return np.concatenate(self._ids), np.concatenate(self._logprobs)

    def _tell(self, start: int, end: int, policy_version: int) -> None:
        ids, logprobs = self.arrays()
        self._told = end
        self._on_tokens(
            TokenChunk(
                start_token=start,
                output_ids=ids[start:end],
                behavior_logprobs=logprobs[start:end],
                policy_version=policy_version,
            )
        )


def sound_part(reply: Reply, *, unproven: int | None) -> Reply:
    """Return the reply without what an unproven version sampled: an aborted one, if that was anything.

    Example:
        >>> spans = (VersionSpan(0, 2, 1), VersionSpan(2, 3, 2))
        >>> reply = Reply(
        ...     output_ids=np.array([5, 6, 7]), logprobs=np.zeros(3), spans=spans, reason=StopReason.STOP,
        ...     cached_tokens=0,
        ... )
        >>> cut = sound_part(reply, unproven=2)
        >>> cut.output_ids.tolist(), cut.reason.value
        ([5, 6], 'abort')
    """
    if unproven is None:
        return reply
    sound = tuple(span for span in reply.spans if span.policy_version != unproven)
    if len(sound) == len(reply.spans):
        return reply
    # The unproven version is the newest: its tokens are the last.
    end = sound[-1].end_token if sound else 0
    return Reply(
        output_ids=reply.output_ids[:end],
        logprobs=reply.logprobs[:end],
        spans=sound,
        reason=StopReason.ABORT,
        cached_tokens=reply.cached_tokens,
    )
