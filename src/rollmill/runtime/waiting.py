"""Waiting for another process at start-up, with a deadline and a name."""

from __future__ import annotations

from collections.abc import Callable

from rollmill.clock import Clock
from rollmill.errors import DeadlineExceeded
from rollmill.runtime.incarnation import Incarnation, Preflight, read_record
from rollmill.runtime.layout import ProcessLayout

PREFLIGHT_WAIT_S = 960.0
"""Longer than the supervisor's deadline for the preflight, which says what is wrong."""

INCARNATION_WAIT_S = 330.0
"""Longer than the supervisor's deadline for the reconciliation."""


def wait_for_preflight(layout: ProcessLayout, *, wait: Callable[[float], bool], clock: Clock) -> Preflight:
    """Return what the controller found, once it has found it; if it finds a mistake, this process is ended.

    Args:
        wait: of a doorbell that was bound before this call.

    Raises:
        DeadlineExceeded: after PREFLIGHT_WAIT_S.
    """
    wait_until(layout.preflight.exists, wait=wait, clock=clock, deadline_s=PREFLIGHT_WAIT_S, what="the preflight")
    return read_record(layout.preflight, Preflight)


def wait_for_incarnation(
    layout: ProcessLayout, number: int, *, wait: Callable[[float], bool], clock: Clock
) -> Incarnation:
    """Return the record of this incarnation, or of a later one, once the books have gone back to where it begins.

    Args:
        wait: of a doorbell that was bound before this call.

    Raises:
        DeadlineExceeded: after INCARNATION_WAIT_S.
    """

    def begun() -> bool:
        return read_record(layout.incarnation, Incarnation).number >= number

    wait_until(
        begun,
        wait=wait,
        clock=clock,
        deadline_s=INCARNATION_WAIT_S,
        what="the controller to go back to the newest checkpoint",
    )
    return read_record(layout.incarnation, Incarnation)


def wait_until(
    predicate: Callable[[], bool], *, wait: Callable[[float], bool], clock: Clock, deadline_s: float, what: str
) -> None:
    """Wait until the predicate holds, looking again at every ring of the bell and at least once a second.

    Args:
        wait: blocks for at most this many seconds, or until the bell rings.
        deadline_s: seconds from now.
        what: named in the error.

    Raises:
        DeadlineExceeded: naming what was waited for.
    """
    until_s = clock.now_s() + deadline_s
    while not predicate():
        left_s = until_s - clock.now_s()
        if left_s <= 0:
            raise DeadlineExceeded(f"waited {deadline_s:.0f} s for {what}; the logs of the other processes say why.")
        wait(min(left_s, 1.0))
