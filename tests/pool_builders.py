"""A fake provider on which starts share processors, and what tests of pools ask of it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from rollmill.sandboxes import Lease, Provider, SandboxSpec, SandboxState
from rollmill.sandboxes.admission import AdmissionSettings, PoolSettings, SandboxPool
from rollmill.sandboxes.records import Capabilities, DeathReason
from rollmill.testing import FakeSandbox, FakeSandboxProvider, run_virtual

T = TypeVar("T")
LEASE = Lease(owner="me", ttl_s=100_000.0)


class SharedCores(FakeSandboxProvider):
    """A start takes `start_s` of a processor, and k of them take k over `cores` times as long.

    Attributes:
        most_starting: the most creations that were under way at a time.
        most_alive: the most sandboxes that lived.
        created: ids, in the order of their creation.
    """

    def __init__(
        self, *, core_s: float = 0.0, cores: int = 2, capabilities: Mapping[str, Any] | None = None, **options: Any
    ) -> None:
        super().__init__(**options)
        self._core_s, self._cores, self._changes = core_s, cores, dict(capabilities or {})
        self.starting = self.most_starting = self.most_alive = 0
        self.created: list[str] = []
        self.refuse_kill: list[Exception] = []

    async def capabilities(self) -> Capabilities:
        return msgspec.structs.replace(await super().capabilities(), **self._changes)

    async def create(
        self, spec: SandboxSpec, *, id: str, labels: Mapping[str, str] | None = None, lease: Lease
    ) -> FakeSandbox:
        self.created.append(id)
        self.starting += 1
        self.most_starting = max(self.most_starting, self.starting)
        try:
            await asyncio.sleep(self._core_s * max(1.0, self.starting / self._cores))
            sandbox = await super().create(spec, id=id, labels=labels, lease=lease)
        finally:
            self.starting -= 1
        self.most_alive = max(self.most_alive, len(self._alive))
        return sandbox

    async def kill(self, ids: Sequence[str], *, reason: DeathReason = DeathReason.RELEASED) -> None:
        if self.refuse_kill:
            raise self.refuse_kill.pop()
        await super().kill(ids, reason=reason)

    async def alive(self) -> list[str]:
        """Return who lives, those that are starting among them."""
        gone = (SandboxState.DEAD, SandboxState.LOST)
        return [one.sandbox_id for one in await self.list() if one.state not in gone]


def pool_of(provider: Provider, *, pool: dict[str, Any] | None = None, **admission: Any) -> SandboxPool:
    """Return a pool with few settings changed; two starts at first."""
    settings = PoolSettings(admission=AdmissionSettings(**{"initial_starting": 2, **admission}), **(pool or {}))
    return SandboxPool(provider, settings=settings)


def in_virtual_time(body: Callable[[], Awaitable[T]]) -> T:
    """Run a test's body on the virtual loop."""

    async def whole() -> T:
        return await body()

    return run_virtual(whole())
