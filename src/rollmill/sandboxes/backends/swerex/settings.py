"""Settings of the SWE-ReX backend."""

from __future__ import annotations

from rollmill.sandboxes.backends.hosted.settings import JobSettings
from rollmill.sandboxes.isolation import IsolationLevel


class SweRexSettings(JobSettings, frozen=True, kw_only=True):
    """How to talk to runtimes.

    Attributes:
        isolation: what keeps a runtime from its host: nothing of it shows, so it is what you know of where they run.
        wait_s: shorter than elsewhere: the server does one call at a time, so a long one holds up others.
        idle_s: so are pauses, since calls are short.
    """

    isolation: IsolationLevel = IsolationLevel.NONE
    wait_s: float = 0.1
    idle_s: float = 0.5
