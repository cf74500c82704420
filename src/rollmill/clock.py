"""Clocks: the one way any part learns the time.

Decides nothing. `SystemClock` reads the machine's monotonic clock; `VirtualClock` is moved by hand, so
that a test or the twin runs an hour in a millisecond. Pure packages never hold a clock: the time reaches
them inside an event.
"""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Source of time for the shells around the pure core."""

    def now_s(self) -> float:
        """Return seconds since an arbitrary fixed start; never decreases."""
        ...

    def wall_s(self) -> float:
        """Return seconds since the Unix epoch, for records that people read."""
        ...


class SystemClock:
    """The machine's monotonic clock.

    `CLOCK_MONOTONIC` is shared by all processes of one machine, so stamps from the trainer and from the
    controller can be compared.
    """

    def now_s(self) -> float:
        """Return seconds of the machine's monotonic clock."""
        return time.monotonic()

    def wall_s(self) -> float:
        """Return seconds since the Unix epoch."""
        return time.time()


class VirtualClock:
    """A clock that moves only when told to.

    Example:
        >>> clock = VirtualClock()
        >>> clock.advance(2.5)
        >>> clock.now_s()
        2.5
    """

    def __init__(self, *, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now_s(self) -> float:
        """Return the virtual time."""
        return self._now_s

    def wall_s(self) -> float:
        """Return the virtual time too: a test has no other."""
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Move the clock forward.

        Raises:
            ValueError: if `seconds` is negative; time never goes back.
        """
        if seconds < 0:
            raise ValueError(f"a clock cannot go back by {-seconds} s")
        self._now_s += seconds
