"""Advantages: who enters the baseline, and the numbers, by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmill.algorithms.advantages import group_advantages, has_spread, overlong_penalty, reward_permutation
from rollmill.types import Cut, InfraFailed, Outcome, PolicyFailed, Scored, Unscored


def scored(*rewards: float) -> list[Outcome]:
    return [Scored(raw_reward=reward, shaped_reward=reward) for reward in rewards]


def test_grpo_divides_by_the_population_standard_deviation_plus_epsilon() -> None:
    # mean 1/4; variance (9/16 + 3 * 1/16) / 4 = 3/16; std sqrt(3)/4 = 0.4330127
    # 0.75 / (0.4330127 + 0.1) = 1.4070959; -0.25 / 0.5330127 = -0.4690320
    result = group_advantages(scored(1, 0, 0, 0), kind="grpo", eps=0.1)
    np.testing.assert_allclose(result.advantages, [1.4070959, -0.4690320, -0.4690320, -0.4690320], rtol=1e-6)
    assert result.advantages.dtype == np.float32
    assert result.has_signal


def test_dr_grpo_does_not_divide() -> None:
    result = group_advantages(scored(1, 0, 0, 0), kind="dr_grpo", eps=0.1)
    np.testing.assert_allclose(result.advantages, [0.75, -0.25, -0.25, -0.25])


def test_rloo_compares_with_the_mean_of_the_others() -> None:
    # 1 - (0 + 0 + 0.5) / 3 = 5/6;  0 - 1.5 / 3 = -1/2 (twice);  0.5 - 1/3 = 1/6
    result = group_advantages(scored(1, 0, 0, 0.5), kind="rloo", eps=0.1)
    np.testing.assert_allclose(result.advantages, [5 / 6, -1 / 2, -1 / 2, 1 / 6], rtol=1e-6)


def test_only_scored_and_policy_failed_siblings_enter_the_baseline() -> None:
    outcomes = [
        *scored(1.0),
        PolicyFailed(kind="refused", reward=0.0),
        Unscored(reason="reward_failed(timeout)"),
        InfraFailed(kind="sandbox"),
        Cut(reason="overlong"),
    ]
    result = group_advantages(outcomes, kind="dr_grpo", eps=1e-4)
    np.testing.assert_array_equal(result.in_loss, [True, True, False, False, False])
    # baseline over the two that count: (1 + 0) / 2
    np.testing.assert_allclose(result.advantages, [0.5, -0.5, 0, 0, 0])
    assert result.unscored == 3


def test_a_group_of_one_has_nothing_to_compare_with() -> None:
    for kind in ("grpo", "dr_grpo", "rloo"):
        result = group_advantages(scored(1.0), kind=kind, eps=1e-4)
        assert not result.has_signal
        np.testing.assert_array_equal(result.advantages, [0.0])


def test_an_empty_group_has_no_signal() -> None:
    result = group_advantages([], kind="grpo", eps=1e-4)
    assert (len(result.advantages), result.has_signal) == (0, False)


def test_float_noise_between_equal_rewards_is_no_signal() -> None:
    # 0.1 + 0.2 != 0.3 by 5.6e-17; a naive z-score of these two gives +-1
    result = group_advantages(scored(0.1 + 0.2, 0.3), kind="grpo", eps=1e-12)
    assert not result.has_signal
    np.testing.assert_array_equal(result.advantages, [0.0, 0.0])


def test_the_tolerance_grows_with_the_size_of_the_rewards() -> None:
    assert not has_spread(np.array([1000.0, 1000.0005]))  # limit 1e-6 * 1000.0005 = 1.0e-3
    assert has_spread(np.array([1000.0, 1000.002]))
    assert has_spread(np.array([0.0, 2e-6]))
    assert not has_spread(np.array([0.0, 9e-7]))


def test_an_all_wrong_group_has_signal_by_its_lengths_only_when_asked_for_shaped_rewards() -> None:
    outcomes: list[Outcome] = [Scored(raw_reward=0.0, shaped_reward=shaped) for shaped in (-1.0, 0.0)]
    assert not group_advantages(outcomes, kind="dr_grpo", eps=1e-4).has_signal
    by_shaped = group_advantages(outcomes, kind="dr_grpo", eps=1e-4, signal="shaped_reward")
    assert by_shaped.has_signal
    assert by_shaped.advantages.tolist() == [-0.5, 0.5]


def test_shaping_that_cancels_the_difference_leaves_no_signal_either_way() -> None:
    outcomes: list[Outcome] = [
        Scored(raw_reward=1.0, shaped_reward=0.0),
        Scored(raw_reward=0.0, shaped_reward=0.0),
    ]
    assert not group_advantages(outcomes, kind="grpo", eps=1e-4).has_signal
    assert not group_advantages(outcomes, kind="grpo", eps=1e-4, signal="shaped_reward").has_signal


@given(
    st.lists(
        st.one_of(
            st.floats(allow_nan=True, allow_infinity=True, width=32).map(
                lambda reward: Scored(raw_reward=reward, shaped_reward=reward)
            ),
            st.just(Unscored(reason="x")),
            st.just(InfraFailed(kind="x")),
        ),
        max_size=9,
    ),
    st.sampled_from(["grpo", "dr_grpo", "rloo"]),
)
def test_advantages_are_always_finite_and_zero_outside_the_loss(outcomes: list[Outcome], kind: str) -> None:
    result = group_advantages(outcomes, kind=kind, eps=1e-4)  # type: ignore[arg-type]
    assert np.all(np.isfinite(result.advantages))
    assert np.all(result.advantages[~result.in_loss] == 0)
    assert result.has_signal or np.all(result.advantages == 0)
    assert result.unscored + int(result.in_loss.sum()) == len(outcomes)


@given(st.permutations(range(5)))
def test_the_order_of_siblings_does_not_matter(order: list[int]) -> None:
    outcomes = [*scored(1.0, 0.25, 0.0), Unscored(reason="x"), PolicyFailed(kind="x", reward=-1.0)]
    straight = group_advantages(outcomes, kind="grpo", eps=1e-4)
    shuffled = group_advantages([outcomes[i] for i in order], kind="grpo", eps=1e-4)
    np.testing.assert_allclose(shuffled.advantages, straight.advantages[order], rtol=1e-6)


def test_the_reward_permutation_follows_its_seed_alone() -> None:
    first = reward_permutation(8, seed=3)
    np.testing.assert_array_equal(first, reward_permutation(8, seed=3))
    assert sorted(first) == list(range(8))
    assert any(not np.array_equal(first, reward_permutation(8, seed=seed)) for seed in range(4, 8))


def test_permuted_rewards_keep_the_set_of_advantages_among_those_that_count() -> None:
    outcomes = [*scored(1.0, 0.0), Unscored(reason="x"), *scored(0.0, 0.0)]
    permutation = np.array([3, 0, 1, 2])
    result = group_advantages(outcomes, kind="dr_grpo", eps=1e-4, permutation=permutation)
    # counting siblings 0, 1, 3, 4 now get the rewards of number 3, 0, 1, 2 of them: 0, 1, 0, 0
    np.testing.assert_allclose(result.advantages, [-0.25, 0.75, 0.0, -0.25, -0.25])


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [(0, 0.0), (16, 0.0), (17, -0.125), (20, -0.5), (24, -1.0), (30, -1.0)],  # (16 - 20) / 8 = -0.5
)
def test_the_overlong_penalty_grows_linearly_in_the_buffer_zone(tokens: int, expected: float) -> None:
    assert overlong_penalty(tokens, max_new_tokens=24, buffer_tokens=8, penalty=1.0) == expected


def test_the_overlong_penalty_is_zero_and_not_minus_zero_before_the_zone() -> None:
    assert math.copysign(1.0, overlong_penalty(3, max_new_tokens=24, buffer_tokens=8, penalty=2.0)) == 1.0
    assert overlong_penalty(24, max_new_tokens=24, buffer_tokens=8, penalty=2.0) == -2.0
