"""The memory of many sandboxes: what their processes hold, and what the kernel charges to their group.

Counted, for ours and for each peer in the same way:

* `anon` and `file`: the proportional share (PSS) of private memory and of mapped files, summed over every process that
  stays: a zygote or an agent of ours, first processes and shims of a runtime, gVisor's sentry, gofer and stubs. What
  they share among themselves counts once.
* `shmem`: pages of file systems in memory and of memory files (layers that are written to, gVisor's memory of its
  guests), as charged to the group. Without a group, the share that is mapped.
* `owner`: by how much the private memory of the process grew that made them; our provider lives in it.
* `kernel`: what the kernel charges to the group for itself: page tables, stacks, mounts, inodes, sockets, and the
  groups themselves. Also what it could let go of, such as looked-up names.

Not counted: objects that the kernel charges to nobody (parts of namespaces, of control groups other than those of
memory), pages of files that were read and are not mapped, and what other programs of the machine share of a mapped
file. Two more figures are in no sum. `usage` is all that is charged to the group, with pages of files that were read.
`machine_kernel` is by how much the whole machine's kernel memory grew that cannot be let go of, charged or not: it
holds a part of `kernel` once more, and what anything else did meanwhile.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

KIB = 1024
_MACHINE = ("SUnreclaim", "KernelStack", "PageTables", "Percpu")
_SUMMED = ("anon", "file", "shmem", "owner", "kernel")


@dataclass(frozen=True, slots=True)
class Shares:
    """What processes hold of memory by proportional shares, bytes."""

    anon: int = 0
    file: int = 0
    shmem: int = 0

    def __add__(self, other: Shares) -> Shares:
        return Shares(self.anon + other.anon, self.file + other.file, self.shmem + other.shmem)


@dataclass(frozen=True, slots=True)
class Charges:
    """What is charged to a group and those below it, bytes: for memory files, for the kernel itself, and in all."""

    shmem: int
    kernel: int
    usage: int


@dataclass(frozen=True, slots=True)
class Look:
    """One look at the processes that were made, at the one that made them, at their group, and at the machine.

    `charges` is `None` where there is no group.
    """

    processes: int
    shares: Shares
    owner_anon: int
    charges: Charges | None
    machine_kernel: int


def fields_of(text: str) -> dict[str, int]:
    """Return the numbers of lines such as `Slab: 12 kB` or `shmem 12`, in bytes.

    Example:
        >>> fields_of("Pss_Anon:   12 kB\\nshmem 5\\n")
        {'Pss_Anon': 12288, 'shmem': 5}
    """
    found: dict[str, int] = {}
    for line in text.splitlines():
        match line.split():
            case [name, number, "kB"]:
                found[name.rstrip(":")] = int(number) * KIB
            case [name, number] if number.isdigit():
                found[name.rstrip(":")] = int(number)
    return found


def shares_of(rollup: str) -> Shares:
    """Return what one process holds, from its `smaps_rollup`."""
    fields = fields_of(rollup)
    return Shares(fields["Pss_Anon"], fields["Pss_File"], fields["Pss_Shmem"])


def charges_of(stat: str, *, usage: str, kernel: str | None = None) -> Charges:
    """Return what a group is charged, from its `memory.stat`.

    Args:
        usage: its `memory.current`, or of version 1 its `memory.usage_in_bytes`.
        kernel: of version 1, its `memory.kmem.usage_in_bytes`; version 2 tells it in the other file.
    """
    fields = fields_of(stat)
    if kernel is None:
        return Charges(shmem=fields["shmem"], kernel=fields["kernel"], usage=int(usage))
    return Charges(shmem=fields["total_shmem"], kernel=int(kernel), usage=int(usage))


def machine_kernel_of(meminfo: str) -> int:
    """Return what the kernel of the machine holds and cannot let go of, from `/proc/meminfo`."""
    fields = fields_of(meminfo)
    return sum(fields[name] for name in _MACHINE)


def each(before: Look, after: Look, *, count: int) -> dict[str, float | None]:
    """Return what one of so many takes, by kind, in bytes; `bytes_each` is the sum of what is known.

    `before` has none of them, and no process of theirs.
    """
    taken: dict[str, float | None] = {
        "anon": after.shares.anon,
        "file": after.shares.file,
        "shmem": after.shares.shmem,
        "owner": after.owner_anon - before.owner_anon,
        "kernel": None,
        "usage": None,
        "machine_kernel": after.machine_kernel - before.machine_kernel,
    }
    if before.charges is not None and after.charges is not None:
        taken["shmem"] = after.charges.shmem - before.charges.shmem
        taken["kernel"] = after.charges.kernel - before.charges.kernel
        taken["usage"] = after.charges.usage - before.charges.usage
    out = {f"{name}_bytes_each": None if value is None else value / count for name, value in taken.items()}
    total = sum(value for name in _SUMMED if (value := taken[name]) is not None)
    return {"bytes_each": total / count, "processes_each": after.processes / count, **out}


def medians(readings: Sequence[Mapping[str, float | None]]) -> dict[str, float | int | None]:
    """Return the median of each kind over repeats, and the extremes of the sum."""
    found: dict[str, float | int | None] = {}
    for name in readings[0]:
        values = [value for one in readings if (value := one[name]) is not None]
        found[name] = statistics.median(values) if len(values) == len(readings) else None
    sums = [value for one in readings if (value := one["bytes_each"]) is not None]
    return {**found, "least_bytes_each": min(sums), "most_bytes_each": max(sums), "repeats": len(readings)}


def strangers(groups: Mapping[int, str], *, group: str) -> list[int]:
    """Return the processes that are neither in a group nor below it: what they take is charged to another one."""
    return [pid for pid, own in groups.items() if own != group and not own.startswith(f"{group}/")]


def read_charges(group: Path) -> Charges:
    """Read what a group is charged, version 1 or 2."""
    stat = (group / "memory.stat").read_text()
    if (group / "memory.current").exists():
        return charges_of(stat, usage=(group / "memory.current").read_text())
    usage = (group / "memory.usage_in_bytes").read_text()
    return charges_of(stat, usage=usage, kernel=(group / "memory.kmem.usage_in_bytes").read_text())


def look(made: Iterable[psutil.Process], *, owner: int, group: Path | None) -> Look:
    """Look at processes, at the one that made them, at the group of all of them, and at the machine."""
    shares, processes = Shares(), 0
    for one in made:
        try:
            shares += shares_of(Path(f"/proc/{one.pid}/smaps_rollup").read_text())
        except (FileNotFoundError, ProcessLookupError):  # it has ended, and holds nothing
            continue
        processes += 1
    return Look(
        processes=processes,
        shares=shares,
        owner_anon=shares_of(Path(f"/proc/{owner}/smaps_rollup").read_text()).anon,
        charges=None if group is None else read_charges(group),
        machine_kernel=machine_kernel_of(Path("/proc/meminfo").read_text()),
    )
