"""Memory that a set of processes really occupies.

Processes share pages (weights in shared memory, libraries), so a sum of resident sizes counts them several times. The
proportional set size (PSS) splits each shared page between its users; the sum over all processes is then the true
total. Decides nothing; a process that ended while it was read simply does not count.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

import msgspec
import psutil


class MemoryUse(msgspec.Struct, frozen=True, kw_only=True):
    """Sum over processes.

    Attributes:
        total_bytes: sum of `measure` over the processes that could be read.
        measure: `pss`; or `rss` where the kernel does not tell the PSS, which counts shared pages once per process.
        per_process: pid -> bytes.
        missing: pids that had ended or were not readable.
    """

    total_bytes: int
    measure: str
    per_process: dict[int, int]
    missing: tuple[int, ...] = ()


def memory_of(pids: Iterable[int]) -> MemoryUse:
    """Return the memory of these processes, in one measure for all.

    PSS if every process that lives tells it, else RSS for all: two measures are never added up.
    """
    wanted = tuple(dict.fromkeys(pids))
    for measure in ("pss", "rss"):
        sizes: dict[int, int] = {}
        missing: list[int] = []
        denied = False
        for pid in wanted:
            try:
                sizes[pid] = _read(pid, measure=measure)
            except psutil.NoSuchProcess:
                missing.append(pid)
            except (psutil.AccessDenied, AttributeError):
                missing.append(pid)
                denied = True
        if not denied or measure == "rss":
            break
    return MemoryUse(total_bytes=sum(sizes.values()), measure=measure, per_process=sizes, missing=tuple(missing))


def tree_of(pid: int | None = None) -> tuple[int, ...]:
    """Return a process and all its descendants that live now; this process by default."""
    try:
        root = psutil.Process(os.getpid() if pid is None else pid)
        return (root.pid, *(child.pid for child in root.children(recursive=True)))
    except psutil.NoSuchProcess:
        return ()


def _read(pid: int, *, measure: str) -> int:
    process = psutil.Process(pid)
    # macOS and Windows have no `pss` field: AttributeError, and the caller falls back.
    return int(getattr(process.memory_full_info() if measure == "pss" else process.memory_info(), measure))
