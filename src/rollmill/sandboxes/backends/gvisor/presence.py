"""Where gVisor's runtime is on this machine, or what is missing to have it; in words, without starting it."""

from __future__ import annotations

from rollmill.errors import ConfigError
from rollmill.sandboxes.backends.gvisor.build import PACKAGES, missing
from rollmill.sandboxes.backends.gvisor.settings import GvisorSettings


def presence(settings: GvisorSettings) -> str:
    """Return the end of a sentence that begins with the runtime's name."""
    try:
        return f"is {settings.find_runsc()}"
    except ConfigError:
        absent = missing()
    if not absent:
        return "is missing and can be built here: `rollmill sandbox build-runsc`"
    return (
        f"is missing. Install runsc; or, to build it here, what is missing too: {'; '.join(absent)} (on Debian 12: "
        f"apt-get install {' '.join(PACKAGES)}, then `rollmill sandbox build-runsc`)"
    )
