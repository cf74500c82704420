"""Importance correction between the behaviour policy (which sampled) and the proximal policy (before the update).

Computes a detached weight per token. Decides nothing about clipping the update itself; that is the loss's.
"""

from __future__ import annotations

from typing import Literal

import torch

from rollmill.algorithms.shapes import check_flat

CorrectionKind = Literal["none", "truncated_is", "masked_is"]


def correction_weights(
    kind: CorrectionKind, *, proximal: torch.Tensor, behaviour: torch.Tensor, mask: torch.Tensor, cap: float
) -> torch.Tensor:
    """Return the weight of each token: how much likelier the proximal policy was to sample it, bounded.

    `truncated_is` takes min(ratio, cap): biased, variance bounded. `masked_is` takes the ratio inside [1 / cap, cap]
    and 0 outside: tokens too far off teach nothing. `none` takes 1.

    Args:
        proximal: float [tokens] log-probs before the update, detached.
        behaviour: float [tokens] log-probs when sampled.
        mask: bool [tokens]; False tokens get 0.
        cap: upper bound of the ratio, above 1 for `masked_is`.

    Reference:
        Truncation of importance weights: IMPALA, arXiv 1802.01561, section 4.1; between behaviour and proximal policy:
        AReaL, arXiv 2505.24298, section 5.2. Masking outside an interval: IcePop in Ring-1T, arXiv 2510.18855.
    """
    check_flat(proximal=proximal, behaviour=behaviour, mask=mask)
    if kind == "none":
        return mask.to(proximal.dtype)
    ratio = torch.exp(torch.where(mask, proximal.detach() - behaviour, 0.0))
    if kind == "truncated_is":
        weight = ratio.clamp(max=cap)
    else:
        weight = torch.where((ratio <= cap) & (ratio >= 1.0 / cap), ratio, 0.0)
    return weight * mask
