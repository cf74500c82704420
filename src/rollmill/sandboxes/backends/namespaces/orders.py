"""What a zygote is ordered to make, on this machine or inside another one. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rollmill.sandboxes.records import Limits


def creation(
    limits: Limits,
    *,
    id: str,
    id_base: int | None,
    groups: Sequence[tuple[int, str]],
    record: str,
    plan: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the order to make a sandbox.

    Args:
        limits: which the kernel is to keep.
        id: of the sandbox.
        id_base: first of its ids; `None` where it has one alone.
        groups: (version, directory) of its cgroups.
        record: path of its record, without which nothing is made.
        plan: its name, its file system, and who may be in it; limits and filters are added.
    """
    processes = limits.pids + 1  # its agent is one
    return {
        "op": "create",
        "id": id,
        "id_base": id_base,
        "groups": groups,
        "caps": {"memory_bytes": limits.memory_bytes, "pids": processes, "cpus": limits.cpus},
        "record": record,
        "plan": {
            **plan,
            "seccomp": True,
            "landlock": True,
            "limits": {
                "pids": processes,
                "open_files": limits.open_files,
                "disk_bytes": limits.disk_bytes,
                "cpu_s": limits.cpu_s,
                "memory_bytes": limits.memory_bytes,
            },
        },
    }
