"""tinker-cookbook 822: discarding what is too old starved slow (hard) prompts. verl 6975: all samples were too old.

Expected: pacing instead of discarding. A task that takes four steps is trained, nothing is dropped, the bound holds;
the trainer waits for the old group, and that wait is counted. If everything is over-age, sampling goes on.
"""

from __future__ import annotations

import pytest

from rollmill.scheduling import DropReason
from rollmill.scheduling import instructions as ins
from simulation.scheduling_world import TimedWorld, World, settings

SLOW = 3


def test_a_task_that_takes_four_steps_is_trained_and_nothing_is_dropped() -> None:
    world = TimedWorld(
        settings(batch_groups=2, group_size=1, max_staleness=2, total_steps=10, prior_yield=1.0, prior_group_s=1.0),
        rollout_s=lambda start: 4.0 if start.task_index == SLOW else 0.25,
        train_s=1.0,
    )
    world.begin()
    world.play(until_s=100.0)
    assert world.ended == ins.Finish(reason="steps_done")
    assert SLOW in world.trained_tasks
    assert [drop for drop in world.drops if drop[1] is not DropReason.STOPPED] == []
    assert max(world.staleness) <= 2
    assert world.core.view().waits_for_old == 1
    # The slow task starts when the first batch is taken at 0.25 and ends at 4.25; the two steps that may pass it end at
    # 2.25, and two fast tasks are ready by then: the trainer waits 2 s for the old one.
    assert world.core.view().waits_for_old_s == pytest.approx(2.0)


def test_when_every_candidate_is_over_age_sampling_goes_on() -> None:
    world = World(settings(batch_groups=2, group_size=1, max_staleness=0, total_steps=2, group_oversampling=3.0))
    world.begin()
    # Six are dispatched for a batch of two; the four others are of step 0 and useless at step 1.
    for rollout_id in list(world.flights)[:2]:
        world.finish(rollout_id)
    for group_id in list(world.closings):
        world.close(group_id)
    stale = [drop for drop in world.drops if drop[1] is DropReason.STALE]
    assert len(stale) == 4
    assert len(world.aborts) == 4
    world.run()
    assert world.ended == ins.Finish(reason="steps_done")
    assert world.staleness == [0, 0, 0, 0]
