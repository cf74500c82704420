from __future__ import annotations

import pytest

from rollmill.errors import InvariantViolation, StalenessViolation
from rollmill.scheduling import DropReason, Scheduler
from rollmill.scheduling import events as ev
from rollmill.scheduling import instructions as ins
from rollmill.scheduling.assignment import choose_batch
from rollmill.scheduling.groups import GroupBook, GroupRecord, GroupState
from simulation.scheduling_world import World, settings

OPEN, READY = GroupState.OPEN, GroupState.READY


def book_of(*groups: tuple[int, GroupState], max_staleness: int = 2) -> GroupBook:
    """A book of groups, oldest first, given by (oldest step, state)."""
    book = GroupBook(max_staleness=max_staleness)
    for seq, (floor_step, state) in enumerate(groups):
        group = GroupRecord(
            seq=seq,
            group_id=f"g{seq}",
            task_index=seq,
            dispatched_s=0.0,
            deadline_s=1.0,
            floor_step=floor_step,
            members=[],
        )
        book.add(group)
        if state is READY:
            book.mark_ready(group)
    return book


def chosen(book: GroupBook, *, step: int, places: int = 2, window: int = 8) -> list[int] | None:
    groups = choose_batch(book, step=step, places=places, window=window)
    return None if groups is None else [group.seq for group in groups]


def test_a_batch_takes_the_oldest_ready_groups() -> None:
    assert chosen(book_of((0, OPEN), (0, READY), (0, READY), (0, READY)), step=0) == [1, 2]


def test_a_group_outside_the_window_waits() -> None:
    book = book_of((0, OPEN), (0, OPEN), (0, READY), (0, READY))
    assert chosen(book, step=0, window=3) is None
    assert chosen(book, step=0, window=4) == [2, 3]


def test_a_window_smaller_than_a_batch_counts_as_one_batch() -> None:
    assert chosen(book_of((0, READY), (0, READY)), step=0, window=1) == [0, 1]


def test_a_group_that_would_expire_holds_the_batch() -> None:
    # At step 2 with budget 2, groups of step 0 must be trained now.
    assert chosen(book_of((0, OPEN), (1, READY), (1, READY)), step=2) is None
    assert chosen(book_of((0, READY), (1, READY), (1, READY)), step=2) == [0, 1]


def test_a_group_that_would_expire_is_taken_from_outside_the_window() -> None:
    # A replica with old weights may make a young group the most urgent one.
    book = book_of((2, OPEN), (2, READY), (2, READY), (0, READY))
    assert chosen(book, step=2, window=2) == [1, 3]


def test_a_batch_is_held_when_passing_the_old_would_leave_them_no_place_later() -> None:
    # Three groups of step 0 must be trained by step 2, two to a batch: at step 1 one of them must go, or three are
    # left for two places at step 2. Only a younger pair is ready, so the batch waits.
    book = book_of((0, OPEN), (0, OPEN), (0, OPEN), (1, READY), (1, READY))
    assert chosen(book, step=1) is None
    # With one of the three ready it goes first, and one of the younger fills up.
    book = book_of((0, OPEN), (0, OPEN), (0, READY), (1, READY), (1, READY))
    assert chosen(book, step=1) == [2, 3]


def test_batches_are_assigned_a_few_ahead_of_the_trainer() -> None:
    world = World(settings(max_staleness=1, prior_group_s=1e3, total_steps=9))
    world.begin()
    for rollout_id in list(world.flights):
        world.finish(rollout_id)
    for group_id in list(world.closings):
        world.close(group_id)
    assert [batch.optimizer_step for batch in world.assigned] == [0, 1]
    assert [batch.batch_id for batch in world.assigned] == [0, 1]
    assert world.core.view().batches_ahead == 2


def test_a_wait_for_an_old_group_is_counted_and_timed_only_while_the_trainer_is_idle() -> None:
    world = World(settings(batch_groups=1, group_size=1, max_staleness=1, total_steps=5, prior_group_s=1e3))
    world.begin()  # g0 and g1, both of step 0
    world.now_s = 1.0
    world.finish("g000001/0.1")
    world.close("g000001")
    world.take()
    world.now_s = 2.0
    world.train()
    world.publish()
    world.load("r0")  # g2 of step 1
    world.finish("g000002/0.1")
    world.now_s = 3.0
    world.close("g000002")
    # g0 must be trained at step 1; g2 is ready and could be, but then g0 would be lost.
    waiting = next(wait for wait in world.core.waits(4.0) if wait.who == "trainer")
    assert waiting.pending[0] == "g000000"
    assert "old groups, although 1 groups are ready" in waiting.waits_for
    world.now_s = 8.0
    world.finish("g000000/0.1")
    world.close("g000000")
    assert world.assigned[0].group_ids == ("g000000",)
    view = world.core.view()
    assert (view.waits_for_old, view.waits_for_old_s) == (1, 5.0)


def test_an_old_group_that_holds_the_batch_is_dropped_at_its_deadline_and_the_run_goes_on() -> None:
    world = World(settings(batch_groups=1, group_size=1, max_staleness=0, total_steps=2, group_deadline_s=20.0))
    world.begin()
    world.tick(20.0)
    assert world.drops == [("g000000", DropReason.GROUP_DEADLINE)]
    world.run()
    assert world.trained_tasks == [1, 2]


def shrinking(**changes: object) -> World:
    world = World(settings(**{"replace_zero_advantage": False, "max_staleness": 0, "total_steps": 2, **changes}))
    world.begin()
    return world


def test_with_shrink_a_group_without_signal_takes_its_place_and_the_batch_is_smaller() -> None:
    world = shrinking()
    world.has_signal = lambda task: task != 0
    world.run()
    assert world.trained_tasks == [1, 2, 3]
    assert [len(batch) for batch in world.trained] == [1, 2]
    assert world.core.view().dropped == {"zero_advantage": 2}


def test_with_shrink_a_batch_is_never_empty() -> None:
    world = shrinking()
    world.has_signal = lambda task: task > 4
    world.run()
    # Tasks 0 to 3 have no signal: two windows are passed over; 4 has none either, so step 0 trains 5 alone.
    assert world.trained_tasks == [5, 6, 7]


def test_at_the_end_of_the_data_the_last_batch_may_be_smaller() -> None:
    world = World(settings(max_staleness=1, total_steps=100, data_limit=5))
    world.begin()
    world.run()
    assert world.ended == ins.Finish(reason="end_of_data")
    assert [len(batch) for batch in world.trained] == [2, 2, 1]


def test_data_that_has_no_signal_at_all_ends_the_run_without_a_batch() -> None:
    world = World(settings(data_limit=5), has_signal=lambda task: False)
    world.begin()
    world.run()
    assert world.ended == ins.Finish(reason="end_of_data")
    assert world.trained == []
    assert world.core.view().dropped == {"zero_advantage": 10}


def test_when_all_steps_are_done_what_still_runs_is_aborted_and_what_is_buffered_stays_so() -> None:
    world = World(settings(max_staleness=3, total_steps=1, prior_yield=0.25, prior_group_s=1e3))
    world.begin()
    for group in ("g000000", "g000001", "g000002"):
        for sibling in (0, 1):
            world.finish(f"{group}/{sibling}.1")
    for group in ("g000000", "g000002", "g000001"):
        world.close(group)
    world.take()
    world.train()
    view = world.core.view()
    assert world.ended == ins.Finish(reason="steps_done")
    # Eight groups were tried, two trained, one is left over, five were aborted.
    assert (view.trained, view.buffered, view.in_flight, view.dropped) == (4, 2, 0, {"stopped": 10})


def test_a_batch_that_was_never_assigned_cannot_be_taken_or_trained() -> None:
    world = World(settings())
    world.begin()
    with pytest.raises(InvariantViolation, match="batch 7 is not under way"):
        world.feed(ev.BatchTaken(at_s=0.0, batch_id=7))


def test_a_batch_trained_out_of_order_is_refused() -> None:
    world = World(settings(max_staleness=1, prior_group_s=1e3))
    world.begin()
    for rollout_id in list(world.flights):
        world.finish(rollout_id)
    for group_id in list(world.closings):
        world.close(group_id)
    with pytest.raises(InvariantViolation, match="trained in order"):
        world.feed(ev.BatchTrained(at_s=0.0, batch_id=1, optimizer_step=2, step_s=1.0))


def test_taking_a_batch_twice_changes_nothing() -> None:
    world = World(settings(max_staleness=0))
    world.begin()
    while world.training is None:
        world.act(world.actions()[0])
    before = world.core.view()
    assert world.feed(ev.BatchTaken(at_s=world.now_s, batch_id=world.training.batch_id)) == []
    assert world.core.view() == before


def test_a_group_over_the_budget_is_refused_at_consumption_whatever_assigned_it() -> None:
    world = World(settings(max_staleness=1, total_steps=9))
    world.begin(step=5)
    while not world.assigned:
        world.act(world.actions()[0])
    state = world.core._state  # pyright: ignore[reportPrivateUsage]
    state.batches[0].groups[0].floor_step = 3
    with pytest.raises(StalenessViolation, match=r"step 3 .* staleness 2, budget 1"):
        world.core.handle(ev.BatchTaken(at_s=1.0, batch_id=0))


def test_the_first_event_must_begin_the_run_and_only_once() -> None:
    core = Scheduler(settings())
    with pytest.raises(InvariantViolation, match="before RunStarted"):
        core.handle(ev.ReplicaJoined(at_s=0.0, replica_id="r0", slots=1, policy_version=0))
    started = ev.RunStarted(at_s=0.0, history_id="h0", optimizer_step=0, policy_version=0)
    core.handle(started)
    with pytest.raises(InvariantViolation, match="has begun already"):
        core.handle(started)
