"""AReaL 1388, 1345: after recovery the capacity formula counted from 0 against a high version: a burst of rollouts and
unbounded staleness.

Expected: capacity depends on how far the serving weights are behind the trainer, never on the absolute step.
"""

from __future__ import annotations

import pytest

from simulation.scheduling_world import World, settings


def twelve(**changes: object) -> World:
    return World(
        settings(batch_groups=4, group_size=1, max_staleness=2, total_steps=100, prior_group_s=1000.0, **changes)
    )


@pytest.mark.parametrize("step", [0, 50])
def test_budget_two_and_batch_four_admit_twelve_at_any_step(step: int) -> None:
    world = twelve()
    world.begin(step=step)
    # (2 + 1) * 4; the faulty formula gave (2 + 50 + 1) * 4 = 212 at step 50.
    assert world.core.view().ceiling == 12
    assert len(world.flights) == 12
    assert world.core.view().capacity == 0


def test_a_run_that_is_resumed_at_step_fifty_admits_twelve_too() -> None:
    world = twelve()
    world.begin()
    while world.trainer_step < 50:
        world.act(world.actions()[0])
    world.crash(commit_step=50)
    assert world.core.view().ceiling == 0  # nobody serves yet
    world.join("r0")
    view = world.core.view()
    assert view.ceiling == 12
    assert view.stock > 0
    assert view.capacity == 12 - view.stock


def test_each_step_that_the_serving_weights_are_behind_costs_one_batch() -> None:
    world = twelve()
    world.begin()
    for behind in (1, 2, 3):
        while world.trainer_step < behind:
            actions = [action for action in world.actions() if action[0] not in ("publish", "load")]
            world.act(actions[0])
        assert world.core.view().ceiling == 12 - 4 * behind
        assert world.core.view().capacity == 0
