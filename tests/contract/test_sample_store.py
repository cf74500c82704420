"""What every sample store does, whatever it is made of."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from buffer_builders import a_group, a_rollout, a_step, assign, commit_at, drop, put
from rollmill.buffer import (
    Assignment,
    MemoryStore,
    Reconciliation,
    SampleStore,
    SqliteStore,
    StoreStatistics,
    Transition,
)
from rollmill.errors import LeaseLost, StoreError
from rollmill.types import Scored


def train(store: SampleStore, batch_id: int, *ids: str, step: int, version: int | None = None) -> None:
    """Assign, lease and record one batch of groups that are buffered."""
    store.apply(assign(batch_id, *ids, step=step - 1))
    assert store.lease_batch(optimizer_step=step - 1, owner="trainer", now_s=0.0, lease_s=10.0) is not None
    store.record_step(a_step(batch_id, *ids, step=step, version=version), owner="trainer")


def everything(store: SampleStore) -> tuple[object, ...]:
    """All that can be read of a store, to show that nothing changed."""
    return (
        store.statistics(),
        tuple(store.journal()),
        tuple(store.waiting_groups()),
        tuple(store.steps()),
        store.notes(prefix=""),
    )


@pytest.fixture(params=["memory", "sqlite"])
def store(request, tmp_path):
    made = MemoryStore() if request.param == "memory" else SqliteStore(tmp_path / "store.sqlite")
    yield made
    made.close()


def test_a_group_comes_back_equal_in_every_array(store):
    store.apply(put("g1"))
    back = store.group("g1")
    wanted = a_group("g1")
    assert back.rollouts[1].turns[0].output_ids.tolist() == [7, 8]
    assert back.rollouts[1].turns[0].output_ids.dtype == np.int32
    assert back.advantages.tolist() == [-1.0, 1.0]
    assert back.in_loss.dtype == np.bool_
    assert back.rollouts[0].turns[0].version_spans == wanted.rollouts[0].turns[0].version_spans
    assert back.rollouts[1].outcome == Scored(raw_reward=1.0, shaped_reward=1.0)
    assert back.rollouts[0].task == wanted.rollouts[0].task


def test_the_journal_is_appended_in_order_and_read_after_an_offset(store):
    assert store.apply(Transition(journal=(b"a", b"b"))) == 2
    assert store.apply(Transition(journal=(b"c",))) == 3
    assert store.apply(Transition()) == 3
    assert list(store.journal()) == [(1, b"a"), (2, b"b"), (3, b"c")]
    assert list(store.journal(after=2)) == [(3, b"c")]
    assert list(store.journal(after=3)) == []


def test_one_transition_may_put_assign_and_drop(store):
    transition = Transition(
        journal=(b"e",),
        puts=(a_group("g1"), a_group("g2")),
        assignments=(Assignment(batch_id=0, optimizer_step=0, group_ids=("g2",)),),
        drops=(("g1", "zero_advantage"),),
    )
    assert store.apply(transition) == 1
    statistics = store.statistics()
    assert (statistics.buffered_groups, statistics.assigned_groups, statistics.dropped_groups) == (0, 1, 1)


@pytest.mark.parametrize(
    ("refused", "word"),
    [
        (Transition(journal=(b"x",), puts=(a_group("new"), a_group("g1"))), "already has it"),
        (Transition(journal=(b"x",), puts=(a_group("new"), a_group("new"))), "already has it"),
        (Transition(journal=(b"x",), puts=(a_group("gone"),)), "dropped: stale"),
        (Transition(journal=(b"x",), puts=(a_group("done"),)), "trained in optimizer step 1"),
        (Transition(puts=(a_group("new"),), drops=(("nobody", "stale"),)), "never seen"),
        (Transition(puts=(a_group("new"),), drops=(("done", "stale"),)), "trained in optimizer step 1"),
        (Transition(puts=(a_group("new"),), drops=(("gone", "stale"),)), "dropped: stale"),
        (Transition(puts=(a_group("new"),), drops=(("taken", "stale"),)), "assigned to batch 5"),
        (Transition(puts=(a_group("new"),), drops=(("g1", "stale"), ("g1", "stale"))), "dropped: stale"),
        (assign(9, "new", step=9), "never seen"),
        (assign(9, "g1", "g1", step=9), "assigned to batch 9"),
        (assign(9, "taken", step=9), "assigned to batch 5"),
        (assign(9, step=9), "no groups"),
        (assign(5, "g1", step=9), "batch 5 exists"),
        (assign(9, "g1", step=5), "batch 5 is assigned to it"),
        (assign(9, "g1", step=0), "batch 0 is assigned to it"),
    ],
)
def test_a_refused_transition_changes_nothing_and_names_the_id(store, refused, word):
    store.apply(put("g1", "gone", "done", "taken", journal=(b"first",)))
    train(store, 0, "done", step=1)
    store.apply(drop("gone"))
    store.apply(assign(5, "taken", step=5))
    before = everything(store)
    with pytest.raises(StoreError, match=word):
        store.apply(refused)
    assert everything(store) == before


def test_a_dropped_group_keeps_its_reason_and_loses_its_samples(store):
    store.apply(put("g1"))
    held = store.statistics().sample_bytes
    store.apply(drop("g1", "zero_advantage"))
    assert held > 0
    assert store.statistics().sample_bytes == 0
    with pytest.raises(StoreError, match="dropped: zero_advantage"):
        store.group("g1")


def test_a_buffered_group_is_replaced_by_a_larger_one_and_no_other_is(store):
    store.apply(put("g0", "g1"))
    small = a_group("g0")
    larger = msgspec.structs.replace(
        small,
        rollouts=(*small.rollouts, a_rollout("g0", 2)),
        advantages=np.array([-1.0, 0.0, 1.0], np.float32),
        in_loss=np.array([True, True, True]),
    )
    store.apply(Transition(replaces=(larger,)))
    assert [rollout.sibling for rollout in store.group("g0").rollouts] == [0, 1, 2]
    assert store.statistics().buffered_groups == 2
    store.apply(Transition(assignments=(Assignment(batch_id=0, optimizer_step=0, group_ids=("g0",)),)))
    with pytest.raises(StoreError, match="g0"):
        store.apply(Transition(replaces=(larger,)))
    with pytest.raises(StoreError, match="g9"):
        store.apply(Transition(replaces=(a_group("g9"),)))


def test_an_unknown_group_is_an_error(store):
    with pytest.raises(StoreError, match="never put"):
        store.group("nobody")


def test_a_batch_is_leased_with_its_groups_in_the_assigned_order(store):
    store.apply(put("a", "b", "c"))
    store.apply(assign(3, "c", "a", step=0))
    batch = store.lease_batch(optimizer_step=0, owner="t1", now_s=5.0, lease_s=10.0)
    assert [group.group_id for group in batch.groups] == ["c", "a"]
    assert (batch.batch_id, batch.optimizer_step, batch.owner, batch.expires_s) == (3, 0, "t1", 15.0)
    assert list(store.leased_batches()) == [3]
    assert list(store.waiting_groups()) == ["a", "b", "c"]
    assert store.statistics() == StoreStatistics(
        buffered_groups=1,
        assigned_groups=0,
        leased_groups=2,
        trained_groups=0,
        dropped_groups=0,
        sample_bytes=store.statistics().sample_bytes,
        journal_entries=0,
    )


def test_a_step_without_a_batch_leases_nothing(store):
    assert store.lease_batch(optimizer_step=0, owner="t1", now_s=0.0, lease_s=1.0) is None


def test_another_owner_is_refused_until_the_lease_expires(store):
    store.apply(put("a"))
    store.apply(assign(0, "a", step=0))
    store.lease_batch(optimizer_step=0, owner="t1", now_s=0.0, lease_s=10.0)
    with pytest.raises(LeaseLost, match=r"leased by 't1' for another 0\.5 s"):
        store.lease_batch(optimizer_step=0, owner="t2", now_s=9.5, lease_s=10.0)
    assert store.lease_batch(optimizer_step=0, owner="t2", now_s=10.0, lease_s=10.0).owner == "t2"


def test_the_same_owner_may_lease_again(store):
    store.apply(put("a"))
    store.apply(assign(0, "a", step=0))
    store.lease_batch(optimizer_step=0, owner="t1", now_s=0.0, lease_s=10.0)
    assert store.lease_batch(optimizer_step=0, owner="t1", now_s=1.0, lease_s=10.0).expires_s == 11.0


def test_a_renewed_lease_holds_longer(store):
    store.apply(put("a"))
    store.apply(assign(0, "a", step=0))
    store.lease_batch(optimizer_step=0, owner="t1", now_s=0.0, lease_s=10.0)
    store.renew_lease(batch_id=0, owner="t1", now_s=8.0, lease_s=10.0)
    with pytest.raises(LeaseLost):
        store.lease_batch(optimizer_step=0, owner="t2", now_s=17.0, lease_s=10.0)


def test_work_done_under_a_lost_lease_is_refused(store):
    store.apply(put("a"))
    store.apply(assign(0, "a", step=0))
    store.lease_batch(optimizer_step=0, owner="t1", now_s=0.0, lease_s=10.0)
    store.lease_batch(optimizer_step=0, owner="t2", now_s=20.0, lease_s=10.0)
    for late in (
        lambda: store.record_step(a_step(0, "a", step=1), owner="t1"),
        lambda: store.renew_lease(batch_id=0, owner="t1", now_s=20.0, lease_s=10.0),
        lambda: store.release_batch(batch_id=0, owner="t1"),
    ):
        with pytest.raises(LeaseLost, match="'t2' leased it"):
            late()
    store.record_step(a_step(0, "a", step=1), owner="t2")
    assert store.statistics().trained_groups == 1


def test_an_expired_lease_that_nobody_took_is_still_its_owners(store):
    store.apply(put("a"))
    store.apply(assign(0, "a", step=0))
    store.lease_batch(optimizer_step=0, owner="t1", now_s=0.0, lease_s=1.0)
    store.renew_lease(batch_id=0, owner="t1", now_s=50.0, lease_s=1.0)
    store.record_step(a_step(0, "a", step=1), owner="t1")
    assert store.statistics().trained_groups == 1


def test_a_released_batch_stays_assigned(store):
    store.apply(put("a"))
    store.apply(assign(0, "a", step=0))
    store.lease_batch(optimizer_step=0, owner="t1", now_s=0.0, lease_s=10.0)
    store.release_batch(batch_id=0, owner="t1")
    assert (store.statistics().assigned_groups, list(store.leased_batches())) == (1, [])
    assert store.lease_batch(optimizer_step=0, owner="t2", now_s=0.0, lease_s=10.0).owner == "t2"


def test_a_step_is_recorded_once_and_only_under_a_lease(store):
    store.apply(put("a"))
    store.apply(assign(0, "a", step=0))
    with pytest.raises(StoreError, match="not leased"):
        store.record_step(a_step(0, "a", step=1), owner="t1")
    with pytest.raises(StoreError, match="no such batch"):
        store.record_step(a_step(7, "a", step=1), owner="t1")
    store.lease_batch(optimizer_step=0, owner="t1", now_s=0.0, lease_s=10.0)
    store.record_step(a_step(0, "a", step=1))
    with pytest.raises(StoreError, match="trained before in this history"):
        store.record_step(a_step(0, "a", step=1), owner="t1")
    with pytest.raises(StoreError, match="trained already"):
        store.lease_batch(optimizer_step=0, owner="t1", now_s=0.0, lease_s=10.0)
    assert [record.optimizer_step for _, record in store.steps()] == [1]


@pytest.mark.parametrize(
    ("record", "word"),
    [(a_step(0, "a", step=2), "leads to 1"), (a_step(0, "b", step=1), "differ"), (a_step(0, step=1), "differ")],
)
def test_a_record_of_another_step_or_other_groups_is_refused(store, record, word):
    store.apply(put("a", "b"))
    store.apply(assign(0, "a", step=0))
    store.lease_batch(optimizer_step=0, owner="t1", now_s=0.0, lease_s=10.0)
    with pytest.raises(StoreError, match=word):
        store.record_step(record, owner="t1")
    assert store.statistics().trained_groups == 0
    assert list(store.steps()) == []


def test_step_records_are_read_after_a_row(store):
    store.apply(put("a", "b"))
    train(store, 0, "a", step=1)
    first = store.steps()[-1][0]
    train(store, 1, "b", step=2)
    assert [record for _, record in store.steps(after=first)] == [a_step(1, "b", step=2)]


def test_a_store_that_agrees_with_the_commit_point_is_left_alone(store):
    store.apply(put("a", "b", journal=(b"e",)))
    train(store, 0, "a", step=1)
    before = everything(store)
    found = store.reconcile(commit_at(1, "a", offset=1))
    assert found == Reconciliation(trained_group_ids=("a",), released_group_ids=(), abandoned_versions=())
    assert everything(store) == before


def test_what_the_commit_point_does_not_list_waits_again(store):
    store.apply(put("a", "b", "c", "d", "e"))
    train(store, 0, "a", step=1)
    train(store, 1, "b", step=2)  # after the checkpoint of step 1
    store.apply(assign(2, "c", step=2))
    store.lease_batch(optimizer_step=2, owner="t1", now_s=0.0, lease_s=1e9)
    store.apply(assign(3, "d", step=3))
    found = store.reconcile(commit_at(1, "a"))
    assert found.trained_group_ids == ("a",)
    assert found.released_group_ids == ("b", "c", "d")
    assert found.abandoned_versions == (3,)
    assert [record.optimizer_step for _, record in store.steps()] == [1]
    assert [record.optimizer_step for _, record in store.steps(abandoned=True)] == [2]
    assert list(store.waiting_groups()) == ["b", "c", "d", "e"]
    assert list(store.leased_batches()) == []
    train(store, 2, "b", "c", step=2, version=4)  # ids and steps of deleted batches are free again
    assert [(r.optimizer_step, r.policy_version) for _, r in store.steps()] == [(1, 2), (2, 4)]


def test_rows_of_step_records_only_grow_across_a_reconciliation(store):
    store.apply(put("a", "b"))
    train(store, 0, "a", step=1)
    train(store, 1, "b", step=2)
    seen = store.steps()[-1][0]
    store.reconcile(commit_at(1, "a"))
    train(store, 1, "b", step=2, version=4)
    assert [record.policy_version for _, record in store.steps(after=seen)] == [4]


def test_reconciling_twice_is_reconciling_once(store):
    store.apply(put("a", "b"))
    train(store, 0, "a", step=1)
    train(store, 1, "b", step=2)
    first = store.reconcile(commit_at(1, "a"))
    before = everything(store)
    again = store.reconcile(commit_at(1, "a"))
    assert again == msgspec.structs.replace(first, released_group_ids=())
    assert everything(store) == before


def test_groups_of_earlier_checkpoints_stay_trained_in_order_of_training(store):
    store.apply(put("a", "b", "c", "d"))
    train(store, 0, "d", "a", step=1)
    train(store, 1, "c", step=2)
    train(store, 2, "b", step=3)
    # The checkpoint of step 2 lists only what was trained since the one of step 1.
    found = store.reconcile(commit_at(2, "c"))
    assert found.trained_group_ids == ("d", "a", "c")


def test_a_listed_group_is_trained_even_if_its_step_was_never_recorded(store):
    store.apply(put("a", "b"))
    store.apply(assign(0, "a", step=0))
    store.lease_batch(optimizer_step=0, owner="t1", now_s=0.0, lease_s=10.0)
    found = store.reconcile(commit_at(1, "a"))  # killed between the checkpoint and record_step
    assert found.trained_group_ids == ("a",)
    assert store.statistics().trained_groups == 1
    with pytest.raises(StoreError, match="trained already"):
        store.lease_batch(optimizer_step=0, owner="t2", now_s=0.0, lease_s=10.0)


def test_an_empty_history_releases_everything(store):
    store.apply(put("a"))
    train(store, 0, "a", step=1)
    found = store.reconcile(commit_at(0, version=1))
    assert (found.trained_group_ids, found.released_group_ids) == ((), ("a",))
    assert store.statistics().buffered_groups == 1


@pytest.mark.parametrize(
    ("commit", "word"),
    [
        (commit_at(1, "nobody"), "does not have"),
        (commit_at(1, "gone"), "dropped: stale"),
        (commit_at(1, "a", offset=99), "the store has 0 entries"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused_and_changes_nothing(store, commit, word):
    store.apply(put("a", "gone", "b"))
    store.apply(drop("gone"))
    train(store, 0, "a", step=1)
    train(store, 1, "b", step=2)
    before = everything(store)
    with pytest.raises(StoreError, match=word):
        store.reconcile(commit)
    assert everything(store) == before


def test_notes_are_json_and_found_by_prefix(store):
    store.set_note("phase", "running")
    store.set_note("seconds/trainer", {"train": 1.5})
    store.set_note("seconds/generator-0", [1, None])
    store.set_note("phase", "finishing")
    assert store.note("phase") == "finishing"
    assert store.note("absent", 7) == 7
    assert store.notes(prefix="seconds/") == {"seconds/generator-0": [1, None], "seconds/trainer": {"train": 1.5}}
    assert store.notes(prefix="seconds_") == {}
    with pytest.raises(StoreError, match="JSON"):
        store.set_note("bad", float("nan"))


def test_closing_twice_is_harmless(store):
    store.close()
    store.close()
