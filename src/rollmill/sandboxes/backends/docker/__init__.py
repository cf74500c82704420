"""Docker and Podman."""

from rollmill.sandboxes.backends.docker.driver import DockerProvider
from rollmill.sandboxes.backends.docker.settings import DockerSettings

__all__ = ["DockerProvider", "DockerSettings"]
