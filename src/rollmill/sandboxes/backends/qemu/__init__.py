"""The QEMU backend: each sandbox in a machine of its own, with KVM or emulated."""

from rollmill.sandboxes.backends.qemu.provider import QemuProvider
from rollmill.sandboxes.backends.qemu.settings import QemuSettings

__all__ = ["QemuProvider", "QemuSettings"]
