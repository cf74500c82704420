"""What a run costs, seen from outside: CPU seconds and memory of a process tree over time, and the machine."""

from __future__ import annotations

import bisect
import os
import platform
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

CPU_EVERY_S = 0.5
TREE_EVERY_S = 2.0
MEMORY_EVERY_S = 5.0


@dataclass
class TreeSampler:
    """Samples a process and its descendants until the process ends. Start it as a context manager.

    A descendant that was reaped counts through its parent's `children` times, so nothing is lost when one ends.
    Its own cost is that of a few reads of /proc per second, the same for both systems.

    Args:
        pid: root of the tree.
    """

    pid: int
    times_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    peak_pss_bytes: int = 0
    _stop: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> TreeSampler:
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def cpu_at(self, at_s: float) -> float:
        """Return CPU seconds of the tree at a time of the monotonic clock, interpolated between two samples."""
        return interpolate(self.times_s, self.cpu_s, at=at_s)

    def _run(self) -> None:
        from rollmill.telemetry.memory import memory_of

        tree: list[psutil.Process] = []
        next_tree_s = next_memory_s = 0.0
        while not self._stop.is_set():
            now_s = time.monotonic()
            if now_s >= next_tree_s:
                try:
                    root = psutil.Process(self.pid)
                    tree = [root, *root.children(recursive=True)]
                except psutil.NoSuchProcess:
                    return
                next_tree_s = now_s + TREE_EVERY_S
            if now_s >= next_memory_s:
                self.peak_pss_bytes = max(self.peak_pss_bytes, memory_of(one.pid for one in tree).total_bytes)
                next_memory_s = now_s + MEMORY_EVERY_S
            cpu_s = sum(_cpu(process) for process in tree)
            # a child that ended and is not reaped yet counts nowhere for a moment: a sum never falls
            self.cpu_s.append(max(cpu_s, self.cpu_s[-1] if self.cpu_s else 0.0))
            self.times_s.append(now_s)
            self._stop.wait(CPU_EVERY_S)


def _cpu(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return times.user + times.system + times.children_user + times.children_system


def interpolate(xs: list[float], ys: list[float], *, at: float) -> float:
    """Return y at `at` on the line through the neighbouring points; the end value outside.

    Example:
        >>> interpolate([0.0, 2.0], [10.0, 20.0], at=0.5)
        12.5
    """
    right = bisect.bisect_left(xs, at)
    if right == 0:
        return ys[0]
    if right == len(xs):
        return ys[-1]
    share = (at - xs[right - 1]) / (xs[right] - xs[right - 1])
    return ys[right - 1] + share * (ys[right] - ys[right - 1])


def machine() -> dict[str, Any]:
    """Return what the numbers depend on."""
    from rollmill.config.precision import native_bfloat16

    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return {
        "cpu": next((line.split(":", 1)[1].strip() for line in lines if "model name" in line), platform.processor()),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": psutil.virtual_memory().total,
        "native_bfloat16": native_bfloat16(),
        "python": platform.python_version(),
        "load_average": os.getloadavg()[0],
        "date": time.strftime("%Y-%m-%d"),
    }
