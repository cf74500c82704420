"""Settings of the container backend."""

from __future__ import annotations

import os

from rollmill.errors import ConfigError
from rollmill.sandboxes.backends.hosted.settings import HostedSettings

_PULLS = ("missing", "never", "always")
_DEFAULT_SOCKET = "/var/run/docker.sock"


class DockerSettings(HostedSettings, frozen=True, kw_only=True):
    """How containers are made. The defaults are the hard ones; each that is changed lets a program do more.

    Attributes:
        socket: of Docker's or Podman's Engine API; empty: `DOCKER_HOST` if it names one, else Docker's usual one.
        image: what stands for `HostImage`.
        pull: `missing`: pull an image that is not there; `never`; `always`: look for a newer one each time.
        runtime: name of an OCI runtime that the daemon knows, such as `runsc` or `kata`; empty: the daemon's default.
        cap_add: capabilities given back after all were dropped. Programs that change owners or users need some.
        read_only_root: only `writable` can be written to, in memory, capped by the spec's `disk_bytes` and `inodes`
            each. Without it the root can be written to and nothing caps it but `storage_size`.
        writable: those directories.
        storage_size: cap the root by the daemon's storage option `size`; few storage drivers have it.
        init: run a small init, which reaps orphans.
    """

    socket: str = ""
    image: str = "debian:stable-slim"
    pull: str = "missing"
    runtime: str = ""
    cap_add: tuple[str, ...] = ()
    read_only_root: bool = False
    writable: tuple[str, ...] = ("/tmp", "/root", "/workspace")
    storage_size: bool = False
    init: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.pull not in _PULLS:
            raise ConfigError(f"pull is {self.pull!r}; it must be one of {', '.join(_PULLS)}")
        wrong = [path for path in self.writable if not path.startswith("/") or ":" in path or path == "/"]
        if wrong:
            raise ConfigError(f"writable names {wrong}; each must be an absolute path below the root")
        if "ALL" in self.cap_add:
            raise ConfigError("cap_add gives all capabilities back; name those that are needed")
        self.socket_path()

    def socket_path(self) -> str:
        """Return where the Engine API listens.

        Raises:
            ConfigError: if `DOCKER_HOST` names no Unix socket.
        """
        if self.socket:
            return self.socket
        host = os.environ.get("DOCKER_HOST", "")
        if host and not host.startswith("unix://"):
            raise ConfigError(
                f"DOCKER_HOST is {host!r}; sandboxes are made over a Unix socket only. Name one by `socket`, or "
                "forward the remote one (ssh -L /tmp/docker.sock:/var/run/docker.sock HOST)"
            )
        return host.removeprefix("unix://") or _DEFAULT_SOCKET
