"""OpenRLHF 1322: the checkpoint kept the loader's cursor but not the rollouts that waited, so their prompts were lost.
NeMo-RL 3599: 675 of 736 skipped prompts came from checkpoints that were not atomic. NeMo-RL 2519: a resume with another
dataset skipped its first rows.

Expected: over save, kill at any event and restore, every prompt is trained exactly once in the surviving history;
rollouts that waited are used, not sampled again; another dataset is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from property.crash_world import TASKS, CrashWorld
from rollmill.config.schema import RollmillConfig
from rollmill.errors import RunDirectoryError
from rollmill.telemetry.run_directory import RunDirectory


@contextmanager
def saved_after_two_of_eight() -> Iterator[CrashWorld]:
    """Tasks 0..7: four are sampled and stored, two of them trained, then a checkpoint is written."""
    world = CrashWorld(max_staleness=1, checkpoint_every=1)
    with world.killer:
        for _ in range(200):
            if world.acknowledged_step == 1:
                break
            *others, last = world.turns()
            # The newest rollout ends first until four groups are stored; then trainer and controller work.
            busy = [last] if len(world.acknowledged) < 4 else others[:2] or [last]
            for turn in busy:
                turn()
        assert world.acknowledged_step == 1
        assert len(world.acknowledged) == 4
        yield world
        world.close()


def play(world: CrashWorld) -> None:
    for turn in range(400):
        if world.ended:
            return
        turns = world.turns()
        turns[turn % len(turns)]()
    raise AssertionError("the run hangs")


@pytest.mark.parametrize("events", range(24))
def test_killed_at_any_event_after_the_save_every_task_is_trained_once(events: int) -> None:
    with saved_after_two_of_eight() as world:
        for turn in range(events):
            turns = world.turns()
            turns[turn % len(turns)]()
        world.crash()
        world.go_on()
        world.check_resumed()
        play(world)
        world.check_end()
        trained = [world.task_of[group] for _, record in world.store.steps() for group in record.group_ids]
        assert sorted(trained) == list(range(TASKS))


def test_rollouts_that_waited_at_the_save_are_used_and_not_sampled_again() -> None:
    with saved_after_two_of_eight() as world:
        waiting = set(world.store.waiting_groups())
        assert len(waiting) == 2
        world.crash()
        world.go_on()
        play(world)
        trained = {group for _, record in world.store.steps() for group in record.group_ids}
        assert waiting <= trained


def test_another_dataset_is_refused_with_both_identities(tmp_path: Path) -> None:
    config = RollmillConfig()
    run = RunDirectory.create(tmp_path / "run", config=config, started_at_s=0.0)
    run.check_data("sums-of-two")
    run.close()
    again, _ = RunDirectory.resume(tmp_path / "run", started_at_s=1.0)
    again.check_data("sums-of-two")
    with pytest.raises(RunDirectoryError, match="started on the data set sums-of-two, this one is sums-of-three"):
        again.check_data("sums-of-three")
    again.close()
