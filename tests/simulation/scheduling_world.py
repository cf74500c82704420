"""A world around the scheduling core: rollouts, a closing shell, a trainer, replicas that load weights.

`World` obeys instructions and keeps what is outstanding; a driver decides what happens next, in any order.
`TimedWorld` gives everything a duration on a virtual clock. Both keep their own truth about weights, so that
staleness is measured apart from the core's books.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from rollmill.scheduling import Scheduler, SchedulerSettings
from rollmill.scheduling import events as ev
from rollmill.scheduling import instructions as ins

ENCODER = msgspec.json.Encoder()
DECODER = msgspec.json.Decoder(ev.AnyEvent)


def settings(**changes: object) -> SchedulerSettings:
    """Two groups of two rollouts per batch, budget 1, far deadlines, unless said otherwise."""
    base: dict[str, object] = {
        "batch_groups": 2,
        "group_size": 2,
        "max_staleness": 1,
        "total_steps": 4,
        "rollout_deadline_s": 1e6,
        "group_deadline_s": 1e7,
    }
    return SchedulerSettings(**{**base, **changes})  # type: ignore[arg-type]


@dataclass
class Flight:
    """A rollout that runs, with the step of the oldest weights that may sample its tokens."""

    start: ins.StartRollout
    oldest_step: int


@dataclass
class World:
    """Obeys the core. `trace` holds what a synchronous loop would do too: dispatches, batches, loads."""

    settings: SchedulerSettings
    has_signal: Callable[[int], bool] = lambda task_index: True
    counts: Callable[[ins.StartRollout], bool] = lambda start: True
    validate: bool = True
    now_s: float = 0.0
    core: Scheduler = field(init=False)
    journal: list[bytes] = field(default_factory=list)
    told: list[list[ins.AnyInstruction]] = field(default_factory=list)
    flights: dict[str, Flight] = field(default_factory=dict)
    finished_steps: dict[str, int] = field(default_factory=dict)
    closings: dict[str, ins.CloseGroup] = field(default_factory=dict)
    assigned: list[ins.AssignBatch] = field(default_factory=list)
    loads: dict[str, int] = field(default_factory=dict)
    replicas: dict[str, int] = field(default_factory=dict)
    training: ins.AssignBatch | None = None
    trainer_step: int = 0
    version: int = 0
    step_of_version: dict[int, int] = field(default_factory=dict)
    unpublished: list[int] = field(default_factory=list)
    newest_of_group: dict[str, int] = field(default_factory=dict)
    oldest_of_group: dict[str, int] = field(default_factory=dict)
    task_of_group: dict[str, int] = field(default_factory=dict)
    trained: list[tuple[str, ...]] = field(default_factory=list)
    staleness: list[int] = field(default_factory=list)
    drops: list[tuple[str, ins.DropReason]] = field(default_factory=list)
    aborts: list[ins.AbortRollout] = field(default_factory=list)
    dispatches: list[ins.StartRollout] = field(default_factory=list)
    trace: list[tuple[object, ...]] = field(default_factory=list)
    ended: ins.Finish | ins.Fail | None = None

    def __post_init__(self) -> None:
        self.core = Scheduler(self.settings)

    # -- the shell ---------------------------------------------------------------------------------------------

    def feed(self, event: ev.AnyEvent) -> list[ins.AnyInstruction]:
        """Journal an event, hand it to the core, check every invariant, obey."""
        self.journal.append(ENCODER.encode(event))
        out = self.core.handle(event)
        self.told.append(out)
        if self.validate:
            self.core.validate()
        for instruction in out:
            self._obey(instruction)
        return out

    def begin(self, *, slots: int = 64, replicas: int = 1, step: int = 0) -> None:
        """Start the run at `step` and let the replicas join."""
        self.trainer_step = step
        self.step_of_version[self.version] = step
        self.feed(ev.RunStarted(at_s=self.now_s, history_id="h0", optimizer_step=step, policy_version=self.version))
        for i in range(replicas):
            self.join(f"r{i}", slots=slots)

    def join(self, replica_id: str, *, slots: int = 64, version: int | None = None) -> None:
        """Let a replica join, with the newest weights unless said otherwise."""
        served = self.replicas[replica_id] = self.version if version is None else version
        self.feed(ev.ReplicaJoined(at_s=self.now_s, replica_id=replica_id, slots=slots, policy_version=served))

    def _obey(self, instruction: ins.AnyInstruction) -> None:
        match instruction:
            case ins.StartRollout():
                oldest = min(self.step_of_version[version] for version in self.replicas.values())
                self.flights[instruction.rollout_id] = Flight(instruction, oldest)
                self.task_of_group[instruction.group_id] = instruction.task_index
                self.dispatches.append(instruction)
                self.trace.append(("start", instruction.task_index, instruction.sibling, oldest))
            case ins.AbortRollout():
                self.flights.pop(instruction.rollout_id, None)
                self.aborts.append(instruction)
            case ins.CloseGroup():
                self.closings[instruction.group_id] = instruction
            case ins.DropGroup():
                self.drops.append((instruction.group_id, instruction.reason))
            case ins.AssignBatch():
                self.assigned.append(instruction)
            case ins.LoadWeights():
                self.loads[instruction.replica_id] = instruction.policy_version
            case ins.Finish() | ins.Fail():
                assert self.ended is None, "the run ended twice"
                self.ended = instruction

    @property
    def trained_tasks(self) -> list[int]:
        """Tasks that the surviving history has trained, in order."""
        return [self.task_of_group[group_id] for batch in self.trained for group_id in batch]

    def crash(self, *, commit_step: int, first_step: int = 0) -> list[ins.AnyInstruction]:
        """Lose every process and go on from the checkpoint of `commit_step`; replicas are to join again."""
        del self.trained[commit_step - first_step :]
        for lost in (self.flights, self.closings, self.loads, self.replicas):
            lost.clear()
        self.assigned.clear()
        self.unpublished.clear()
        self.training = self.ended = None
        self.trainer_step = commit_step
        self.version += 1
        self.step_of_version[self.version] = commit_step
        return self.feed(
            ev.RunResumed(
                at_s=self.now_s,
                history_id=f"h{self.version}",
                optimizer_step=commit_step,
                policy_version=self.version,
                trained_group_ids=tuple(group_id for batch in self.trained for group_id in batch),
                abandoned_above=self.version - 1,
                abandoned_group_ids=tuple(g for g, step in self.newest_of_group.items() if step > commit_step),
            )
        )

    # -- what may happen ---------------------------------------------------------------------------------------

    def actions(self) -> list[tuple[str, str]]:
        """Everything that could happen next; empty means that nobody will ever do anything again."""
        found = [("finish", rollout_id) for rollout_id in self.flights]
        found += [("close", group_id) for group_id in self.closings]
        if self.training is not None:
            found.append(("train", ""))
        elif self.assigned and self.assigned[0].optimizer_step == self.trainer_step:
            found.append(("take", ""))
        if self.unpublished:
            found.append(("publish", ""))
        found += [("load", replica_id) for replica_id in self.loads]
        return found

    def act(self, action: tuple[str, str]) -> list[ins.AnyInstruction]:
        kind, key = action
        return {
            "finish": self.finish,
            "close": self.close,
            "take": lambda _: self.take(),
            "train": lambda _: self.train(),
            "publish": lambda _: self.publish(),
            "load": self.load,
        }[kind](key)

    def finish(self, rollout_id: str) -> list[ins.AnyInstruction]:
        flight = self.flights.pop(rollout_id)
        self.finished_steps[rollout_id] = flight.oldest_step
        counts = self.counts(flight.start)
        return self.feed(
            ev.RolloutFinished(
                at_s=self.now_s,
                rollout_id=rollout_id,
                output_tokens=4,
                oldest_optimizer_step=flight.oldest_step,
                counts=counts,
                reason="" if counts else "unscored: timeout",
            )
        )

    def fail(self, rollout_id: str, failure: ev.FailureClass, reason: str = "refused") -> list[ins.AnyInstruction]:
        self.flights.pop(rollout_id, None)
        return self.feed(ev.RolloutFailed(at_s=self.now_s, rollout_id=rollout_id, failure=failure, reason=reason))

    def close(self, group_id: str) -> list[ins.AnyInstruction]:
        closing = self.closings.pop(group_id)
        steps = [self.finished_steps[rollout_id] for rollout_id in closing.rollout_ids]
        oldest = self.oldest_of_group[group_id] = min(steps)
        self.newest_of_group[group_id] = max(steps)
        return self.feed(
            ev.GroupClosed(
                at_s=self.now_s,
                group_id=group_id,
                has_signal=self.has_signal(self.task_of_group[group_id]),
                oldest_optimizer_step=oldest,
                loss_tokens=8,
            )
        )

    def take(self) -> list[ins.AnyInstruction]:
        self.training = self.assigned.pop(0)
        assert self.training.group_ids, "an empty batch was assigned"
        for group_id in self.training.group_ids:
            staleness = self.trainer_step - self.oldest_of_group[group_id]
            assert 0 <= staleness <= self.settings.max_staleness, f"{group_id} consumed with staleness {staleness}"
            self.staleness.append(staleness)
        return self.feed(ev.BatchTaken(at_s=self.now_s, batch_id=self.training.batch_id))

    def train(self, *, step_s: float = 1.0) -> list[ins.AnyInstruction]:
        batch, self.training = self.training, None
        assert batch is not None
        tasks = [self.task_of_group[group_id] for group_id in batch.group_ids]
        self.trace.append(("train", self.trainer_step, tuple(tasks)))
        self.trained.append(batch.group_ids)
        self.trainer_step += 1
        self.unpublished.append(self.trainer_step)
        return self.feed(
            ev.BatchTrained(at_s=self.now_s, batch_id=batch.batch_id, optimizer_step=self.trainer_step, step_s=step_s)
        )

    def publish(self) -> list[ins.AnyInstruction]:
        step = self.unpublished.pop(0)
        self.version += 1
        self.step_of_version[self.version] = step
        return self.feed(ev.WeightsPublished(at_s=self.now_s, policy_version=self.version, optimizer_step=step))

    def load(self, replica_id: str) -> list[ins.AnyInstruction]:
        version = self.loads.pop(replica_id)
        self.replicas[replica_id] = version
        self.trace.append(("load", self.step_of_version[version]))
        return self.feed(ev.WeightsLoaded(at_s=self.now_s, replica_id=replica_id, policy_version=version))

    def leave(
        self, replica_id: str, *, reason: str = "died", then: ev.AfterLoss = ev.AfterLoss.FAIL
    ) -> list[ins.AnyInstruction]:
        self.replicas.pop(replica_id)
        self.loads.pop(replica_id, None)
        return self.feed(ev.ReplicaLeft(at_s=self.now_s, replica_id=replica_id, reason=reason, then=then))

    def restart_controller(self) -> list[ins.AnyInstruction]:
        """Lose the controller and what it held; trainer and replicas live on, and the replicas are to join again."""
        for lost in (self.flights, self.closings, self.loads, self.replicas):
            lost.clear()
        self.ended = None
        return self.feed(ev.ControllerRestarted(at_s=self.now_s))

    # -- drivers -----------------------------------------------------------------------------------------------

    def tick(self, at_s: float) -> list[ins.AnyInstruction]:
        """Move the clock; a silent tick stays out of the journal."""
        self.now_s = at_s
        event = ev.Tick(at_s=at_s)
        out = self.core.handle(event)
        if out:
            self.journal.append(ENCODER.encode(event))
            self.told.append(out)
        self.core.validate()
        for instruction in out:
            self._obey(instruction)
        return out

    def run(self, *, choose: Callable[[int], int] = lambda n: 0, limit: int = 20_000) -> None:
        """Let things happen, one at a time, until the run ends.

        Raises:
            AssertionError: if nothing can happen any more, or not within `limit` events.
        """
        for _ in range(limit):
            if self.ended is not None:
                return
            actions = self.actions()
            assert actions, f"the schedule hangs: {self.core.waits(self.now_s)}"
            self.now_s += 1.0
            self.act(actions[choose(len(actions))])
        raise AssertionError(f"not finished after {limit} events: {self.core.view()}")

    def refold(self) -> Scheduler:
        """Return a new core that has read the journal, after checking that it gave the same instructions."""
        core = Scheduler(self.settings)
        for entry, told in zip(self.journal, self.told, strict=True):
            assert core.handle(DECODER.decode(entry)) == told
        return core


@dataclass
class TimedWorld(World):
    """Gives each action a duration in virtual seconds.

    Attributes:
        rollout_s: duration of a rollout by its start; `slots` run at once, the others queue.
        train_s, publish_s, load_s, close_s: durations of the other actions.
        fate: what becomes of an attempt: `finish`, `infra`, `data` or `lost`.
    """

    rollout_s: Callable[[ins.StartRollout], float] = lambda start: 1.0
    train_s: float = 1.0
    publish_s: float = 0.0
    load_s: float = 0.0
    close_s: float = 0.0
    slots: int = 64
    tick_s: float | None = None
    fate: Callable[[ins.StartRollout], str] = lambda start: "finish"
    events: list[tuple[float, int, str, str]] = field(default_factory=list)
    order: int = 0
    queue: list[str] = field(default_factory=list)
    running: set[str] = field(default_factory=set)
    idle_s: float = 0.0
    busy_s: float = 0.0
    idle_since_s: float | None = 0.0
    peak_promised: int = 0

    def _at(self, delay_s: float, kind: str, key: str = "") -> None:
        heapq.heappush(self.events, (self.now_s + delay_s, self.order, kind, key))
        self.order += 1

    def _obey(self, instruction: ins.AnyInstruction) -> None:
        super()._obey(instruction)
        match instruction:
            case ins.StartRollout():
                self.queue.append(instruction.rollout_id)
            case ins.AbortRollout():
                self.running.discard(instruction.rollout_id)
                if instruction.rollout_id in self.queue:
                    self.queue.remove(instruction.rollout_id)
            case ins.CloseGroup():
                self._at(self.close_s, "close", instruction.group_id)
            case ins.LoadWeights():
                self._at(self.load_s, "load", instruction.replica_id)
            case _:
                pass

    def _fill_slots(self) -> None:
        while self.queue and len(self.running) < self.slots:
            rollout_id = self.queue.pop(0)
            start = self.flights[rollout_id].start
            self.running.add(rollout_id)
            if self.fate(start) != "lost":
                self._at(self.rollout_s(start), "finish", rollout_id)

    def _poke_trainer(self) -> None:
        if self.training is None and self.assigned and self.assigned[0].optimizer_step == self.trainer_step:
            if self.idle_since_s is not None:
                self.idle_s += self.now_s - self.idle_since_s
                self.idle_since_s = None
            self.take()
            self._at(self.train_s, "train")

    def play(self, *, until_s: float = 1e5) -> None:
        """Run until the end or until `until_s`.

        Raises:
            AssertionError: if the run has not ended by then.
        """
        if self.tick_s is not None:
            self._at(self.tick_s, "tick")
        while self.ended is None:
            self._fill_slots()
            self._poke_trainer()
            view_stock = self.core.view().stock if self.validate else 0
            self.peak_promised = max(self.peak_promised, view_stock)
            if self.ended is not None:
                break
            assert self.events, f"the schedule hangs: {self.core.waits(self.now_s)}"
            at_s, _, kind, key = heapq.heappop(self.events)
            assert at_s <= until_s, f"not finished at {until_s}: {self.core.waits(self.now_s)}"
            self.now_s = at_s
            self._happen(kind, key)

    def _happen(self, kind: str, key: str) -> None:
        if kind == "finish":
            if key in self.running:
                self.running.discard(key)
                fate = self.fate(self.flights[key].start)
                if fate == "finish":
                    self.finish(key)
                else:
                    self.fail(key, ev.FailureClass(fate))
        elif kind == "close":
            self.close(key)
        elif kind == "train":
            self.busy_s += self.train_s
            self.train(step_s=self.train_s)
            self.idle_since_s = self.now_s
            self._at(self.publish_s, "publish")
        elif kind == "publish":
            self.publish()
        elif kind == "load":
            self.load(key)
        elif kind == "tick":
            self.tick(self.now_s)
            self._at(self.tick_s or 1.0, "tick")
