"""Control groups of a sandbox, version 1, version 2 or both side by side.

Groups are made below the group of the process that asks, so that whatever limits that one holds for its sandboxes too.
A limit that the machine does not offer is left out and not claimed: `create` returns what holds.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable
from typing import NamedTuple

PARENT_NAME = "rollmill"
MEMORY, PIDS, CPU, FREEZE = "memory", "pids", "cpu", "freeze"
_V1_CONTROLLERS = ("memory", "pids", "cpu", "cpuacct")
_V2_CONTROLLERS = ("memory", "pids", "cpu")
_CPU_PERIOD_US = 100_000


class Hierarchy(NamedTuple):
    """One mounted hierarchy and where this process stands in it.

    Attributes:
        version: 1 or 2.
        controllers: what it controls.
        group: directory of this process's own group.
    """

    version: int
    controllers: tuple[str, ...]
    group: str


class Caps(NamedTuple):
    """Limits of one sandbox as a whole."""

    memory_bytes: int
    pids: int
    cpus: float


def discover(*, process: str = "/proc/self") -> tuple[Hierarchy, ...]:
    """Return the hierarchies of this machine in which groups may be made."""
    try:
        with open(f"{process}/cgroup") as stream:
            own = _own_groups(stream)
        with open(f"{process}/mountinfo") as stream:
            mounts = _cgroup_mounts(stream)
    except OSError:
        return ()
    found: dict[str, Hierarchy] = {}
    for version, options, root, point in mounts:
        names = tuple(one for one in _V1_CONTROLLERS if one in options) if version == 1 else ()
        key = ",".join(sorted(options & set(own))) if version == 1 else ""
        path = next((own[one] for one in own if (one in options if version == 1 else one == "")), None)
        if path is None or (version == 1 and not names):
            continue
        group = _place(point, root=root, path=path)
        if version == 2:
            names = _read_words(f"{group}/cgroup.controllers")
        if os.access(group, os.W_OK):
            found.setdefault(key or point, Hierarchy(version, names, group))
    return tuple(found.values())


def _own_groups(lines: Iterable[str]) -> dict[str, str]:
    """Return the group of each controller; version 2 has the empty name."""
    own: dict[str, str] = {}
    for line in lines:
        _, names, path = line.rstrip("\n").split(":", 2)
        own.update(dict.fromkeys(names.split(","), path))
    return own


def _cgroup_mounts(lines: Iterable[str]) -> list[tuple[int, set[str], str, str]]:
    """Return (version, options, root, mount point) of each cgroup mount."""
    found = []
    for line in lines:
        left, _, right = line.partition(" - ")
        fields, kind = left.split(), right.split()
        if kind[0] in ("cgroup", "cgroup2"):
            found.append((1 if kind[0] == "cgroup" else 2, set(kind[2].split(",")), fields[3], fields[4]))
    return found


def _place(point: str, *, root: str, path: str) -> str:
    """Return the directory of a group; a container may see only part of the tree, and then sees it as the whole."""
    inside = path[len(root) :] if root != "/" and path.startswith(root) else path
    wanted = f"{point}/{inside.strip('/')}".rstrip("/")
    return wanted if os.path.isdir(wanted) else point


def _read_words(path: str) -> tuple[str, ...]:
    try:
        with open(path) as stream:
            return tuple(stream.read().split())
    except OSError:
        return ()


class Groups:
    """The groups of one sandbox.

    Args:
        directories: (version, directory) of each; from `create`, or from a record on disk.
    """

    def __init__(self, directories: Iterable[tuple[int, str]]) -> None:
        self.directories = tuple((version, directory) for version, directory in directories)

    @classmethod
    def planned(cls, hierarchies: Iterable[Hierarchy], *, name: str) -> Groups:
        """Return the groups that a sandbox will have, before any is made: for the record on disk."""
        return cls((one.version, f"{one.group}/{PARENT_NAME}/{name}") for one in hierarchies)

    def create(self, caps: Caps) -> tuple[str, ...]:
        """Make the groups and set the limits; return the names of those that hold."""
        held: list[str] = []
        for version, directory in self.directories:
            try:
                _make(version, directory)
            except OSError:
                continue  # not ours to write: this hierarchy protects nothing, and is not claimed
            held += _limit_v1(directory, caps) if version == 1 else _limit_v2(directory, caps)
        return tuple(dict.fromkeys(held))

    def open_home(self) -> int:
        """Open the group of version 2, in which a process may be born; -1 where there is none."""
        for version, directory in self.directories:
            if version == 2 and os.path.isdir(directory):
                return os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        return -1

    def open_entrances(self, *, born_inside: bool) -> list[int]:
        """Open the files through which a process enters the groups that exist, by writing `0` to each.

        The sandbox enters by itself, and by its only thread: to enter as a process means to wait for a grace period of
        the kernel, for which the zygote has no time.

        Args:
            born_inside: it is in the group of version 2 already.

        Raises:
            OSError: if one cannot be opened; a sandbox outside its limits must not start.
        """
        opened: list[int] = []
        try:
            for version, directory in self.directories:
                if os.path.isdir(directory) and not (version == 2 and born_inside):
                    name = "tasks" if version == 1 else "cgroup.procs"
                    opened.append(os.open(f"{directory}/{name}", os.O_WRONLY | os.O_CLOEXEC))
        except OSError:
            for one in opened:
                os.close(one)
            raise
        return opened

    def freeze(self, frozen: bool) -> bool:
        """Stop or continue every process; `False` where no version 2 hierarchy is."""
        for version, directory in self.directories:
            if version == 2 and _try_write(f"{directory}/cgroup.freeze", str(int(frozen))):
                return True
        return False

    def kill(self) -> None:
        """Kill every process of the groups."""
        for version, directory in self.directories:
            if version == 2 and _try_write(f"{directory}/cgroup.kill", "1"):
                continue
            for word in _read_words(f"{directory}/cgroup.procs"):
                try:
                    os.kill(int(word), 9)
                except ProcessLookupError:
                    continue  # ended between the reading and the signal

    def destroy(self) -> bool:
        """Remove the groups; `False` if some process is still in one, to be tried again."""
        gone = True
        for _, directory in self.directories:
            try:
                os.rmdir(directory)
            except FileNotFoundError:
                continue
            except OSError as error:
                if error.errno not in (errno.EBUSY, errno.EACCES, errno.EPERM):
                    raise
                gone = False
        return gone

    def usage(self) -> dict[str, int]:
        """Return `memory_bytes`, `peak_memory_bytes`, `pids`, `cpu_us` and `oom_kills`, where they are counted."""
        found: dict[str, int] = {}
        for version, directory in self.directories:
            found.update(_usage_v1(directory) if version == 1 else _usage_v2(directory))
        return found


def _make(version: int, directory: str) -> None:
    parent = os.path.dirname(directory)
    if not os.path.isdir(parent):
        if version == 2:
            _hand_down(os.path.dirname(parent))
        os.makedirs(parent, exist_ok=True)
    if version == 2:
        _hand_down(parent)
    if not os.path.isdir(directory):  # left by a killed owner with the same process id and sandbox: taken over
        os.mkdir(directory)


def _hand_down(directory: str) -> None:
    """Let the groups below have controllers; a group with processes of its own, but the root, refuses (EBUSY)."""
    for name in _read_words(f"{directory}/cgroup.controllers"):
        if name in _V2_CONTROLLERS:
            _try_write(f"{directory}/cgroup.subtree_control", f"+{name}")


def _limit_v1(directory: str, caps: Caps) -> list[str]:
    held = []
    if _try_write(f"{directory}/memory.limit_in_bytes", str(caps.memory_bytes)):
        _try_write(f"{directory}/memory.memsw.limit_in_bytes", str(caps.memory_bytes))
        held.append(MEMORY)
    if _try_write(f"{directory}/pids.max", str(caps.pids)):
        held.append(PIDS)
    if _try_write(f"{directory}/cpu.cfs_period_us", str(_CPU_PERIOD_US)) and _try_write(
        f"{directory}/cpu.cfs_quota_us", str(_quota_us(caps))
    ):
        held.append(CPU)
    return held


def _limit_v2(directory: str, caps: Caps) -> list[str]:
    held = []
    if _try_write(f"{directory}/memory.max", str(caps.memory_bytes)):
        _try_write(f"{directory}/memory.swap.max", "0")
        held.append(MEMORY)
    if _try_write(f"{directory}/pids.max", str(caps.pids)):
        held.append(PIDS)
    if _try_write(f"{directory}/cpu.max", f"{_quota_us(caps)} {_CPU_PERIOD_US}"):
        held.append(CPU)
    if os.path.exists(f"{directory}/cgroup.freeze"):
        held.append(FREEZE)
    return held


def _quota_us(caps: Caps) -> int:
    return max(1000, round(caps.cpus * _CPU_PERIOD_US))


def _usage_v1(directory: str) -> dict[str, int]:
    wanted = {
        "memory_bytes": "memory.usage_in_bytes",
        "peak_memory_bytes": "memory.max_usage_in_bytes",
        "pids": "pids.current",
    }
    found = {name: value for name, file in wanted.items() if (value := _read_int(f"{directory}/{file}")) is not None}
    if (cpu_ns := _read_int(f"{directory}/cpuacct.usage")) is not None:
        found["cpu_us"] = cpu_ns // 1000
    if (kills := _read_field(f"{directory}/memory.oom_control", "oom_kill")) is not None:
        found["oom_kills"] = kills
    return found


def _usage_v2(directory: str) -> dict[str, int]:
    wanted = {"memory_bytes": "memory.current", "peak_memory_bytes": "memory.peak", "pids": "pids.current"}
    found = {name: value for name, file in wanted.items() if (value := _read_int(f"{directory}/{file}")) is not None}
    if (cpu_us := _read_field(f"{directory}/cpu.stat", "usage_usec")) is not None:
        found["cpu_us"] = cpu_us
    if (kills := _read_field(f"{directory}/memory.events", "oom_kill")) is not None:
        found["oom_kills"] = kills
    return found


def _read_int(path: str) -> int | None:
    words = _read_words(path)
    return int(words[0]) if words and words[0].isdigit() else None


def _read_field(path: str, name: str) -> int | None:
    words = _read_words(path)
    for key, value in zip(words[::2], words[1::2], strict=False):
        if key == name:
            return int(value)
    return None


def _write(path: str, text: str) -> None:
    descriptor = os.open(path, os.O_WRONLY)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)


def _try_write(path: str, text: str) -> bool:
    try:
        _write(path, text)
    except OSError:
        return False  # the file belongs to a controller that is not here, or refuses the value
    return True
