"""Where a node's sandboxes come from: made by the provider as they are asked for, or by a pool in front of it."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping

from rollmill.errors import CreateUnknown, SandboxDead, SandboxRetryable
from rollmill.sandboxes.admission import SandboxPool
from rollmill.sandboxes.protocol import Provider, Sandbox
from rollmill.sandboxes.records import DeathReason, Lease, SandboxSpec, SnapshotRef

_RECONCILE_S = 30.0


class Stock:
    """Sandboxes of a provider, each made when it is asked for.

    Args:
        provider: makes them; closed by whoever opened it.
    """

    def __init__(self, provider: Provider) -> None:
        self._provider = provider

    async def create(self, spec: SandboxSpec, *, id: str, labels: Mapping[str, str], lease: Lease) -> Sandbox:
        """Return a sandbox that answers; its id is its own to say.

        Raises:
            SandboxError: what the provider said.
            ImageError: the image cannot be used.
        """
        try:
            return await self._provider.create(spec, id=id, labels=labels, lease=lease)
        except CreateUnknown as error:
            try:
                async with asyncio.timeout(_RECONCILE_S):
                    return await self._provider.attach(id)
            except (SandboxDead, TimeoutError):
                raise SandboxRetryable(
                    f"{error} It was looked for and is not there; try again.", after_s=1.0
                ) from error

    async def restore(self, files: SnapshotRef, *, id: str, labels: Mapping[str, str], lease: Lease) -> Sandbox:
        """Return a sandbox with the files of a snapshot."""
        return await self._provider.restore(files, id=id, labels=labels, lease=lease)

    async def pause(self, sandbox: Sandbox) -> None:
        """Stop every program of it."""
        await sandbox.pause()

    async def resume(self, sandbox: Sandbox) -> None:
        """Let them go on."""
        await sandbox.resume()

    async def kill(self, sandbox: Sandbox, reason: DeathReason) -> None:
        """End it, and wait until nothing of it is left."""
        await sandbox.kill(reason)

    def ended(self, sandbox: Sandbox) -> None:
        """Note that it has ended, of itself or with its snapshot."""


class PooledStock(Stock):
    """Sandboxes of a pool: of some templates ready ones, and never more that start at once than the pool lets.

    A ready one carries the pool's labels alone: it was made before anybody asked for it.

    Args:
        pool: an open one over the same provider; closed by whoever opened it, after the node.
        ready: how many of a spec are kept ready beside those in use.
    """

    def __init__(self, provider: Provider, pool: SandboxPool, *, ready: Mapping[SandboxSpec, int]) -> None:
        super().__init__(provider)
        self._pool = pool
        self._ready = {spec: count for spec, count in ready.items() if count}
        self._wanted: Counter[SandboxSpec] = Counter()
        self._specs: dict[str, SandboxSpec] = {}
        self._paused: set[str] = set()
        for spec in self._ready:
            self._want(spec, 0)

    async def create(self, spec: SandboxSpec, *, id: str, labels: Mapping[str, str], lease: Lease) -> Sandbox:
        """Return a ready one, or one that starts in its turn."""
        own = None if spec in self._ready else labels
        with self._one_more(spec):
            sandbox = await self._pool.acquire(spec, lease=lease, id=id, labels=own)
        self._specs[sandbox.id] = spec
        return sandbox

    async def restore(self, files: SnapshotRef, *, id: str, labels: Mapping[str, str], lease: Lease) -> Sandbox:
        """Return a sandbox with the files of a snapshot, before those that begin."""

        async def make(sandbox_id: str) -> Sandbox:
            return await self._provider.restore(files, id=sandbox_id, labels=labels, lease=lease)

        with self._one_more(files.spec):
            sandbox = await self._pool.acquire(files.spec, lease=lease, id=id, make=make, resumes=True)
        self._specs[sandbox.id] = files.spec
        return sandbox

    async def pause(self, sandbox: Sandbox) -> None:
        """Stop every program of it; others may run meanwhile."""
        await self._pool.suspend(sandbox)
        self._paused.add(sandbox.id)
        self._want(self._specs[sandbox.id], -1)

    async def resume(self, sandbox: Sandbox) -> None:
        """Let them go on when there is room, before those that begin."""
        with self._one_more(self._specs[sandbox.id]):
            await self._pool.resume(sandbox)
        self._paused.discard(sandbox.id)

    async def kill(self, sandbox: Sandbox, reason: DeathReason) -> None:
        """End it, and wait until nothing of it is left."""
        await self._pool.release(sandbox, reason=reason)
        self.ended(sandbox)

    def ended(self, sandbox: Sandbox) -> None:
        """Note that it is not in use any more."""
        self._pool.ended(sandbox)
        if (spec := self._specs.pop(sandbox.id, None)) is None:
            return
        if sandbox.id in self._paused:
            self._paused.discard(sandbox.id)
        else:
            self._want(spec, -1)

    @contextlib.contextmanager
    def _one_more(self, spec: SandboxSpec) -> Iterator[None]:
        self._want(spec, 1)
        try:
            yield
        except BaseException:
            self._want(spec, -1)
            raise

    def _want(self, spec: SandboxSpec, change: int) -> None:
        if (ready := self._ready.get(spec, 0)) > 0:
            self._wanted[spec] += change
            self._pool.demand(spec, self._wanted[spec] + ready)
