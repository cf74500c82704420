"""The book of seconds: every second of an owner belongs to exactly one cause.

The owner says when it turns from one cause to another, so the sum equals the wall time by construction;
`validate` proves it. Holds no clock and decides nothing.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable

import msgspec

from rollmill.errors import InvariantViolation

_RELATIVE_TOLERANCE = 1e-9
_ABSOLUTE_TOLERANCE_S = 1e-6


class TrainerCause(enum.StrEnum):
    """What a trainer's second was spent on."""

    STARTUP = "startup"
    WAIT_DATA = "wait_data"
    TRAIN = "train"
    PUBLISH = "publish"
    CHECKPOINT = "checkpoint"
    IDLE = "idle"
    SHUTDOWN = "shutdown"


class ReplicaCause(enum.StrEnum):
    """What a replica's second was spent on."""

    STARTUP = "startup"
    PREFILL = "prefill"
    DECODE = "decode"
    WEIGHT_LOAD = "weight_load"
    PAUSED = "paused"
    IDLE = "idle"
    SHUTDOWN = "shutdown"


TRAINER_CAUSES: tuple[str, ...] = tuple(cause.value for cause in TrainerCause)
REPLICA_CAUSES: tuple[str, ...] = tuple(cause.value for cause in ReplicaCause)


class SecondsReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a book of seconds says at one moment.

    Attributes:
        owner: whose seconds.
        wall_s: wall time covered, over all incarnations.
        seconds: cause -> seconds; they sum to `wall_s`.
    """

    owner: str
    wall_s: float
    seconds: dict[str, float]

    def validate(self) -> None:
        """Check that the causes sum to the wall time.

        Raises:
            InvariantViolation: if they do not, with both numbers.
        """
        total = math.fsum(self.seconds.values())
        if not math.isclose(total, self.wall_s, rel_tol=_RELATIVE_TOLERANCE, abs_tol=_ABSOLUTE_TOLERANCE_S):
            raise InvariantViolation(
                f"seconds of {self.owner} sum to {total:.6f} by cause but {self.wall_s:.6f} passed: {self.seconds}. "
                "A cause was booked twice or not at all; this is a bug of its ledger."
            )


def merge_reports(reports: Iterable[SecondsReport]) -> SecondsReport:
    """Return one report over several incarnations of one owner, in order.

    Time in which the owner did not exist belongs to no incarnation and is in no cause.

    Raises:
        InvariantViolation: if there is none, they have different owners, or one does not balance.
    """
    parts = list(reports)
    owners = list(dict.fromkeys(part.owner for part in parts))
    if len(owners) != 1:
        raise InvariantViolation(f"reports to merge must have one owner, got {owners or 'no report at all'}.")
    seconds: dict[str, float] = {}
    for part in parts:
        part.validate()
        for cause, spent in part.seconds.items():
            seconds[cause] = seconds.get(cause, 0.0) + spent
    return SecondsReport(owner=owners[0], wall_s=math.fsum(part.wall_s for part in parts), seconds=seconds)


class SecondsLedger:
    """Books the seconds of one owner, one cause at a time.

    Example:
        >>> book = SecondsLedger("trainer", start_s=10.0)
        >>> book.switch("train", at_s=12.0)
        >>> book.close(at_s=15.0)
        >>> book.seconds
        {'startup': 2.0, 'train': 3.0}
    """

    def __init__(self, owner: str, *, start_s: float, cause: str = "startup") -> None:
        self.owner = owner
        self._start_s = start_s
        self._cause = str(cause)
        self._since_s = start_s
        self._seconds: dict[str, float] = {}
        self._closed = False

    @property
    def cause(self) -> str:
        """The cause that the present second goes to."""
        return self._cause

    @property
    def wall_s(self) -> float:
        """Seconds booked so far; the running cause counts up to its last switch only."""
        return self._since_s - self._start_s

    @property
    def seconds(self) -> dict[str, float]:
        """Cause -> seconds booked so far."""
        return dict(self._seconds)

    def switch(self, cause: str, *, at_s: float) -> None:
        """Book the time since the last switch to its cause, and turn to another.

        Raises:
            InvariantViolation: if time went back or the book is closed.
        """
        self._book(at_s)
        self._cause = str(cause)

    def close(self, *, at_s: float) -> None:
        """Book the rest and take no more; closing again changes nothing."""
        if not self._closed:
            self._book(at_s)
            self._closed = True

    def report(self, *, at_s: float | None = None) -> SecondsReport:
        """Return the book; with `at_s`, the running cause counts up to that moment."""
        seconds = dict(self._seconds)
        wall_s = self.wall_s
        if at_s is not None and not self._closed:
            self._check_time(at_s)
            seconds[self._cause] = seconds.get(self._cause, 0.0) + at_s - self._since_s
            wall_s = at_s - self._start_s
        return SecondsReport(owner=self.owner, wall_s=wall_s, seconds=seconds)

    def validate(self) -> None:
        """Check that the causes sum to the wall time.

        Raises:
            InvariantViolation: if they do not.
        """
        self.report().validate()

    def _book(self, at_s: float) -> None:
        if self._closed:
            raise InvariantViolation(f"the seconds of {self.owner} are closed; nothing can be booked at {at_s:.3f}.")
        self._check_time(at_s)
        if at_s > self._since_s:
            self._seconds[self._cause] = self._seconds.get(self._cause, 0.0) + at_s - self._since_s
        self._since_s = at_s

    def _check_time(self, at_s: float) -> None:
        if at_s < self._since_s:
            raise InvariantViolation(
                f"the clock of {self.owner} went back from {self._since_s:.6f} to {at_s:.6f} s in {self._cause}; "
                "stamps of one ledger must come from one monotonic clock."
            )
