"""Circuit breaker: whoever fails again and again is left alone for a while, then asked once. Pure.

closed --failures in a row--> open --open_s--> half-open, one probe --success--> closed
                               ^------failure, twice as long------'
"""

from __future__ import annotations

import enum

MAX_BACKOFF = 16.0


class BreakerState(enum.StrEnum):
    """Where a breaker stands."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class Breaker:
    """Breaker of one provider or one image.

    Args:
        failures: in a row that open it.
        open_s: how long it stays open; each failed probe doubles it, up to 16 times.

    Example:
        >>> breaker = Breaker(failures=2, open_s=10.0)
        >>> for at_s in (0.0, 1.0):
        ...     breaker.failed(now_s=at_s)
        >>> [breaker.allows(now_s=at_s) for at_s in (2.0, 10.9, 11.0)]
        [False, False, True]
    """

    __slots__ = ("_backoff", "_closed", "_limit", "_open_s", "_probing", "failures", "reopens_s")

    def __init__(self, *, failures: int, open_s: float) -> None:
        self._limit, self._open_s = failures, open_s
        self._closed, self._probing = True, False
        self._backoff = 1.0
        self.failures = 0
        self.reopens_s = 0.0

    @property
    def closed(self) -> bool:
        """Return whether everybody passes."""
        return self._closed

    def state(self, *, now_s: float) -> BreakerState:
        """Return where it stands."""
        if self._closed:
            return BreakerState.CLOSED
        return BreakerState.OPEN if now_s < self.reopens_s else BreakerState.HALF_OPEN

    def allows(self, *, now_s: float) -> bool:
        """Return whether a start may begin now."""
        return self._closed or (now_s >= self.reopens_s and not self._probing)

    def began(self) -> bool:
        """Note a start; return whether it is the probe."""
        if self._closed:
            return False
        self._probing = True
        return True

    def succeeded(self) -> None:
        """Close: something worked."""
        self._closed, self._probing = True, False
        self.failures, self._backoff = 0, 1.0

    def failed(self, *, now_s: float, probe: bool = False) -> None:
        """Count a failure.

        Args:
            now_s: time.
            probe: whether it was the probe's; a start from before the opening says nothing new.
        """
        self.failures += 1
        if probe:
            self._backoff = min(2 * self._backoff, MAX_BACKOFF)
            self._open(now_s)
        elif self._closed and self.failures >= self._limit:
            self._open(now_s)

    def undecided(self) -> None:
        """The probe ended without an answer; another one may begin."""
        self._probing = False

    def _open(self, now_s: float) -> None:
        self._closed, self._probing = False, False
        self.reopens_s = now_s + self._open_s * self._backoff
