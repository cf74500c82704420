"""Estimators of the KL divergence from log-probs of sampled tokens."""

from __future__ import annotations

import torch

from rollmill.algorithms.shapes import check_flat


def k3(logprobs: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return the k3 estimate of KL(p || q) per token: q/p - log(q/p) - 1, unbiased and never negative.

    Args:
        logprobs: float [tokens], log p of tokens that were sampled from p.
        other: float [tokens], log q of the same tokens.

    Reference:
        John Schulman, "Approximating KL divergence" (2020); as used in GRPO, arXiv 2402.03300, eq. 4.
    """
    check_flat(logprobs=logprobs, other=other)
    # beyond this the estimate says no more than "far", and its exponential would overflow the gradient
    difference = (other - logprobs).clamp(max=20.0)
    # expm1 keeps the digits where the policies are close: exp(d) - 1 - d would cancel to noise
    return torch.expm1(difference) - difference
