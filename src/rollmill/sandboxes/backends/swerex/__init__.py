"""SWE-ReX runtimes."""

from rollmill.sandboxes.backends.swerex.deployment import Deployment, Endpoint, FixedEndpoints
from rollmill.sandboxes.backends.swerex.driver import SweRexProvider
from rollmill.sandboxes.backends.swerex.settings import SweRexSettings

__all__ = ["Deployment", "Endpoint", "FixedEndpoints", "SweRexProvider", "SweRexSettings"]
