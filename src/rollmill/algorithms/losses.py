"""Policy losses over flat packed tokens.

Each surrogate turns ratios and advantages into a loss per token; `token_weights` turns those into a sum whose
denominator belongs to the whole optimizer step, so that the gradient does not depend on how the batch was split.
Decides nothing about packing, devices or the optimizer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from rollmill.algorithms.corrections import CorrectionKind, correction_weights
from rollmill.algorithms.kl import k3
from rollmill.algorithms.shapes import check_flat

LossKind = Literal["ppo", "gspo", "dapo", "cispo"]
Normalisation = Literal["token", "sequence", "constant"]

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are cut here before they are exponentiated: far beyond every clip, but 0 * inf in a gradient is NaN."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBatch:
    """Packed tokens of one micro-batch; sequences are never split over micro-batches.

    Attributes:
        logprobs: float [tokens], under the policy that is trained; carries the gradient.
        proximal: float [tokens], under the policy before the update; detached.
        behaviour: float [tokens], when sampled.
        advantages: float [tokens], of the token's sequence.
        mask: bool [tokens]; False tokens are in neither numerator nor denominator.
        sequence_index: int64 [tokens], which sequence of the micro-batch a token belongs to.
        reference: float [tokens], under the reference policy; `None` without KL.
    """

    logprobs: torch.Tensor
    proximal: torch.Tensor
    behaviour: torch.Tensor
    advantages: torch.Tensor
    mask: torch.Tensor
    sequence_index: torch.Tensor
    reference: torch.Tensor | None = None

    def __post_init__(self) -> None:
        check_flat(
            logprobs=self.logprobs,
            proximal=self.proximal,
            behaviour=self.behaviour,
            advantages=self.advantages,
            mask=self.mask,
            sequence_index=self.sequence_index,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSettings:
    """How the loss is formed; see `rollmill.config.schema.AlgorithmSettings` for the meaning of each."""

    loss: LossKind = "ppo"
    clip_low: float = 0.2
    clip_high: float = 0.2
    normalisation: Normalisation = "token"
    correction: CorrectionKind = "clipped_is"
    correction_cap: float = 2.0
    kl_coefficient: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LossStatistics:
    """Sums over the masked tokens of one micro-batch; sums (and one maximum) can be added over micro-batches."""

    tokens: int = 0
    clipped: float = 0.0
    ratio_sum: float = 0.0
    ratio_max: float = 0.0
    weight_sum: float = 0.0
    zero_weight: float = 0.0
    kl_sum: float = 0.0

    def __add__(self, other: LossStatistics) -> LossStatistics:
        return LossStatistics(
            tokens=self.tokens + other.tokens,
            clipped=self.clipped + other.clipped,
            ratio_sum=self.ratio_sum + other.ratio_sum,
            ratio_max=max(self.ratio_max, other.ratio_max),
            weight_sum=self.weight_sum + other.weight_sum,
            zero_weight=self.zero_weight + other.zero_weight,
            kl_sum=self.kl_sum + other.kl_sum,
        )

    def summary(self) -> dict[str, float]:
        """Return the statistics as means over the tokens in the loss."""
        n = max(self.tokens, 1)
        return {
            "clip_fraction": self.clipped / n,
            "ratio_mean": self.ratio_sum / n,
            "ratio_max": self.ratio_max,
            "correction_weight_mean": self.weight_sum / n,
            "correction_masked_fraction": self.zero_weight / n,
            "kl_reference": self.kl_sum / n,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class LossOutput:
    """The micro-batch's share of the step's loss.

    Attributes:
        loss: scalar; shares of one step add up to its loss.
        per_token: float [tokens], detached, before normalisation; says which sequence is not finite.
    """

    loss: torch.Tensor
    per_token: torch.Tensor
    statistics: LossStatistics


def loss_denominator(
    normalisation: Normalisation, *, sequence_tokens: Sequence[int], batch_rollouts: int, max_new_tokens: int
) -> float:
    """Return the denominator of a whole optimizer step.

    Args:
        sequence_tokens: tokens in the loss of every sequence of the step, also of those with advantage 0 that need not
            be computed: they are in the loss with the value 0.
        batch_rollouts: rollouts of a full batch, for `constant`: how many count must not change a token's weight.
        max_new_tokens: cap on a sequence's output, for `constant`.

    Reference:
        token: DAPO, arXiv 2503.14476, eq. 8. sequence: GRPO, arXiv 2402.03300, eq. 3. constant: Dr. GRPO,
        arXiv 2503.20783, section 3.2.
    """
    if normalisation == "token":
        return float(sum(sequence_tokens))
    if normalisation == "constant":
        return float(batch_rollouts * max_new_tokens)
    return float(sum(1 for tokens in sequence_tokens if tokens > 0))


def token_weights(
    normalisation: Normalisation, *, mask: torch.Tensor, sequence_index: torch.Tensor, denominator: float
) -> torch.Tensor:
    """Return float32 [tokens]: the share of each token in the step's loss; 0 where masked.

    Args:
        denominator: `loss_denominator` of the whole step, not of this micro-batch.
    """
    check_flat(mask=mask, sequence_index=sequence_index)
    weights = mask.to(torch.float32) / denominator
    if normalisation == "sequence":
        weights = weights / _sequence_sums(mask.to(torch.float32), sequence_index)[sequence_index].clamp(min=1.0)
    return weights


def policy_loss(batch: TokenBatch, *, settings: LossSettings, denominator: float) -> LossOutput:
    """Return the micro-batch's share of the loss.

    Decoupled PPO: the correction weighs tokens by proximal / behaviour, and the clip acts on policy / proximal. With
    `correction = none` there is no such weight, and the clip acts on policy / behaviour.

    With one update per batch policy / proximal is 1 in value, so no clip is active then; the bound on old samples is
    the correction's cap. Its weight is per token for every surrogate. Where `clipped_is` looks at how far the policy
    has gone, it looks at what the surrogate clips: the token, or the sequence for GSPO; CISPO takes no token's gradient
    away, so `clipped_is` only truncates there.

    Args:
        denominator: `loss_denominator` of the whole step.

    Reference:
        Decoupled objective: arXiv 2110.00641, eq. 2; AReaL, arXiv 2505.24298, eq. 5.
    """
    mask = batch.mask
    anchor = batch.behaviour if settings.correction == "none" else batch.proximal
    weight = _correction(batch, settings=settings)
    log_ratio = torch.where(mask, batch.logprobs - anchor, 0.0)
    surrogate, ratio, clipped = _surrogate(batch, log_ratio, settings=settings)
    per_token = weight * surrogate
    kl = torch.zeros_like(per_token)
    if batch.reference is not None:
        kl = k3(torch.where(mask, batch.logprobs, 0.0), torch.where(mask, batch.reference, 0.0))
        per_token = per_token + settings.kl_coefficient * kl
    shares = token_weights(
        settings.normalisation, mask=mask, sequence_index=batch.sequence_index, denominator=denominator
    )
    # not a product with the mask: 0 * NaN is NaN, and a masked token must reach neither the sum nor the gradient
    per_token = torch.where(mask, per_token, 0.0)
    return LossOutput(
        loss=(shares * per_token).sum(),
        per_token=per_token.detach(),
        statistics=_statistics(ratio.detach(), clipped=clipped, weight=weight, kl=kl.detach(), mask=mask),
    )


def _correction(batch: TokenBatch, *, settings: LossSettings) -> torch.Tensor:
    kind, drift = settings.correction, None
    if kind == "clipped_is" and settings.loss == "cispo":
        kind = "truncated_is"
    if kind == "clipped_is" and settings.loss == "gspo":
        log_ratio = torch.where(batch.mask, batch.proximal - batch.behaviour, 0.0)
        drift = sequence_log_ratio(log_ratio, mask=batch.mask, sequence_index=batch.sequence_index)
    return correction_weights(
        kind,
        proximal=batch.proximal,
        behaviour=batch.behaviour,
        advantages=batch.advantages,
        mask=batch.mask,
        cap=settings.correction_cap,
        drift=drift,
    )


def _surrogate(
    batch: TokenBatch, log_ratio: torch.Tensor, *, settings: LossSettings
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    low, high = settings.clip_low, settings.clip_high
    advantages = torch.where(batch.mask, batch.advantages, 0.0)
    if settings.loss == "gspo":
        log_ratio = sequence_log_ratio(log_ratio, mask=batch.mask, sequence_index=batch.sequence_index)
    ratio = torch.exp(log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))
    if settings.loss == "cispo":
        loss, clipped = cispo_loss(
            torch.where(batch.mask, batch.logprobs, 0.0), ratio, advantages, clip_low=low, clip_high=high
        )
    else:
        # DAPO is this clip with clip_high above clip_low, and token normalisation
        loss, clipped = clipped_loss(ratio, advantages, clip_low=low, clip_high=high)
    return loss, ratio, clipped


def clipped_loss(
    ratio: torch.Tensor, advantages: torch.Tensor, *, clip_low: float, clip_high: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (loss, clipped) per token: -min(r A, clip(r, 1 - low, 1 + high) A).

    Args:
        ratio: float [tokens], policy over anchor; carries the gradient.
        advantages: float [tokens].

    Reference:
        PPO: arXiv 1707.06347, eq. 7. Separate upper bound ("clip-higher"): DAPO, arXiv 2503.14476, eq. 10.
    """
    check_flat(ratio=ratio, advantages=advantages)
    plain = ratio * advantages
    bounded = ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages
    return -torch.minimum(plain, bounded), bounded < plain


def sequence_log_ratio(log_ratio: torch.Tensor, *, mask: torch.Tensor, sequence_index: torch.Tensor) -> torch.Tensor:
    """Return float [tokens]: the mean log-ratio of the token's sequence, the same for all its tokens.

    Reference:
        GSPO: arXiv 2507.18071, eq. 7: s = exp(mean over tokens of the log-ratio).
    """
    check_flat(log_ratio=log_ratio, mask=mask, sequence_index=sequence_index)
    sums = _sequence_sums(torch.where(mask, log_ratio, 0.0), sequence_index)
    counts = _sequence_sums(mask.to(log_ratio.dtype), sequence_index).clamp(min=1.0)
    return (sums / counts)[sequence_index]


def cispo_loss(
    logprobs: torch.Tensor, ratio: torch.Tensor, advantages: torch.Tensor, *, clip_low: float, clip_high: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (loss, clipped) per token: -sg(clip(r, 1 - low, 1 + high)) A log pi; no token loses its gradient.

    Reference:
        CISPO: arXiv 2506.13585 (MiniMax-M1), eq. 4 and 5.
    """
    check_flat(logprobs=logprobs, ratio=ratio, advantages=advantages)
    ratio = ratio.detach()
    bounded = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    return -bounded * advantages * logprobs, bounded != ratio


def _sequence_sums(values: torch.Tensor, sequence_index: torch.Tensor) -> torch.Tensor:
    sequences = int(sequence_index.max()) + 1 if len(sequence_index) else 0
    return torch.zeros(sequences, dtype=values.dtype).index_add(0, sequence_index, values)


def _statistics(
    ratio: torch.Tensor, *, clipped: torch.Tensor, weight: torch.Tensor, kl: torch.Tensor, mask: torch.Tensor
) -> LossStatistics:
    tokens = int(mask.sum())
    if not tokens:
        return LossStatistics()
    return LossStatistics(
        tokens=tokens,
        clipped=float(clipped[mask].sum()),
        ratio_sum=float(ratio[mask].sum()),
        ratio_max=float(ratio[mask].max()),
        weight_sum=float(weight[mask].sum()),
        zero_weight=float((weight[mask] == 0).sum()),
        kl_sum=float(kl[mask].sum()),
    )
