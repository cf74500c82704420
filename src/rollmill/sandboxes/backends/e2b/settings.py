"""Settings of the E2B backend."""

from __future__ import annotations

import math
import os

from rollmill.errors import ConfigError
from rollmill.sandboxes.backends.hosted.settings import HostedSettings
from rollmill.sandboxes.isolation import IsolationLevel

TOKEN_VARIABLE = "E2B_API_KEY"


class E2BSettings(HostedSettings, frozen=True, kw_only=True):
    """How to reach E2B, or a service that speaks its API.

    Attributes:
        domain: of the service; empty: `E2B_DOMAIN`, or E2B's own.
        api_url: where the control API is; empty: `E2B_API_URL`, or `https://api.DOMAIN`.
        sandbox_url: one address for all sandboxes, told apart by a header; empty: `E2B_SANDBOX_URL`, or a host name
            for each sandbox below the domain.
        template: what stands for `HostImage`.
        api_version: 2 as current servers have it, 1 for older ones that know only `/sandboxes`.
        isolation: what keeps a sandbox from its host there. Nothing in the API shows it; E2B itself runs virtual
            machines. Set it lower for a service of your own.
        internet: whether sandboxes may reach the internet; the spec's `Network.NONE` asks that they do not, and only
            with `False` that is sent.
        max_lifetime_s: longest time limit that the service takes (an hour or a day at E2B, by plan).
        pauses: whether the service can pause. One of ours that runs as a plain user cannot where it may write to no
            cgroup v2.
        user: whose rights programs have that name no user. `root` as everywhere here.
    """

    domain: str = ""
    api_url: str = ""
    sandbox_url: str = ""
    template: str = "base"
    api_version: int = 2
    isolation: IsolationLevel = IsolationLevel.VIRTUAL_MACHINE
    internet: bool = False
    max_lifetime_s: float = 86_400.0
    pauses: bool = True
    user: str = "root"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.api_version not in (1, 2):
            raise ConfigError(f"api_version is {self.api_version}; servers speak 1 or 2")
        if not 1 <= self.max_lifetime_s < math.inf:
            raise ConfigError(f"max_lifetime_s is {self.max_lifetime_s}; it must be at least 1 and finite")

    def host(self) -> str:
        """Return the domain."""
        return self.domain or os.environ.get("E2B_DOMAIN", "") or "e2b.app"

    def control_url(self) -> str:
        """Return where the control API is."""
        return self.api_url or os.environ.get("E2B_API_URL", "") or f"https://api.{self.host()}"

    def address_of(self, ref: str, *, domain: str) -> str:
        """Return where the daemon inside a sandbox is reached."""
        fixed = self.sandbox_url or os.environ.get("E2B_SANDBOX_URL", "")
        return fixed.rstrip("/") or f"https://{ENVD_PORT}-{ref}.{domain or self.host()}"


ENVD_PORT = 49983
