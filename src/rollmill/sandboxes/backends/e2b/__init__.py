"""E2B, and every service that speaks its HTTP API."""

from rollmill.sandboxes.backends.e2b.driver import E2BProvider
from rollmill.sandboxes.backends.e2b.settings import E2BSettings

__all__ = ["E2BProvider", "E2BSettings"]
