"""An asyncio loop on a virtual clock: time jumps to the next timer as soon as nothing else can happen.

A test with deadlines of minutes runs in milliseconds, in one possible order. It is for coroutines that wait for timers
and for each other. Threads, processes and sockets live in real time and do not belong here.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

from rollmill.clock import VirtualClock
from rollmill.errors import DeadlineExceeded

T = TypeVar("T")


def run_virtual(main: Coroutine[Any, Any, T], *, clock: VirtualClock | None = None) -> T:
    """Run a coroutine to its end on a loop whose time is the clock's.

    Args:
        main: what to run.
        clock: give the same one to the parts under test, so that they and the loop agree; made new if `None`.

    Raises:
        DeadlineExceeded: if everything waits and no timer is left: a real run would hang for ever.

    Example:
        >>> clock = VirtualClock()
        >>> run_virtual(asyncio.sleep(3600, "done"), clock=clock)
        'done'
        >>> clock.now_s()
        3600.0
    """
    clock = VirtualClock() if clock is None else clock
    with asyncio.Runner(loop_factory=lambda: _VirtualLoop(clock)) as runner:
        return runner.run(main)


class _VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock
        super().__init__(_JumpingSelector(clock))

    def time(self) -> float:
        return self._clock.now_s()


class _JumpingSelector(selectors.SelectSelector):
    """Never sleeps: where the loop would, it moves the clock."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__()
        self._clock = clock
        self._stalled = False

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if ready or timeout == 0:
            return ready
        if timeout is None:
            if self._stalled:  # raised once already: the runner is cancelling what is left
                return super().select(None)
            self._stalled = True
            raise DeadlineExceeded(
                f"at {self._clock.now_s():g} s of virtual time every task waits and no timer is set: a real run would "
                "hang. Some wait has no deadline."
            )
        self._clock.advance(max(0.0, timeout))
        return ready
