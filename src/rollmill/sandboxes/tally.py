"""What happened to sandboxes, counted as it happens: starts by phase, ends by reason, orphans swept. No I/O.

A provider tells its observer, and so does whoever keeps a queue in front of it; `metrics` shows the counts.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec

from rollmill.sandboxes.records import Death, DeathReason, Record

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
"""Upper bounds of start phases: a pool's hit takes a millisecond, a queue minutes."""


class Observer(Protocol):
    """What a provider tells."""

    def started(self, *, create_s: float, ready_s: float) -> None:
        """A sandbox answers: so long until its first process ran, and from then until it answered."""
        ...

    def ended(self, end: Death) -> None:
        """A sandbox has ended, or a start failed."""
        ...

    def swept(self, *, removed: int, left: int) -> None:
        """A sweep removed what killed owners left, and could not remove some of it."""
        ...


class Spread(Record, frozen=True, kw_only=True):
    """How many values lie between bounds.

    Attributes:
        bounds: upper bounds, ascending; a value on a bound lies under it.
        counts: values between each bound and the one before, and last those above all bounds.
        total: their sum.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float = 0.0

    def with_value(self, value: float) -> Spread:
        """Return it with one value more.

        Example:
            >>> waits = spread((1.0, 5.0)).with_value(0.5).with_value(1.0).with_value(7.0)
            >>> waits.counts, waits.total
            ((2, 0, 1), 8.5)
        """
        place = bisect.bisect_left(self.bounds, value)
        counts = tuple(count + (number == place) for number, count in enumerate(self.counts))
        return Spread(bounds=self.bounds, counts=counts, total=self.total + value)


def spread(bounds: Sequence[float] = SECONDS) -> Spread:
    """Return an empty one."""
    return Spread(bounds=tuple(bounds), counts=(0,) * (len(bounds) + 1))


class TallyStatistics(Record, frozen=True, kw_only=True):
    """What was counted.

    Attributes:
        start_s: seconds of starts by phase: `queue`, `create`, `ready`.
        ends: sandboxes that ended, by reason.
        swept: orphans removed.
        unswept: orphans that did not go in time, summed over sweeps.
    """

    start_s: Mapping[str, Spread]
    ends: Mapping[DeathReason, int] = msgspec.field(default_factory=dict)
    swept: int = 0
    unswept: int = 0


class SandboxTally(Observer):
    """Counts.

    Example:
        >>> tally = SandboxTally()
        >>> tally.queued(0.2)
        >>> tally.started(create_s=0.004, ready_s=0.008)
        >>> tally.statistics().start_s["ready"].total
        0.008
    """

    def __init__(self) -> None:
        self._start_s = {phase: spread() for phase in ("queue", "create", "ready")}
        self._ends: Counter[DeathReason] = Counter()
        self._swept, self._unswept = 0, 0

    def statistics(self) -> TallyStatistics:
        """Return what was counted so far."""
        return TallyStatistics(
            start_s=dict(self._start_s), ends=dict(self._ends), swept=self._swept, unswept=self._unswept
        )

    def queued(self, queue_s: float) -> None:
        """A sandbox was asked for, and its creation began so much later."""
        self._start_s["queue"] = self._start_s["queue"].with_value(queue_s)

    def started(self, *, create_s: float, ready_s: float) -> None:
        """A sandbox answers."""
        for phase, value in (("create", create_s), ("ready", ready_s)):
            self._start_s[phase] = self._start_s[phase].with_value(value)

    def ended(self, end: Death) -> None:
        """A sandbox has ended."""
        self._ends[end.reason] += 1

    def swept(self, *, removed: int, left: int) -> None:
        """A sweep has run."""
        self._swept += removed
        self._unswept += left
