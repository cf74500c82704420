"""The whole state of the core, in one place. It is the fold of the journal; nothing here decides."""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass, field

from rollmill.ledger import RolloutLedger
from rollmill.scheduling.groups import Batch, GroupBook, GroupRecord, Member, Replica
from rollmill.scheduling.instructions import AnyInstruction
from rollmill.scheduling.rates import Rates
from rollmill.scheduling.settings import SchedulerSettings

STORY_LINES = 48
STORIES_KEPT = 512


@dataclass(slots=True)
class StalenessBook:
    """Staleness of what was consumed, by rollout."""

    rollouts: int = 0
    total: int = 0
    largest: int = 0

    def observe(self, staleness: int, *, rollouts: int) -> None:
        """Count a consumed group."""
        self.rollouts += rollouts
        self.total += staleness * rollouts
        self.largest = max(self.largest, staleness)

    @property
    def mean(self) -> float:
        """Mean over consumed rollouts; 0 before the first."""
        return self.total / self.rollouts if self.rollouts else 0.0


@dataclass(slots=True)
class WaveBook:
    """Deterministic mode: the wave that runs, and where each step began in the data.

    Attributes:
        opened: waves opened in the whole run; numbers the next one.
        first_task: task number that the newest wave began with.
        losses: times that the newest wave was lost in part and started again whole.
        again: the next wave is such a second start.
        first_task_of_step: optimizer step -> task number that its first wave began with.
    """

    opened: int = 0
    first_task: int = 0
    losses: int = 0
    again: bool = False
    first_task_of_step: dict[int, int] = field(default_factory=lambda: dict[int, int]())


@dataclass(slots=True)
class State:
    """Everything the core knows.

    Attributes:
        optimizer_step: committed updates of the trainer.
        next_step: the step whose batch is assigned next; `next_step - optimizer_step` batches are under way.
        trained_at_s: time of the last update whose weights are not served everywhere yet.
        attempts: rollout id -> (group, member) of every attempt that runs.
        parked: member id -> (group, member) of those that wait for a replica.
        deadlines: heap of (time, order, kind, id); entries of the past are skipped when they surface.
        requeued: task indices to draw before new ones, because what held them was lost or stopped.
        awaited: lost replicas that come back -> when each was lost.
        missing: lost replicas that the run goes on without.
        degraded_steps: optimizer steps trained while a replica was missing.
        producers_ended: nobody produces any more; what is buffered is trained, then the run finishes.
        halted: `Finish` or `Fail` was given.
    """

    settings: SchedulerSettings
    ledger: RolloutLedger
    book: GroupBook
    rates: Rates
    now_s: float = 0.0
    started: bool = False
    history_id: str = ""
    optimizer_step: int = 0
    next_step: int = 0
    trained_at_s: float | None = None
    batches: dict[int, Batch] = field(default_factory=lambda: dict[int, Batch]())
    next_batch_id: int = 0
    next_seq: int = 0
    next_task: int = 0
    requeued: deque[int] = field(default_factory=lambda: deque[int]())
    attempts: dict[str, tuple[GroupRecord, Member]] = field(
        default_factory=lambda: dict[str, tuple[GroupRecord, Member]]()
    )
    parked: dict[str, tuple[GroupRecord, Member]] = field(
        default_factory=lambda: dict[str, tuple[GroupRecord, Member]]()
    )
    replicas: dict[str, Replica] = field(default_factory=lambda: dict[str, Replica]())
    step_of_version: dict[int, int] = field(default_factory=lambda: dict[int, int]())
    newest_version: int = 0
    newest_since_s: float = 0.0
    loaded_step: int | None = None
    slots: int = 0
    deadlines: list[tuple[float, int, str, str]] = field(default_factory=lambda: list[tuple[float, int, str, str]]())
    deadline_order: int = 0
    start_order: int = 0
    start_order_at_loss: int = 0
    infra_in_a_row: int = 0
    data_drops_in_a_row: int = 0
    stopping: bool = False
    halted: bool = False
    had_replica: bool = False
    awaited: dict[str, float] = field(default_factory=lambda: dict[str, float]())
    missing: set[str] = field(default_factory=lambda: set[str]())
    degraded_steps: int = 0
    producers_ended: bool = False
    had_batch: bool = False
    trainer_idle_since_s: float | None = None
    held_since_s: float | None = None
    waits_for_old: int = 0
    waits_for_old_s: float = 0.0
    staleness: StalenessBook = field(default_factory=StalenessBook)
    waves: WaveBook = field(default_factory=WaveBook)
    seconds_bound: dict[str, float] = field(default_factory=lambda: dict[str, float]())
    stories: dict[str, deque[str]] = field(default_factory=lambda: dict[str, deque[str]]())
    finished_stories: deque[str] = field(default_factory=lambda: deque[str]())
    out: list[AnyInstruction] = field(default_factory=lambda: list[AnyInstruction]())

    @property
    def training(self) -> bool:
        """Whether the trainer holds a batch. It holds one at a time, whatever order its reports come in."""
        return any(batch.leased_s is not None for batch in self.batches.values())

    @property
    def underway(self) -> int:
        """Batches assigned or leased and not yet trained."""
        return self.next_step - self.optimizer_step

    @property
    def draws_left(self) -> bool:
        """Whether another task can be drawn."""
        if self.producers_ended:
            return False
        limit = self.settings.data_limit
        return bool(self.requeued) or limit is None or self.next_task < limit

    def add_deadline(self, at_s: float, *, kind: str, key: str) -> None:
        """Remember a deadline; `kind` is `rollout` or `group`."""
        heapq.heappush(self.deadlines, (at_s, self.deadline_order, kind, key))
        self.deadline_order += 1

    def tell(self, group_id: str, what: str) -> None:
        """Add a line to a group's story."""
        story = self.stories.get(group_id)
        if story is None:
            story = self.stories[group_id] = deque(maxlen=STORY_LINES)
        story.append(f"{self.now_s:.3f}s {what}")

    def end_story(self, group_id: str) -> None:
        """Keep the story of a finished group until enough others have finished after it."""
        self.finished_stories.append(group_id)
        if len(self.finished_stories) > STORIES_KEPT:
            oldest = self.finished_stories.popleft()
            if oldest not in self.book.live:
                self.stories.pop(oldest, None)
