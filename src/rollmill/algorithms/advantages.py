"""Advantages of a group of sibling rollouts, in NumPy.

Decides which siblings enter the baseline and the loss, what each one's advantage is, and whether the group has any
signal. Deliberately no torch: the controller computes this when a group closes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec
import numpy as np

from rollmill.types import Outcome, raw_reward_of, shaped_reward_of

AdvantageKind = Literal["grpo", "dr_grpo", "rloo"]
SignalKind = Literal["raw_reward", "shaped_reward"]

SIGNAL_TOLERANCE = 1e-6
"""Rewards closer than this (relative to the largest, at least 1) are equal: sums of floats differ by such noise."""


class GroupAdvantages(msgspec.Struct, frozen=True, kw_only=True):
    """What a group teaches.

    Attributes:
        advantages: float32 [siblings]; 0 where the sibling stays out of the loss or the group has no signal.
        in_loss: bool [siblings]; False keeps the sibling out of baseline and loss.
        has_signal: at least one advantage is meant to be non-zero.
        unscored: siblings without a usable reward (unscored, infrastructure, cut, or a reward that is not finite).
        without_tokens: siblings with a reward but no trainable token.
    """

    advantages: np.ndarray
    in_loss: np.ndarray
    has_signal: bool
    unscored: int
    without_tokens: int


def has_spread(values: np.ndarray) -> bool:
    """Return whether the values differ by more than float noise.

    Args:
        values: float64 [n], finite.
    """
    if len(values) < 2:
        return False
    return float(np.ptp(values)) > SIGNAL_TOLERANCE * max(1.0, float(np.abs(values).max()))


def baseline_advantages(rewards: np.ndarray, *, kind: AdvantageKind, eps: float) -> np.ndarray:
    """Return the advantage of each reward against its siblings.

    Args:
        rewards: float64 [n], finite; every one enters the baseline.
        kind: `grpo` is (r - mean) / (population std + eps); `dr_grpo` is r - mean; `rloo` is r - mean of the others.
        eps: added to the standard deviation of `grpo`.

    Returns:
        float64 [n]; a group of one has nothing to compare with and gets 0.

    Reference:
        GRPO: arXiv 2402.03300, section 4.1.2. Dr. GRPO: arXiv 2503.20783, section 3.2. RLOO: arXiv 2402.14740, eq. 8.
    """
    n = len(rewards)
    if n < 2:
        return np.zeros(n)
    centred = rewards - rewards.mean()
    if kind == "grpo":
        return centred / (rewards.std() + eps)
    if kind == "rloo":
        # r_i - (sum - r_i) / (n - 1) equals n / (n - 1) * (r_i - mean)
        return centred * (n / (n - 1))
    return centred


def group_advantages(
    outcomes: Sequence[Outcome],
    *,
    kind: AdvantageKind,
    eps: float,
    signal: SignalKind = "raw_reward",
    token_counts: Sequence[int] | None = None,
    permutation: np.ndarray | None = None,
) -> GroupAdvantages:
    """Return advantages over the siblings that count.

    Only `scored` and `policy_failed` outcomes with finite rewards and at least one trainable token enter the
    baseline: a false zero for a sibling that broke would shift everybody else. Whether there is signal is asked of the
    raw rewards unless told otherwise: shaping (a length penalty) gives an all-wrong group one, which is no lesson in
    being right.

    Args:
        outcomes: one per sibling; any number of siblings.
        kind: see `baseline_advantages`.
        eps: see `baseline_advantages`.
        signal: rewards that must differ; with `raw_reward` the shaped ones must too.
        token_counts: trainable tokens of each sibling; `None` takes all as trainable.
        permutation: int [counting siblings]; reassigns rewards among those that count (control experiment).
    """
    raw, shaped = _rewards(outcomes)
    scored = np.isfinite(raw) & np.isfinite(shaped)
    trainable = np.ones(len(outcomes), dtype=bool) if token_counts is None else np.asarray(token_counts) > 0
    in_loss = scored & trainable
    raw, shaped = raw[in_loss], shaped[in_loss]
    if permutation is not None:
        raw, shaped = raw[permutation], shaped[permutation]
    # shaping may also cancel what the raw rewards tell apart: then no advantage is left either
    has_signal = has_spread(shaped) and (signal == "shaped_reward" or has_spread(raw))
    advantages = np.zeros(len(outcomes), dtype=np.float32)
    if has_signal:
        advantages[in_loss] = baseline_advantages(shaped, kind=kind, eps=eps)
    return GroupAdvantages(
        advantages=advantages,
        in_loss=in_loss,
        has_signal=has_signal,
        unscored=int((~scored).sum()),
        without_tokens=int((scored & ~trainable).sum()),
    )


def _rewards(outcomes: Sequence[Outcome]) -> tuple[np.ndarray, np.ndarray]:
    """Return raw and shaped rewards, float64 [siblings], NaN where there is none."""

    def column(values: list[float | None]) -> np.ndarray:
        return np.array([np.nan if value is None else value for value in values], dtype=np.float64)

    return column([raw_reward_of(o) for o in outcomes]), column([shaped_reward_of(o) for o in outcomes])


def reward_permutation(n: int, *, seed: int) -> np.ndarray:
    """Return a permutation of `n` rewards for the shuffled-reward control: same rewards, nothing to learn.

    Args:
        n: siblings that count.
        seed: derived from the run and the group, so that a resumed run draws the same one.
    """
    return np.random.default_rng(seed).permutation(n)


def overlong_penalty(output_tokens: int, *, max_new_tokens: int, buffer_tokens: int, penalty: float) -> float:
    """Return the soft penalty (at most 0) of a long output: 0 before the buffer zone, `-penalty` at the cap.

    Args:
        output_tokens: length of the output.
        max_new_tokens: the cap.
        buffer_tokens: length of the zone before the cap in which the penalty grows linearly.
        penalty: full penalty at the cap.

    Reference:
        DAPO: arXiv 2503.14476, eq. 13.

    Example:
        >>> overlong_penalty(20, max_new_tokens=24, buffer_tokens=8, penalty=1.0)
        -0.5
    """
    free = max_new_tokens - buffer_tokens
    excess = (output_tokens - free) / buffer_tokens
    return -penalty * min(max(excess, 0.0), 1.0) if excess > 0 else 0.0
