"""The provider of sandboxes in machines under QEMU."""

from __future__ import annotations

from rollmill.sandboxes.backends.microvm.provider import MicroVmProvider
from rollmill.sandboxes.backends.qemu.hypervisor import QemuHypervisor
from rollmill.sandboxes.backends.qemu.settings import QemuSettings
from rollmill.sandboxes.tally import Observer


class QemuProvider(MicroVmProvider):
    """Runs sandboxes of this machine under QEMU. Use it as an asynchronous context manager, or call `close`.

    Args:
        settings: how.
        observer: told of starts, ends and sweeps.
    """

    def __init__(self, settings: QemuSettings | None = None, *, observer: Observer | None = None) -> None:
        settings = QemuSettings() if settings is None else settings
        super().__init__(settings, hypervisor=QemuHypervisor(settings), observer=observer)
