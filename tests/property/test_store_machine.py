"""The sample stores against a model of a few dictionaries, under any order of operations.

The model knows nothing of the stores' code: it says for each operation whether it must be refused, and what the store
must then show.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from buffer_builders import a_group, a_step, commit_at
from rollmill.buffer import Assignment, LeasedBatch, MemoryStore, SampleStore, SqliteStore, Transition
from rollmill.errors import LeaseLost, StoreError

OWNERS = st.sampled_from(["t1", "t2"])
LEASE_S = 10.0


class StoreMachine(RuleBasedStateMachine):
    """Puts, assigns, leases, lets leases expire, records, drops, checkpoints, reconciles, reopens."""

    def __init__(self) -> None:
        super().__init__()
        self.store: SampleStore = self.open()
        self.now_s = 0.0
        self.where: dict[str, str] = {}  # group -> buffered | assigned | trained | dropped
        self.batches: dict[int, tuple[int, tuple[str, ...]]] = {}  # not yet trained: id -> (step, groups)
        self.leases: dict[int, tuple[str, float]] = {}
        self.history: list[tuple[int, tuple[str, ...], int]] = []  # (optimizer step, groups, version), surviving
        self.journal: list[bytes] = []
        self.committed = commit_at(0, version=1)
        self.next_batch = 0
        self.next_version = 2
        self.rules_since_crash = 0

    def open(self) -> SampleStore:
        raise NotImplementedError

    def step(self) -> int:
        return self.history[-1][0] if self.history else 0

    def assigned_steps(self) -> set[int]:
        return {step for step, _ in self.batches.values()} | {step - 1 for step, _, _ in self.history}

    def groups_that_are(self, *states: str) -> list[str]:
        return sorted(group for group, state in self.where.items() if state in states)

    @rule(count=st.integers(1, 3), entries=st.integers(0, 2))
    def some_groups_come(self, count, entries):
        self.put(count, entries)

    def put(self, count: int, entries: int) -> None:
        groups = [f"g{len(self.where) + n:03d}" for n in range(count)]
        journal = tuple(f"e{len(self.journal) + n}".encode() for n in range(entries))
        self.journal += journal
        transition = Transition(journal=journal, puts=tuple(a_group(group) for group in groups))
        assert self.store.apply(transition) == len(self.journal)
        self.where |= dict.fromkeys(groups, "buffered")

    @precondition(lambda self: self.groups_that_are("buffered"))
    @rule(data=st.data(), drop_too=st.booleans())
    def assign(self, data, drop_too):
        """Assign the next free step, in one transition with a drop where there is a group to spare."""
        self.assign_next(data, drop_too=drop_too)

    def assign_next(self, data: st.DataObject, *, drop_too: bool) -> None:
        free = self.groups_that_are("buffered")
        groups = data.draw(st.lists(st.sampled_from(free), min_size=1, max_size=3, unique=True))
        spare = [group for group in free if group not in groups][:1] if drop_too else []
        batch = Assignment(
            batch_id=self.next_batch,
            optimizer_step=max(self.assigned_steps(), default=-1) + 1,
            group_ids=tuple(groups),
        )
        self.store.apply(Transition(assignments=(batch,), drops=tuple((group, "stale") for group in spare)))
        self.batches[batch.batch_id] = (batch.optimizer_step, batch.group_ids)
        self.next_batch += 1
        self.where |= dict.fromkeys(groups, "assigned") | dict.fromkeys(spare, "dropped")

    @precondition(lambda self: self.where)
    @rule(data=st.data())
    def what_must_be_refused_changes_nothing(self, data):
        """Whatever good stands beside the fault in the same transition is undone too."""
        known = data.draw(st.sampled_from(sorted(self.where)))
        busy = self.groups_that_are("assigned", "trained", "dropped")
        faults = [Transition(puts=(a_group(known),)), Transition(drops=(("never seen", "stale"),))]
        if busy:
            group = data.draw(st.sampled_from(busy))
            batch = Assignment(batch_id=self.next_batch, optimizer_step=10_000, group_ids=(group,))
            faults += [Transition(drops=((group, "stale"),)), Transition(assignments=(batch,))]
        free = self.groups_that_are("buffered")
        if free and self.assigned_steps():
            step = data.draw(st.sampled_from(sorted(self.assigned_steps())))
            batch = Assignment(batch_id=self.next_batch, optimizer_step=step, group_ids=(free[0],))
            faults.append(Transition(assignments=(batch,)))
        fault = data.draw(st.sampled_from(faults))
        beside = msgspec.structs.replace(fault, journal=(b"beside",), puts=(a_group("beside"), *fault.puts))
        with pytest.raises(StoreError):
            self.store.apply(beside)

    @rule(owner=OWNERS)
    def lease(self, owner):
        self.lease_as(owner)

    @rule(owner=OWNERS, data=st.data())
    def train(self, owner, data):
        """What happens when nothing goes wrong."""
        self.have_a_batch(data)
        self.now_s += LEASE_S  # nobody else's lease stands in the way
        self.lease_as(owner)
        for batch_id in [b for b, (holder, _) in self.leases.items() if holder == owner]:
            if self.batches[batch_id][0] == self.step():
                self.use(batch_id, owner, "record")

    def have_a_batch(self, data: st.DataObject) -> None:
        if not any(step == self.step() for step, _ in self.batches.values()):
            self.put(2, 1)
            self.assign_next(data, drop_too=False)

    def lease_as(self, owner: str) -> None:
        step = self.step()
        found = [batch_id for batch_id, (at, _) in self.batches.items() if at == step]
        if not found:
            assert self.attempt_lease(owner, step) is None
            return
        batch_id = found[0]
        holder, expires_s = self.leases.get(batch_id, (owner, 0.0))
        if holder != owner and expires_s > self.now_s:
            with pytest.raises(LeaseLost):
                self.attempt_lease(owner, step)
            return
        batch = self.attempt_lease(owner, step)
        assert batch is not None
        assert tuple(group.group_id for group in batch.groups) == self.batches[batch_id][1]
        self.leases[batch_id] = (owner, self.now_s + LEASE_S)

    def attempt_lease(self, owner: str, step: int) -> LeasedBatch | None:
        return self.store.lease_batch(optimizer_step=step, owner=owner, now_s=self.now_s, lease_s=LEASE_S)

    @rule(seconds=st.sampled_from([1.0, LEASE_S]))
    def time_passes(self, seconds):
        self.now_s += seconds

    @rule(holder=OWNERS, owner=OWNERS, data=st.data(), what=st.sampled_from(["record", "record", "renew", "release"]))
    def use_lease(self, holder, owner, data, what):
        """Use a lease that stands, or one that is taken for it; a lease that ran out counts until it is taken."""
        if not self.leases:
            self.have_a_batch(data)
            self.lease_as(holder)
        self.use(data.draw(st.sampled_from(sorted(self.leases))), owner, what)

    def use(self, batch_id: int, owner: str, what: str) -> None:
        step, groups = self.batches[batch_id]
        record = a_step(batch_id, *groups, step=step + 1, version=self.next_version)
        use = {
            "renew": lambda: self.store.renew_lease(batch_id=batch_id, owner=owner, now_s=self.now_s, lease_s=LEASE_S),
            "release": lambda: self.store.release_batch(batch_id=batch_id, owner=owner),
            "record": lambda: self.store.record_step(record, owner=owner),
        }[what]
        if self.leases[batch_id][0] != owner:
            with pytest.raises(LeaseLost):
                use()
            return
        use()
        if what == "renew":
            self.leases[batch_id] = (owner, self.now_s + LEASE_S)
            return
        del self.leases[batch_id]
        if what == "record":
            del self.batches[batch_id]
            self.history.append((step + 1, groups, self.next_version))
            self.next_version += 1
            self.where |= dict.fromkeys(groups, "trained")

    @precondition(lambda self: self.history)
    @rule()
    def checkpoint(self):
        since = self.committed.optimizer_step
        groups = [group for step, ids, _ in self.history if step > since for group in ids]
        step, _, version = self.history[-1]
        self.committed = commit_at(step, *groups, version=version, offset=len(self.journal))

    @precondition(lambda self: self.rules_since_crash > 6)
    @rule()
    def crash_and_reconcile(self):
        self.rules_since_crash = 0
        self.reopen()
        found = self.store.reconcile(self.committed)
        step = self.committed.optimizer_step
        kept = [item for item in self.history if item[0] <= step]
        lost = [item for item in self.history if item[0] > step]
        waiting = {group for _, groups in self.batches.values() for group in groups}
        released = waiting | {group for _, groups, _ in lost for group in groups}
        assert list(found.trained_group_ids) == [group for _, groups, _ in kept for group in groups]
        assert set(found.released_group_ids) == released
        assert len(found.released_group_ids) == len(released)
        assert {version for _, _, version in lost} <= set(found.abandoned_versions)
        self.history, self.batches, self.leases = kept, {}, {}
        self.where |= dict.fromkeys(released, "buffered")

    def reopen(self) -> None:
        """A crash loses nothing that was acknowledged."""

    @invariant()
    def time_since_the_crash_is_counted(self):
        self.rules_since_crash += 1

    @invariant()
    def the_store_shows_what_the_model_knows(self):
        statistics = self.store.statistics()
        leased = sum(len(self.batches[batch_id][1]) for batch_id in self.leases)
        states = list(self.where.values())
        assert statistics.buffered_groups == states.count("buffered")
        assert statistics.assigned_groups + statistics.leased_groups == states.count("assigned")
        assert statistics.leased_groups == leased
        assert statistics.trained_groups == states.count("trained")
        assert statistics.dropped_groups == states.count("dropped")
        assert list(self.store.leased_batches()) == sorted(self.leases)
        assert list(self.store.waiting_groups()) == sorted(
            group for group, state in self.where.items() if state in ("buffered", "assigned")
        )

    @invariant()
    def the_books_of_steps_and_journal_agree(self):
        shown = [(record.optimizer_step, record.group_ids, record.policy_version) for _, record in self.store.steps()]
        assert shown == self.history
        rows = [row for row, _ in self.store.steps()]
        assert rows == sorted(set(rows))
        assert [entry for _, entry in self.store.journal()] == self.journal

    @invariant()
    def no_group_is_trained_twice_in_the_surviving_history(self):
        trained = [group for _, record in self.store.steps() for group in record.group_ids]
        assert len(trained) == len(set(trained))

    def teardown(self) -> None:
        self.store.close()


class MemoryMachine(StoreMachine):
    def open(self) -> SampleStore:
        return MemoryStore()


class SqliteMachine(StoreMachine):
    def open(self) -> SampleStore:
        self.directory = Path(tempfile.mkdtemp())
        return SqliteStore(self.directory / "store.sqlite")

    def reopen(self) -> None:
        self.store.close()
        self.store = SqliteStore(self.directory / "store.sqlite", create=False)

    def teardown(self) -> None:
        super().teardown()
        shutil.rmtree(self.directory)


TestMemoryStoreMachine = MemoryMachine.TestCase
TestMemoryStoreMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestSqliteStoreMachine = SqliteMachine.TestCase
TestSqliteStoreMachine.settings = settings(
    max_examples=15, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
