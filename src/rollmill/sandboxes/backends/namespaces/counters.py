"""What the groups of a sandbox count, read from outside, under the names of the watchdog's samples.

Which files there are depends on the machine and not on the moment: they are looked for once, and then only read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from rollmill.sandboxes.guest.cgroups import Groups
from rollmill.sandboxes.watchdog.processes import read_bytes


def _number(data: bytes) -> float | None:
    words = data.split()
    return int(words[0]) if words and words[0].isdigit() else None


def _programs(data: bytes) -> float | None:
    count = _number(data)
    return None if count is None else max(0, count - 1)  # its agent is one


def _from_ns(data: bytes) -> float | None:
    count = _number(data)
    return None if count is None else count / 1e9


def _field(data: bytes, name: bytes) -> float | None:
    words = data.split()
    return next((int(value) for key, value in zip(words[::2], words[1::2], strict=False) if key == name), None)


def _from_us(data: bytes) -> float | None:
    count = _field(data, b"usage_usec")
    return None if count is None else count / 1e6


def _stalled(data: bytes) -> float | None:
    """Return the seconds in which all of a group waited, of a file in the form of /proc/pressure."""
    line = next((line for line in data.splitlines() if line.startswith(b"full ")), None)
    return None if line is None else int(line.rpartition(b"total=")[2]) / 1e6


# File of a group -> what it counts; where two count the same, the first that is there.
_FILES: dict[str, tuple[str, Callable[[bytes], float | None]]] = {
    "cpuacct.usage": ("cpu_s", _from_ns),
    "cpu.stat": ("cpu_s", _from_us),
    "memory.usage_in_bytes": ("memory_bytes", _number),
    "memory.current": ("memory_bytes", _number),
    "memory.oom_control": ("oom_kills", lambda data: _field(data, b"oom_kill")),
    "memory.events": ("oom_kills", lambda data: _field(data, b"oom_kill")),
    "memory.pressure": ("memory_stall_s", _stalled),
    "pids.current": ("pids", _programs),
    "pids.events": ("refused_forks", lambda data: _field(data, b"max")),
}


class Counters(NamedTuple):
    """The files of one sandbox's groups.

    Attributes:
        sources: what each counts, where it is, and how it is read.
        cpu_path: the one that counts processor time, empty if none does.
    """

    sources: tuple[tuple[str, str, Callable[[bytes], float | None]], ...]
    cpu_path: str

    @classmethod
    def of(cls, groups: Groups) -> Counters:
        """Look for the files of some groups."""
        found: dict[str, tuple[str, str, Callable[[bytes], float | None]]] = {}
        for file, (name, parse) in _FILES.items():
            for _, directory in groups.directories:
                path = f"{directory}/{file}"
                if name not in found and parse(read_bytes(path)) is not None:
                    found[name] = (name, path, parse)
        return cls(tuple(found.values()), found["cpu_s"][1] if "cpu_s" in found else "")

    def read(self) -> dict[str, float]:
        """Return what they count now; what is gone is left out."""
        values = ((name, parse(read_bytes(path))) for name, path, parse in self.sources)
        return {name: value for name, value in values if value is not None}
