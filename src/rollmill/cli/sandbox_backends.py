"""How the backend of this machine that a command uses is made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rollmill.errors import ConfigError
from rollmill.sandboxes.backends.gvisor import GvisorProvider, GvisorSettings
from rollmill.sandboxes.backends.namespaces import NamespaceProvider, NamespaceSettings
from rollmill.sandboxes.tally import Observer


def settings_of(backend: str, *, snapshot_directory: Path | None = None, **options: Any) -> Any:
    """Return the settings of a backend; `options` are those that all of them have.

    Raises:
        ConfigError: for a directory of snapshots where the backend keeps them in memory alone.
    """
    if backend == "qemu":
        from rollmill.sandboxes.backends.qemu import QemuSettings

        if snapshot_directory is not None:
            raise ConfigError("machines keep their snapshots in memory alone; leave --snapshots out for --backend qemu")
        return QemuSettings(**options)
    kind = GvisorSettings if backend == "gvisor" else NamespaceSettings
    return kind(snapshot_directory=snapshot_directory, **options)


def provider_of(settings: Any, *, observer: Observer | None = None) -> Any:
    """Return the provider that settings are of."""
    if isinstance(settings, GvisorSettings):
        return GvisorProvider(settings, observer=observer)
    if isinstance(settings, NamespaceSettings):
        return NamespaceProvider(settings, observer=observer)
    from rollmill.sandboxes.backends.qemu import QemuProvider

    return QemuProvider(settings, observer=observer)
