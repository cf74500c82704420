"""NeMo-RL 3248: the epoch limit was ignored in asynchronous mode.

Expected: the same stop rule for every staleness budget: each problem once per epoch, then the end.
"""

from __future__ import annotations

import pytest

from rollmill.config.schema import EnvironmentSettings, RollmillConfig, RunSettings, ScheduleSettings, TaskMix
from rollmill.controller.translate import scheduler_settings
from rollmill.scheduling import SchedulerSettings
from rollmill.scheduling import instructions as ins
from simulation.scheduling_world import World


def epochs_of(epochs: int, *, problems: int, max_staleness: int) -> SchedulerSettings:
    """What a user writes, as the core gets it."""
    config = RollmillConfig(
        run=RunSettings(steps=1000),
        environment=EnvironmentSettings(tasks=(TaskMix(name="scripted"),)),
        schedule=ScheduleSettings(
            batch_groups=2, group_size=2, max_staleness=max_staleness, data_epochs=epochs, rollout_deadline_s=1e5
        ),
    )
    return scheduler_settings(config, training_size=problems)


@pytest.mark.parametrize("max_staleness", [0, 1, 4])
@pytest.mark.parametrize("epochs", [1, 2])
def test_a_run_of_some_epochs_ends_after_them_whatever_the_budget(max_staleness: int, epochs: int) -> None:
    world = World(epochs_of(epochs, problems=6, max_staleness=max_staleness))
    world.begin()
    world.run()
    assert world.ended == ins.Finish(reason="end_of_data")
    assert sorted(world.trained_tasks) == list(range(6 * epochs))
    assert world.trainer_step == 3 * epochs
