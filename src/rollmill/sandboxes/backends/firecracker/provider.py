"""The provider of sandboxes in machines under Firecracker."""

from __future__ import annotations

from collections.abc import Callable

from rollmill.sandboxes.backends.firecracker.hypervisor import FirecrackerHypervisor
from rollmill.sandboxes.backends.firecracker.settings import FirecrackerSettings
from rollmill.sandboxes.backends.microvm.kit import Kit
from rollmill.sandboxes.backends.microvm.provider import MicroVmProvider
from rollmill.sandboxes.tally import Observer


class FirecrackerProvider(MicroVmProvider):
    """Runs sandboxes of this machine under Firecracker. Use it as an asynchronous context manager, or call `close`.

    Args:
        settings: how.
        observer: told of starts, ends and sweeps.
        make_kit: makes what machines boot; `None`: from the kernel of the settings and the distribution's packages.
    """

    def __init__(
        self,
        settings: FirecrackerSettings | None = None,
        *,
        observer: Observer | None = None,
        make_kit: Callable[[], Kit] | None = None,
    ) -> None:
        settings = FirecrackerSettings() if settings is None else settings
        hypervisor = FirecrackerHypervisor(settings)
        super().__init__(settings, hypervisor=hypervisor, observer=observer, make_kit=make_kit)
