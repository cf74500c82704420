"""Settings of the Firecracker backend."""

from __future__ import annotations

from rollmill.sandboxes.backends.microvm.settings import MicroVmSettings


class FirecrackerSettings(MicroVmSettings, frozen=True, kw_only=True):
    """How one provider runs its machines under Firecracker. `kernel` must name an uncompressed one (vmlinux).

    Attributes:
        program: Firecracker, 1.8 or later: from there on a distribution's kernel finds its devices (by ACPI).
        kvm_device: the kernel's interface for virtual machines; empty: not looked at, where the program needs none.
    """

    program: str = "firecracker"
    kvm_device: str = "/dev/kvm"
