"""T21: failures are counted as data.

open-instruct 1887 and miles 2800: a sandbox that died was trained as reward 0 and biased its whole group. OpenRLHF
1239: a sibling without a trainable token shifted the baseline. prime-rl 2014: a fixed-size reshape broke on missing
siblings. Here only outcomes that are rewards enter mean, deviation and loss, and groups have any size.
"""

from __future__ import annotations

import numpy as np
import pytest

from rollmill.algorithms.advantages import group_advantages
from rollmill.trainer.packing import plan_step
from rollmill.types import InfraFailed, Outcome
from unit.trainer.trainer_builders import closed, rollout, scored, turn


def test_an_infrastructure_failure_stays_out_of_the_baseline_and_the_loss() -> None:
    # without division by the standard deviation: (1, 1, 0) against 2/3; a false zero would give +-1/2
    outcomes: list[Outcome] = [scored(1.0), scored(1.0), scored(0.0), InfraFailed(kind="sandbox died")]
    result = group_advantages(outcomes, kind="dr_grpo", eps=1e-4)
    np.testing.assert_allclose(result.advantages, [1 / 3, 1 / 3, -2 / 3, 0.0], rtol=1e-6)
    assert result.in_loss.tolist() == [True, True, True, False]
    assert result.unscored == 1


def test_a_sibling_without_a_trainable_token_leaves_the_others_alone_whatever_its_reward() -> None:
    outcomes: list[Outcome] = [scored(1.0), scored(1.0), scored(0.0), scored(100.0)]
    result = group_advantages(outcomes, kind="dr_grpo", eps=1e-4, token_counts=[3, 2, 4, 0])
    np.testing.assert_allclose(result.advantages, [1 / 3, 1 / 3, -2 / 3, 0.0], rtol=1e-6)
    assert (result.without_tokens, result.unscored) == (1, 0)


def test_the_failed_sibling_reaches_neither_the_computation_nor_the_denominator() -> None:
    rewards: list[Outcome] = [scored(1.0), scored(1.0), scored(0.0), InfraFailed(kind="sandbox died")]
    members = [rollout("g", i, turn([1, 2], [3, 4 + i]), outcome=outcome) for i, outcome in enumerate(rewards)]
    plan = plan_step([closed("g", members, advantage="dr_grpo")], budget_tokens=100, keep_zero_advantage=True)
    assert plan.rollout_ids == ("g/0.1", "g/1.1", "g/2.1")
    assert plan.loss_tokens == 6


@pytest.mark.parametrize("size", [2, 3, 5, 7])
def test_groups_of_any_size_have_a_baseline(size: int) -> None:
    outcomes: list[Outcome] = [scored(1.0), *(scored(0.0) for _ in range(size - 1))]
    result = group_advantages(outcomes, kind="dr_grpo", eps=1e-4)
    np.testing.assert_allclose(result.advantages, [1 - 1 / size] + [-1 / size] * (size - 1), rtol=1e-6)
