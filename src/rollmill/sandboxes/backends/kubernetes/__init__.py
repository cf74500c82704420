"""Kubernetes, with the agent-sandbox controller."""

from rollmill.sandboxes.backends.kubernetes.driver import KubernetesProvider
from rollmill.sandboxes.backends.kubernetes.settings import KubernetesSettings

__all__ = ["KubernetesProvider", "KubernetesSettings"]
