"""prime-rl 2459: one bad example was scheduled again 10,729 times in 20 minutes (also NeMo-RL 3938: a refused prompt
left a hole that stopped the run).

Expected: a task that the data makes fail is tried data_retries + 1 times, then its group is dropped with a reason,
replaced by the next task, and training advances. The run fails only if groups keep dying with no success between.
"""

from __future__ import annotations

from rollmill.scheduling import instructions as ins
from simulation.scheduling_world import TimedWorld, settings

BAD = 2  # tasks: a, b, bad, c, d


def test_a_refused_task_is_tried_three_times_then_dropped_and_training_advances() -> None:
    world = TimedWorld(
        settings(
            batch_groups=2,
            group_size=1,
            max_staleness=0,
            total_steps=10,
            data_limit=5,
            data_retries=2,
            rollout_deadline_s=30.0,
            group_deadline_s=60.0,
        ),
        fate=lambda start: "data" if start.task_index == BAD else "finish",
        tick_s=1.0,
    )
    world.begin()
    world.play(until_s=60.0)
    view = world.core.view()
    assert world.ended == ins.Finish(reason="end_of_data")
    assert view.optimizer_step == 2
    assert world.trained_tasks == [0, 1, 3, 4]
    assert (view.trained, view.dropped) == (4, {"data_failure": 1})
    assert [start.attempt for start in world.dispatches if start.task_index == BAD] == [1, 2, 3]
    assert any("failed 3 attempts: refused" in line for line in world.core.story("g000002"))
    assert max(start.deadline_s for start in world.dispatches) < 60.0


def test_data_that_is_bad_throughout_ends_the_run_with_its_reason() -> None:
    world = TimedWorld(
        settings(batch_groups=2, group_size=2, total_steps=10, data_retries=0, data_failure_limit=6),
        fate=lambda start: "data",
    )
    world.begin()
    world.play(until_s=60.0)
    assert isinstance(world.ended, ins.Fail)
    assert world.ended.code == "data"
    assert "6 groups in a row" in world.ended.message
    assert "refused" in world.ended.message


def test_a_success_between_bad_tasks_keeps_the_run_alive() -> None:
    world = TimedWorld(
        settings(batch_groups=1, group_size=1, max_staleness=0, total_steps=8, data_retries=0, data_failure_limit=2),
        fate=lambda start: "data" if start.task_index % 2 else "finish",
    )
    world.begin()
    world.play(until_s=100.0)
    assert world.ended == ins.Finish(reason="steps_done")
    assert world.trained_tasks == [0, 2, 4, 6, 8, 10, 12, 14]
