from __future__ import annotations

import pytest

from rollmill.scheduling import DropReason, FailureClass
from rollmill.scheduling import events as ev
from rollmill.scheduling import instructions as ins
from simulation.scheduling_world import World, settings

INFRA, DATA = FailureClass.INFRA, FailureClass.DATA


def world_of(**changes: object) -> World:
    """One group of two rollouts per batch, budget 0."""
    world = World(settings(**{"batch_groups": 1, "max_staleness": 0, **changes}))
    world.begin()
    return world


def test_an_infrastructure_failure_is_dispatched_again_and_keeps_its_place() -> None:
    world = world_of(infra_attempts=3)
    world.fail("g000000/0.1", INFRA)
    assert set(world.flights) == {"g000000/0.2", "g000000/1.1"}
    view = world.core.view()
    assert (view.admitted, view.in_flight, view.redispatched) == (2, 2, {"infra_failure": 1})


def test_a_rollout_without_attempts_left_is_dropped_and_never_becomes_a_reward() -> None:
    world = world_of(infra_attempts=3, group_size=3)
    for attempt in (1, 2, 3):
        world.fail(f"g000000/0.{attempt}", INFRA)
    for sibling in (1, 2):
        world.finish(f"g000000/{sibling}.1")
    assert world.closings["g000000"].rollout_ids == ("g000000/1.1", "g000000/2.1")
    world.close("g000000")
    assert world.core.view().dropped == {"infra_failure": 1}
    assert world.core.view().buffered == 2


def test_failures_in_a_row_end_the_run_with_the_last_reason() -> None:
    world = world_of(infra_attempts=100, infra_failures_in_a_row=3)
    for attempt in (1, 2, 3):
        world.fail(f"g000000/0.{attempt}", INFRA, "connection refused")
    assert isinstance(world.ended, ins.Fail)
    assert world.ended.code == "engine_dead"
    assert "3 infrastructure failures" in world.ended.message
    assert "connection refused" in world.ended.message


def test_a_success_resets_the_row_of_failures() -> None:
    world = world_of(infra_attempts=100, infra_failures_in_a_row=3, group_size=4)
    for sibling in (0, 1, 2):
        world.fail(f"g000000/{sibling}.1", INFRA)
        if sibling == 1:
            world.finish("g000000/3.1")
    world.fail("g000000/0.2", INFRA)
    assert world.ended is None


def test_the_loss_of_one_replica_is_one_failure_not_as_many_as_it_had_rollouts() -> None:
    world = World(settings(batch_groups=4, max_staleness=0, infra_failures_in_a_row=3))
    world.begin(replicas=2)
    world.now_s = 1.0
    world.leave("r0")
    for rollout_id in list(world.flights)[:6]:
        world.fail(rollout_id, INFRA, "replica r0 is gone")
    assert world.ended is None
    # Attempts started after the loss count again.
    world.now_s = 2.0
    for rollout_id in [rollout_id for rollout_id in world.flights if rollout_id.endswith(".2")][:2]:
        world.fail(rollout_id, INFRA)
    for rollout_id in [rollout_id for rollout_id in world.flights if rollout_id.endswith(".3")]:
        world.fail(rollout_id, INFRA)
    assert isinstance(world.ended, ins.Fail)


def test_the_failure_of_an_attempt_that_was_aborted_is_late_and_costs_nobody() -> None:
    world = world_of(infra_failures_in_a_row=1, rollout_deadline_s=5.0)
    world.tick(5.0)
    assert (
        world.feed(ev.RolloutFailed(at_s=5.1, rollout_id="g000000/0.1", failure=INFRA, reason="request aborted")) == []
    )
    assert world.ended is None
    assert world.core.view().late_results == 1


def test_a_data_failure_is_not_an_infrastructure_failure() -> None:
    world = world_of(infra_failures_in_a_row=1, data_retries=1)
    world.fail("g000000/0.1", DATA)
    assert world.ended is None
    world.fail("g000000/0.2", DATA)
    assert world.drops == [("g000000", DropReason.DATA_FAILURE)]
    # The sibling that still ran was aborted with its group.
    assert [abort.rollout_id for abort in world.aborts] == ["g000000/1.1"]
    assert world.core.view().dropped == {"data_failure": 2}
    assert {flight.start.task_index for flight in world.flights.values()} == {1}


def test_a_tick_before_any_deadline_changes_nothing_and_says_nothing() -> None:
    world = world_of(rollout_deadline_s=5.0, group_deadline_s=50.0)
    before = world.core.view()
    assert world.core.next_deadline_s() == 5.0
    assert world.core.handle(ev.Tick(at_s=4.0)) == []
    assert world.core.view() == before


def test_any_event_past_a_deadline_acts_on_it_and_its_own_result_counts_first() -> None:
    world = world_of(rollout_deadline_s=5.0, group_deadline_s=50.0)
    world.now_s = 6.0
    out = world.finish("g000000/0.1")
    assert [type(instruction) for instruction in out] == [ins.AbortRollout, ins.StartRollout]
    assert set(world.flights) == {"g000000/1.2"}


def test_a_replica_may_be_replaced_while_the_trainer_has_work() -> None:
    world = world_of()
    # Group 0 is assigned, so the run may outlive its replicas for a while.
    world.finish("g000000/0.1")
    world.finish("g000000/1.1")
    world.close("g000000")
    world.take()
    world.leave("r0")
    assert world.ended is None
    assert world.core.view().capacity == 0
    world.join("r1")
    world.train()
    assert world.ended is None
    world.run()
    assert world.ended == ins.Finish(reason="steps_done")


def test_a_failed_rollout_is_parked_while_nobody_serves_and_starts_when_someone_joins() -> None:
    world = World(settings(batch_groups=1, max_staleness=1, prior_group_s=1e3))
    world.begin()
    for sibling in (0, 1):
        world.finish(f"g000000/{sibling}.1")
    world.close("g000000")
    world.leave("r0")
    for rollout_id in list(world.flights):
        world.fail(rollout_id, INFRA, "replica r0 is gone")
    assert world.flights == {}
    waiting = [wait for wait in world.core.waits(1.0) if wait.who == "group g000001"]
    assert waiting[0].pending == ("g000001/0.2", "g000001/1.2")
    assert "2 of them wait for a replica" in waiting[0].waits_for
    world.join("r1")
    assert set(world.flights) == {"g000001/0.2", "g000001/1.2"}


def test_with_no_replica_and_nothing_assigned_the_run_fails_with_the_numbers() -> None:
    world = world_of()
    world.leave("r0")
    assert isinstance(world.ended, ins.Fail)
    assert world.ended.code == "producers_gone"
    assert "0 replicas alive, 0 of 1 groups buffered" in world.ended.message


def test_without_a_replica_the_trainer_first_uses_up_what_is_assigned() -> None:
    world = World(settings(batch_groups=1, max_staleness=1, prior_group_s=1e3))
    world.begin()
    for rollout_id in list(world.flights):
        world.finish(rollout_id)
    for group_id in list(world.closings):
        world.close(group_id)
    world.leave("r0")
    assert len(world.assigned) == 2
    for _ in range(2):
        assert world.ended is None
        world.take()
        world.train()
    assert isinstance(world.ended, ins.Fail)


def test_one_replica_of_two_is_enough() -> None:
    world = World(settings())
    world.begin(replicas=2)
    world.leave("r0")
    world.run()
    assert world.ended == ins.Finish(reason="steps_done")


def test_after_a_failure_nothing_is_started_any_more() -> None:
    world = world_of(infra_failures_in_a_row=1)
    world.fail("g000000/0.1", INFRA)
    assert isinstance(world.ended, ins.Fail)
    world.ended = None
    assert world.finish("g000000/1.1") == []
    assert world.core.handle(ev.Tick(at_s=1e9)) == []


@pytest.mark.parametrize("underway", [False, True])
def test_a_stop_aborts_what_runs_keeps_what_is_buffered_and_waits_for_the_trainer(underway: bool) -> None:
    world = World(settings(max_staleness=1, prior_group_s=1e3))
    world.begin()
    for group in ("g000000", "g000001", "g000002"):
        for sibling in (0, 1):
            world.finish(f"{group}/{sibling}.1")
        world.close(group)
    if underway:
        world.take()
    out = world.feed(ev.StopRequested(at_s=1.0, reason="Ctrl-C"))
    assert {type(i) for i in out} <= {ins.AbortRollout, ins.DropGroup, ins.Finish}
    view = world.core.view()
    assert (view.in_flight, view.buffered, view.dropped) == (0, 6, {"stopped": 2})
    if underway:
        assert world.ended is None
        world.train()
        assert world.core.view().trained == 4
    assert world.ended == ins.Finish(reason="stopped")


def test_a_group_that_closes_during_a_stop_is_still_buffered() -> None:
    world = world_of()
    for sibling in (0, 1):
        world.finish(f"g000000/{sibling}.1")
    world.feed(ev.StopRequested(at_s=1.0, reason="Ctrl-C"))
    assert world.ended is None
    world.close("g000000")
    assert world.ended == ins.Finish(reason="stopped")
    assert world.core.view().buffered == 2


def test_a_fleet_that_grows_or_shrinks_is_counted_and_what_runs_goes_on() -> None:
    world = world_of()
    flights = dict(world.flights)
    for slots in (6, 2):
        world.feed(ev.ReplicaResized(at_s=0.0, replica_id="r0", slots=slots))
        assert world.core.view().slots == slots
        assert world.flights == flights


def test_a_fleet_that_left_meanwhile_is_not_resized() -> None:
    world = world_of()
    world.feed(ev.ReplicaResized(at_s=0.0, replica_id="gone", slots=99))
    assert world.core.view().slots == 64
