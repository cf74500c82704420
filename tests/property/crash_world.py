"""A run without processes in which any durable operation can be the last one of the process that does it.

The durable parts are the real ones: sample store, manifests, checkpoints, incarnation record, and the real scheduling
core that is folded from the journal. `Killer` stands below them, at the calls of the operating system: before a call,
inside it (a torn file) or after it the process is gone, and whatever it still tries is not done.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch

from buffer_builders import a_group
from rollmill.buffer import Assignment, CommitPoint, LeasedBatch, SqliteStore, StepRecord, Transition
from rollmill.runtime import resume
from rollmill.runtime.fold import fold
from rollmill.runtime.incarnation import Incarnation
from rollmill.runtime.layout import ProcessLayout
from rollmill.runtime.resume import first_incarnation, next_incarnation
from rollmill.scheduling import Scheduler, SchedulerSettings
from rollmill.scheduling import events as ev
from rollmill.scheduling import instructions as ins
from rollmill.testing import fake_manifest
from rollmill.weights.checkpoint import write_checkpoint
from rollmill.weights.manifests import Manifests

OWNER = "trainer"
TASKS = 8
GROUP = 2
BATCH = 2


def scratch_folder() -> Path:
    """Return a new folder, in memory where there is such a place: what a kill leaves does not depend on the disk."""
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    return Path(tempfile.mkdtemp(prefix="crash-", dir=memory))


class Killed(BaseException):
    """SIGKILL: nothing catches it, nothing is tidied up after it."""


class Killer:
    """Counts durable operations, and ends the process at one of them.

    Attributes:
        operations: how many there were.
        where: the operation that was the last, in words.
    """

    CALLS = ("rename", "replace", "unlink", "rmdir", "mkdir", "fsync")

    def __init__(self) -> None:
        self.operations = 0
        self.where = ""
        self._left: int | None = None
        self._torn = 1.0
        self._at = ""
        self._dead = False
        self._real = {name: getattr(os, name) for name in self.CALLS}

    def __enter__(self) -> Killer:
        for name, real in self._real.items():
            setattr(os, name, self._mortal(name, real))
        return self

    def __exit__(self, *_: object) -> None:
        for name, real in self._real.items():
            setattr(os, name, real)

    def arm(self, after: int, *, torn: float = 1.0) -> None:
        """End the process at the operation number `after` from now; a file written there keeps this share."""
        self._left, self._torn = after, torn

    def arm_at(self, where: str) -> None:
        """End the process at the next moment of this name."""
        self._at = where

    def disarm(self) -> None:
        self._left, self._at, self._dead = None, "", False

    def point(self, where: str) -> None:
        """One moment at which the process may end."""
        if self._dead:
            raise Killed(where)
        self.operations += 1
        if self._left is not None:
            self._left -= 1
        if where == self._at or (self._left is not None and self._left <= 0):
            self._dead, self.where = True, where
            raise Killed(where)

    def _mortal(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> Any:
            try:
                self.point(f"before {name}")
            except Killed:
                if name == "fsync" and self.where == "before fsync":
                    self._tear(arguments[0])
                raise
            found = None if name == "fsync" else real(*arguments, **keywords)
            self.point(f"after {name}")
            return found

        return call

    def _tear(self, handle: int) -> None:
        """Leave a part of what was written and not yet flushed."""
        self.where = "inside a write"
        path = Path(os.readlink(f"/proc/self/fd/{handle}"))
        if path.is_file():
            with path.open("r+b") as file:
                file.truncate(int(path.stat().st_size * self._torn))


class MortalStore(SqliteStore):
    """The store; its transactions are among the moments at which the process may end."""

    killer: Killer

    def __init__(self, path: str | Path) -> None:
        super().__init__(path)
        # A kill, unlike a power cut, loses nothing that was written; flushing costs the test its time.
        self._connection.execute("PRAGMA synchronous = OFF")

    @contextlib.contextmanager
    def _transaction(self, kind: str = "IMMEDIATE") -> Iterator[Any]:
        if kind != "IMMEDIATE":
            with super()._transaction(kind) as db:
                yield db
            return
        self.killer.point("before a transaction")
        with super()._transaction(kind) as db:
            yield db
            self.killer.point("inside a transaction")
        self.killer.point("after a transaction")


class Trainer:
    """The trainer's loop as a sequence of small turns, in its order: lease, publish, record, checkpoint."""

    def __init__(self, world: CrashWorld, incarnation: Incarnation) -> None:
        self.world = world
        self.history = incarnation.history_id
        self.step = incarnation.optimizer_step
        self.committed = incarnation.optimizer_step if incarnation.checkpoint else None
        self.uncommitted: list[str] = []
        self.batch: LeasedBatch | None = None
        self.version: int | None = None
        self.first = True

    def turn(self) -> None:
        world = self.world
        if self.first:
            self.version = world.publish(self.step, history=self.history)
            self.first = False
        elif self.batch is None:
            self.batch = world.store.lease_batch(optimizer_step=self.step, owner=OWNER, now_s=0.0, lease_s=9.0)
            self.version = None
        elif self.version is None:
            self.version = world.publish(self.step + 1, history=self.history)
        else:
            self._record(self.batch)

    def _record(self, batch: LeasedBatch) -> None:
        assert self.version is not None
        groups = tuple(group.group_id for group in batch.groups)
        record = StepRecord(
            batch_id=batch.batch_id,
            history_id=self.history,
            optimizer_step=self.step + 1,
            policy_version=self.version,
            group_ids=groups,
            finished_at_s=0.0,
            seconds={},
            metrics={},
        )
        self.world.store.record_step(record, owner=OWNER)
        self.step += 1
        self.batch = None
        self.uncommitted += groups
        if self.step % self.world.checkpoint_every == 0:
            self.checkpoint()

    def checkpoint(self) -> None:
        commit = CommitPoint(
            history_id=self.history,
            optimizer_step=self.step,
            policy_version=self.world.newest_version(),
            trained_group_ids=tuple(self.uncommitted),
            journal_offset=self.world.store.statistics().journal_entries,
        )
        write_checkpoint(
            self.world.layout.checkpoints,
            optimizer_step=self.step,
            model_tensors={"w": torch.full((64,), float(self.step))},
            optimizer_tensors={},
            commit=msgspec.to_builtins(commit),
            trainer_state={},
            keep=2,
        )
        self.world.acknowledged_step = self.committed = self.step
        self.uncommitted = []


class Controller:
    """The core, folded from the journal, and a shell that obeys it: one transaction per event."""

    def __init__(self, world: CrashWorld, incarnation: Incarnation) -> None:
        self.world = world
        self.incarnation = incarnation
        self.books = fold(world.store, world.settings)
        self.core: Scheduler = self.books.scheduler
        self.stored = self.books.stored_groups
        self.row = self.books.last_step_row
        self.taken: set[int] = set()
        self.known: set[int] = set()
        self.flights: dict[str, ins.StartRollout] = {}
        self.served = 0
        self.loads: int | None = None
        self.ended = ""

    def begin(self) -> None:
        """Tell the core that the run begins or goes on, and that a replica serves the newest version."""
        world, incarnation = self.world, self.incarnation
        version = world.newest_version()
        self.known = set(world.manifests.versions())
        self.served = version
        if self.books.events == 0:
            first: ev.AnyEvent = ev.RunStarted(
                at_s=0.0, history_id=incarnation.history_id, optimizer_step=0, policy_version=version
            )
        else:
            gone = set(incarnation.abandoned_versions)
            first = ev.RunResumed(
                at_s=0.0,
                history_id=incarnation.history_id,
                optimizer_step=incarnation.optimizer_step,
                policy_version=version,
                trained_group_ids=incarnation.trained_group_ids,
                abandoned_above=min(gone, default=version) - 1,
                abandoned_group_ids=tuple(
                    group for group in world.store.waiting_groups() if world.sampled_with[group] & gone
                ),
            )
        self.feed(first)
        self.feed(ev.ReplicaJoined(at_s=0.0, replica_id="r", slots=64, policy_version=version))

    def feed(self, *events: ev.AnyEvent) -> None:
        """Hand events to the core, make what follows durable in one transaction, then obey."""
        work, journal, effects = list(events), [], []
        puts: list[str] = []
        assigned: list[Assignment] = []
        drops: list[tuple[str, str]] = []
        while work:
            event = work.pop(0)
            journal.append(msgspec.json.encode(event))
            for instruction in self.core.handle(event):
                match instruction:
                    case ins.CloseGroup():
                        puts.append(instruction.group_id)
                        self.stored.add(instruction.group_id)
                        work.append(self._closed(instruction.group_id))
                    case ins.AssignBatch():
                        assigned.append(
                            Assignment(
                                batch_id=instruction.batch_id,
                                optimizer_step=instruction.optimizer_step,
                                group_ids=instruction.group_ids,
                            )
                        )
                    case ins.DropGroup():
                        if instruction.group_id in self.stored:
                            drops.append((instruction.group_id, instruction.reason.value))
                            self.stored.discard(instruction.group_id)
                    case _:
                        effects.append(instruction)
        self.world.apply(
            Transition(
                journal=tuple(journal),
                puts=tuple(a_group(group) for group in puts),
                assignments=tuple(assigned),
                drops=tuple(drops),
            )
        )
        for instruction in effects:
            self._obey(instruction)

    def _closed(self, group_id: str) -> ev.GroupClosed:
        step = self.world.step_of(min(self.world.sampled_with[group_id]))
        return ev.GroupClosed(at_s=0.0, group_id=group_id, has_signal=True, oldest_optimizer_step=step, loss_tokens=4)

    def _obey(self, instruction: ins.AnyInstruction) -> None:
        match instruction:
            case ins.StartRollout():
                self.flights[instruction.rollout_id] = instruction
                self.world.task_of[instruction.group_id] = instruction.task_index
            case ins.AbortRollout():
                self.flights.pop(instruction.rollout_id, None)
            case ins.LoadWeights():
                self.loads = instruction.policy_version
            case ins.Finish():
                self.ended = instruction.reason
            case _:
                raise AssertionError(f"the core asked for {instruction}")

    def finish(self, rollout_id: str) -> None:
        start = self.flights.pop(rollout_id)
        self.world.sampled_with.setdefault(start.group_id, set()).add(self.served)
        step = self.world.step_of(self.served)
        self.feed(
            ev.RolloutFinished(
                at_s=0.0, rollout_id=rollout_id, output_tokens=2, oldest_optimizer_step=step, counts=True
            )
        )

    def look(self) -> None:
        """Hear of what the trainer has done."""
        world = self.world
        for version in world.manifests.versions():
            if version not in self.known:
                self.known.add(version)
                self.feed(ev.WeightsPublished(at_s=0.0, policy_version=version, optimizer_step=world.step_of(version)))
        for batch_id in world.store.leased_batches():
            self._take(batch_id)
        for row, record in world.store.steps(after=self.row):
            self.row = row
            self._take(record.batch_id)
            self.feed(
                ev.BatchTrained(at_s=0.0, batch_id=record.batch_id, optimizer_step=record.optimizer_step, step_s=1.0)
            )

    def _take(self, batch_id: int) -> None:
        if batch_id not in self.taken:
            self.taken.add(batch_id)
            self.feed(ev.BatchTaken(at_s=0.0, batch_id=batch_id))

    def load(self) -> None:
        version, self.loads = self.loads, None
        if version is not None:
            self.served = version
            self.feed(ev.WeightsLoaded(at_s=0.0, replica_id="r", policy_version=version))


class CrashWorld:
    """One run directory, its two writers, and what was acknowledged to them.

    Attributes:
        acknowledged: groups whose transaction was confirmed.
        doubtful: groups of the transaction in which a process ended.
        acknowledged_step: optimizer step of the newest checkpoint that was confirmed.
        damaged_above: steps above this one have lost their checkpoints to a bad disk.
    """

    def __init__(self, *, max_staleness: int = 1, checkpoint_every: int = 2) -> None:
        self.root = scratch_folder()
        self.layout = ProcessLayout(self.root)
        self.layout.processes.mkdir()
        (self.layout.weights / "manifests").mkdir(parents=True)
        self.manifests = Manifests(self.layout.weights / "manifests")
        self.settings = SchedulerSettings(
            batch_groups=BATCH,
            group_size=GROUP,
            max_staleness=max_staleness,
            total_steps=100,
            data_limit=TASKS,
            rollout_deadline_s=1e6,
            group_deadline_s=1e7,
        )
        self.checkpoint_every = checkpoint_every
        self.killer = Killer()
        MortalStore.killer = self.killer
        self.acknowledged: set[str] = set()
        self.doubtful: set[str] = set()
        self.acknowledged_step = 0
        self.sampled_with: dict[str, set[int]] = {}
        self.task_of: dict[str, int] = {}
        self.starts = 0
        self.incarnation = first_incarnation(self.layout)
        self._open()

    def _open(self) -> None:
        self.store: SqliteStore = MortalStore(self.layout.store)
        self.trainer = Trainer(self, self.incarnation)
        self.controller: Controller | None = None

    def close(self) -> None:
        self.killer.disarm()
        self.store.close()
        shutil.rmtree(self.root)

    # what the parts call

    def apply(self, transition: Transition) -> None:
        groups = {group.group_id for group in transition.puts}
        self.doubtful |= groups
        self.store.apply(transition)
        self.doubtful -= groups
        self.acknowledged |= groups

    def publish(self, step: int, *, history: str) -> int:
        version = self.newest_version() + 1
        self.manifests.write(
            fake_manifest(version, optimizer_step=step, parent=None, history_id=history, transport="file")
        )
        return version

    def newest_version(self) -> int:
        return max(self.manifests.versions(), default=0)

    def step_of(self, version: int) -> int:
        return self.manifests.read(version).optimizer_step

    # what may happen

    def turns(self) -> list[Callable[[], None]]:
        """Everything that may happen next, in the order in which an idle machine would do it."""
        if self.controller is None:
            return [self._controller_begins] if not self.trainer.first else [self.trainer.turn]
        controller = self.controller
        found: list[Callable[[], None]] = [self.trainer.turn, controller.look]
        if controller.loads is not None:
            found.append(controller.load)
        found += [lambda rollout_id=rollout_id: controller.finish(rollout_id) for rollout_id in controller.flights]
        return found

    def _controller_begins(self) -> None:
        controller = Controller(self, self.incarnation)
        controller.begin()
        self.controller = controller
        for group in self.store.waiting_groups():
            newest = max(self.step_of(version) for version in self.sampled_with[group])
            assert newest <= self.incarnation.optimizer_step, f"{group} has tokens of weights that no history has"

    @property
    def ended(self) -> bool:
        return self.controller is not None and self.controller.ended == "end_of_data"

    def crash(self) -> None:
        """All processes are gone: what they held in memory is lost, what they left on the disk stays."""
        self.killer.disarm()
        self.store.close()

    def go_on(self) -> None:
        """Reconcile and start again; may itself be killed, and is then done again.

        Raises:
            Killed: if the killer was armed.
        """
        real, resume.SqliteStore = resume.SqliteStore, MortalStore  # type: ignore[misc]
        try:
            self.incarnation = next_incarnation(self.layout)
        finally:
            resume.SqliteStore = real  # type: ignore[misc]
        self.starts += 1
        self._open()

    def checkpoints(self) -> list[Path]:
        """Return the checkpoints that are visible, oldest first."""
        return sorted(self.layout.checkpoints.glob("step-??????"))

    def rot(self) -> bool:
        """Flip a bit in the newest checkpoint, if another one verifies; return whether it was done."""
        found = self.checkpoints()
        if len(found) < 2:
            return False
        file = found[-1] / "model.safetensors"
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(bytes(data))
        self.acknowledged_step = int(found[-2].name.removeprefix("step-"))
        return True

    # what must hold

    def check_resumed(self) -> None:
        """Check the books right after a reconciliation.

        Raises:
            AssertionError: naming what does not hold.
        """
        incarnation, store = self.incarnation, self.store
        assert incarnation.optimizer_step >= self.acknowledged_step, "an acknowledged checkpoint was not used"
        self.acknowledged_step = incarnation.optimizer_step
        assert store.leased_batches() == [], "a lease outlived its process"
        self._settle_doubt()
        self.check_books()
        steps = [record.optimizer_step for _, record in store.steps()]
        assert steps == list(range(1, incarnation.optimizer_step + 1))[: len(steps)]
        trained = [group for _, record in store.steps() for group in record.group_ids]
        assert set(trained) <= set(incarnation.trained_group_ids)
        assert len(incarnation.trained_group_ids) == BATCH * incarnation.optimizer_step

    def _settle_doubt(self) -> None:
        """What was not acknowledged is there whole, or not at all."""
        known = self.store.known_groups(self.doubtful)
        assert known in (set(), self.doubtful), f"half a transaction: {known} of {self.doubtful}"
        self.acknowledged |= known
        self.doubtful = set()

    def check_books(self) -> None:
        """Every acknowledged group is trained once, waits, or was dropped with a reason; store and journal agree."""
        store = self.store
        store.verify()
        trained = [group for _, record in store.steps() for group in record.group_ids]
        assert len(trained) == len(set(trained)), f"trained twice: {trained}"
        assert self.acknowledged <= store.known_groups(self.acknowledged)
        books = fold(store, self.settings)
        books.scheduler.validate()
        depth = store.statistics()
        live = depth.buffered_groups + depth.assigned_groups + depth.leased_groups + depth.trained_groups
        assert len(books.stored_groups) == live, "the fold of the journal and the store disagree"
        for group in self.acknowledged - books.stored_groups:
            reasons = {books.scheduler.ledger.reason_of(f"{group}/{sibling}") for sibling in range(GROUP)}
            assert None not in reasons, f"{group} was dropped without a reason"

    def check_end(self) -> None:
        """Every task was trained exactly once in the surviving history."""
        self.check_books()
        trained = [group for _, record in self.store.steps() for group in record.group_ids]
        assert sorted(self.task_of[group] for group in trained) == list(range(TASKS))
        assert [record.optimizer_step for _, record in self.store.steps()] == list(range(1, TASKS // BATCH + 1))
        assert self.store.statistics().leased_groups == 0
