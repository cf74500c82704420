"""Threads borrowed from cores that nobody else uses: the trainer's while it waits for data, a replica's while it waits.

A process with one thread leaves a core unused whenever nobody else computes. It takes that core's thread for its next
piece of work and gives it back as soon as somebody else wants the core. What others use is what all cores were busy
with, less what this process itself computed: so two borrowers that wake at the same time both give back.
`threads_now` decides; `CoreBorrower` looks and tells whoever computes.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path

import psutil

LOOK_EVERY_S = 0.25
"""Cores are looked at this often: a few decode steps, or one micro-batch."""
FREE = 0.7
"""So much of a core must have been free for each thread that is borrowed."""
KEPT = 0.5
"""A borrowed thread is given back if less than this of its core was free."""


def threads_now(present: int, *, own: int, borrow: int, free_cores: float) -> int:
    """Return how many threads the next piece of work takes.

    Args:
        present: that the last one took.
        own: that the process has in any case.
        borrow: further ones that it may take.
        free_cores: cores that others left free on average since the last look, this process's own included.

    Example:
        >>> threads_now(1, own=1, borrow=1, free_cores=1.9), threads_now(2, own=1, borrow=1, free_cores=1.2)
        (2, 1)
        >>> threads_now(2, own=1, borrow=1, free_cores=1.6)  # in between nothing changes
        2
    """
    most = own + borrow
    taken = int(free_cores + 1 - FREE)
    kept = min(present, int(free_cores + 1 - KEPT))
    return max(own, min(most, max(taken, kept)))


def idle_core_seconds() -> float:
    """Return the seconds that all cores of the machine together have stood idle."""
    times = psutil.cpu_times()
    return times.idle + getattr(times, "iowait", 0.0)


def has_quota(root: Path = Path("/")) -> bool:
    """Return whether processor time is rationed for this process, as in a container with a limit.

    The cores of the machine say nothing then: an idle one is not this process's to take.

    Args:
        root: where `proc` and `sys` are mounted; another one in tests.
    """
    try:
        groups = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return False
    for line in groups:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        top = root / "sys/fs/cgroup" / ("cpu" if controllers else "")
        place = top / path.lstrip("/")
        # In a container the path is often the host's, and the group itself is mounted at the top.
        for folder in (*(one for one in (place, *place.parents) if top in (one, *one.parents)), top):
            if _rations(folder):
                return True
    return False


def _rations(folder: Path) -> bool:
    for name, free in (("cpu.max", "max"), ("cpu.cfs_quota_us", "-1")):
        with contextlib.suppress(OSError, IndexError):
            return (folder / name).read_text().split()[0] != free
    return False


class CoreBorrower:
    """Called before each piece of work, on the thread that computes it.

    Args:
        own: threads that the process has in any case.
        borrow: further ones that it may take.
        set_threads: tells the library that computes, on the calling thread.
        now_s: clock.
        idle_s: see `idle_core_seconds`.
        own_s: processor seconds of this process.
        machine_cores: cores that `idle_s` is of.
        usable_cores: cores that this process may use.
        rationed: see `has_quota`; nothing is borrowed then.
    """

    def __init__(
        self,
        *,
        own: int,
        borrow: int,
        set_threads: Callable[[int], None],
        now_s: Callable[[], float],
        idle_s: Callable[[], float] = idle_core_seconds,
        own_s: Callable[[], float] = time.process_time,
        machine_cores: int | None = None,
        usable_cores: int | None = None,
        rationed: bool | None = None,
    ) -> None:
        self.threads = own
        rationed = has_quota() if rationed is None else rationed
        self._own, self._borrow = own, 0 if rationed else borrow
        self._set_threads, self._now_s, self._idle_s, self._own_s = set_threads, now_s, idle_s, own_s
        self._machine_cores = machine_cores or os.cpu_count() or 1
        self._usable_cores = usable_cores or len(os.sched_getaffinity(0))
        self._looked = now_s(), idle_s(), own_s()

    def __call__(self) -> None:
        """Look at the cores if it is time, and take or give back threads."""
        looked = self._now_s(), self._idle_s(), self._own_s()
        passed_s, idle_s, own_s = (now - before for now, before in zip(looked, self._looked, strict=True))
        if passed_s < LOOK_EVERY_S:
            return
        self._looked = looked
        others = max(0.0, self._machine_cores - (idle_s + own_s) / passed_s)
        free_cores = self._usable_cores - others
        threads = threads_now(self.threads, own=self._own, borrow=self._borrow, free_cores=free_cores)
        if threads != self.threads:
            self._set_threads(threads)
            self.threads = threads
