"""How the host feels while a sandbox does its worst: a canary beside classes of stress-ng."""

from __future__ import annotations

import shutil
import statistics
import time

from common import LEASE, MIB, Record, canary, new_id, opened, spread

from rollmill.errors import RollmillError
from rollmill.sandboxes import HostImage, Limits, SandboxSpec

STRESSORS = (
    "cpu",
    "matrix",
    "memcpy",
    "vm",
    "mmap",
    "malloc",
    "brk",
    "stack",
    "bigheap",
    "fork",
    "vfork",
    "clone",
    "nanosleep",
    "pthread",
    "mutex",
    "sem",
    "futex",
    "pipe",
    "sock",
    "udp",
    "hdd",
    "dir",
    "dentry",
    "rename",
    "link",
    "symlink",
    "chmod",
    "file-ioctl",
    "fallocate",
    "inotify",
    "timer",
    "signal",
    "kill",
    "sigsuspend",
    "switch",
    "yield",
    "poll",
    "epoll",
    "eventfd",
    "zombie",
)
LIMITS = Limits(memory_bytes=256 * MIB, disk_bytes=128 * MIB, inodes=20_000, pids=128, cpus=0.5)


def barely_ran(ended: str, *, seconds: float, asked_s: float) -> bool:
    """Return whether a class ended by itself, and not well, before half of its time.

    One that the caps ended was at work until then; one that knows no such option, or may not do what it is for, was
    not.

    Example:
        >>> barely_ran("exit status 1", seconds=0.1, asked_s=2), barely_ran("SandboxDead", seconds=0.1, asked_s=2)
        (True, False)
    """
    return ended.startswith("exit status") and ended != "exit status 0" and seconds < 0.5 * asked_s


async def stress(*, seconds: int) -> Record:
    """Measure the canary beside each class, which runs so many seconds in a sandbox of its own.

    A class that did not run is in no figure, and is told with its words.
    """
    if shutil.which("stress-ng") is None:
        return {"left_out": "stress-ng is not installed (Debian: stress-ng)"}
    spec = SandboxSpec(image=HostImage(), limits=LIMITS)
    medians: dict[str, float] = {}
    failed: dict[str, str] = {}
    everything: list[float] = []
    ended: dict[str, str] = {}
    async with opened() as provider:
        for name in STRESSORS:
            sandbox = await provider.create(spec, id=new_id(), lease=LEASE)
            command = ["stress-ng", f"--{name}", "2", "--timeout", str(seconds), "--temp-path", "/tmp"]
            at_s, words = time.perf_counter(), ""
            async with canary() as latencies:
                try:
                    result = await sandbox.exec(command, timeout_s=seconds + 5.0)
                    ended[name] = result.killed_by or f"exit status {result.exit_code}"
                    words = (result.stderr or result.stdout)[-200:].decode("utf-8", "replace").strip()
                except RollmillError as error:
                    ended[name] = type(error).__name__
            if barely_ran(ended[name], seconds=time.perf_counter() - at_s, asked_s=seconds):
                failed[name] = f"{ended[name]}: {words}"
            else:
                medians[name] = 1e3 * statistics.median(latencies)
                everything += latencies
            await sandbox.kill()
        left = [one.sandbox_id for one in await provider.list() if one.death is None]
    worst = max(medians, key=lambda name: medians[name])
    return {
        "classes": len(medians),
        "canary": spread(everything),
        "worst_median_ms": medians[worst],
        "worst_class": worst,
        "medians_ms": medians,
        "ended": ended,
        "left_out": failed,
        "left_behind": left,
    }
