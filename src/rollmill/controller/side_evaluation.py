"""Evaluations beside the training: a version is held when it is due, and evaluated while newer ones are trained.

`due_versions` is pure: it says which publications are to be evaluated. `SideEvaluations` keeps them until they are, one
after another, by a replica of their own. It never holds a weight load back and never ends the run: an evaluation whose
replica is lost is tried once more, then reported as failed.

    Waits for                  Woken by                  Gives up after
    a version that is due      `look`                    `close`, or the end of those to come
    an evaluation              its replica, its scorer   evaluation.deadline_s, start of the replica included apart
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Protocol

import msgspec

from rollmill.controller.evaluation import EvaluationResult
from rollmill.errors import DataError, DeadlineExceeded, WeightError
from rollmill.types import WeightManifest

BACKLOG = 1
"""Versions that wait, each with its tensors in memory, while another is evaluated."""
ATTEMPTS = 2
BEFORE = "before"


class EvaluatorLost(Exception):
    """The replica that evaluates did not start, or ended under its requests."""


class DueVersion(msgspec.Struct, frozen=True, kw_only=True):
    """A publication to evaluate."""

    label: str
    policy_version: int
    digest: str


class Holder(Protocol):
    """What the repository does for an evaluation; see `rollmill.weights.protocol`."""

    def hold(self, policy_version: int, *, owner: str) -> None:
        """Keep a version's tensors from being retired."""
        ...

    def release(self, policy_version: int, *, owner: str) -> None:
        """End a hold."""
        ...


class Reports(Protocol):
    """Who tells people what became of an evaluation."""

    def event(self, kind: str, **fields: object) -> None:
        """Record that something happened."""
        ...


def labels_due(*, at_start: bool, every_steps: int, steps: int, began_at: int, done: Collection[str]) -> dict[int, str]:
    """Return optimizer step -> label of the evaluations during a run; the one at its end is not among them.

    Args:
        began_at: optimizer step that this history starts from.
        done: labels that need not be repeated.

    Example:
        >>> labels_due(at_start=True, every_steps=4, steps=12, began_at=0, done=())
        {0: 'before', 4: 'step-4', 8: 'step-8'}
    """
    labels: dict[int, str] = {}
    # A run that has trained cannot make up the evaluation before its first step.
    if at_start and began_at == 0:
        labels[0] = BEFORE
    if every_steps:
        first = began_at - began_at % every_steps + every_steps
        labels.update((step, f"step-{step}") for step in range(first, steps, every_steps))
    return {step: label for step, label in labels.items() if label not in done}


def due_labels(labels: Mapping[int, str], *, loaded_step: int) -> tuple[tuple[str, ...], str | None]:
    """Return which evaluations training has overtaken, and which one is due, if any: the newest that is loaded.

    Args:
        labels: optimizer step -> label of those that are not made yet.
        loaded_step: optimizer step that every replica serves or has passed.

    Example:
        >>> due_labels({4: "step-4", 8: "step-8", 12: "step-12"}, loaded_step=9)
        (('step-4',), 'step-8')
    """
    due = [labels[step] for step in sorted(labels) if step <= loaded_step]
    return tuple(due[:-1]), due[-1] if due else None


def due_versions(
    manifests: Sequence[WeightManifest], *, history_id: str, labels: dict[int, str]
) -> list[tuple[int, DueVersion]]:
    """Return (optimizer step, version) of this history's publications that have a label, the first of each step."""
    found: dict[int, DueVersion] = {}
    for manifest in manifests:
        step = manifest.optimizer_step
        if manifest.history_id == history_id and step in labels and step not in found:
            found[step] = DueVersion(label=labels[step], policy_version=manifest.policy_version, digest=manifest.digest)
    return sorted(found.items())


class SideEvaluations:
    """Evaluates what is due, one version at a time.

    Args:
        labels: optimizer step -> label, see `labels_due`.
        history_id: of the publications that count.
        holder: keeps a version loadable until it was evaluated.
        ask: evaluates one version; raises `EvaluatorLost` if its replica was lost.
        keep: takes the result of a version.
        reports: hears of what failed and why.
    """

    def __init__(
        self,
        *,
        labels: dict[int, str],
        history_id: str,
        holder: Holder,
        ask: Callable[[DueVersion, int], Awaitable[EvaluationResult]],
        keep: Callable[[DueVersion, EvaluationResult], None],
        reports: Reports,
    ) -> None:
        self._labels = dict(labels)
        self._history_id = history_id
        self._holder = holder
        self._ask = ask
        self._keep = keep
        self._reports = reports
        self._queue: deque[DueVersion] = deque()
        self._under_way: DueVersion | None = None
        self._closed = False
        self._changed = asyncio.Event()

    @property
    def is_over(self) -> bool:
        """Whether nothing waits, nothing is under way and nothing comes any more."""
        return self._under_way is None and not self._queue and (self._closed or not self._labels)

    @property
    def is_last(self) -> bool:
        """Whether nothing waits or comes after the one under way."""
        return not self._queue and (self._closed or not self._labels)

    def look(self, manifests: Sequence[WeightManifest]) -> None:
        """Hold what has become due; what finds no room is skipped, with a reason."""
        if self._closed:
            return
        for step, due in due_versions(manifests, history_id=self._history_id, labels=self._labels):
            del self._labels[step]
            self._changed.set()
            if len(self._queue) >= BACKLOG + (self._under_way is None):
                behind = self._under_way or self._queue[0]
                self._skip(due, f"evaluation {behind.label!r} still runs and another waits; evaluate less often")
                continue
            try:
                self._holder.hold(due.policy_version, owner=_owner(due))
            except WeightError as error:
                self._skip(due, str(error))
                continue
            self._queue.append(due)

    def close(self) -> None:
        """Take nothing more; what waits is still evaluated."""
        self._closed = True
        self._changed.set()

    async def run(self) -> None:
        """Evaluate until nothing comes any more.

        Cancellation:
            ends the evaluation under way and lets go of all versions.
        """
        try:
            while not self.is_over:
                if self._queue:
                    self._under_way = self._queue.popleft()
                    await self._evaluate(self._under_way)
                    self._release(self._under_way)
                    self._under_way = None
                    continue
                self._changed.clear()
                await self._changed.wait()
        finally:
            for due in (*([self._under_way] if self._under_way else []), *self._queue):
                self._release(due)
            self._queue.clear()
            self._under_way = None

    async def _evaluate(self, due: DueVersion) -> None:
        reasons: list[str] = []
        for attempt in range(1, ATTEMPTS + 1):
            try:
                result = await self._ask(due, attempt)
            except EvaluatorLost as lost:
                reasons.append(str(lost))
                self._reports.event(
                    "evaluator_lost", label=due.label, attempt=attempt, attempts=ATTEMPTS, reason=str(lost)
                )
            except DeadlineExceeded as late:
                reasons.append(str(late))
                break
            else:
                try:
                    self._keep(due, result)
                except DataError as error:  # not one verdict
                    reasons.append(str(error))
                    break
                return
        self._reports.event("evaluation_failed", label=due.label, policy_version=due.policy_version, reasons=reasons)

    def _release(self, due: DueVersion) -> None:
        self._holder.release(due.policy_version, owner=_owner(due))

    def _skip(self, due: DueVersion, reason: str) -> None:
        self._reports.event("evaluation_skipped", label=due.label, policy_version=due.policy_version, reason=reason)


def _owner(due: DueVersion) -> str:
    return f"evaluation {due.label}"
