"""What a Linux node has left: pressure, memory, disks, process ids. Reads; decides nothing."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from rollmill.sandboxes.guest import cgroups
from rollmill.sandboxes.watchdog.records import NodeReading, Pressure

_UNLIMITED_BYTES = 2**60  # what a version 1 group without a limit reads as is a little below 2**63


class NodeReader:
    """Reads one node. A call blocks where a disk does: make it in a thread.

    Args:
        paths: on the file systems that sandboxes, images and snapshots are kept on.
        root: where `proc` is mounted; another one in tests.
    """

    def __init__(self, paths: Sequence[Path] = (), *, root: Path = Path("/")) -> None:
        self._paths = tuple(paths)
        self._proc = root / "proc"
        self._groups = tuple(
            Path(one.group) for one in cgroups.discover(process=str(self._proc / "self")) if "memory" in one.controllers
        )

    def pressure(self) -> Pressure | None:
        """Return the shares of the last ten seconds, `None` where the kernel does not keep them."""
        cpu, memory, io = (_stalls(self._proc / "pressure" / name) for name in ("cpu", "memory", "io"))
        if not cpu:
            return None
        return Pressure(
            cpu_some=cpu.get("some", 0.0),
            memory_some=memory.get("some", 0.0),
            memory_full=memory.get("full", 0.0),
            io_some=io.get("some", 0.0),
            io_full=io.get("full", 0.0),
        )

    def read(self) -> NodeReading:
        """Return everything."""
        disks = [one for one in map(_disk, self._paths) if one is not None]
        return NodeReading(
            pressure=self.pressure(),
            memory_free=self._memory_free(),
            disk_free=min((one[0] for one in disks), default=None),
            inodes_free=min((one[1] for one in disks), default=None),
            pids_free=self._pids_free(),
        )

    def _memory_free(self) -> float | None:
        shares = [share for group in self._groups for share in _group_memory_free(group)]
        fields = _fields(_lines(self._proc / "meminfo"))
        total, available = fields.get("MemTotal:"), fields.get("MemAvailable:")
        if total and available is not None:
            shares.append(available / total)
        return min(shares, default=None)

    def _pids_free(self) -> float | None:
        most = _number(self._proc / "sys/kernel/pid_max")
        threads_most = _number(self._proc / "sys/kernel/threads-max")
        words = " ".join(_lines(self._proc / "loadavg")).split()
        if most is None or len(words) < 4:
            return None
        running = int(words[3].partition("/")[2])  # threads of the whole machine, each of which has an id
        return max(0.0, 1.0 - running / min(most, threads_most or most))


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return []  # not kept by this kernel, or not shown here


def _number(path: Path) -> int | None:
    lines = _lines(path)
    return int(lines[0]) if lines and lines[0].strip().isdigit() else None


def _fields(lines: Iterable[str]) -> dict[str, int]:
    """Return the first number of each line by the line's first word."""
    words = (line.split() for line in lines)
    return {one[0]: int(one[1]) for one in words if len(one) > 1 and one[1].isdigit()}


def _stalls(path: Path) -> dict[str, float]:
    """Return `some` and `full` as shares, of a file in the form of /proc/pressure."""
    found: dict[str, float] = {}
    for line in _lines(path):
        kind, _, rest = line.partition(" avg10=")
        if rest:
            found[kind] = float(rest.split()[0]) / 100.0
    return found


def _disk(path: Path) -> tuple[float, float] | None:
    try:
        found = os.statvfs(path)
    except OSError:
        return None  # not made yet, or gone: says nothing about the node
    # Some file systems have no fixed number of inodes and report none.
    return (
        found.f_bavail / found.f_blocks if found.f_blocks else 1.0,
        found.f_favail / found.f_files if found.f_files else 1.0,
    )


def _group_memory_free(group: Path) -> Iterable[float]:
    """Yield what a group and those above it leave of their limits; what can be dropped at once counts as free."""
    for directory in (group, *group.parents):
        if not (directory / "cgroup.procs").exists():
            return
        limit = _number(directory / "memory.max") or _number(directory / "memory.limit_in_bytes")
        used = _number(directory / "memory.current") or _number(directory / "memory.usage_in_bytes")
        if not limit or used is None or limit >= _UNLIMITED_BYTES:
            continue
        fields = _fields(_lines(directory / "memory.stat"))
        cache = fields.get("total_inactive_file", fields.get("inactive_file", 0))
        yield max(0.0, 1.0 - max(0, used - cache) / limit)
