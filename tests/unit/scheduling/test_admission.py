from __future__ import annotations

import pytest

from rollmill.scheduling import events as ev
from rollmill.scheduling import instructions as ins
from rollmill.scheduling.rates import Ratio
from simulation.scheduling_world import TimedWorld, World, settings


def test_the_stock_target_is_a_batch_plus_what_the_trainer_consumes_while_a_group_is_made() -> None:
    # B = 4 * 8 = 32; mu_t = 32 / 8 s = 4 per s; y = 0.5; E[W] = 3 s: 32 + 4 / 0.5 * 3 = 56, in [32, 128].
    world = World(
        settings(batch_groups=4, group_size=8, max_staleness=3, prior_step_s=8.0, prior_yield=0.5, prior_group_s=3.0)
    )
    world.begin()
    view = world.core.view()
    assert view.stock_target == pytest.approx(56.0)
    # Whole groups are admitted while the promise is below the target: 56 / 8 = 7.
    assert (view.stock, view.ceiling, view.capacity) == (56, 128, 72)
    assert len(world.flights) == 56


@pytest.mark.parametrize(
    ("group_s", "target"),
    [
        (0.001, 4.0),  # at least a batch: nothing could be trained with less
        (1e6, 12.0),  # at most what the bound allows: (2 + 1) batches
    ],
)
def test_the_stock_target_is_clipped_between_a_batch_and_the_bound(group_s: float, target: float) -> None:
    world = World(settings(max_staleness=2, prior_group_s=group_s, prior_yield=1.0))
    world.begin()
    assert world.core.view().stock_target == pytest.approx(target, abs=0.01)


def test_a_batch_in_training_is_promised_but_feeds_no_later_step() -> None:
    # B = 4; mu_t = 4 / 5 per s, E[W] = 0.5 s: the lead is 0.4 of a rollout.
    world = World(settings(max_staleness=3, prior_step_s=5.0, prior_group_s=0.5, prior_yield=1.0))
    world.begin()
    assert world.core.view().stock_target == pytest.approx(4.4)
    while world.training is None:
        world.act(world.actions()[0])
    view = world.core.view()
    assert view.stock_target > 8.0
    # The next batch is made while this one is trained.
    assert view.unfinished_groups + view.ready_groups >= 2


def test_with_fast_loads_no_group_is_started_under_weights_about_to_be_replaced() -> None:
    world = TimedWorld(
        settings(max_staleness=3, total_steps=40, prior_step_s=10.0, prior_group_s=1.0, prior_yield=1.0),
        rollout_s=lambda start: 1.0,
        train_s=10.0,
        publish_s=0.5,
        load_s=0.5,
    )
    world.begin()
    world.play()
    # A refresh (1 s) and a group (1 s) fit into a step (10 s): wait for the new weights, one step ahead is enough to
    # hide generation. The budget allows three; started before the load, every rollout would be one step older.
    assert sum(world.staleness[40:]) / len(world.staleness[40:]) < 1.6
    assert world.idle_s == pytest.approx(1.0)  # the first group only


def test_nothing_is_admitted_before_a_replica_serves() -> None:
    world = World(settings())
    out = world.feed(ev.RunStarted(at_s=0.0, history_id="h0", optimizer_step=0, policy_version=0))
    assert out == []
    assert world.core.view().capacity == 0


def test_the_oldest_serving_replica_decides_what_may_be_admitted() -> None:
    world = World(settings(max_staleness=0, total_steps=3))
    world.begin(replicas=2)
    while world.trainer_step < 1:
        world.act(world.actions()[0])
    world.publish()
    assert set(world.loads) == {"r0", "r1"}
    world.load("r0")
    assert world.flights == {}  # r1 still serves step 0, and any rollout might land there
    world.load("r1")
    assert len(world.flights) == 4


def test_no_more_groups_are_admitted_than_the_remaining_steps_can_use() -> None:
    world = World(settings(max_staleness=3, total_steps=2, prior_yield=1.0, prior_group_s=1e3))
    world.begin()
    # The bound allows 8 groups; two steps of two groups are left.
    assert len(world.dispatches) == 4 * 2
    world.run()
    assert len({start.group_id for start in world.dispatches}) == 4


def test_at_a_low_yield_more_groups_are_admitted_for_the_last_steps() -> None:
    world = World(settings(max_staleness=3, total_steps=1, prior_yield=0.25, prior_group_s=1e3))
    world.begin()
    # Two groups with signal at a quarter each: eight are tried at once, within the bound of eight.
    assert len(world.dispatches) == 8 * 2


def test_a_wrong_estimate_of_the_yield_never_stops_the_run() -> None:
    world = World(settings(max_staleness=1, total_steps=2, prior_yield=1.0), has_signal=lambda task: task % 5 == 0)
    world.begin()
    world.run()
    assert world.ended == ins.Finish(reason="steps_done")
    assert world.trained_tasks == [0, 5, 10, 15]


def test_group_oversampling_raises_stock_and_ceiling_and_drops_the_surplus_when_it_is_stale() -> None:
    world = World(settings(max_staleness=0, group_oversampling=1.5, total_steps=1))
    world.begin()
    assert len(world.flights) == 3 * 2
    for rollout_id in list(world.flights)[2:]:
        world.finish(rollout_id)
    for group_id in list(world.closings):
        world.close(group_id)
    assert world.assigned[0].group_ids == ("g000001", "g000002")
    assert world.drops == [("g000000", ins.DropReason.STALE)]
    assert len(world.flights) == 0


def test_tasks_are_drawn_in_order_and_each_once() -> None:
    world = World(settings(max_staleness=2, total_steps=6))
    world.begin()
    world.run()
    first = [start.task_index for start in world.dispatches if start.sibling == 0]
    assert first == list(range(len(first)))


def test_a_rate_starts_at_its_prior_and_follows_what_is_measured() -> None:
    rate = Ratio.from_prior(10.0, observations=1.0, decay=0.5)
    assert rate.value == 10.0
    rate.observe(4.0, 1.0)
    # (10 * 0.5 + 4) / (1 * 0.5 + 1) = 6
    assert rate.value == pytest.approx(6.0)
    for _ in range(30):
        rate.observe(4.0, 1.0)
    assert rate.value == pytest.approx(4.0, abs=1e-6)


def test_consumption_is_rollouts_per_second_of_training_not_of_waiting() -> None:
    world = World(settings(max_staleness=0, total_steps=100))
    world.begin()
    while world.trainer_step < 40:
        if world.training is not None:
            world.train(step_s=2.0)
            continue
        world.now_s += 100.0
        world.act(world.actions()[0])
    # 4 rollouts per step of 2 s, however long the waits were.
    assert world.core.view().consumption_rollouts_per_s == pytest.approx(2.0, rel=0.05)
