"""Closing a group: verdict, steps, and the shuffled-reward control."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from rollmill.algorithms.grouping import close_group
from rollmill.config.schema import AlgorithmSettings
from rollmill.types import (
    FilterVerdict,
    Group,
    Outcome,
    Rollout,
    SamplingParams,
    Scored,
    StopReason,
    Task,
    Turn,
    Unscored,
    VersionSpan,
)

STEPS = {7: 5, 8: 6, 9: 7}


def sibling(index: int, outcome: Outcome | float, *, spans: Sequence[tuple[int, int, int]] = ((0, 3, 7),)) -> Rollout:
    n = spans[-1][1] if spans else 0
    return Rollout(
        rollout_id=f"g/{index}.1",
        group_id="g",
        sibling=index,
        attempt=1,
        task=Task(task_id="t", environment="e", messages=()),
        turns=(
            Turn(
                request_id="r",
                prompt_ids=np.arange(4, dtype=np.int32),
                output_ids=np.zeros(n, dtype=np.int32),
                behavior_logprobs=np.zeros(n, dtype=np.float32),
                version_spans=tuple(VersionSpan(*span) for span in spans),
                stop_reason=StopReason.STOP,
            ),
        ),
        outcome=Scored(raw_reward=outcome, shaped_reward=outcome) if isinstance(outcome, float) else outcome,
        sampling=SamplingParams(),
        started_at_s=0.0,
        finished_at_s=1.0,
    )


def close(rollouts: Sequence[Rollout], *, shuffle_seed: int | None = None) -> Group:
    settings = AlgorithmSettings(advantage="dr_grpo")
    return close_group(
        "g", 3, rollouts, settings=settings, optimizer_step_of=STEPS.__getitem__, shuffle_seed=shuffle_seed
    )


def test_a_group_with_signal_is_trainable() -> None:
    group = close([sibling(0, 1.0), sibling(1, 0.0)])
    assert (group.group_id, group.task_index, group.verdict) == ("g", 3, FilterVerdict.TRAINABLE)
    np.testing.assert_allclose(group.advantages, [0.5, -0.5])


def test_equal_rewards_are_zero_advantage() -> None:
    assert close([sibling(0, 1.0), sibling(1, 1.0)]).verdict is FilterVerdict.ZERO_ADVANTAGE


def test_nothing_that_counts_is_no_trainable_tokens() -> None:
    group = close([sibling(0, Unscored(reason="x")), sibling(1, 1.0, spans=())])
    assert group.verdict is FilterVerdict.NO_TRAINABLE_TOKENS
    assert not group.in_loss.any()


def test_optimizer_steps_are_those_of_tokens_in_the_loss_only() -> None:
    group = close(
        [
            sibling(0, 1.0, spans=((0, 2, 8), (2, 5, 9))),
            sibling(1, 0.0, spans=((0, 3, 8),)),
            sibling(2, Unscored(reason="x"), spans=((0, 3, 7),)),  # older, but nobody trains on it
        ]
    )
    assert (group.oldest_optimizer_step, group.newest_optimizer_step) == (6, 7)


def test_a_version_nobody_knows_is_an_error() -> None:
    with pytest.raises(KeyError):
        close([sibling(0, 1.0, spans=((0, 3, 99),)), sibling(1, 0.0)])


def test_shuffled_rewards_move_among_siblings_that_count_and_leave_the_record_alone() -> None:
    members = [sibling(0, 1.0), sibling(1, Unscored(reason="x")), *(sibling(i, 0.0) for i in range(2, 6))]
    plain = close(members)
    seeds = range(12)
    shuffled = [close(members, shuffle_seed=seed) for seed in seeds]
    for group in shuffled:
        np.testing.assert_allclose(np.sort(group.advantages), np.sort(plain.advantages))
        assert group.advantages[1] == 0
        assert group.rollouts[0].outcome == members[0].outcome
    winners = {int(np.argmax(group.advantages)) for group in shuffled}
    assert len(winners) > 2
    assert int(np.argmax(close(members, shuffle_seed=4).advantages)) == int(np.argmax(shuffled[4].advantages))


def test_the_settings_say_which_rewards_must_differ() -> None:
    outcomes = [Scored(raw_reward=0.0, shaped_reward=shaped) for shaped in (-1.0, 0.0)]
    verdicts = [
        close_group(
            "g",
            0,
            [sibling(index, outcome) for index, outcome in enumerate(outcomes)],
            settings=AlgorithmSettings(signal=signal),
            optimizer_step_of=STEPS.__getitem__,
        ).verdict
        for signal in ("raw_reward", "shaped_reward")
    ]
    assert verdicts == [FilterVerdict.ZERO_ADVANTAGE, FilterVerdict.TRAINABLE]
