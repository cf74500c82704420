"""When a request is sent to a second replica because its first token is late. Pure.

The delay is a percentile of what first tokens took lately; the budget bounds the share of requests that are sent twice,
so that a slow fleet is not made slower.
"""

from __future__ import annotations

import bisect
from collections import deque

WINDOW = 256
LEAST = 16
"""First tokens that must have been seen before one can be called late."""
BURST = 4.0


class HedgeLaw:
    """Delay and budget of hedges.

    Args:
        budget: hedges per request, 0 to 1.
        percentile: of the last first tokens, beyond which one is late.

    Example:
        >>> law = HedgeLaw(budget=0.5, percentile=90.0)
        >>> for tenth in range(20):
        ...     law.first_token(tenth / 10)
        >>> law.delay_s()
        1.8
    """

    def __init__(self, *, budget: float, percentile: float) -> None:
        self._budget = budget
        self._share = percentile / 100.0
        self._allowance = 0.0
        self._recent: deque[float] = deque()
        self._sorted: list[float] = []

    def request(self) -> None:
        """Count a request: it adds to the budget."""
        self._allowance = min(self._allowance + self._budget, BURST)

    def first_token(self, took_s: float) -> None:
        """Hear how long a first token took."""
        if self._budget == 0:
            return
        if len(self._recent) == WINDOW:
            del self._sorted[bisect.bisect_left(self._sorted, self._recent.popleft())]
        self._recent.append(took_s)
        bisect.insort(self._sorted, took_s)

    def delay_s(self) -> float | None:
        """Return when a first token is late; `None` if hedging is off or too little is known."""
        if self._budget == 0 or len(self._sorted) < LEAST:
            return None
        return self._sorted[min(int(self._share * len(self._sorted)), len(self._sorted) - 1)]

    def take(self) -> bool:
        """Take a hedge out of the budget; return whether there was one."""
        if self._allowance < 1.0:
            return False
        self._allowance -= 1.0
        return True
