"""Kills until nothing is left: a kill that failed is tried again, an id whose creation was cut off is looked for."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from rollmill.sandboxes.protocol import Provider
from rollmill.sandboxes.records import DeathReason, SandboxState

_FIRST_REST_S = 0.5
_LONGEST_REST_S = 30.0
_GONE = (SandboxState.DEAD, SandboxState.LOST)


class Remover:
    """Kills sandboxes of one provider.

    Args:
        provider: whose.
        kill_s: longest order to kill before it is tried again.

    Attributes:
        failures: kills that failed; each was tried again.
        last_failure: what was wrong with the last of them.
        unresolved: ids that may still appear -> until when they are looked for.
    """

    def __init__(self, provider: Provider, *, kill_s: float) -> None:
        self._provider = provider
        self._kill_s = kill_s
        self.failures = 0
        self.last_failure = ""
        self.unresolved: dict[str, float] = {}

    async def remove(self, ids: Sequence[str], *, reason: DeathReason) -> None:
        """Kill these and return when nothing of them is left; it goes on until then or until it is cancelled."""
        rest_s = _FIRST_REST_S
        while not await self.killed_for_good(ids, reason=reason):
            await asyncio.sleep(rest_s)
            rest_s = min(2 * rest_s, _LONGEST_REST_S)

    async def killed_for_good(self, ids: Sequence[str], *, reason: DeathReason, limit_s: float | None = None) -> bool:
        """Kill these once, within `limit_s`; return whether nothing of them is left, or can still appear."""
        if not await self.kill(ids, reason=reason, limit_s=limit_s) or not await self._resolved(ids):
            return False
        for one in ids:
            self.unresolved.pop(one, None)
        return True

    async def kill(self, ids: Sequence[str], *, reason: DeathReason, limit_s: float | None = None) -> bool:
        """Order it once; return whether the provider says that they are gone."""
        try:
            async with asyncio.timeout(self._kill_s if limit_s is None else limit_s):
                await self._provider.kill(ids, reason=reason)
        except Exception as error:  # whatever it is, they may live, so it is counted and tried again
            self.failures += 1
            self.last_failure = f"kill of {', '.join(ids[:3])}: {type(error).__name__}: {error}"
            return False
        return True

    async def _resolved(self, ids: Sequence[str]) -> bool:
        """Return whether none of these can appear any more."""
        now_s = asyncio.get_running_loop().time()
        open_ids = [one for one in ids if self.unresolved.get(one, now_s) > now_s]
        if not open_ids:
            return True
        try:
            async with asyncio.timeout(self._kill_s):
                known = await self._provider.status(open_ids)
        except Exception as error:  # as above
            self.failures += 1
            self.last_failure = f"status of {', '.join(open_ids[:3])}: {type(error).__name__}: {error}"
            return False
        return all(one in known and known[one].state in _GONE for one in open_ids)
