"""What gVisor sandboxes have on this machine, found by making one; and what is missing where none can be made."""

from __future__ import annotations

import os

import msgspec

from rollmill.sandboxes.backends.gvisor.presence import presence
from rollmill.sandboxes.backends.gvisor.provider import GvisorProvider
from rollmill.sandboxes.backends.gvisor.settings import GvisorSettings
from rollmill.sandboxes.doctor import Diagnosis, examine
from rollmill.sandboxes.isolation import IsolationLevel, Protection

_WITHOUT = (Protection.LANDLOCK, Protection.VIRTUAL_MACHINE)


async def diagnose_gvisor(settings: GvisorSettings) -> Diagnosis:
    """Make a sandbox and look at it."""
    asked = msgspec.structs.replace(settings, minimum_isolation=IsolationLevel.NONE)
    found, _ = await examine(lambda: GvisorProvider(asked), backend="gvisor", without=_WITHOUT)
    return msgspec.structs.replace(found, notes=notes(settings))


def notes(settings: GvisorSettings) -> tuple[str, ...]:
    """Return what to know about gVisor on this machine."""
    found = [f"gVisor's runtime {presence(settings)}."]
    if os.geteuid() != 0:
        found.append("As a plain user: snapshots hold files alone; the runtime restores processes as root only.")
        found.append("As a plain user: one user inside (root).")
    return tuple(found)
