"""One request while it lives in the adapter: what came of it, under which version, what its listener may hear.

Decides what of an output is sound. An update is proven by a score, and a server can score only while it runs; what it
samples between an update and the end of the pause is kept from everybody until the pause ends, and cut off if the
version that sampled it is never proven. No I/O, no clock.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection

import msgspec
import numpy as np

from rollmill.errors import EngineError
from rollmill.generator.engines.protocol import OnTokens
from rollmill.generator.engines.remote.adapters import RemoteAdapter
from rollmill.generator.engines.remote.port import Delta
from rollmill.types import GenerateRequest, StopReason, TokenChunk, Turn, TurnTimings, VersionSpan

GroupKey = tuple[str, bytes]

_SEED_STRIDE = 0x9E3779B97F4A7C15
"""Between the seeds of the parts of a request that was sent anew; odd: they differ for every number of tokens."""


class Live:
    """A request of a caller.

    Args:
        server_id: the id that the server knows it by.
        capacity: cap of its output.
        now_s: when it came.

    Attributes:
        group: what it shares a prefill with, or `None`.
        sent_s: when it was sent, `None` while it waits here.
        gave_up: it is to end with what it has.
        withdrawn: it is to be sent anew, with the tokens that it has.
        adapter: what the server works with for it, since it was sent; `None` for the base alone.
        over: its caller has it.
    """

    def __init__(
        self, request: GenerateRequest, *, server_id: str, capacity: int, now_s: float, on_tokens: OnTokens | None
    ) -> None:
        self.request = request
        self.server_id = server_id
        self.arrived_s = now_s
        self.sent_s: float | None = None
        self.first_token_s: float | None = None
        self.gave_up = self.withdrawn = False
        self.adapter: RemoteAdapter | None = None
        self.over = asyncio.Event()
        self.count = 0
        self.cached_tokens = 0
        self.reason: StopReason | None = None
        self.capacity = capacity
        self.group: GroupKey | None = (
            (request.group_key, np.ascontiguousarray(request.prompt_ids).tobytes()) if request.group_key else None
        )
        self._ids = np.empty(capacity, dtype=np.int32)
        self._logprobs = np.empty(capacity, dtype=np.float32)
        self._told = 0
        self._marks: list[tuple[int, int]] = []
        self._record: tuple[VersionSpan, ...] | None = None
        self._on_tokens = on_tokens

    def to_send(self) -> GenerateRequest:
        """Return what the server is asked for: what is left of it, under the server's name of its adapter."""
        adapter = "" if self.adapter is None else self.adapter.server_name
        if not self.count:
            return msgspec.structs.replace(self.request, adapter=adapter)
        sampling = self.request.sampling
        return msgspec.structs.replace(
            self.request,
            adapter=adapter,
            prompt_ids=np.concatenate([self.request.prompt_ids, self._ids[: self.count]]),
            # The same seed would give the next tokens the numbers that the first ones were drawn with.
            sampling=msgspec.structs.replace(sampling, seed=(sampling.seed + self.count * _SEED_STRIDE) % (1 << 63)),
        )

    def serve_under(self, policy_version: int) -> None:
        """What comes from now on was sampled under this version."""
        if self._marks and self._marks[-1][0] == self.count:
            self._marks.pop()
        self._marks.append((self.count, policy_version))

    def take(self, delta: Delta, *, now_s: float) -> None:
        """Keep a piece of the output.

        Raises:
            EngineError: if there are more tokens than were asked for.
        """
        end = self.count + len(delta.output_ids)
        if end > self.capacity:
            raise EngineError(
                f"request {self.request.request_id}: the server sent {end} tokens where {self.capacity} were asked for"
            )
        if end and self.first_token_s is None:
            self.first_token_s = now_s
        self._ids[self.count : end] = delta.output_ids
        self._logprobs[self.count : end] = delta.logprobs
        self.count = end
        if delta.cached_tokens is not None:
            self.cached_tokens = delta.cached_tokens
        if delta.reason is not None:
            # With an adapter the server's record speaks of the base. A name of an adapter is one version.
            self.reason, self._record = delta.reason, delta.record if self.adapter is None else None

    def tell(self) -> int:
        """Tell the listener what it has not heard, and return how many tokens that is."""
        start, self._told = self._told, self.count
        if self._on_tokens is not None and start < self.count:
            for span in self._spans(self.count):
                begin = max(span.start_token, start)
                if begin < span.end_token:
                    self._on_tokens(self._chunk(begin, span))
        return self.count - start

    def settle(self, *, unproven: int | None) -> None:
        """Let the server's record of versions be the last word, and cut off what an unproven version sampled.

        Raises:
            EngineError: if the record does not cover the output, or contradicts what was told already.
        """
        if self._record is not None and (self._record[-1].end_token if self._record else 0) != self.count:
            raise EngineError(
                f"request {self.request.request_id}: the server's record of versions ends elsewhere than its "
                f"{self.count} tokens, at {self._record[-1].end_token if self._record else 0}"
            )
        told = [(span.end_token, span.policy_version) for span in self._spans(self._told)]
        if self._record is not None:
            recorded = [
                (min(span.end_token, self._told), span.policy_version)
                for span in self._record
                if span.start_token < self._told
            ]
            if self._on_tokens is not None and told != recorded:
                raise EngineError(
                    f"request {self.request.request_id}: its tokens were streamed as sampled under (end, version) "
                    f"{told}, and the server's record says {recorded}. The turn is refused"
                )
            self._marks = [(span.start_token, span.policy_version) for span in self._record]
        for start, version in self._marks:
            if version == unproven and start < self.count:
                self.count, self.reason = start, StopReason.ABORT
                return

    def turn(self, *, now_s: float) -> Turn:
        """Return the turn with what there is."""
        sent_s = now_s if self.sent_s is None else self.sent_s
        first_s = now_s if self.first_token_s is None else self.first_token_s
        return Turn(
            request_id=self.request.request_id,
            prompt_ids=np.ascontiguousarray(self.request.prompt_ids, dtype=np.int32),
            output_ids=self._ids[: self.count].copy(),
            behavior_logprobs=self._logprobs[: self.count].copy(),
            version_spans=self._spans(self.count),
            stop_reason=self.reason or StopReason.ABORT,
            timings=TurnTimings(
                queued_s=sent_s - self.arrived_s, prefill_s=max(0.0, first_s - sent_s), decode_s=now_s - first_s
            ),
            cached_tokens=self.cached_tokens,
        )

    def _spans(self, end: int) -> tuple[VersionSpan, ...]:
        """Return the spans of the first `end` tokens, neighbours of one version joined."""
        spans: list[VersionSpan] = []
        for at, (start, version) in enumerate(self._marks):
            stop = min(end, self._marks[at + 1][0] if at + 1 < len(self._marks) else end)
            if start >= stop:
                continue
            if spans and spans[-1].policy_version == version:
                start = spans.pop().start_token
            spans.append(VersionSpan(start, stop, version))
        return tuple(spans)

    def _chunk(self, start: int, span: VersionSpan) -> TokenChunk:
        return TokenChunk(
            start_token=start,
            output_ids=self._ids[start : span.end_token].copy(),
            behavior_logprobs=self._logprobs[start : span.end_token].copy(),
            policy_version=span.policy_version,
        )


class Lives(dict[str, Live]):
    """The living requests by their ids, and who of them uses an adapter."""

    def ask_for(self, name: str) -> bool:
        """Return whether one asks for an adapter."""
        return any(live.request.adapter == name for live in self.values())

    def run_under(self, server_name: str) -> bool:
        """Return whether the server works on one under this name of an adapter."""
        return any(_runs_under(live, (server_name,)) for live in self.values())

    def withdraw(self, server_names: Collection[str]) -> None:
        """Mark those that run under these names of adapters as to be sent anew."""
        for live in self.values():
            live.withdrawn = live.withdrawn or _runs_under(live, server_names)


def _runs_under(live: Live, server_names: Collection[str]) -> bool:
    return live.sent_s is not None and live.adapter is not None and live.adapter.server_name in server_names
