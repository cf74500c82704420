"""T23: groups are put together wrongly.

NeMo-RL 3882: groups keyed by prompt tokens mixed tasks with equal text but different images. rllm 776: a fresh id per
trajectory made every group one of size 1. PipelineRL 54: only the first rollout entered mean and deviation. tunix
820: a micro-batch smaller than the group mixed prompts. Here the group id is explicit, advantages are computed once
when the group closes, and packing cannot change them.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from rollmill.trainer.packing import plan_step
from rollmill.trainer.step import Trainer
from rollmill.types import FilterVerdict, Group
from unit.trainer.trainer_builders import closed, config, rollout, scored, tiny_model, turn

PROMPT = [1, 2, 3]  # the same text for both tasks


def two_tasks() -> list[Group]:
    """Task a: rewards 1 and 0.5; task b: 0.5 and 0. One baseline over all four would be 0.5."""
    return [
        closed(
            name,
            [rollout(name, i, turn(PROMPT, [5 + 2 * k + i, 6]), outcome=scored(r)) for i, r in enumerate(rewards)],
            advantage="dr_grpo",
        )
        for k, (name, rewards) in enumerate((("a", (1.0, 0.5)), ("b", (0.5, 0.0))))
    ]


EXPECTED = {"a/0.1": 0.25, "a/1.1": -0.25, "b/0.1": 0.25, "b/1.1": -0.25}


@pytest.mark.parametrize("order", list(itertools.permutations(range(2))))
@pytest.mark.parametrize("budget", [5, 8, 100])
def test_baselines_belong_to_the_group_id_in_any_order_and_any_split(order: tuple[int, ...], budget: int) -> None:
    groups = [two_tasks()[i] for i in order]
    plan = plan_step(groups, budget_tokens=budget, keep_zero_advantage=False)
    seen = {
        batch.rollout_ids[index]: float(advantage)
        for batch in plan.micro_batches
        for index, advantage in zip(batch.sequence_index, batch.advantages, strict=True)
    }
    assert seen == EXPECTED


def test_every_sibling_enters_the_baseline_not_only_the_first() -> None:
    # mean of (1, 0, 0, 0) is 1/4; with the first alone it would be 1
    members = [rollout("g", i, turn(PROMPT, [5]), outcome=scored(float(i == 0))) for i in range(4)]
    np.testing.assert_allclose(closed("g", members, advantage="dr_grpo").advantages, [0.75, -0.25, -0.25, -0.25])


def test_a_group_of_one_has_advantage_zero_and_is_filtered() -> None:
    group = closed("g", [rollout("g", 0, turn(PROMPT, [5]), outcome=scored(1.0))])
    assert group.advantages.tolist() == [0.0]
    assert group.verdict is FilterVerdict.ZERO_ADVANTAGE


def test_micro_batches_smaller_than_a_group_give_the_same_update() -> None:
    norms = []
    for budget in (100, 16):
        members = [rollout("g", i, turn(list(range(10)), [5 + i, 6, 7, i])) for i in range(6)]
        trainer = Trainer(tiny_model(), config=config(trainer={"micro_batch_tokens": budget}))
        metrics = trainer.train_step([closed("g", members)], optimizer_step_of=lambda _: 0)
        norms.append(metrics.grad_norm)
        assert metrics.micro_batches == (1 if budget == 100 else 3)  # 10 + 3 + 3 positions hold two siblings
    assert norms[1] == pytest.approx(norms[0], rel=1e-5)
