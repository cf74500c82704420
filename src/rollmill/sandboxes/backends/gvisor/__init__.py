"""Sandboxes with a kernel of their own in user space: gVisor's `runsc`, under everything that namespaces give."""

from rollmill.sandboxes.backends.gvisor.provider import GvisorProvider
from rollmill.sandboxes.backends.gvisor.sandbox import GvisorSandbox
from rollmill.sandboxes.backends.gvisor.settings import GvisorSettings

__all__ = ["GvisorProvider", "GvisorSandbox", "GvisorSettings"]
