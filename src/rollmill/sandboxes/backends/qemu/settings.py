"""Settings of the QEMU backend."""

from __future__ import annotations

from rollmill.errors import ConfigError
from rollmill.sandboxes.backends.microvm.accelerators import AUTO, KVM, TCG
from rollmill.sandboxes.backends.microvm.settings import MicroVmSettings


class QemuSettings(MicroVmSettings, frozen=True, kw_only=True):
    """How one provider runs its machines under QEMU.

    Attributes:
        program: QEMU for x86_64, 7.2 or later.
        accelerator: `kvm`, `tcg` (emulation, about twenty times slower), or `auto`: KVM if a machine boots with it.
        kvm_trial_s: with `auto`, how long the first boot with KVM may take before emulation is used.
    """

    program: str = "qemu-system-x86_64"
    accelerator: str = AUTO
    kvm_trial_s: float = 20.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.accelerator not in (KVM, TCG, AUTO):
            raise ConfigError(f"accelerator is {self.accelerator!r}; it is kvm, tcg or auto")
