"""agent-lightning 480, 218: failed rollouts were counted as complete ("33/32"), and the late result of a task that had
been given to somebody else crashed the run.

Expected: completion is idempotent and typed; a late result is ignored and counted.
"""

from __future__ import annotations

from rollmill.scheduling import events as ev
from simulation.scheduling_world import World, settings

FIRST = "g000000/0.1"


def finished(rollout_id: str) -> ev.RolloutFinished:
    return ev.RolloutFinished(at_s=3.0, rollout_id=rollout_id, output_tokens=4, oldest_optimizer_step=0, counts=True)


def test_a_result_that_comes_twice_completes_once() -> None:
    world = World(settings(max_staleness=0, total_steps=1))
    world.begin()
    admitted = world.core.view().admitted
    world.finish(FIRST)
    assert world.feed(finished(FIRST)) == []
    assert world.core.view().admitted == admitted
    assert world.core.view().late_results == 1
    world.run()
    view = world.core.view()
    # 2 groups of 2: four of four, never five.
    assert (view.trained, view.admitted, view.dropped) == (4, 4, {})


def test_a_failure_is_not_a_completion() -> None:
    world = World(settings(max_staleness=0, total_steps=1))
    world.begin()
    world.fail(FIRST, ev.FailureClass.INFRA, "engine gone")
    view = world.core.view()
    assert (view.trained, view.buffered, view.in_flight) == (0, 0, 4)
    assert view.redispatched == {"infra_failure": 1}
    assert "g000000/0.2" in world.flights


def test_a_late_result_of_a_group_that_was_trained_changes_nothing() -> None:
    world = World(settings(max_staleness=0, total_steps=2, rollout_deadline_s=5.0))
    world.begin()
    world.tick(5.0)  # every first attempt is given up, second ones run
    world.now_s = 6.0
    while world.trainer_step < 1:
        world.act(world.actions()[0])
    before = world.core.view().rollouts()
    assert world.feed(finished(FIRST)) == []
    assert world.core.view().rollouts() == before
    assert world.core.view().late_results == 1
    world.run()
    assert world.core.view().trained == 8
