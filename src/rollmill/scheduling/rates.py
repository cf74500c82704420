"""Measured rates that the stock is sized from. Decides nothing; holds numbers only.

Each rate is a ratio of two decayed sums that start from the prior as pseudo-observations, so that a cold
start is not starved and the prior fades as measurements come.
"""

from __future__ import annotations

from dataclasses import dataclass

from rollmill.scheduling.settings import SchedulerSettings

_DECAY = 0.9
_PRIOR_OBSERVATIONS = 2.0


@dataclass(slots=True)
class Ratio:
    """Decayed numerator over decayed denominator.

    Example:
        >>> rate = Ratio.from_prior(0.5, observations=2.0, decay=1.0)
        >>> rate.observe(1.0, 1.0)
        >>> round(rate.value, 4)  # (0.5 * 2 + 1) / (2 + 1)
        0.6667
    """

    numerator: float
    denominator: float
    decay: float

    @classmethod
    def from_prior(
        cls, value: float, *, observations: float = _PRIOR_OBSERVATIONS, unit: float = 1.0, decay: float = _DECAY
    ) -> Ratio:
        """Start from `observations` pseudo-observations of `value`, each with a denominator of `unit`."""
        return cls(numerator=value * unit * observations, denominator=unit * observations, decay=decay)

    @property
    def value(self) -> float:
        """The smoothed ratio."""
        return self.numerator / self.denominator

    def observe(self, numerator: float, denominator: float) -> None:
        """Add one observation; the older ones lose weight."""
        self.numerator = self.numerator * self.decay + numerator
        self.denominator = self.denominator * self.decay + denominator


@dataclass(slots=True)
class Rates:
    """Consumption, yield and latency.

    Attributes:
        consumption: rollouts the trainer consumes per second while it trains.
        signal: share of closed groups with signal.
        group_s: seconds from dispatch to close of a group.
        refresh_s: seconds from an optimizer update until all replicas serve its weights.
    """

    consumption: Ratio
    signal: Ratio
    group_s: Ratio
    refresh_s: Ratio

    @classmethod
    def from_priors(cls, settings: SchedulerSettings) -> Rates:
        """Start from the configured priors."""
        batch_rollouts = settings.batch_groups * settings.group_size
        return cls(
            consumption=Ratio.from_prior(batch_rollouts / settings.prior_step_s, unit=settings.prior_step_s),
            signal=Ratio.from_prior(settings.prior_yield, observations=8.0, decay=0.98),
            group_s=Ratio.from_prior(settings.prior_group_s, observations=4.0, decay=0.95),
            refresh_s=Ratio.from_prior(settings.prior_step_s),
        )
