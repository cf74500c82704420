"""Processes as /proc shows them to everybody: who descends from whom, and what each has used. Reads; decides nothing.

It is read for sandboxes whose groups do not count, and for evidence. Nothing here waits for a process: what may (a
command line, whose memory its process may hold) is read last, for a few, by whoever bounds the time.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import NamedTuple

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_MOST_BYTES = 4096
# Places in /proc/PID/stat, counted behind the name: it stands in brackets and may hold anything.
_STATE, _PARENT, _CPU, _THREADS, _STARTED, _RESIDENT = 0, 1, slice(11, 15), 17, 19, 21


class ProcessRow(NamedTuple):
    """One process.

    Attributes:
        pid: on the host.
        parent: its parent's.
        name: as it calls itself, 15 bytes.
        state: one letter; `Z` has ended.
        threads: how many.
        cpu_s: its processor seconds, with those of children that it waited for.
        resident_bytes: pages in memory, shared ones included.
        started_ticks: from boot to its start.
    """

    pid: int
    parent: int
    name: str
    state: str
    threads: int
    cpu_s: float
    resident_bytes: int
    started_ticks: int


def read_row(pid: int) -> ProcessRow | None:
    """Return one process, `None` if it is gone."""
    if not (data := read_bytes(f"/proc/{pid}/stat")):
        return None
    before, _, behind = data.rpartition(b")")
    words = behind.split()
    return ProcessRow(
        pid=pid,
        parent=int(words[_PARENT]),
        name=before.partition(b"(")[2].decode("utf-8", "replace"),
        state=words[_STATE].decode("ascii"),
        threads=int(words[_THREADS]),
        cpu_s=sum(map(int, words[_CPU])) / _TICKS_PER_S,
        resident_bytes=int(words[_RESIDENT]) * _PAGE_BYTES,
        started_ticks=int(words[_STARTED]),
    )


def read_all() -> dict[int, ProcessRow]:
    """Return every process of the machine, by id."""
    rows = (read_row(int(name)) for name in os.listdir("/proc") if name.isdigit())
    return {row.pid: row for row in rows if row is not None}


def trees(rows: Iterable[ProcessRow]) -> dict[int, list[ProcessRow]]:
    """Return the children of each process that has some."""
    found: dict[int, list[ProcessRow]] = {}
    for row in rows:
        found.setdefault(row.parent, []).append(row)
    return found


def descendants(root: int, *, children: dict[int, list[ProcessRow]]) -> list[ProcessRow]:
    """Return all below a process, itself not among them. Orphans belong to the first process of their namespace."""
    found: list[ProcessRow] = []
    waiting = [root]
    while waiting:
        below = children.get(waiting.pop(), [])
        found += below
        waiting += [row.pid for row in below]
    return found


def shared_bytes(pid: int) -> int:
    """Return how much of a process's resident memory belongs to files: not taken from anybody."""
    words = read_bytes(f"/proc/{pid}/statm").split()
    return int(words[2]) * _PAGE_BYTES if len(words) > 2 else 0


def proportional_bytes(pid: int) -> int | None:
    """Return a process's memory with shared pages divided among those that share them, `None` where it is not shown."""
    for line in read_bytes(f"/proc/{pid}/smaps_rollup").splitlines():
        if line.startswith(b"Pss:"):
            return int(line.split()[1]) * 1024
    return None


def command_line(pid: int, *, most_bytes: int) -> str:
    """Return the beginning of a process's command line. It may wait for the process."""
    data = read_bytes(f"/proc/{pid}/cmdline", most_bytes=most_bytes)
    return data.replace(b"\0", b" ").decode("utf-8", "replace").strip()


def read_bytes(path: str, *, most_bytes: int = _MOST_BYTES) -> bytes:
    """Return the beginning of a file of the kernel's, nothing if it is gone or not shown."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        return os.read(descriptor, most_bytes)
    except OSError:  # the process ended in between
        return b""
    finally:
        os.close(descriptor)
