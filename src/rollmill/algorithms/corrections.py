"""Importance correction between the behaviour policy (which sampled) and the proximal policy (before the update).

Computes a detached weight per token. Decides nothing about clipping the update itself; that is the loss's.
"""

from __future__ import annotations

import math
from typing import Literal

import torch

from rollmill.algorithms.shapes import check_flat

CorrectionKind = Literal["none", "truncated_is", "masked_is", "clipped_is"]


def correction_weights(
    kind: CorrectionKind,
    *,
    proximal: torch.Tensor,
    behaviour: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    cap: float,
    drift: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the weight of each token: how much likelier the proximal policy was to sample it, bounded.

    `truncated_is` takes min(ratio, cap): biased, variance bounded. `masked_is` takes the ratio inside [1 / cap, cap]
    and 0 outside: tokens too far off teach nothing. `clipped_is` takes min(ratio, cap), and 0 where the policy has
    already gone beyond [1 / cap, cap] in the direction in which the advantage would push it further; what leads back
    keeps its weight, as under PPO's clip. `none` takes 1.

    Args:
        proximal: float [tokens] log-probs before the update, detached.
        behaviour: float [tokens] log-probs when sampled.
        advantages: float [tokens], of the token's sequence.
        mask: bool [tokens]; False tokens get 0.
        cap: upper bound of the ratio, above 1 for `masked_is` and `clipped_is`.
        drift: float [tokens], log of how far the policy has gone; the log of the token's own ratio if not given.

    Reference:
        Truncation of importance weights: IMPALA, arXiv 1802.01561, section 4.1; between behaviour and proximal policy:
        AReaL, arXiv 2505.24298, section 5.2. Masking outside an interval: IcePop in Ring-1T, arXiv 2510.18855. Which
        side of an interval loses its gradient: PPO, arXiv 1707.06347, eq. 7.
    """
    check_flat(proximal=proximal, behaviour=behaviour, advantages=advantages, mask=mask)
    if kind == "none":
        return mask.to(proximal.dtype)
    log_ratio = torch.where(mask, proximal.detach() - behaviour, 0.0)
    ratio = torch.exp(log_ratio)
    if kind == "masked_is":
        return torch.where((ratio <= cap) & (ratio >= 1.0 / cap), ratio, 0.0) * mask
    weight = ratio.clamp(max=cap)
    if kind == "clipped_is":
        far = log_ratio if drift is None else drift.detach()
        weight = torch.where(far * torch.sign(advantages) > math.log(cap), 0.0, weight)
    return weight * mask
