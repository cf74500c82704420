"""Sandboxes from the Linux kernel's own parts: namespaces, overlays, cgroups, seccomp, Landlock. No daemon, no root."""

from rollmill.sandboxes.backends.namespaces.provider import NamespaceProvider
from rollmill.sandboxes.backends.namespaces.settings import NamespaceSettings

__all__ = ["NamespaceProvider", "NamespaceSettings"]
