"""SkyRL 1173: a buffer stayed at 125 of 128 for hours because lost workers returned nothing (verl 7155, NeMo-RL 3238).

Expected: a rollout that never returns is dispatched again at its deadline, the stall report names its group before
that, and the result that comes after all is ignored and counted.
"""

from __future__ import annotations

from rollmill.scheduling import events as ev
from rollmill.scheduling import instructions as ins
from simulation.scheduling_world import World, settings

LOST = "g000005/1.1"


def test_a_lost_rollout_is_dispatched_again_once_and_its_late_result_is_ignored() -> None:
    world = World(settings(batch_groups=8, group_size=2, max_staleness=0, total_steps=1, rollout_deadline_s=5.0))
    world.begin()
    assert len(world.flights) == 16
    world.now_s = 1.0
    for rollout_id in [rollout_id for rollout_id in world.flights if rollout_id != LOST]:
        world.finish(rollout_id)
    for group_id in list(world.closings):
        world.close(group_id)

    report = world.core.waits(2.0)
    named = [wait for wait in report if wait.who == "group g000005"]
    assert [wait.pending for wait in named] == [(LOST,)]
    assert named[0].age_s == 2.0
    assert next(wait for wait in report if wait.who == "trainer").pending == ("g000005",)
    assert "g000005/1.1" in named[0].sentence

    assert world.tick(4.999) == []
    redispatch = world.tick(5.0)
    assert redispatch == [
        ins.AbortRollout(rollout_id=LOST, reason="rollout_deadline"),
        ins.StartRollout(
            rollout_id="g000005/1.2", group_id="g000005", task_index=5, sibling=1, attempt=2, deadline_s=10.0
        ),
    ]
    world.now_s = 7.0
    world.finish("g000005/1.2")
    world.close("g000005")
    assert [len(batch.group_ids) for batch in world.assigned] == [8]
    world.take()

    world.now_s = 9.0
    late = ev.RolloutFinished(at_s=9.0, rollout_id=LOST, output_tokens=4, oldest_optimizer_step=0, counts=True)
    assert world.feed(late) == []
    world.train()
    view = world.core.view()
    assert world.ended == ins.Finish(reason="steps_done")
    assert (view.admitted, view.trained, view.dropped) == (16, 16, {})
    assert view.redispatched == {"rollout_deadline": 1}
    assert view.late_results == 1


def test_a_task_that_never_returns_costs_its_group_and_not_the_run() -> None:
    world = World(
        settings(
            batch_groups=2, group_size=2, max_staleness=0, total_steps=1, rollout_deadline_s=5.0, group_deadline_s=12.0
        )
    )
    world.begin()
    for rollout_id in ("g000000/0.1", "g000000/1.1", "g000001/0.1"):
        world.finish(rollout_id)
    world.close("g000000")
    for at_s in (5.0, 10.0):
        world.tick(at_s)
    # Attempts at 0, 5 and 10 s; the third gets the 2 s that are left of the group's 12.
    assert [flight.start.attempt for flight in world.flights.values()] == [3]
    assert [flight.start.deadline_s for flight in world.flights.values()] == [12.0]
    world.tick(12.0)
    assert world.drops == [("g000001", ins.DropReason.GROUP_DEADLINE)]
    assert {flight.start.task_index for flight in world.flights.values()} == {2}
    world.run()
    assert world.trained_tasks == [0, 2]
