"""Confidence interval of a proportion.

Held-out accuracy is a share of `n` problems that were solved; the Wilson score interval keeps its coverage for small
`n` and for shares near 0 and 1, where the normal approximation leaves the unit interval.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec

Z_95 = 1.959963984540054
"""Two-sided 95 % quantile of the standard normal distribution."""


class Proportion(msgspec.Struct, frozen=True, kw_only=True):
    """A share of successes with its 95 % interval.

    Attributes:
        accuracy: successes / n, in [0, 1].
        low, high: ends of the interval, in [0, 1].
        n: trials.
    """

    accuracy: float
    low: float
    high: float
    n: int

    def as_dict(self) -> dict[str, Any]:
        """Return the four numbers as plain data."""
        return msgspec.to_builtins(self)


def wilson(successes: int, n: int, *, z: float = Z_95) -> tuple[float, float]:
    """Return the ends of the Wilson score interval.

    Args:
        successes: in [0, n].
        n: trials, at least 1.
        z: quantile of the standard normal distribution; the default gives 95 %.

    Raises:
        ValueError: if `n` is below 1 or `successes` lies outside [0, n].

    Example:
        >>> low, high = wilson(5, 10)
        >>> round(low, 4), round(high, 4)
        (0.2366, 0.7634)

    Reference:
        E. B. Wilson, "Probable Inference, the Law of Succession, and Statistical Inference", Journal of the American
        Statistical Association 22 (1927), 209-212.
    """
    if n < 1 or not 0 <= successes <= n:
        raise ValueError(f"a proportion needs 0 <= successes <= n and n >= 1, got {successes} of {n}")
    share = successes / n
    scale = 1 + z * z / n
    centre = (share + z * z / (2 * n)) / scale
    half = z / scale * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    # At 0 and n the ends are exactly 0 and 1; rounding must not push them past it.
    low = 0.0 if successes == 0 else max(0.0, centre - half)
    high = 1.0 if successes == n else min(1.0, centre + half)
    return low, high


def proportion(successes: int, n: int) -> Proportion:
    """Return the share with its 95 % interval.

    Raises:
        ValueError: as `wilson`.
    """
    low, high = wilson(successes, n)
    return Proportion(accuracy=successes / n, low=low, high=high, n=n)
