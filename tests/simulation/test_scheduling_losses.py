"""What the core does when a replica or the controller is lost and the run goes on."""

from __future__ import annotations

import pytest

from rollmill.scheduling import DropReason, FailureClass
from rollmill.scheduling import events as ev
from rollmill.scheduling import instructions as ins
from simulation.scheduling_world import World, settings

TASKS = 8


def starts(out: list[ins.AnyInstruction]) -> list[str]:
    return [instruction.rollout_id for instruction in out if isinstance(instruction, ins.StartRollout)]


def test_an_awaited_replica_keeps_the_run_alive_with_nobody_serving() -> None:
    world = World(settings(max_staleness=0))
    world.begin()
    assert world.leave("r0", then=ev.AfterLoss.AWAIT) == []
    assert world.core.view().awaited == ("r0",)
    assert world.ended is None
    sentences = [wait.sentence for wait in world.core.waits(1.5)]
    assert "the run (replica r0 was lost) waits for it to serve again, for 1.5 s now." in sentences


def test_rollouts_of_a_lost_replica_are_dispatched_again_when_it_is_back() -> None:
    world = World(settings(max_staleness=0))
    world.begin()
    running = list(world.flights)
    world.leave("r0", then=ev.AfterLoss.AWAIT)
    for rollout_id in running:
        assert starts(world.fail(rollout_id, FailureClass.INFRA, "unreachable")) == []
    world.join("r0")
    assert [rollout_id.partition(".")[2] for rollout_id in world.flights] == ["2"] * len(running)
    assert world.core.view().awaited == ()
    world.run()
    assert world.ended == ins.Finish(reason="steps_done")


def test_one_loss_is_one_failure_however_many_rollouts_ran_there() -> None:
    # 8 rollouts run, and 4 failures in a row would end the run.
    world = World(settings(max_staleness=1, prior_group_s=1e3, infra_failures_in_a_row=4))
    world.begin()
    assert len(world.flights) == 8
    for _ in range(2):
        running = list(world.flights)
        world.leave("r0", then=ev.AfterLoss.AWAIT)
        for rollout_id in running:
            world.fail(rollout_id, FailureClass.INFRA, "unreachable")
        world.join("r0")
    assert world.ended is None
    assert len(world.flights) == 8


def test_a_rollout_that_every_replica_dies_of_is_given_up() -> None:
    world = World(settings(max_staleness=0, infra_attempts=3))
    world.begin()
    for attempt in (1, 2, 3):
        world.leave("r0", then=ev.AfterLoss.AWAIT)
        world.fail(f"g000000/0.{attempt}", FailureClass.INFRA, "unreachable")
        world.join("r0")
    assert not any(rollout_id.startswith("g000000/0.") for rollout_id in world.flights)
    world.run()
    assert world.core.view().dropped["infra_failure"] >= 1


def test_a_replica_that_comes_back_with_old_weights_loads_the_newest() -> None:
    world = World(settings(max_staleness=1, loads_at_once=2))
    world.begin(replicas=2)
    while not world.version:
        world.act(next(action for action in reversed(world.actions()) if action[0] != "load"))
    world.leave("r1", then=ev.AfterLoss.AWAIT)
    world.join("r1", version=0)
    assert world.loads["r1"] == world.version


def test_without_the_others_a_degraded_run_goes_on_and_counts_its_steps_apart() -> None:
    world = World(settings(total_steps=4))
    world.begin(replicas=2)
    while world.trainer_step < 1:
        world.act(world.actions()[-1])
    world.leave("r1", then=ev.AfterLoss.DEGRADE)
    world.run()
    assert world.ended == ins.Finish(reason="steps_done")
    assert world.core.view().degraded_steps == 3


def test_a_replica_that_joins_after_all_ends_the_degradation() -> None:
    world = World(settings(total_steps=4))
    world.begin(replicas=2)
    world.leave("r1", then=ev.AfterLoss.DEGRADE)
    world.join("r1")
    world.run()
    assert world.core.view().degraded_steps == 0


def test_with_the_last_replica_gone_a_degraded_run_trains_what_is_buffered_and_finishes() -> None:
    # Three groups of two are ready, a batch takes two: one batch is assigned, the third group makes a last, small one.
    world = World(settings(max_staleness=3, prior_group_s=1e3, total_steps=10))
    world.begin()
    for group in ("g000000", "g000001", "g000002"):
        world.finish(f"{group}/0.1")
        world.finish(f"{group}/1.1")
        world.close(group)
    running = len(world.flights)
    out = world.leave("r0", then=ev.AfterLoss.DEGRADE)
    dropped = [instruction for instruction in out if isinstance(instruction, ins.DropGroup)]
    assert {drop.reason for drop in dropped} == {DropReason.INFRA_FAILURE}
    assert len(dropped) * 2 == running
    assert [batch.group_ids for batch in world.assigned] == [("g000000", "g000001"), ("g000002",)]
    world.run()
    assert world.ended == ins.Finish(reason="degraded")
    view = world.core.view()
    assert (view.trained, view.degraded_steps, view.in_flight, view.buffered) == (6, 2, 0, 0)


def test_a_degraded_run_with_nothing_buffered_finishes_at_once_and_resumes_with_the_same_tasks() -> None:
    world = World(settings(max_staleness=0))
    world.begin()
    tasks = {flight.start.task_index for flight in world.flights.values()}
    world.leave("r0", then=ev.AfterLoss.DEGRADE)
    assert world.ended == ins.Finish(reason="degraded")
    world.crash(commit_step=0)
    world.join("r0")
    assert {flight.start.task_index for flight in world.flights.values()} == tasks
    world.run()
    assert world.ended == ins.Finish(reason="steps_done")


@pytest.mark.parametrize("max_staleness", [0, 2])
def test_a_controller_lost_at_every_event_each_task_is_trained_exactly_once(max_staleness: int) -> None:
    def fresh() -> World:
        world = World(settings(max_staleness=max_staleness, total_steps=100, data_limit=TASKS))
        world.begin()
        return world

    whole = fresh()
    whole.run()
    for lost_after in range(len(whole.journal) - 1):
        world = fresh()
        while len(world.journal) < 2 + lost_after and world.ended is None:
            world.now_s += 1.0
            world.act(world.actions()[-1])
        served = dict(world.replicas)
        batches = [*world.assigned]
        world.restart_controller()
        assert world.assigned[: len(batches)] == batches
        for name, version in served.items():
            if world.ended is None:
                world.join(name, version=version)
        world.run()
        assert world.ended == ins.Finish(reason="end_of_data"), f"lost after event {lost_after}"
        assert sorted(world.trained_tasks) == list(range(TASKS)), f"lost after event {lost_after}"
        world.core.ledger.recount()
        world.refold()


def test_a_new_controller_gives_up_what_was_in_flight_and_keeps_the_batch_of_the_trainer() -> None:
    world = World(settings(max_staleness=1, prior_group_s=1e3))
    world.begin()
    while world.training is None:
        world.act(world.actions()[-1])
    leased = world.training
    flying = {flight.start.task_index for flight in world.flights.values()}
    assert flying
    world.restart_controller()
    assert {reason for _, reason in world.drops} <= {DropReason.LOST_IN_RESTART}
    assert world.core.view().batches_ahead == 1
    world.join("r0")
    # The tasks that were lost come first; the trainer's step is heard as if nothing had been.
    assert flying <= {flight.start.task_index for flight in world.flights.values()}
    world.train()
    assert world.core.view().optimizer_step == leased.optimizer_step + 1


def test_a_new_controller_may_hear_of_steps_that_nobody_heard() -> None:
    world = World(settings(max_staleness=1))
    world.begin()
    while not world.assigned:
        world.act(world.actions()[-1])
    batch = world.assigned.pop(0)
    world.restart_controller()
    world.feed(ev.WeightsPublished(at_s=2.0, policy_version=1, optimizer_step=1))
    world.feed(ev.BatchTaken(at_s=2.0, batch_id=batch.batch_id))
    world.feed(ev.BatchTrained(at_s=2.0, batch_id=batch.batch_id, optimizer_step=1, step_s=1.0))
    view = world.core.view()
    assert (view.optimizer_step, view.trained) == (1, 4)


def test_a_run_that_had_finished_finishes_again_for_its_new_controller() -> None:
    world = World(settings(total_steps=2))
    world.begin()
    world.run()
    assert world.ended == ins.Finish(reason="steps_done")
    world.restart_controller()
    assert world.ended == ins.Finish(reason="steps_done")
