"""Where SWE-ReX runtimes come from: the protocol only talks to one that runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from rollmill.errors import ConfigError, ImageError, SandboxRetryable
from rollmill.sandboxes.backends.http import Secret
from rollmill.sandboxes.records import HostImage, Image, Record

_RETRY_AFTER_S = 5.0


class Endpoint(Record, frozen=True, kw_only=True):
    """A runtime that runs.

    Attributes:
        url: with host, port, and a path if there is one.
        token: what it was started with.
    """

    url: str
    token: Secret


class Deployment(Protocol):
    """Starts and stops runtimes: containers, pods, machines."""

    async def start(self, *, id: str, image: Image) -> Endpoint:
        """Return a runtime that nobody has used.

        Raises:
            SandboxRetryable: if there is none now.
            ImageError: if it is the image.
        """
        ...

    async def stop(self, endpoint: Endpoint) -> None:
        """End it and all that runs in it; one that has ended is no error."""
        ...


class FixedEndpoints:
    """Runtimes that somebody else started, each handed out once.

    Args:
        endpoints: all of them.
        reuse: hand one out again after its sandbox ended. Nothing resets it: files and processes of the last one stay.
    """

    def __init__(self, endpoints: Sequence[Endpoint], *, reuse: bool = False) -> None:
        if not endpoints or len({one.url for one in endpoints}) != len(endpoints):
            raise ConfigError(f"{len(endpoints)} endpoints of SWE-ReX with {len({one.url for one in endpoints})} urls")
        self._free = list(endpoints)
        self._reuse = reuse

    async def start(self, *, id: str, image: Image) -> Endpoint:
        """Return one that is free."""
        if not isinstance(image, HostImage):
            raise ImageError(f"runtimes that run already have their image; {image} cannot be chosen")
        if not self._free:
            raise SandboxRetryable("every runtime of SWE-ReX is in use or was used", after_s=_RETRY_AFTER_S)
        return self._free.pop(0)

    async def stop(self, endpoint: Endpoint) -> None:
        """Put one back, if it may be used again."""
        if self._reuse:
            self._free.append(endpoint)
