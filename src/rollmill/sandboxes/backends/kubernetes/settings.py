"""Settings of the Kubernetes backend, and where a pod finds its own cluster."""

from __future__ import annotations

import os
import re
import ssl
from pathlib import Path

from rollmill.errors import ConfigError
from rollmill.sandboxes.backends.hosted.settings import HostedSettings
from rollmill.sandboxes.backends.http import Secret
from rollmill.sandboxes.isolation import IsolationLevel

_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")


class KubernetesSettings(HostedSettings, frozen=True, kw_only=True):
    """How sandboxes are made in a cluster that has the agent-sandbox controller.

    Attributes:
        server: address of the API server; empty: that of the cluster this pod is in.
        authority: file with the server's certificate authority; empty: the pod's own, or the system's.
        namespace: where sandboxes are made. Its network policy must deny everything: a pod cannot ask for that itself.
        image: what stands for `HostImage`.
        warm_pool: `SandboxWarmPool` that sandboxes are claimed from instead of made; a `NamedImage` names another pool
            then, and memory, disk, processors and the runtime class stand in the pool's template. Empty: made.
        runtime_class: of pods, such as `gvisor` or `kata`; empty: the cluster's default.
        isolation: what the runtime class and the namespace's policies make of it. `none` is what is known without.
        container: name of the container in the pod.
    """

    server: str = ""
    authority: str = ""
    namespace: str = "default"
    image: str = "debian:stable-slim"
    warm_pool: str = ""
    runtime_class: str = ""
    isolation: IsolationLevel = IsolationLevel.NONE
    container: str = "sandbox"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("namespace", "container", *(["warm_pool"] if self.warm_pool else [])):
            if not _NAME.fullmatch(getattr(self, name)):
                raise ConfigError(f"{name} is {getattr(self, name)!r}, which cannot be a name in Kubernetes")

    def address(self) -> str:
        """Return where the API server is.

        Raises:
            ConfigError: if neither the settings nor the environment say.
        """
        if self.server:
            return self.server.rstrip("/")
        host, port = os.environ.get("KUBERNETES_SERVICE_HOST", ""), os.environ.get("KUBERNETES_SERVICE_PORT", "443")
        if not host:
            raise ConfigError(
                "the Kubernetes backend knows no API server: this is no pod (KUBERNETES_SERVICE_HOST is not set), so "
                "give `server`; `kubectl proxy` makes one on loopback with your own rights"
            )
        return f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"

    def bearer(self) -> Secret | None:
        """Return the token: the one given, the pod's own, or none, as behind `kubectl proxy`."""
        if self.token is not None:
            return self.token
        found = os.environ.get("KUBERNETES_TOKEN", "")
        if not found and not self.server and (_ACCOUNT / "token").exists():
            found = (_ACCOUNT / "token").read_text(encoding="ascii").strip()
        return Secret(found) if found else None

    def trust(self) -> ssl.SSLContext | None:
        """Return what certificates are trusted, `None` where nothing is encrypted."""
        if not self.address().startswith("https:"):
            return None
        file = self.authority or (str(_ACCOUNT / "ca.crt") if not self.server else "")
        try:
            return ssl.create_default_context(cafile=file or None)
        except OSError as error:
            raise ConfigError(f"the certificate authority {file!r} cannot be read: {error}") from error
