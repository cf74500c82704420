"""The Firecracker backend: each sandbox in a machine of its own. Not run with Firecracker itself so far."""

from rollmill.sandboxes.backends.firecracker.provider import FirecrackerProvider
from rollmill.sandboxes.backends.firecracker.settings import FirecrackerSettings

__all__ = ["FirecrackerProvider", "FirecrackerSettings"]
