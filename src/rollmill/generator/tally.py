"""Counts that stay small however long a replica serves: histograms, and sums over the last minute. Pure."""

from __future__ import annotations

import bisect
import collections
import math
from collections.abc import Sequence

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
"""Upper bounds for waits of a whole request: from an idle small model to a deadline."""
TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)
"""Upper bounds for the time between two tokens."""


class Histogram:
    """How many values lie between bounds, and their sum.

    Attributes:
        bounds: upper bounds, ascending; a value on a bound lies under it.
        counts: values between each bound and the one before, and last those above all bounds.
        total: their sum.

    Example:
        >>> waits = Histogram((1.0, 5.0))
        >>> for value in (0.5, 1.0, 7.0):
        ...     waits.observe(value)
        >>> waits.counts, waits.total
        ([2, 0, 1], 8.5)
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, *, times: int = 1) -> None:
        """Count a value, several times if it stands for several."""
        self.counts[bisect.bisect_left(self.bounds, value)] += times
        self.total += value * times


class RecentValues:
    """Quantiles of the values of the last `window_s` seconds; of the newest `most` of them, if there were more.

    Example:
        >>> waits = RecentValues(window_s=60, most=100)
        >>> for at_s, value in ((0.0, 9.0), (30.0, 1.0), (40.0, 2.0), (50.0, 3.0)):
        ...     waits.add(value, now_s=at_s)
        >>> waits.quantiles((0.5, 0.95), now_s=65.0)  # the first one is too old
        {0.5: 2.0, 0.95: 3.0}
    """

    def __init__(self, *, window_s: float = 60.0, most: int = 4096) -> None:
        self._window_s = window_s
        self._values: collections.deque[tuple[float, float]] = collections.deque(maxlen=most)

    def add(self, value: float, *, now_s: float) -> None:
        """Take a value."""
        self._values.append((now_s, value))

    def quantiles(self, shares: Sequence[float], *, now_s: float) -> dict[float, float]:
        """Return share -> the smallest value that at least this share of all lies at or under; empty without values."""
        while self._values and self._values[0][0] < now_s - self._window_s:
            self._values.popleft()
        values = sorted(value for _, value in self._values)
        return {share: values[max(0, math.ceil(share * len(values)) - 1)] for share in shares} if values else {}


class Recent:
    """The sum of what happened in the last `window_s` seconds, in buckets of a second.

    Example:
        >>> tokens = Recent(now_s=0.0, window_s=60)
        >>> tokens.add(120.0, since_s=0.0, now_s=4.0)
        >>> tokens.per_s(now_s=4.0)
        30.0
        >>> tokens.per_s(now_s=62.0)  # the seconds from 2 on are left
        1.0
    """

    def __init__(self, *, now_s: float, window_s: int = 60) -> None:
        self._began_s = now_s
        self._window_s = window_s
        self._buckets: collections.deque[tuple[int, float]] = collections.deque()

    def add(self, amount: float, *, now_s: float, since_s: float | None = None) -> None:
        """Count an amount now, or spread evenly over the time since then."""
        last = int(now_s)
        first = last if since_s is None else max(int(since_s), last - self._window_s)
        # The second that has just begun gets none of what came to be before it.
        seconds = range(first, last) if last > first else range(last, last + 1)
        for second in seconds:
            self._put(second, amount / len(seconds))
        self._forget(now_s)

    def _put(self, second: int, amount: float) -> None:
        if self._buckets and self._buckets[-1][0] >= second:
            at, before = self._buckets[-1]
            self._buckets[-1] = (at, before + amount)
        else:
            self._buckets.append((second, amount))

    def _forget(self, now_s: float) -> None:
        while self._buckets and self._buckets[0][0] < now_s - self._window_s:
            self._buckets.popleft()

    def sum(self, *, now_s: float) -> float:
        """Return what happened in the window."""
        self._forget(now_s)
        return sum(amount for _, amount in self._buckets)

    def per_s(self, *, now_s: float) -> float:
        """Return the rate in the window, or since the start where that is shorter (but not under a second)."""
        return self.sum(now_s=now_s) / max(1.0, min(float(self._window_s), now_s - self._began_s))
