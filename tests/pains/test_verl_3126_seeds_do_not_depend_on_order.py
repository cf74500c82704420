"""verl 3126, AReaL 1607: ids and seeds followed the order of completion, so two runs of one seed differed.

Expected: a request's seed follows from the run, the task's place in the data, the sibling and the turn, whatever came
first.
"""

from __future__ import annotations

import random

from rollmill.types import derive_seed, rollout_seed
from simulation.scheduling_world import World, settings

RUN_SEED = 7


def seeds_of_a_run(order: int) -> dict[tuple[int, int], set[int]]:
    """Seeds by (task, sibling) of a run whose rollouts end in an order of its own; one in ten is lost and repeated."""
    chance = random.Random(order)
    world = World(settings(batch_groups=2, group_size=2, max_staleness=2, total_steps=100, data_limit=12))
    world.begin()
    world.run(choose=lambda n: chance.randrange(n))
    found: dict[tuple[int, int], set[int]] = {}
    for start in world.dispatches:
        seed = rollout_seed(RUN_SEED, task_index=start.task_index, sibling=start.sibling)
        found.setdefault((start.task_index, start.sibling), set()).add(seed)
    return found


def test_two_runs_in_different_order_give_every_rollout_the_same_seed() -> None:
    first, second = seeds_of_a_run(1), seeds_of_a_run(2)
    assert first == second
    assert len(first) == 12 * 2
    assert all(len(seeds) == 1 for seeds in first.values())
    every = {seed for seeds in first.values() for seed in seeds}
    assert len(every) == 12 * 2, "no two rollouts share a seed"


def test_each_part_of_the_name_changes_the_seed() -> None:
    base = rollout_seed(RUN_SEED, task_index=3, sibling=1)
    others = {
        rollout_seed(RUN_SEED + 1, task_index=3, sibling=1),
        rollout_seed(RUN_SEED, task_index=4, sibling=1),
        rollout_seed(RUN_SEED, task_index=3, sibling=0),
        rollout_seed(RUN_SEED, task_index=1, sibling=3),
        derive_seed(base, "turn", 0),
        derive_seed(base, "turn", 1),
    }
    assert len(others) == 6
    assert base not in others
