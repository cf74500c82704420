"""What machines under QEMU have on this machine, found by making one; and what is missing where none can be made."""

from __future__ import annotations

import msgspec

from rollmill.sandboxes.backends.microvm import accelerators, kit
from rollmill.sandboxes.backends.qemu.hypervisor import QemuHypervisor
from rollmill.sandboxes.backends.qemu.provider import QemuProvider
from rollmill.sandboxes.backends.qemu.settings import QemuSettings
from rollmill.sandboxes.doctor import Diagnosis, examine
from rollmill.sandboxes.isolation import IsolationLevel


async def diagnose_qemu(settings: QemuSettings) -> Diagnosis:
    """Boot a machine, clone it, and look at the sandbox in it."""
    asked = msgspec.structs.replace(settings, minimum_isolation=IsolationLevel.NONE)
    found, _ = await examine(lambda: QemuProvider(asked), backend="qemu", without=())
    return msgspec.structs.replace(found, notes=notes(settings))


def notes(settings: QemuSettings) -> tuple[str, ...]:
    """Return what to know about machines on this machine."""
    missing = (*QemuHypervisor(settings).missing(), *kit.missing(settings.kernel))
    found = [f"Missing for machines: {one}." for one in missing]
    if reason := accelerators.why_no_kvm():
        found.append(f"Machines are emulated, about twenty times slower: {reason}.")
    else:
        found.append("Machines use KVM if the first one boots with it.")
    chosen = kit.find_kernel() if settings.kernel is None else settings.kernel
    if chosen is not None:
        found.append(f"They boot {chosen}.")
    found.append("Isolation level virtual_machine takes KVM; emulation counts as own_kernel.")
    return tuple(found)
