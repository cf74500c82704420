"""What every provider of this machine answers from its own books: those that live, and recent ends."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Generic, TypeVar

from rollmill.errors import SandboxDead
from rollmill.sandboxes.backends.namespaces.sandbox import NamespaceSandbox
from rollmill.sandboxes.lifecycle import dead_error
from rollmill.sandboxes.records import DeathReason, SandboxState, SandboxStatus

S = TypeVar("S", bound=NamespaceSandbox)


class OwnSandboxes(Generic[S]):
    """The calls of a provider that concern sandboxes which it has, or had."""

    _alive: dict[str, S]
    _ends: OrderedDict[str, SandboxStatus]

    async def attach(self, id: str) -> S:
        """Return a sandbox that lives and is this provider's."""
        if (sandbox := self._alive.get(id)) is not None:
            return sandbox
        if (ended := self._ends.get(id)) is not None and ended.death is not None:
            raise dead_error(id, ended.death)
        raise SandboxDead(
            f"sandbox {id} is not known to this provider: another process's, or never made",
            reason=DeathReason.PROVIDER_LOST.value,
            fault="infrastructure",
        )

    async def list(
        self, *, labels: Mapping[str, str] | None = None, state: SandboxState | None = None
    ) -> tuple[SandboxStatus, ...]:
        """Return those that live, and recent ends."""
        wanted = dict(labels or {}).items()
        found = (*self._ends.values(), *(one.status() for one in self._alive.values()))
        return tuple(
            one for one in found if wanted <= dict(one.labels).items() and (state is None or one.state is state)
        )

    async def status(self, ids: Sequence[str]) -> dict[str, SandboxStatus]:
        """Return what is known; ids that are not known are left out."""
        found: dict[str, SandboxStatus] = {}
        for one in ids:
            if one in self._alive:
                found[one] = self._alive[one].status()
            elif one in self._ends:
                found[one] = self._ends[one]
        return found

    async def kill(self, ids: Sequence[str], *, reason: DeathReason = DeathReason.RELEASED) -> None:
        """End these; one that is not known counts as ended.

        Raises:
            DeadlineExceeded: if one of them did not end in time; the others were waited for.
        """
        doomed = [self._alive[one] for one in ids if one in self._alive]
        for one in doomed:
            one.order_end(reason)
        ends = await asyncio.gather(*(one.kill(reason) for one in doomed), return_exceptions=True)
        for end in ends:
            if isinstance(end, BaseException):
                raise end
