"""Runs the requests of a plan and makes samples of their turns; ends a sample where its stop string ends.

The engine knows no stop strings: text is matched here as the tokens come, and the engine is told to abort that sample
alone. What it had sampled beyond the string is cut off, so that the same request always has the same ids, whatever the
timing.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Protocol

from rollmill.errors import DeadlineExceeded, NotServing, RequestAborted, RollmillError
from rollmill.generator.http.plan import Plan
from rollmill.generator.http.protocol import Inference
from rollmill.generator.http.replies import Sample, finish_reason_of, spans_until
from rollmill.generator.http.text import Decode, ReplyText
from rollmill.generator.state import Standing, refusal
from rollmill.generator.wire import sibling_id
from rollmill.types import StopReason, TokenChunk, Turn


class Hearer(Protocol):
    """Hears samples as they grow; must not raise."""

    def grew(self, index: int, *, text: str, ids: Sequence[int], logprobs: Sequence[float]) -> None:
        """Hear what a sample gained; the text may lag behind the ids."""
        ...

    def ended(self, sample: Sample) -> None:
        """Hear the end of a sample."""
        ...


class Sampler:
    """One run of a plan.

    Args:
        service: what samples.
        plan: what is sampled.
        wants_text: whether samples need their text.
        hearer: hears samples as they grow.
    """

    def __init__(self, service: Inference, plan: Plan, *, wants_text: bool, hearer: Hearer | None = None) -> None:
        self._service, self._plan, self._hearer = service, plan, hearer
        self._decode: Decode | None = service.codec.decode if wants_text and service.codec is not None else None
        self._growing: dict[int, _Growing] = {}
        self._tasks: asyncio.TaskGroup | None = None

    async def run(self) -> list[Sample]:
        """Return the samples of all prompts, in the order of their index.

        Raises:
            RollmillError: what the service raised for the first request that failed; the others are aborted.

        Cancellation:
            aborts all requests and frees their KV.
        """
        plan = self._plan
        try:
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                groups = [
                    tasks.create_task(self._run_one(number), name=request.request_id)
                    for number, request in enumerate(plan.requests)
                ]
        except BaseExceptionGroup as group:  # the others were cancelled because of the first
            raise group.exceptions[0] from group
        return [sample for group in groups for sample in group.result()]

    async def _run_one(self, number: int) -> list[Sample]:
        plan = self._plan
        request, first = plan.requests[number], number * plan.siblings
        if self._hearer is None and not plan.stops:
            turns = await self._service.generate(request, siblings=plan.siblings)
            return [self._sample(first + i, turn) for i, turn in enumerate(turns)]
        listener = _Listener(self, first=first, number=number)
        await self._service.generate(request, siblings=plan.siblings, listener=listener)
        return [listener.samples[i] for i in range(plan.siblings)]

    def _grow(self, index: int, chunk: TokenChunk, *, number: int, sibling: int) -> None:
        """Take the next tokens of a sample; tell the hearer, and the engine if it is over."""
        growing = self._growing.get(index)
        if growing is None:
            growing = self._growing[index] = _Growing(self._decode, stops=self._plan.stops)
        if growing.over:
            return
        text = growing.push(chunk)
        ids, logprobs = chunk.output_ids, chunk.behavior_logprobs
        if growing.over:
            keep = growing.kept(len(ids) + chunk.start_token) - chunk.start_token
            ids, logprobs = ids[:keep], logprobs[:keep]
            self._end_early(number, sibling=sibling)
        if self._hearer is not None:
            self._hearer.grew(index, text=text, ids=ids.tolist(), logprobs=logprobs.tolist())

    def _end_early(self, number: int, *, sibling: int) -> None:
        plan = self._plan
        part = sibling_id(plan.requests[number].request_id, sibling, siblings=plan.siblings)
        if self._tasks is None:
            return
        with contextlib.suppress(RuntimeError):  # the group is ending with an error, which aborts all its requests
            self._tasks.create_task(self._abort(part), name=f"stop {part}")

    async def _abort(self, part: str) -> None:
        await self._service.abort(part)

    def _end(self, index: int, turn: Turn) -> Sample:
        growing = self._growing.pop(index, None)
        rest = "" if growing is None else growing.finish()
        sample = self._sample(index, turn, growing=growing)
        if self._hearer is not None:
            if rest:
                self._hearer.grew(index, text=rest, ids=(), logprobs=())
            self._hearer.ended(sample)
        return sample

    def _sample(self, index: int, turn: Turn, *, growing: _Growing | None = None) -> Sample:
        match = None if growing is None or growing.text is None else growing.text.match
        end = len(turn.output_ids) if match is None else match.end_token
        by_token = match is None and turn.stop_reason is StopReason.STOP
        text = self._whole_text(turn) if growing is None or match is None else "".join(growing.parts)
        return Sample(
            index=index,
            output_ids=turn.output_ids[:end],
            logprobs=turn.behavior_logprobs[:end],
            spans=turn.version_spans if match is None else spans_until(turn.version_spans, end),
            text=text,
            finish_reason=finish_reason_of(turn.stop_reason, match=match),
            stop_token=int(turn.output_ids[-1]) if by_token else None,
            match=match,
            timings=turn.timings,
            cached_tokens=turn.cached_tokens,
        )

    def _whole_text(self, turn: Turn) -> str:
        # A hearer has had the text already.
        return "" if self._decode is None or self._hearer is not None else self._decode(turn.output_ids.tolist())


class _Growing:
    """A sample that grows: its text, and whether a stop string ended it."""

    def __init__(self, decode: Decode | None, *, stops: Sequence[str]) -> None:
        self.text = None if decode is None else ReplyText(decode, stops=stops)
        self.parts: list[str] = []

    @property
    def over(self) -> bool:
        return self.text is not None and self.text.match is not None

    def push(self, chunk: TokenChunk) -> str:
        return "" if self.text is None else self._keep(self.text.push(chunk.output_ids.tolist()))

    def finish(self) -> str:
        return "" if self.text is None else self._keep(self.text.finish())

    def kept(self, count: int) -> int:
        """Return how many of the tokens stay."""
        return count if self.text is None or self.text.match is None else self.text.match.end_token

    def _keep(self, text: str) -> str:
        if text:
            self.parts.append(text)
        return text


class _Listener:
    """Hears the siblings of one request."""

    def __init__(self, sampler: Sampler, *, first: int, number: int) -> None:
        self._sampler, self._first, self._number = sampler, first, number
        self.samples: dict[int, Sample] = {}

    def tokens(self, index: int, chunk: TokenChunk) -> None:
        self._sampler._grow(self._first + index, chunk, number=self._number, sibling=index)

    def finished(self, index: int, turn: Turn) -> None:
        self.samples[index] = self._sampler._end(self._first + index, turn)


def why_cut(service: Inference, plan: Plan, sample: Sample, *, waited_s: float) -> RollmillError:
    """Return the error of a sample that was cut short, for callers who have no word for that.

    Args:
        waited_s: seconds since the request was handed over.
    """
    had = f"after {len(sample.output_ids)} tokens of sample {sample.index}"
    if waited_s >= plan.deadline_s:
        return DeadlineExceeded(
            f"request {plan.request_id} was not done within its deadline of {plan.deadline_s:g} s ({had}). Raise "
            "deadline_s, ask for fewer tokens, or call /inference/v1/generate, which returns what there is"
        )
    status = service.status()
    if (why := refusal(Standing(state=status.state, reason=status.reason), to_generate=True)) is not None:
        return NotServing(f"request {plan.request_id} was cut short {had}: {why}")
    return RequestAborted(
        f"request {plan.request_id} was aborted {had}: somebody aborted it by its id, or a load of weights failed half "
        "way. Ask again, or call /inference/v1/generate, which returns what there is"
    )
