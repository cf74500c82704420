"""Memory of the trainer's process: how much it may still take, and keeping what it has.

Linux and glibc; elsewhere the machine's free memory is what psutil says, and nothing is kept.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import psutil

CGROUP = Path("/sys/fs/cgroup")

_M_TRIM_THRESHOLD = -1
_M_MMAP_MAX = -4


def keep_freed_memory() -> bool:
    """Have the C library keep freed memory for the next step; return whether it can.

    By default every tensor above 32 MiB, and much of what lies at the end of the heap, goes back to the kernel when it
    is freed, and the next step gets zeroed pages anew: 90,000 page faults per step of a model with 135 million weights.
    The process then keeps the most that it ever used.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    # no mapping of its own for a large block, and no trimming: mallopt(3)
    return mallopt is not None and bool(mallopt(_M_MMAP_MAX, 0)) and bool(mallopt(_M_TRIM_THRESHOLD, -1))


def free_memory_bytes(*, available: int | None = None, cgroup: Path = CGROUP) -> int:
    """Return the smaller of what the machine has available and what the container's limit leaves.

    Args:
        available: of the machine; read now if `None`.
        cgroup: of this process, version 2; a folder without `memory.max` sets no limit.
    """
    machine = psutil.virtual_memory().available if available is None else available
    try:
        limit = (cgroup / "memory.max").read_text().strip()
        if limit == "max":
            return machine
        used = int((cgroup / "memory.current").read_text())
        statistics = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
    except OSError:
        return machine
    # pages of files that nobody used lately are given back before the limit kills anybody
    reclaimable = int(statistics.get("inactive_file", 0))
    return max(0, min(machine, int(limit) - used + reclaimable))
