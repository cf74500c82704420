"""Waiting for another process at start-up, with a deadline and a name."""

from __future__ import annotations

from collections.abc import Callable

from rollmill.clock import Clock
from rollmill.errors import DeadlineExceeded


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
