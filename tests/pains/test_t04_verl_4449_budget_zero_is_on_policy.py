"""verl 4449: threshold 0 was documented as on-policy, yet trained one step off. torchforge 557: with allowed age 0
and a 30 s weight update everything was evicted on arrival. prime-rl 2219: a run of one step never ended.

Expected: budget 0 trains only rollouts of the trainer's own version, waits for slow publications, evicts nothing.
"""

from __future__ import annotations

import pytest

from rollmill.scheduling import instructions as ins
from simulation.scheduling_world import TimedWorld, settings


def test_with_budget_zero_and_slow_publication_the_trained_version_is_always_the_trainers() -> None:
    world = TimedWorld(settings(max_staleness=0, total_steps=5), publish_s=3.0, tick_s=1.0)
    world.begin()
    world.play(until_s=100.0)
    assert world.ended == ins.Finish(reason="steps_done")
    assert world.staleness == [0] * 10
    assert world.drops == []
    started = [(entry[1], entry[3]) for entry in world.trace if entry[0] == "start" and entry[2] == 0]
    # Two tasks per step, each dispatched under the weights of the step that trains it.
    assert started == [(task, task // 2) for task in range(10)]


def test_a_publication_of_thirty_seconds_evicts_nothing() -> None:
    world = TimedWorld(settings(max_staleness=0, total_steps=3), publish_s=30.0)
    world.begin()
    world.play(until_s=200.0)
    assert world.drops == []
    assert world.trained_tasks == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("max_staleness", range(4))
def test_the_first_batch_ships_and_a_run_of_one_step_ends(max_staleness: int) -> None:
    world = TimedWorld(settings(max_staleness=max_staleness, total_steps=1), publish_s=3.0)
    world.begin()
    world.play(until_s=20.0)
    assert world.ended == ins.Finish(reason="steps_done")
    assert len(world.trained) == 1
