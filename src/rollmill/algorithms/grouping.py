"""Closing a group: siblings in, `types.Group` out.

Computes advantages, the filter verdict and the span of optimizer steps over the tokens in the loss. Decides nothing
about when a group closes or what happens to it then; that is the scheduling core's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from rollmill.algorithms.advantages import GroupAdvantages, group_advantages, reward_permutation
from rollmill.config.schema import AlgorithmSettings
from rollmill.types import FilterVerdict, Group, Rollout


def close_group(
    group_id: str,
    task_index: int,
    rollouts: Sequence[Rollout],
    *,
    settings: AlgorithmSettings,
    optimizer_step_of: Callable[[int], int],
    shuffle_seed: int | None = None,
) -> Group:
    """Return the closed group with its advantages, computed here once and nowhere else.

    The baseline is over the rollouts given, whatever their prompts: the group id is explicit, never rebuilt from text.

    Args:
        rollouts: all siblings at the close, in sibling order.
        settings: kind of advantage, its epsilon, and what counts as signal.
        optimizer_step_of: policy version -> optimizer step of its manifest.
        shuffle_seed: permutes the rewards among the siblings that count (control experiment); `None` does not.
    """
    result = _advantages(rollouts, settings=settings, shuffle_seed=shuffle_seed)
    counted = [rollout for rollout, counts in zip(rollouts, result.in_loss, strict=True) if counts]
    oldest, newest = _step_range(counted or rollouts, optimizer_step_of=optimizer_step_of)
    return Group(
        group_id=group_id,
        task_index=task_index,
        rollouts=tuple(rollouts),
        advantages=result.advantages,
        in_loss=result.in_loss,
        verdict=_verdict(result),
        oldest_optimizer_step=oldest,
        newest_optimizer_step=newest,
    )


def _advantages(
    rollouts: Sequence[Rollout], *, settings: AlgorithmSettings, shuffle_seed: int | None
) -> GroupAdvantages:
    outcomes = [rollout.outcome for rollout in rollouts]
    tokens = [rollout.output_tokens for rollout in rollouts]
    kind, eps = settings.advantage, settings.advantage_eps
    plain = group_advantages(outcomes, kind=kind, eps=eps, signal=settings.signal, token_counts=tokens)
    if shuffle_seed is None:
        return plain
    permutation = reward_permutation(int(plain.in_loss.sum()), seed=shuffle_seed)
    return group_advantages(
        outcomes, kind=kind, eps=eps, signal=settings.signal, token_counts=tokens, permutation=permutation
    )


def _verdict(result: GroupAdvantages) -> FilterVerdict:
    if not np.any(result.in_loss):
        return FilterVerdict.NO_TRAINABLE_TOKENS
    return FilterVerdict.TRAINABLE if result.has_signal else FilterVerdict.ZERO_ADVANTAGE


def _step_range(rollouts: Sequence[Rollout], *, optimizer_step_of: Callable[[int], int]) -> tuple[int, int]:
    """Return (lowest, highest) optimizer step that sampled a token of these rollouts; (0, 0) without tokens."""
    versions = {version for rollout in rollouts for version in rollout.policy_versions}
    steps = [optimizer_step_of(version) for version in sorted(versions)]
    return (min(steps), max(steps)) if steps else (0, 0)
