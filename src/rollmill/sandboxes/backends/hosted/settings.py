"""Settings that every hosted backend has, and what they claim of a service."""

from __future__ import annotations

import math

from rollmill.errors import ConfigError
from rollmill.sandboxes.backends.hosted.driver import Found
from rollmill.sandboxes.backends.http import Secret
from rollmill.sandboxes.isolation import IsolationLevel, Protection
from rollmill.sandboxes.records import Record

CLAIMS: dict[IsolationLevel, frozenset[Protection]] = {
    IsolationLevel.NONE: frozenset(),
    IsolationLevel.OWN_KERNEL: frozenset({Protection.OWN_KERNEL}),
    IsolationLevel.VIRTUAL_MACHINE: frozenset({Protection.VIRTUAL_MACHINE}),
    IsolationLevel.NAMESPACES: frozenset({Protection.NAMESPACES, Protection.NO_NEW_PRIVILEGES, Protection.NO_NETWORK}),
}
CLAIMS[IsolationLevel.HARDENED] = CLAIMS[IsolationLevel.NAMESPACES] | {
    Protection.USER_NAMESPACE,
    Protection.NO_NESTED_NAMESPACES,
    Protection.CAPABILITIES_DROPPED,
    Protection.SECCOMP,
}
CLAIMS[IsolationLevel.CAPPED] = CLAIMS[IsolationLevel.HARDENED] | {Protection.MEMORY_CAP, Protection.PIDS_CAP}


class HostedSettings(Record, frozen=True, kw_only=True):
    """How long calls may take, and what is accepted.

    Attributes:
        minimum_isolation: below it nothing is started.
        start_s: from the call until a sandbox answers. Raise it for services that pull images then.
        end_s: how long an end may take before `kill` gives up waiting; the order stands and is tried again.
        call_s: of any other call. Raising it waits longer for a service that hangs.
        answer_s: how late the report of a killed program may be.
        token: shown by nothing; `None`: taken from the environment.
    """

    minimum_isolation: IsolationLevel = IsolationLevel.HARDENED
    start_s: float = 120.0
    end_s: float = 60.0
    call_s: float = 60.0
    answer_s: float = 30.0
    token: Secret | None = None

    def __post_init__(self) -> None:
        for name in ("start_s", "end_s", "call_s", "answer_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be above 0 and finite")


class JobSettings(HostedSettings, frozen=True, kw_only=True):
    """The same, of a service whose programs are jobs (`jobs`).

    Attributes:
        scratch: directory inside for programs' output.
        wait_s: how long one call may wait inside for news. A service that does one call at a time wants it short.
        idle_s: longest pause between two looks at a silent program. Raising it costs latency and saves calls.
    """

    scratch: str = "/var/tmp/.rollmill"
    wait_s: float = 2.0
    idle_s: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.scratch.startswith("/"):
            raise ConfigError(f"scratch is {self.scratch!r}; it must be an absolute path inside")
        if not 0 <= self.wait_s <= 10 or not 0 < self.idle_s <= 60:
            raise ConfigError(f"wait_s is {self.wait_s} (0 to 10) and idle_s {self.idle_s} (above 0, at most 60)")


class ClaimedIsolation:
    """The part of a driver that says what keeps sandboxes from their host, where nothing but a claim tells it.

    Args:
        isolation: what is claimed.
    """

    def __init__(self, isolation: IsolationLevel) -> None:
        self._claimed = CLAIMS[isolation]

    @property
    def protections(self) -> frozenset[Protection] | None:
        """Return what is claimed."""
        return self._claimed

    async def protections_of(self, found: Found) -> frozenset[Protection]:
        """Return the same for each."""
        return self._claimed
