"""T24: the zero-variance filter looks at shaped rewards.

NeMo-RL 2431 and verl-recipe 125: in a group whose answers are all wrong, length penalties differ; the filter saw
variance, let the group pass, and normalisation blew the penalties up to full-size advantages. Here signal is decided
on the raw outcome.
"""

from __future__ import annotations

import numpy as np
import pytest

from rollmill.algorithms.advantages import baseline_advantages, group_advantages
from rollmill.types import FilterVerdict, Outcome, Scored
from unit.trainer.trainer_builders import closed, rollout, turn

SHAPED = (-0.1, -0.2, -0.3, -0.4)
ALL_WRONG: list[Outcome] = [Scored(raw_reward=0.0, shaped_reward=shaped) for shaped in SHAPED]


def test_an_all_wrong_group_with_different_penalties_is_filtered() -> None:
    result = group_advantages(ALL_WRONG, kind="grpo", eps=1e-9)
    assert not result.has_signal
    assert result.advantages.tolist() == [0.0] * 4
    members = [rollout("g", i, turn([1], [2, 3]), outcome=outcome) for i, outcome in enumerate(ALL_WRONG)]
    assert closed("g", members).verdict is FilterVerdict.ZERO_ADVANTAGE


def test_the_naive_z_score_would_have_been_of_full_size() -> None:
    # deviations +-0.15 and +-0.05, population standard deviation sqrt(0.0125) = 0.1118: +-1.3416 and +-0.4472
    naive = baseline_advantages(np.array(SHAPED), kind="grpo", eps=0.0)
    np.testing.assert_allclose(naive, [1.3416, 0.4472, -0.4472, -1.3416], atol=1e-4)


@pytest.mark.parametrize("kind", ["grpo", "dr_grpo", "rloo"])
def test_one_right_answer_makes_the_same_penalties_count(kind: str) -> None:
    outcomes: list[Outcome] = [Scored(raw_reward=1.0, shaped_reward=0.9), *ALL_WRONG[1:]]
    result = group_advantages(outcomes, kind=kind, eps=1e-4)  # type: ignore[arg-type]
    assert result.has_signal
    assert np.all(np.diff(result.advantages) < 0)


def test_an_all_right_group_with_different_penalties_is_filtered_too() -> None:
    outcomes: list[Outcome] = [Scored(raw_reward=1.0, shaped_reward=1.0 + shaped) for shaped in SHAPED]
    assert not group_advantages(outcomes, kind="grpo", eps=1e-4).has_signal
