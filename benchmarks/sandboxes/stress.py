"""How the host feels while a sandbox does its worst: a canary beside classes of stress-ng."""

from __future__ import annotations

import shutil
import statistics

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
    "thread",
    "pthread",
    "mutex",
    "sem",
    "futex",
    "pipe",
    "socket",
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


async def stress(*, seconds: int) -> Record:
    """Measure the canary beside each class, which runs so many seconds in a sandbox of its own."""
    if shutil.which("stress-ng") is None:
        return {"left_out": "stress-ng is not installed (Debian: stress-ng)"}
    spec = SandboxSpec(image=HostImage(), limits=LIMITS)
    medians: dict[str, float] = {}
    everything: list[float] = []
    ended: dict[str, str] = {}
    async with opened() as provider:
        for name in STRESSORS:
            sandbox = await provider.create(spec, id=new_id(), lease=LEASE)
            command = ["stress-ng", f"--{name}", "2", "--timeout", str(seconds), "--temp-path", "/tmp"]
            async with canary() as latencies:
                try:
                    result = await sandbox.exec(command, timeout_s=seconds + 5.0)
                    ended[name] = result.killed_by or f"exit status {result.exit_code}"
                except RollmillError as error:
                    ended[name] = type(error).__name__
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
        "left_behind": left,
    }
