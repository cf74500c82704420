"""Keeps requests from a replica that fails them, and lets one through from time to time to see. Pure.

closed --failures in a row--> open --time is over--> half-open --probe succeeds--> closed
                                ^------------- probe fails ---------------/
"""

from __future__ import annotations

MAX_BACKOFF = 16.0


class Breaker:
    """Circuit breaker of one replica.

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

    __slots__ = ("_backoff", "_failures", "_limit", "_open_s", "_open_until_s", "_probing", "closed")

    def __init__(self, *, failures: int, open_s: float) -> None:
        self.closed = True
        self._limit = failures
        self._open_s = open_s
        self._failures = 0
        self._backoff = 1.0
        self._open_until_s = 0.0
        self._probing = False

    def allows(self, *, now_s: float) -> bool:
        """Return whether a request may be sent now."""
        return self.closed or (now_s >= self._open_until_s and not self._probing)

    def sent(self) -> None:
        """A request is being sent; on an open breaker it is the probe."""
        if not self.closed:
            self._probing = True

    def succeeded(self) -> None:
        """A request was answered: all is well again."""
        self.closed, self._probing = True, False
        self._failures, self._backoff = 0, 1.0

    def failed(self, *, now_s: float) -> None:
        """A request failed."""
        if not self.closed:
            # Also a request that was sent before it opened says that the replica still fails.
            if self._probing:
                self._backoff = min(2 * self._backoff, MAX_BACKOFF)
            self._open(now_s)
            return
        self._failures += 1
        if self._failures >= self._limit:
            self._open(now_s)

    def undecided(self) -> None:
        """A request ended without saying anything about the replica; another one may probe."""
        self._probing = False

    def _open(self, now_s: float) -> None:
        self.closed, self._probing = False, False
        self._open_until_s = now_s + self._open_s * self._backoff
