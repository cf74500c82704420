"""What an optimizer step reports."""

from __future__ import annotations

import msgspec
import numpy as np

from rollmill.algorithms.losses import LossStatistics


class Mismatch(msgspec.Struct, frozen=True, kw_only=True):
    """How far the trainer's log-probs before the update are from the behaviour log-probs, as sums over tokens.

    On sequences of the trainer's own weights the difference is pure numerics (another batch shape, another precision);
    on those with older tokens, or KV of older weights, it is mostly how far the policy has moved. The two are never
    mixed.

    Attributes:
        kl_sum: k3 estimate of KL(behaviour || trainer), summed.
    """

    tokens: int = 0
    absolute_sum: float = 0.0
    absolute_max: float = 0.0
    kl_sum: float = 0.0

    def __add__(self, other: Mismatch) -> Mismatch:
        return Mismatch(
            tokens=self.tokens + other.tokens,
            absolute_sum=self.absolute_sum + other.absolute_sum,
            absolute_max=max(self.absolute_max, other.absolute_max),
            kl_sum=self.kl_sum + other.kl_sum,
        )

    @classmethod
    def measure(cls, *, trainer: np.ndarray, behaviour: np.ndarray) -> Mismatch:
        """Return the mismatch of these tokens.

        Args:
            trainer: float [tokens] log-probs before the update.
            behaviour: float [tokens] log-probs when sampled.
        """
        if not len(trainer):
            return cls()
        difference = trainer.astype(np.float64) - behaviour.astype(np.float64)
        return cls(
            tokens=len(difference),
            absolute_sum=float(np.abs(difference).sum()),
            absolute_max=float(np.abs(difference).max()),
            kl_sum=float((np.expm1(difference) - difference).sum()),
        )

    def summary(self, name: str) -> dict[str, float]:
        """Return mean, max and KL per token under `mismatch_<name>_*`; nothing where no token was measured."""
        if not self.tokens:
            return {}
        return {
            f"mismatch_{name}_mean": self.absolute_sum / self.tokens,
            f"mismatch_{name}_max": self.absolute_max,
            f"mismatch_{name}_kl": self.kl_sum / self.tokens,
            f"mismatch_{name}_tokens": float(self.tokens),
        }


class StepMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """One optimizer update, in numbers.

    Attributes:
        loss: of the whole step.
        grad_norm: before clipping.
        loss_tokens: tokens in the loss (the denominator of token normalisation).
        computed_tokens: positions that went through the model.
        padded_tokens: positions that one padded row per sequence would have taken.
        sequences: sequences in the loss.
        staleness_mean, staleness_max: over sequences in the loss, in optimizer steps.
        mismatch_fresh: over sequences sampled with the trainer's present weights alone: pure numerics.
        mismatch_stale: over all others.
    """

    optimizer_step: int
    loss: float
    grad_norm: float
    learning_rate: float
    loss_tokens: int
    computed_tokens: int
    padded_tokens: int
    micro_batches: int
    sequences: int
    staleness_mean: float
    staleness_max: float
    model_flops: float
    statistics: LossStatistics
    mismatch_fresh: Mismatch
    mismatch_stale: Mismatch

    def scalars(self) -> dict[str, float]:
        """Return flat name -> value, for the step record."""
        return {
            "loss": self.loss,
            "grad_norm": self.grad_norm,
            "learning_rate": self.learning_rate,
            "loss_tokens": float(self.loss_tokens),
            "computed_tokens": float(self.computed_tokens),
            "packing_gain": self.padded_tokens / max(self.computed_tokens, 1),
            "micro_batches": float(self.micro_batches),
            "sequences": float(self.sequences),
            "staleness_mean": self.staleness_mean,
            "staleness_max": self.staleness_max,
            "model_flops": self.model_flops,
            **self.statistics.summary(),
            **self.mismatch_fresh.summary("fresh"),
            **self.mismatch_stale.summary("stale"),
        }
