"""The controller: events to the core, its instructions to the world, both through one transaction.

It decides nothing. Order of effects: the core speaks, journal and samples are made durable together, then the
instructions are obeyed. Whatever is lost in between is started again by the fold of the journal.

    Loop        Waits for                              Woken by             Gives up after
    decide      events                                 the event, a tick    never: a tick comes every second
    watch       weights and steps of the trainer       doorbell             one second, then looks again
    tick        time                                   clock                run.stall_limit_s: says who waits for whom
    rollout     replica, scorer                        reply                its deadline; the core dispatches it again
    load        replica                                reply                load deadline; a lost replica joins anew
    evaluation  replica, scorer                        reply                evaluation.deadline_s
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Protocol

import msgspec

from rollmill.algorithms.grouping import close_group
from rollmill.buffer.protocol import Assignment, SampleStore, StepRecord, Transition
from rollmill.clock import Clock
from rollmill.config.schema import RollmillConfig
from rollmill.controller.inbox import Inbox
from rollmill.controller.replicas import Overtaken, ReplicaLost
from rollmill.controller.translate import event_of_error, event_of_rollout
from rollmill.errors import (
    DataError,
    DeadlineExceeded,
    EngineDead,
    EngineError,
    Fault,
    InvariantViolation,
    ProducersGone,
)
from rollmill.scheduling.core import Scheduler
from rollmill.scheduling.events import (
    AfterLoss,
    AnyEvent,
    BatchTaken,
    BatchTrained,
    GroupClosed,
    ReplicaLeft,
    StopRequested,
    Tick,
    WeightsLoaded,
    WeightsPublished,
)
from rollmill.scheduling.instructions import (
    AbortRollout,
    AnyInstruction,
    AssignBatch,
    CloseGroup,
    DropGroup,
    Fail,
    Finish,
    LoadWeights,
    StartRollout,
)
from rollmill.types import FilterVerdict, Group, Rollout, derive_seed
from rollmill.weights.protocol import ModelRepository

TICK_S = 1.0

RunRollout = Callable[[StartRollout], Awaitable[Rollout]]
LoadReplica = Callable[[str, int], Awaitable[dict[str, float] | None]]
"""Has a replica load a version; returns part -> seconds where they were measured."""


class Reporter(Protocol):
    """Who writes what a person reads; see `rollmill.controller.reporting`."""

    def group_closed(self, group: Group) -> None:
        """Record a group and its rollouts."""
        ...

    def step(self, row: int, record: StepRecord) -> None:
        """Record an optimizer step."""
        ...

    def event(self, kind: str, **fields: object) -> None:
        """Record that something happened."""
        ...

    def refresh(self, scheduler: Scheduler) -> None:
        """Show the present state."""
        ...


class RunBlocking(Protocol):
    """Runs a blocking call off the event loop, as `asyncio.to_thread` does; a test runs it in place."""

    def __call__(self, func: Callable[[Transition], int], /, *args: Transition) -> Awaitable[int]:
        """Return the result of `func(*args)`."""
        ...


class Gate:
    """Closed while an evaluation must see one version only; weight loads wait in front of it."""

    def __init__(self) -> None:
        self._open = asyncio.Event()
        self._open.set()
        self._loading = 0
        self._quiet = asyncio.Event()
        self._quiet.set()

    @contextlib.asynccontextmanager
    async def closed(self, *, deadline_s: float) -> AsyncIterator[None]:
        """Hold loads back while the block runs; enter it when those under way are done.

        Raises:
            DeadlineExceeded: if a load takes longer than `deadline_s`.
        """
        self._open.clear()
        try:
            await _within(self._quiet.wait(), deadline_s, "an evaluation waited {} s for a weight load to end.")
            yield
        finally:
            self._open.set()

    @contextlib.asynccontextmanager
    async def load(self, *, deadline_s: float) -> AsyncIterator[None]:
        """Enter when no evaluation runs.

        Raises:
            DeadlineExceeded: if one runs for longer.
        """
        # Another evaluation may have begun between the opening and this task's turn.
        while not self._open.is_set():
            await _within(
                self._open.wait(),
                deadline_s,
                "a weight load waited {} s for an evaluation to end. The generator is slower than expected: raise "
                "evaluation.deadline_s or lower environment.heldout_size.",
            )
        self._loading += 1
        self._quiet.clear()
        try:
            yield
        finally:
            self._loading -= 1
            if self._loading == 0:
                self._quiet.set()


async def _within(wait: Awaitable[object], deadline_s: float, sentence: str) -> None:
    try:
        async with asyncio.timeout(deadline_s):
            await wait
    except TimeoutError:
        raise DeadlineExceeded(sentence.format(f"{deadline_s:.0f}")) from None


class Controller:
    """Runs the core until it says `Finish`."""

    def __init__(
        self,
        *,
        config: RollmillConfig,
        scheduler: Scheduler,
        store: SampleStore,
        repository: ModelRepository,
        clock: Clock,
        run_rollout: RunRollout,
        load_replica: LoadReplica,
        ring_trainer: Callable[[], None],
        reporter: Reporter,
        stored_groups: set[str],
        last_step_row: int = 0,
        run_blocking: RunBlocking | None = None,
    ) -> None:
        self.config = config
        self.scheduler = scheduler
        self.inbox = Inbox()
        self.load_gate = Gate()
        self.finished: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._store = store
        self._repository = repository
        self._clock = clock
        self._run_rollout = run_rollout
        self._load_replica = load_replica
        self._ring_trainer = ring_trainer
        self._reporter = reporter
        self._stored = stored_groups
        self._last_step_row = last_step_row
        self._run_blocking = run_blocking or asyncio.to_thread
        self._optimizer_steps: dict[int, int] = {}
        self._open_groups: dict[str, dict[str, Rollout]] = {}
        self._task_indices: dict[str, int] = {}
        self._running: dict[str, asyncio.Task[None]] = {}
        self._loads: set[asyncio.Task[None]] = set()
        self._taken_batches: set[int] = set()
        self._moved_at_s = clock.now_s()
        self._reported_stall_at_s = clock.now_s()

    async def run(self) -> str:
        """Run until the core finishes; return its reason.

        Raises:
            Fault: the first failure of any loop or of the core itself.

        Cancellation:
            cancels all rollouts; nothing acknowledged is lost.
        """
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            tasks.create_task(self._decide(), name="decide")
            tick = tasks.create_task(self._tick(), name="tick")
            reason = await self.finished
            for task in [tick, *self._running.values()]:
                task.cancel()
        return reason

    def request_stop(self, reason: str) -> None:
        """Ask the core for a clean stop (Ctrl-C)."""
        self.inbox.put(StopRequested(at_s=self._clock.now_s(), reason=reason))

    def give_up(self, reason: str) -> None:
        """End here and now, as a crash would: `run` returns this reason once the transaction under way is durable.

        What the core was not told yet is lost; whoever goes on folds the journal.
        """
        if not self.finished.done():
            self.finished.set_result(reason)
        for load in self._loads:
            load.cancel()
        # `_decide` waits for events; this one only wakes it.
        self.inbox.put(Tick(at_s=self._clock.now_s()))

    def replica_lost(self, replica_id: str, *, reason: str, then: AfterLoss) -> None:
        """Tell the core that a replica is gone, and what the run does without it."""
        self._reporter.event("replica_lost", replica_id=replica_id, reason=reason, then=then.value)
        self.inbox.put(ReplicaLeft(at_s=self._clock.now_s(), replica_id=replica_id, reason=reason, then=then))

    def know_version(self, policy_version: int, *, optimizer_step: int) -> None:
        """Note a version that the core hears of otherwise (at the start of a run)."""
        self._optimizer_steps[policy_version] = optimizer_step

    def moved(self) -> None:
        """Note that something moved, so that the stall report stays quiet."""
        self._moved_at_s = self._clock.now_s()

    # decide

    async def _decide(self) -> None:
        # It ends by itself, so that no transaction is cut in the middle.
        while not self.finished.done():
            events = await self.inbox.take()
            if self.finished.done():
                return
            if any(not isinstance(event, Tick) for event in events):
                self.moved()
            effects = await self._absorb(events)
            if self.finished.done():
                return  # given up meanwhile: what follows would be waited for, and whoever goes on folds the journal
            for instruction in effects:
                self._obey(instruction)

    async def _absorb(self, events: list[AnyEvent]) -> list[AnyInstruction]:
        """Feed the core, make the transition durable, return what is left to do."""
        work = deque(events)
        journal: list[bytes] = []
        puts: list[Group] = []
        replaces: list[Group] = []
        assignments: list[Assignment] = []
        drops: list[tuple[str, str]] = []
        effects: list[AnyInstruction] = []
        while work:
            event = work.popleft()
            instructions = self.scheduler.handle(event)
            # A tick without effect changes no state, so the fold does not need it.
            if instructions or not isinstance(event, Tick):
                journal.append(msgspec.json.encode(event))
            for instruction in instructions:
                match instruction:
                    case CloseGroup():
                        group = self._close(instruction)
                        (replaces if group.group_id in self._stored else puts).append(group)
                        self._stored.add(group.group_id)
                        work.append(self._closed_event(group))
                    case AssignBatch():
                        assignments.append(_assignment(instruction))
                        self._forget(instruction.group_ids)
                    case DropGroup():
                        if instruction.group_id in self._stored:
                            drops.append((instruction.group_id, instruction.reason.value))
                            self._stored.discard(instruction.group_id)
                        self._forget((instruction.group_id,))
                    case _:
                        effects.append(instruction)
        transition = Transition(
            journal=tuple(journal),
            puts=tuple(puts),
            replaces=tuple(replaces),
            assignments=tuple(assignments),
            drops=tuple(drops),
        )
        if journal:
            await self._run_blocking(self._store.apply, transition)
        if assignments:
            self._ring_trainer()
        for group in (*puts, *replaces):
            self._reporter.group_closed(group)
        return effects

    def _close(self, instruction: CloseGroup) -> Group:
        rollouts = self._open_groups[instruction.group_id]
        task_index = self._task_indices[instruction.group_id]
        shuffle = self.config.algorithm.reward_shuffle
        group = close_group(
            instruction.group_id,
            task_index=task_index,
            rollouts=tuple(rollouts[rollout_id] for rollout_id in instruction.rollout_ids),
            settings=self.config.algorithm,
            optimizer_step_of=self._optimizer_steps.__getitem__,
            shuffle_seed=derive_seed(self.config.run.seed, "shuffle", task_index) if shuffle else None,
        )
        return group

    def _closed_event(self, group: Group) -> GroupClosed:
        return GroupClosed(
            at_s=self._clock.now_s(),
            group_id=group.group_id,
            has_signal=group.verdict is FilterVerdict.TRAINABLE,
            oldest_optimizer_step=group.oldest_optimizer_step,
            loss_tokens=sum(
                rollout.output_tokens for rollout, counts in zip(group.rollouts, group.in_loss, strict=True) if counts
            ),
            reason="" if group.verdict is FilterVerdict.TRAINABLE else group.verdict.value,
        )

    def _forget(self, group_ids: tuple[str, ...]) -> None:
        for group_id in group_ids:
            self._open_groups.pop(group_id, None)
            self._task_indices.pop(group_id, None)

    # obey

    def _obey(self, instruction: AnyInstruction) -> None:
        match instruction:
            case StartRollout():
                self._open_groups.setdefault(instruction.group_id, {})
                self._task_indices[instruction.group_id] = instruction.task_index
                task = self._tasks.create_task(self._rollout(instruction), name=f"rollout {instruction.rollout_id}")
                self._running[instruction.rollout_id] = task
            case AbortRollout():
                task = self._running.pop(instruction.rollout_id, None)
                if task is not None:
                    task.cancel()
            case LoadWeights():
                load = self._tasks.create_task(self._load(instruction), name=f"load {instruction.replica_id}")
                self._loads.add(load)
                load.add_done_callback(self._loads.discard)
            case Finish():
                if not self.finished.done():
                    self.finished.set_result(instruction.reason)
            case Fail():
                raise error_of(instruction)
            case _:
                raise InvariantViolation(f"the shell does not know how to obey {type(instruction).__name__}")

    async def _rollout(self, instruction: StartRollout) -> None:
        rollout_id = instruction.rollout_id
        try:
            rollout = await self._run_rollout(instruction)
            event: AnyEvent = event_of_rollout(
                rollout,
                optimizer_step_of=self._optimizer_steps.__getitem__,
                at_s=self._clock.now_s(),
                deterministic=self.config.run.deterministic,
            )
        except Exception as error:
            # Unknown errors count as the data's, with their text, so that bugs surface in the ledger.
            event = event_of_error(rollout_id, error, at_s=self._clock.now_s())
            self._reporter.event("rollout_failed", rollout_id=rollout_id, reason=event.reason)
        else:
            # A result for a group that is gone is late; the core counts it.
            if instruction.group_id in self._open_groups:
                self._open_groups[instruction.group_id][rollout_id] = rollout
        self._running.pop(rollout_id, None)
        self.inbox.put(event)

    async def _load(self, instruction: LoadWeights) -> None:
        # An evaluation may be made twice, and loads weights itself.
        patience_s = 2 * (self.config.evaluation.deadline_s + self.config.generator.load_deadline_s)
        async with self.load_gate.load(deadline_s=patience_s):
            try:
                version, seconds = await self._load_newest(instruction.replica_id)
            except ReplicaLost as error:
                version = max(self._optimizer_steps)
                # The core has been told, and the replica loads the newest version before it joins again.
                self._reporter.event(
                    "load_lost", replica_id=instruction.replica_id, policy_version=version, reason=str(error)
                )
                return
        self._reporter.event(
            "weights_loaded", replica_id=instruction.replica_id, policy_version=version, **(seconds or {})
        )
        self.inbox.put(
            WeightsLoaded(at_s=self._clock.now_s(), replica_id=instruction.replica_id, policy_version=version)
        )

    async def _load_newest(self, replica_id: str) -> tuple[int, dict[str, float] | None]:
        """Return which version was loaded, and how long each part took.

        The version asked for may have been overtaken, and retired, while the load waited for an evaluation or failed.
        """
        while True:
            version = max(self._optimizer_steps)
            try:
                return version, await self._load_replica(replica_id, version)
            except Overtaken:
                self.look()

    # watch

    def look(self) -> None:
        """Turn what the trainer has done since the last look into events; called at every ring and tick."""
        for manifest in self._repository.manifests(after=max(self._optimizer_steps, default=0)):
            if manifest.policy_version in self._optimizer_steps:
                continue
            self._optimizer_steps[manifest.policy_version] = manifest.optimizer_step
            self.inbox.put(
                WeightsPublished(
                    at_s=self._clock.now_s(),
                    policy_version=manifest.policy_version,
                    optimizer_step=manifest.optimizer_step,
                )
            )
        for batch_id in self._store.leased_batches():
            self._take(batch_id)
        for row, record in self._store.steps(after=self._last_step_row):
            self._last_step_row = row
            self._take(record.batch_id)
            self._reporter.step(row, record)
            step_s = sum(seconds for cause, seconds in record.seconds.items() if cause != "wait_data")
            self.inbox.put(
                BatchTrained(
                    at_s=self._clock.now_s(),
                    batch_id=record.batch_id,
                    optimizer_step=record.optimizer_step,
                    step_s=step_s,
                )
            )

    def _take(self, batch_id: int) -> None:
        if batch_id not in self._taken_batches:
            self._taken_batches.add(batch_id)
            self.inbox.put(BatchTaken(at_s=self._clock.now_s(), batch_id=batch_id))

    # tick

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self.look()
            now_s = self._clock.now_s()
            self.inbox.put(Tick(at_s=now_s))
            self._report_stall(now_s)
            self._reporter.refresh(self.scheduler)

    def _report_stall(self, now_s: float) -> None:
        quiet_s = now_s - self._moved_at_s
        settings = self.config.run
        if quiet_s < settings.stall_report_s:
            return
        waits = [wait.sentence for wait in self.scheduler.waits(now_s)]
        if quiet_s >= settings.stall_limit_s:
            raise DeadlineExceeded(
                f"nothing moved for {quiet_s:.0f} s (run.stall_limit_s). " + " ".join(waits or ["Nobody waits."])
            )
        if now_s - self._reported_stall_at_s >= settings.stall_report_s:
            self._reported_stall_at_s = now_s
            self._reporter.event("stall", quiet_s=round(quiet_s, 1), waits=waits)


def _assignment(instruction: AssignBatch) -> Assignment:
    return Assignment(
        batch_id=instruction.batch_id,
        optimizer_step=instruction.optimizer_step,
        group_ids=instruction.group_ids,
    )


def error_of(instruction: Fail) -> Exception:
    """Return the typed error that a `Fail` instruction names."""
    match instruction.code:
        case "producers_gone":
            return ProducersGone(alive=0, buffered=0)
        case "engine_dead":
            return EngineDead(instruction.message)
        case "data":
            return DataError(instruction.message)
        case "engine":
            return EngineError(instruction.message)
        case _:
            return Fault(instruction.message)
