"""AReaL 1481: sessions started from outside bypassed the capacity, and a bounded queue evicted silently. miles 2030: an
unbounded queue of finished groups held 125 steps of backlog.

Expected: with a producer ten times faster than the trainer, occupancy stays within the cap, the producer is held back,
nothing is evicted, and the books balance. (The second entrance over HTTP comes with its service.)
"""

from __future__ import annotations

from rollmill.scheduling import instructions as ins
from simulation.scheduling_world import TimedWorld, World, settings


def test_a_producer_ten_times_faster_is_held_back_and_nothing_is_evicted() -> None:
    world = TimedWorld(
        settings(batch_groups=4, group_size=2, max_staleness=2, total_steps=100, prior_yield=1.0),
        rollout_s=lambda start: 0.1,
        train_s=1.0,
    )
    world.begin()
    world.play(until_s=150.0)
    view = world.core.view()
    assert world.ended == ins.Finish(reason="steps_done")
    # The cap is (2 + 1) batches of 8 rollouts.
    assert world.peak_promised <= 24
    assert {reason for _, reason in world.drops} <= {ins.DropReason.STOPPED}
    assert view.admitted == view.trained + view.buffered + view.in_flight + sum(view.dropped.values())
    assert view.trained == 800
    assert max(world.staleness) <= 2
    # With a fast producer little stock is needed: the trainer is fed by samples younger than the budget allows.
    assert world.idle_s < 1.0
    assert view.staleness_mean < 1.5


def test_at_a_cap_of_1024_the_1025th_rollout_is_not_admitted_and_none_is_evicted() -> None:
    world = World(
        settings(batch_groups=512, group_size=1, max_staleness=1, total_steps=10, prior_group_s=1e6), validate=False
    )
    world.begin(slots=4096)
    assert len(world.flights) == 1024
    assert world.core.view().capacity == 0
    for rollout_id in list(world.flights)[:100]:
        world.finish(rollout_id)
    for group_id in list(world.closings):
        world.close(group_id)
    # A hundred are finished and wait for the trainer: they still take their places.
    assert world.core.view().admitted == 1024
    assert world.core.view().buffered == 100
    assert world.drops == []
    assert world.aborts == []
