"""The seam between the watchdog and what runs the sandboxes, and the way over any provider.

A backend on this machine gives its own `Overseen`, which looks from outside and asks nothing of what a bomb may starve.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from rollmill.errors import RollmillError
from rollmill.sandboxes.protocol import Provider, Sandbox
from rollmill.sandboxes.records import Death, DeathReason, Limits, SandboxState, Usage
from rollmill.sandboxes.watchdog.records import Evidence, Sample, Survey, Watched

_WATCHED_STATES = frozenset({SandboxState.READY, SandboxState.BUSY, SandboxState.PAUSED})
_AT_A_TIME = 64


class Overseen(Protocol):
    """What the watchdog needs of whatever runs sandboxes. It bounds every call itself, `survey` aside."""

    async def survey(self, *, limit_s: float) -> Survey:
        """Look at all sandboxes that live, and return by the limit with what was seen."""
        ...

    async def freeze(self, sandbox_id: str) -> None:
        """Stop every process of a sandbox."""
        ...

    async def describe(self, sandbox_id: str) -> Mapping[str, Any]:
        """Return what else is known of a sandbox, in values that JSON holds; bounded."""
        ...

    async def kill(self, sandbox_id: str, *, reason: DeathReason, detail: str) -> Death:
        """End a sandbox, and wait until nothing of it is left; what it ended by before stands."""
        ...


class EvidenceKeeper(Protocol):
    """Where evidence is kept."""

    async def keep(self, evidence: Evidence) -> str:
        """Keep one, and return where it is."""
        ...


class NoEvidence(EvidenceKeeper):
    """Keeps nothing."""

    async def keep(self, evidence: Evidence) -> str:
        """Drop it: the death's detail still says why."""
        return ""


def spec_limits(sandbox: Sandbox) -> Limits:
    """Return the limits of a sandbox that knows its spec, the default ones of one that does not."""
    spec = getattr(sandbox, "spec", None)
    return Limits() if spec is None else spec.limits


class ProviderOverseen:
    """Any provider, by its protocol alone: each sandbox is asked what it uses.

    For backends of other machines a call a second and sandbox is much; let the watchdog look less often.

    Args:
        provider: whose sandboxes.
        limits_of: the caps of a sandbox.
    """

    def __init__(self, provider: Provider, *, limits_of: Callable[[Sandbox], Limits] = spec_limits) -> None:
        self._provider = provider
        self._limits_of = limits_of

    async def survey(self, *, limit_s: float) -> Survey:
        """Ask all at once, some dozens at a time; who has not answered by the limit is late."""
        loop = asyncio.get_running_loop()
        end_s = loop.time() + limit_s
        listed = await self._provider.list()
        ids = [one.sandbox_id for one in listed if one.state in _WATCHED_STATES]
        found: dict[str, Watched] = {}
        ended: set[str] = set()
        room = asyncio.Semaphore(_AT_A_TIME)

        async def look(sandbox_id: str) -> None:
            try:
                async with asyncio.timeout_at(end_s), room:
                    sandbox = await self._provider.attach(sandbox_id)
                    if sandbox.death is not None:
                        ended.add(sandbox_id)
                        return
                    sample = sample_of(await sandbox.usage(), at_s=loop.time())
                    found[sandbox_id] = Watched(sample=sample, limits=self._limits_of(sandbox))
            except (TimeoutError, RollmillError):
                return  # late, or ended meanwhile: in neither case is it found

        async with asyncio.TaskGroup() as group:
            for one in ids:
                group.create_task(look(one))
        return Survey(found=found, late=tuple(one for one in ids if one not in found and one not in ended))

    async def freeze(self, sandbox_id: str) -> None:
        """Pause it."""
        sandbox = await self._provider.attach(sandbox_id)
        await sandbox.pause()

    async def describe(self, sandbox_id: str) -> Mapping[str, Any]:
        """Return its labels and lease: nothing else is known through the protocol."""
        status = (await self._provider.status([sandbox_id])).get(sandbox_id)
        if status is None:
            return {}
        return {"labels": dict(status.labels), "rollout_id": status.lease.rollout_id, "age_s": status.age_s}

    async def kill(self, sandbox_id: str, *, reason: DeathReason, detail: str) -> Death:
        """Kill it; the protocol has no place for the detail, which stands in the report."""
        sandbox = await self._provider.attach(sandbox_id)
        return await sandbox.kill(reason)


def sample_of(usage: Usage, *, at_s: float) -> Sample:
    """Return a sample of what a provider says; its own first process is not the sandbox's."""
    return Sample(
        at_s=at_s,
        pids=None if usage.processes is None else max(0, usage.processes - 1),
        cpu_s=usage.cpu_s,
        memory_bytes=usage.memory_bytes,
        oom_kills=usage.oom_kills,
        disk_bytes=usage.disk_bytes,
        inodes=usage.inodes,
    )
