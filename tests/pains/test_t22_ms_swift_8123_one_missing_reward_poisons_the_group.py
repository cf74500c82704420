"""T22: a missing reward poisons its group.

ms-swift 8123: one `None` made every advantage of the batch NaN; the loss was 0 and no error was raised. TRL 5902: an
unscored completion became a reward of 0. Here such siblings are unscored, counted, and the rest stays finite.
"""

from __future__ import annotations

import math

import numpy as np
import pytest

from rollmill.algorithms.advantages import group_advantages
from rollmill.trainer.step import Trainer
from rollmill.types import FilterVerdict, Outcome, Unscored
from unit.trainer.trainer_builders import closed, config, rollout, scored, tiny_model, turn

# rewards 1, None, NaN, 0
OUTCOMES: list[Outcome] = [scored(1.0), Unscored(reason="no reward"), scored(math.nan), scored(0.0)]


def test_unscored_and_nan_rewards_are_masked_and_counted_and_the_rest_is_finite() -> None:
    # without division by the standard deviation: 1 and 0 against 1/2
    result = group_advantages(OUTCOMES, kind="dr_grpo", eps=1e-4)
    np.testing.assert_array_equal(result.advantages, [0.5, 0.0, 0.0, -0.5])
    assert result.in_loss.tolist() == [True, False, False, True]
    assert result.unscored == 2


@pytest.mark.parametrize("reward", [math.inf, -math.inf])
def test_an_infinite_reward_is_no_reward_either(reward: float) -> None:
    result = group_advantages([scored(1.0), scored(reward), scored(0.0)], kind="grpo", eps=1e-4)
    assert np.isfinite(result.advantages).all()
    assert result.unscored == 1


def test_a_group_in_which_nothing_was_scored_is_filtered() -> None:
    members = [rollout("g", i, turn([1], [2]), outcome=Unscored(reason="no reward")) for i in range(3)]
    assert closed("g", members).verdict is FilterVerdict.NO_TRAINABLE_TOKENS


def test_the_step_trains_on_the_two_that_have_a_reward_with_a_finite_loss_that_is_not_zero() -> None:
    members = [rollout("g", i, turn([1, 2], [3, 4 + i]), outcome=outcome) for i, outcome in enumerate(OUTCOMES)]
    trainer = Trainer(tiny_model(), config=config())
    metrics = trainer.train_step([closed("g", members)], optimizer_step_of=lambda _: 0)
    assert metrics.sequences == 2
    assert math.isfinite(metrics.loss)
    assert metrics.grad_norm > 0
