"""Which backends have what not all have: for errors that say where to go instead. Pure.

A backend itself says what it can on the machine at hand (`Provider.capabilities`); this is what it can have at best.
"""

from __future__ import annotations

from collections.abc import Mapping

from rollmill.errors import SandboxUnsupported

_MACHINES = ("qemu", "firecracker")
BACKENDS: Mapping[str, tuple[str, ...]] = {
    "full_snapshot": ("gvisor (as root)", *_MACHINES),
    "live_fork": ("gvisor (as root)", *_MACHINES),
    "pause": ("namespaces (with cgroup v2)", "gvisor", *_MACHINES, "docker", "e2b", "daytona"),
    "pause_files": ("namespaces", "gvisor"),
    "expose": ("namespaces", "gvisor", *_MACHINES),
}
"""Capability -> backends that can have it."""


def unsupported(what: str, *, capability: str) -> SandboxUnsupported:
    """Return the error of a call that a backend cannot carry out, which names those that can.

    Example:
        >>> unsupported("docker gives ports inside no address", capability="expose").capability
        'expose'
    """
    return SandboxUnsupported(
        f"{what}; backends that have it: {', '.join(BACKENDS[capability])}", capability=capability
    )
