"""Settings of the SWE-ReX backend."""

from __future__ import annotations

from rollmill.errors import ConfigError
from rollmill.sandboxes.backends.hosted.settings import HostedSettings
from rollmill.sandboxes.isolation import IsolationLevel


class SweRexSettings(HostedSettings, frozen=True, kw_only=True):
    """How to talk to runtimes.

    Attributes:
        isolation: what keeps a runtime from its host: nothing of it shows, so it is what you know of where they run.
        scratch: directory inside for programs' output.
        wait_s: how long one call may wait inside. The server does one call at a time, so a long one holds up others.
        idle_s: longest pause between two looks at a silent program. Raising it costs latency and saves calls.
    """

    isolation: IsolationLevel = IsolationLevel.NONE
    scratch: str = "/var/tmp/.rollmill"
    wait_s: float = 0.1
    idle_s: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.scratch.startswith("/"):
            raise ConfigError(f"scratch is {self.scratch!r}; it must be an absolute path inside")
        if not 0 <= self.wait_s <= 10 or not 0 < self.idle_s <= 60:
            raise ConfigError(f"wait_s is {self.wait_s} (0 to 10) and idle_s {self.idle_s} (above 0, at most 60)")
