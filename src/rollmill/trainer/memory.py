"""How much memory this process may still take. Linux; elsewhere what psutil says."""

from __future__ import annotations

from pathlib import Path

import psutil

CGROUP = Path("/sys/fs/cgroup")


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
