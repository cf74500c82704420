"""Threads borrowed from cores that stand idle, for example while the trainer waits for data.

A replica with one thread leaves a core unused whenever nobody else computes. It takes that core's thread for its own
steps and gives it back as soon as the machine is busy. `threads_now` decides; `CoreBorrower` looks and tells torch.
"""

from __future__ import annotations

from collections.abc import Callable

import psutil

LOOK_EVERY_S = 0.25
"""Cores are looked at this often: a few decode steps."""
FREE = 0.7
"""So much of a core must have stood idle for each thread that is borrowed."""
BUSY = 0.15
"""Less idle time than this of a core: somebody else computes, or the borrowed threads are no longer fed."""


def threads_now(present: int, *, own: int, borrow: int, idle_cores: float) -> int:
    """Return how many threads the next steps take.

    Args:
        present: that the last steps took.
        own: that the replica has in any case.
        borrow: further ones that it may take.
        idle_cores: cores that stood idle on average since the last look; 0.5 is half of one.

    Example:
        >>> threads_now(1, own=1, borrow=1, idle_cores=0.9), threads_now(2, own=1, borrow=1, idle_cores=0.0)
        (2, 1)
        >>> threads_now(2, own=1, borrow=1, idle_cores=0.4)  # in between nothing changes
        2
    """
    if idle_cores < BUSY:
        return own
    return min(own + borrow, present + int(idle_cores + 1 - FREE))


def idle_core_seconds() -> float:
    """Return the seconds that all cores of the machine together have stood idle."""
    times = psutil.cpu_times()
    return times.idle + getattr(times, "iowait", 0.0)


class CoreBorrower:
    """Called before each step of an engine, on the thread that computes it.

    Args:
        own: threads that the replica has in any case.
        borrow: further ones that it may take.
        set_threads: tells the library that computes, on the calling thread.
        now_s: clock.
        idle_s: see `idle_core_seconds`.
    """

    def __init__(
        self,
        *,
        own: int,
        borrow: int,
        set_threads: Callable[[int], None],
        now_s: Callable[[], float],
        idle_s: Callable[[], float] = idle_core_seconds,
    ) -> None:
        self.threads = own
        self._own, self._borrow = own, borrow
        self._set_threads, self._now_s, self._idle_s = set_threads, now_s, idle_s
        self._looked_s, self._idle_before_s = now_s(), idle_s()

    def __call__(self) -> None:
        """Look at the cores if it is time, and take or give back threads."""
        now_s = self._now_s()
        passed_s = now_s - self._looked_s
        if passed_s < LOOK_EVERY_S:
            return
        idle_s = self._idle_s()
        idle_cores = (idle_s - self._idle_before_s) / passed_s
        self._looked_s, self._idle_before_s = now_s, idle_s
        threads = threads_now(self.threads, own=self._own, borrow=self._borrow, idle_cores=idle_cores)
        if threads != self.threads:
            self._set_threads(threads)
            self.threads = threads
