"""Leases on batches, with two owners, clocks that run on, and a kill before, inside or after any operation.

A lease ends by completion, by release, because it ran out and another owner took it, or with the run's reconciliation;
never by itself, and never not at all.
"""

from __future__ import annotations

import shutil

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from buffer_builders import a_step, assign, commit_at, put
from property.crash_world import Killed, Killer, MortalStore, scratch_folder
from rollmill.buffer import SqliteStore
from rollmill.errors import LeaseLost, StoreError

OWNERS = st.sampled_from(["t1", "t2"])
MOMENTS = st.sampled_from(["", "", "before a transaction", "inside a transaction", "after a transaction"])
LEASE_S = 10.0


class LeaseMachine(RuleBasedStateMachine):
    """One batch per optimizer step; the model knows who holds the batch of the present step, and until when."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = scratch_folder()
        MortalStore.killer = self.killer = Killer()
        self.store: SqliteStore = MortalStore(self.folder / "store.sqlite")
        self.now_s = 0.0
        self.step = 0
        self.batches = 0
        self.assigned = False
        self.holder: str | None = None
        self.expires_s = 0.0
        self.ended: list[str] = []
        self.taken = 0

    def attempt(self, operation, moment: str) -> bool:
        """Do it, killed at that moment; return whether it has happened."""
        if moment:
            self.killer.arm_at(moment)
        try:
            operation()
        except Killed:
            self.killer.disarm()
            self.store.close()
            self.store = MortalStore(self.folder / "store.sqlite")
            return moment == "after a transaction"
        finally:
            self.killer.disarm()
        return True

    @precondition(lambda self: not self.assigned)
    @rule()
    def a_batch_is_assigned(self):
        group = f"g{self.batches}"
        self.store.apply(put(group))
        self.store.apply(assign(self.batches, group, step=self.step))
        self.assigned = True

    @rule(seconds=st.sampled_from([0.6 * LEASE_S, LEASE_S]))
    def time_passes(self, seconds):
        self.now_s += seconds

    @precondition(lambda self: self.assigned)
    @rule(owner=OWNERS, moment=MOMENTS)
    def lease(self, owner, moment):
        def operation() -> None:
            batch = self.store.lease_batch(optimizer_step=self.step, owner=owner, now_s=self.now_s, lease_s=LEASE_S)
            assert batch is not None

        if self.holder not in (None, owner) and self.now_s < self.expires_s:
            with pytest.raises(LeaseLost):
                operation()
            return
        if self.attempt(operation, moment):
            if self.holder is None:
                self.taken += 1
            elif self.holder != owner:
                self.taken += 1
                self.ended.append("reaped")
            self.holder, self.expires_s = owner, self.now_s + LEASE_S

    @precondition(lambda self: self.assigned)
    @rule(owner=OWNERS, moment=MOMENTS, how=st.sampled_from(["renew", "release", "record", "record"]))
    def use(self, owner, moment, how):
        batch_id = self.batches
        record = a_step(batch_id, f"g{batch_id}", step=self.step + 1)
        operation = {
            "renew": lambda: self.store.renew_lease(batch_id=batch_id, owner=owner, now_s=self.now_s, lease_s=LEASE_S),
            "release": lambda: self.store.release_batch(batch_id=batch_id, owner=owner),
            "record": lambda: self.store.record_step(record, owner=owner),
        }[how]
        if self.holder != owner:
            with pytest.raises(StoreError):
                operation()
            return
        if not self.attempt(operation, moment):
            return
        if how == "renew":
            self.expires_s = self.now_s + LEASE_S
            return
        self.holder = None
        self.ended.append("released" if how == "release" else "completed")
        if how == "record":
            self.step, self.batches, self.assigned = self.step + 1, self.batches + 1, False

    @precondition(lambda self: self.holder is not None)
    @rule(moment=MOMENTS)
    def a_step_takes_longer_than_its_lease_and_renews_it(self, moment):
        assert self.holder is not None
        owner = self.holder
        self.now_s += 0.6 * LEASE_S
        self.use(owner=owner, moment=moment, how="renew")
        self.now_s += 0.6 * LEASE_S
        self.lease(owner="t1" if owner == "t2" else "t2", moment="")

    @rule()
    def everything_dies_and_the_run_goes_on(self):
        """From a checkpoint of this very step: only the lease is lost, and its batch waits to be assigned again."""
        self.store.close()
        self.store = MortalStore(self.folder / "store.sqlite")
        trained = [group for _, record in self.store.steps() for group in record.group_ids]
        found = self.store.reconcile(commit_at(self.step, *trained))
        assert found.released_group_ids == ((f"g{self.batches}",) if self.assigned else ())
        if self.holder is not None:
            self.holder = None
            self.ended.append("reconciled")
        if self.assigned:
            self.store.apply(assign(self.batches, f"g{self.batches}", step=self.step))

    @invariant()
    def the_store_and_the_model_name_the_same_lease(self):
        assert list(self.store.leased_batches()) == ([self.batches] if self.holder is not None else [])
        assert self.taken == len(self.ended) + (self.holder is not None), "a lease ended by itself"

    @invariant()
    def every_batch_was_trained_once(self):
        trained = [group for _, record in self.store.steps() for group in record.group_ids]
        assert trained == [f"g{n}" for n in range(self.step)]

    def teardown(self):
        """No lease is for ever: once it has run out, anybody can take the batch and finish it."""
        if self.assigned:
            self.now_s += LEASE_S
            self.lease(owner="t3", moment="")
            self.use(owner="t3", moment="", how="record")
        self.the_store_and_the_model_name_the_same_lease()
        self.every_batch_was_trained_once()
        self.store.close()
        shutil.rmtree(self.folder)


TestLeaseMachine = LeaseMachine.TestCase
TestLeaseMachine.settings = settings(
    max_examples=20, stateful_step_count=20, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
