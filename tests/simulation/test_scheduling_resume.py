"""A run that is killed at any event goes on, and every task is trained exactly once in the surviving history (T28)."""

from __future__ import annotations

import pytest

from rollmill.scheduling import DropReason
from rollmill.scheduling import events as ev
from rollmill.scheduling import instructions as ins
from simulation.scheduling_world import World, settings

TASKS = 8


def run_of_eight(*, max_staleness: int) -> World:
    world = World(
        settings(batch_groups=2, group_size=2, max_staleness=max_staleness, total_steps=100, data_limit=TASKS)
    )
    world.begin()
    return world


@pytest.mark.parametrize("max_staleness", [0, 2])
@pytest.mark.parametrize("checkpoint_every", [1, 2])
def test_killed_at_every_event_each_task_is_trained_exactly_once(max_staleness: int, checkpoint_every: int) -> None:
    whole = run_of_eight(max_staleness=max_staleness)
    whole.run()
    events = len(whole.journal)
    assert events > 30
    for killed_after in range(events - 1):
        world = run_of_eight(max_staleness=max_staleness)
        while len(world.journal) < 2 + killed_after and world.ended is None:
            world.now_s += 1.0
            world.act(world.actions()[-1])
        world.crash(commit_step=world.trainer_step - world.trainer_step % checkpoint_every)
        if world.ended is None:
            world.join("r0")
            world.run()
        assert world.ended == ins.Finish(reason="end_of_data")
        assert sorted(world.trained_tasks) == list(range(TASKS)), f"killed after event {killed_after}"
        world.core.ledger.recount()
        world.refold()


def test_what_was_in_flight_is_lost_with_a_reason_and_its_task_is_drawn_first() -> None:
    world = World(settings(max_staleness=0))
    world.begin()
    world.finish("g000000/0.1")
    world.crash(commit_step=0)
    assert world.drops == [
        ("g000000", DropReason.LOST_IN_RESTART),
        ("g000001", DropReason.LOST_IN_RESTART),
    ]
    world.join("r0")
    started = {(flight.start.group_id, flight.start.task_index) for flight in world.flights.values()}
    assert started == {("g000002", 0), ("g000003", 1)}
    assert world.core.view().dropped == {"lost_in_restart": 4}


def test_groups_trained_after_the_checkpoint_are_buffered_again_and_trained_once() -> None:
    world = World(settings(max_staleness=3, total_steps=3, prior_group_s=1e3))
    world.begin()
    # Six groups of step 0 are finished; two batches are trained, none is checkpointed.
    while world.trainer_step < 2:
        world.act(next(action for action in world.actions() if action[0] not in ("publish", "load")))
    assert world.core.view().trained == 8
    buffered = world.core.view().buffered
    world.crash(commit_step=0)
    view = world.core.view()
    assert (view.trained, view.optimizer_step) == (0, 0)
    assert view.buffered == buffered + 8
    # They are assigned again at once, oldest first, under new batch ids.
    assert world.assigned[0].group_ids == ("g000000", "g000001")
    assert world.assigned[0].optimizer_step == 0
    world.join("r0")
    world.run()
    assert world.ended == ins.Finish(reason="steps_done")
    assert len(set(world.trained_tasks)) == 6


def test_samples_of_abandoned_weights_are_dropped_and_their_tasks_drawn_again() -> None:
    world = World(settings(max_staleness=2, total_steps=6))
    world.begin()
    while not any(step > 0 for step in world.newest_of_group.values()):
        world.now_s += 1.0
        world.act(world.actions()[-1])
    abandoned = [group_id for group_id, step in world.newest_of_group.items() if step > 0]
    out = world.crash(commit_step=0)
    for group_id in abandoned:
        assert ins.DropGroup(group_id=group_id, reason=DropReason.ABANDONED_HISTORY) in out
    world.join("r0")
    world.run()
    assert {world.task_of_group[group_id] for group_id in abandoned} <= set(world.trained_tasks)
    assert len(set(world.trained_tasks)) == len(world.trained_tasks) == 12


def test_a_step_the_checkpoint_lists_but_the_journal_missed_counts_as_trained() -> None:
    world = World(settings(max_staleness=0))
    world.begin()
    while world.training is None:
        world.act(world.actions()[0])
    groups = world.training.group_ids
    world.core.handle(
        ev.RunResumed(
            at_s=99.0,
            history_id="h1",
            optimizer_step=1,
            policy_version=5,
            trained_group_ids=groups,
            abandoned_above=4,
            abandoned_group_ids=(),
        )
    )
    world.core.validate()
    assert world.core.view().trained == 4
    assert world.core.view().optimizer_step == 1


def test_after_a_clean_stop_the_aborted_tasks_are_drawn_first() -> None:
    world = World(settings(max_staleness=1, total_steps=4))
    world.begin()
    running = {flight.start.task_index for flight in world.flights.values()}
    world.feed(ev.StopRequested(at_s=1.0, reason="Ctrl-C"))
    assert world.ended == ins.Finish(reason="stopped")
    assert world.core.view().dropped == {"stopped": 2 * len(running)}
    world.crash(commit_step=0)
    world.join("r0")
    assert {flight.start.task_index for flight in world.flights.values()} == running
    world.run()
    assert world.ended == ins.Finish(reason="steps_done")


def test_a_resume_may_change_the_budget() -> None:
    world = World(settings(max_staleness=3, prior_group_s=1e3, total_steps=4))
    world.begin()
    world.crash(commit_step=0)
    tight = settings(max_staleness=0, total_steps=4)
    world.settings = tight
    world.feed(
        ev.RunResumed(
            at_s=1.0,
            history_id="h9",
            optimizer_step=0,
            policy_version=world.version,
            trained_group_ids=(),
            abandoned_above=0,
            abandoned_group_ids=(),
            settings=tight,
        )
    )
    world.join("r0")
    assert world.core.settings.max_staleness == 0
    assert world.core.view().ceiling == 4
    world.run()
    assert set(world.staleness) == {0}
