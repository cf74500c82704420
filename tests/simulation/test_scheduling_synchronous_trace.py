"""Budget 0 is the synchronous loop, exactly; every budget ends with every publication delay (T04)."""

from __future__ import annotations

import itertools
import random

import pytest

from rollmill.scheduling import DropReason
from rollmill.scheduling import instructions as ins
from simulation.scheduling_world import TimedWorld, World, settings


def has_signal(task_index: int) -> bool:
    return task_index % 3 != 1


def synchronous_loop(*, batch_groups: int, group_size: int, steps: int) -> list[tuple[object, ...]]:
    """Sample a batch, replace what has no signal, train, load; written without the core."""
    trace: list[tuple[object, ...]] = []
    tasks = itertools.count()
    for step in range(steps):
        batch: list[int] = []
        while len(batch) < batch_groups:
            round_of_tasks = [next(tasks) for _ in range(batch_groups - len(batch))]
            for task in round_of_tasks:
                trace += [("start", task, sibling, step) for sibling in range(group_size)]
            batch += [task for task in round_of_tasks if has_signal(task)]
        trace += [("train", step, tuple(batch)), ("load", step + 1)]
    return trace


@pytest.mark.parametrize("delay_s", range(4))
@pytest.mark.parametrize("seed", range(3))
def test_budget_zero_gives_the_trace_of_a_synchronous_loop(delay_s: int, seed: int) -> None:
    order = random.Random(seed)
    durations = {}
    world = TimedWorld(
        settings(batch_groups=4, group_size=2, max_staleness=0, total_steps=5),
        has_signal=has_signal,
        rollout_s=lambda start: durations.setdefault(start.rollout_id, order.uniform(0.5, 9.0)),
        publish_s=float(delay_s),
        load_s=0.5,
        slots=3,
    )
    world.begin()
    world.play()
    expected = synchronous_loop(batch_groups=4, group_size=2, steps=5)
    # The run ends with its last update; the loop above also loads the weights of it.
    assert world.trace == expected[:-1]
    assert set(world.staleness) == {0}


@pytest.mark.parametrize("delay_s", range(4))
@pytest.mark.parametrize("max_staleness", range(4))
@pytest.mark.parametrize("total_steps", [1, 5])
def test_every_budget_ends_with_every_publication_delay(max_staleness: int, delay_s: int, total_steps: int) -> None:
    world = TimedWorld(
        settings(batch_groups=2, group_size=2, max_staleness=max_staleness, total_steps=total_steps),
        has_signal=has_signal,
        rollout_s=lambda start: 1.0 + start.task_index % 4,
        publish_s=float(delay_s),
    )
    world.begin()
    world.play(until_s=500.0)
    assert world.ended == ins.Finish(reason="steps_done")
    assert max(world.staleness) <= max_staleness
    assert DropReason.STALE not in {reason for _, reason in world.drops}
    if total_steps > 1:
        assert (max(world.staleness) > 0) == (max_staleness > 0)


def test_two_runs_in_different_order_of_completion_train_the_same_batches_at_budget_zero() -> None:
    traces = []
    for seed in range(4):
        world = World(settings(max_staleness=0, batch_groups=3, total_steps=4), has_signal=has_signal)
        world.begin()
        world.run(choose=random.Random(seed).randrange)
        traces.append([entry for entry in world.trace if entry[0] == "train"])
    assert traces[0] == traces[1] == traces[2] == traces[3]


def test_a_budget_keeps_the_trainer_busy_where_the_synchronous_loop_waits() -> None:
    idle = {}
    for max_staleness in (0, 1, 2):
        world = TimedWorld(
            settings(batch_groups=4, group_size=4, max_staleness=max_staleness, total_steps=30, prior_step_s=2.0),
            rollout_s=lambda start: 1.0 + 0.25 * ((start.task_index * 7 + start.sibling) % 5),
            train_s=2.0,
            publish_s=0.1,
            slots=48,
            validate=False,
        )
        world.begin()
        world.play()
        idle[max_staleness] = world.idle_s / (world.idle_s + world.busy_s)
    # A rollout takes 1 to 2 s and a step 2 s: synchronous, the trainer waits for a whole generation (2.1 of 4.1 s).
    assert idle[0] == pytest.approx(2.1 / 4.1, abs=0.03)
    # One step ahead hides it all but the first batch and the load: at most (2 + 30 * 0.1 s) of 65 s.
    assert idle[1] < 0.09
    assert idle[2] < 0.05
