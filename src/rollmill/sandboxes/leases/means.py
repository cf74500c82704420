"""What a keeper's calls and its sweep share: table and provider, deadlines, who works on what, stores and kills.

| wait | ends after |
|---|---|
| for one call to the provider | `call_s` |
| for another call of this process that suspends the same sandbox | `call_s` |
| for the table | its `busy_s` |
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from typing import TypeVar

from rollmill.clock import Clock
from rollmill.errors import DeadlineExceeded, SandboxDead, SandboxError
from rollmill.sandboxes.leases import law
from rollmill.sandboxes.leases.keeping import KeeperSettings
from rollmill.sandboxes.leases.law import Claim, Row
from rollmill.sandboxes.leases.table import LeaseTable
from rollmill.sandboxes.protocol import Provider, Sandbox
from rollmill.sandboxes.records import DeathReason, Lease, SandboxState, SnapshotRef

T = TypeVar("T")


class Means:
    """One table, one provider, and what this process does with them at the moment.

    Args:
        table: the rows.
        provider: makes the sandboxes.
        settings: how leases are kept.
        owner: who this is.
        clock: of the table's times.
        in_thread: whether changes of the table run beside the loop.
    """

    def __init__(
        self,
        table: LeaseTable,
        provider: Provider,
        *,
        settings: KeeperSettings,
        owner: str,
        clock: Clock,
        in_thread: bool,
    ) -> None:
        self.table, self.provider, self.settings, self.owner = table, provider, settings, owner
        self._clock, self._in_thread = clock, in_thread
        self._at_work: Counter[str] = Counter()
        self._suspending: dict[str, asyncio.Future[None]] = {}

    def now_s(self) -> float:
        """Return the time, since the epoch."""
        return self._clock.wall_s()

    def lease(self, row: Row) -> Lease:
        """Return what a provider is told of a row: to keep its sandbox a little longer than the row says."""
        return Lease(
            owner=self.owner,
            ttl_s=max(1.0, row.expires_s - self.now_s()) + self.settings.slack_s,
            rollout_id=row.rollout_id,
            generation=row.generation,
            policy_version=row.policy_version,
        )

    def labels(self, row: Row) -> dict[str, str]:
        """Return what is written on a row's sandbox."""
        return {
            law.KEEPER_LABEL: self.settings.name,
            law.ROLLOUT_LABEL: row.rollout_id,
            law.GENERATION_LABEL: str(row.generation),
        }

    # -- who works on what -------------------------------------------------------------------------------------------

    @property
    def busy(self) -> frozenset[str]:
        """Return the sandboxes that calls of this process work on."""
        return frozenset(self._at_work)

    @contextlib.contextmanager
    def at_work(self, sandbox_id: str) -> Iterator[None]:
        """Keep sweeps of this process away from a sandbox until the last call on it has ended."""
        self._at_work[sandbox_id] += 1
        try:
            yield
        finally:
            self._at_work[sandbox_id] -= 1
            if not self._at_work[sandbox_id]:
                del self._at_work[sandbox_id]

    async def settled(self, sandbox_id: str) -> None:
        """Wait until no call of this process suspends a sandbox.

        Raises:
            DeadlineExceeded: after `call_s`.
        """
        async with self.in_time("suspension that another call asked for", sandbox_id):
            while (suspending := self._suspending.get(sandbox_id)) is not None:
                await asyncio.wait([suspending])

    @contextlib.asynccontextmanager
    async def alone(self, sandbox_id: str) -> AsyncIterator[None]:
        """Let one call at a time suspend a sandbox: the one that came second would find it ended, or stop it halfway.

        Raises:
            DeadlineExceeded: if another call is not done after `call_s`.
        """
        await self.settled(sandbox_id)
        done = self._suspending[sandbox_id] = asyncio.get_running_loop().create_future()
        try:
            yield
        finally:
            del self._suspending[sandbox_id]
            done.set_result(None)

    @contextlib.asynccontextmanager
    async def in_time(self, what: str, sandbox_id: str) -> AsyncIterator[None]:
        """Bound what a provider does.

        Raises:
            DeadlineExceeded: after `call_s`.
        """
        limit_s = self.settings.call_s
        try:
            async with asyncio.timeout(limit_s):
                yield
        except TimeoutError:
            raise DeadlineExceeded(
                f"the provider did not finish the {what} of sandbox {sandbox_id} within {limit_s:g} s (call_s); it is "
                "overloaded or cut off. The table keeps what it may have left, and a sweep cleans up"
            ) from None

    # -- the table ---------------------------------------------------------------------------------------------------

    async def books(self, change: Callable[[], T]) -> T:
        """Do something with the table."""
        if self._in_thread:
            return await asyncio.to_thread(change)
        await asyncio.sleep(0)  # others go on meanwhile, as they do beside a thread
        return change()

    async def edit(self, row: Row, change: Callable[[Row], Row | None]) -> Row | None:
        """Change what is in a sandbox's row now; `None` removes it."""
        return await self.books(lambda: self.table.edit(row.sandbox_id, change))

    async def swap(self, row: Row, after: Row | None) -> bool:
        """Put a row in place of one that nobody has changed; return whether that was so."""
        return await self.books(lambda: self.table.swap(row, after))

    async def change(self, claim: Claim, change: Callable[[Row], Row]) -> Row:
        """Change the row of a claim that holds, and return it.

        Raises:
            SandboxLeaseLost: if it does not hold.
        """

        def act() -> Row:
            with self.table.change():
                row = change(self.checked(claim))
                self.table.put(row)
            return row

        return await self.books(act)

    def checked(self, claim: Claim) -> Row:
        """Return the row of a claim that holds. Reads the table: call it within `books`."""
        return law.check_claim(claim, self.table.current(claim.rollout_id), now_s=self.now_s())

    # -- the provider ------------------------------------------------------------------------------------------------

    async def attach(self, sandbox_id: str) -> Sandbox:
        """Return a sandbox that lives.

        Raises:
            SandboxDead: if it has ended.
            DeadlineExceeded: after `call_s`.
        """
        async with self.in_time("look-up", sandbox_id):
            return await self.provider.attach(sandbox_id)

    async def prolong(self, row: Row) -> None:
        """Have the provider keep a sandbox for as long as a row says; do this before the row says so."""
        async with self.in_time("renewal", row.sandbox_id):
            await (await self.provider.attach(row.sandbox_id)).renew(self.lease(row))

    async def suspended(self, claim: Claim) -> Row:
        """Note that a rollout is suspended from now on."""
        until_s = self.now_s() + self.settings.suspended_ttl_s
        return await self.change(claim, lambda row: law.suspended(row, until_s=until_s))

    async def keep_files(self, claim: Claim, *, full: bool = False) -> None:
        """Suspend a rollout as its files, unless it is already."""
        async with self.alone(claim.sandbox_id):
            if not await self.is_stored(claim):
                await self._store(claim, full=full)
            await self.suspended(claim)

    async def move(self, claim: Claim) -> bool:
        """Keep of what is suspended the files alone; return whether that was not so already."""
        async with self.alone(claim.sandbox_id):
            if await self.is_stored(claim):
                return False
            await self._store(claim)
            return True

    async def is_stored(self, claim: Claim) -> bool:
        """Return whether a rollout is suspended as its files, and nothing is left of its sandbox."""
        row = await self.books(lambda: self.checked(claim))
        if not law.is_stored(row):
            return False
        try:
            await self.attach(row.sandbox_id)
        except SandboxDead:
            return True
        return False  # whoever wrote the snapshot's name was stopped before it was made

    async def _store(self, claim: Claim, *, full: bool = False) -> None:
        """Let a sandbox end as a snapshot whose name is in its row; one that was paused is again if that fails."""
        name, is_new = await self._name(claim)
        sandbox: Sandbox | None = None
        was_paused = False
        try:
            async with self.in_time("snapshot", claim.sandbox_id):
                sandbox = await self.provider.attach(claim.sandbox_id)
                if was_paused := sandbox.state is SandboxState.PAUSED:
                    await sandbox.resume()
                ref = await sandbox.snapshot(id=name, stop_processes=not full, end=True, full=full)
        except SandboxDead:
            raise  # its snapshot may be there: the name stays
        except SandboxError:
            if sandbox is None or sandbox.death is None:
                await self._go_on(claim, name if is_new else "", sandbox if was_paused else None)
            raise
        await self.books(lambda: self.table.edit(claim.sandbox_id, lambda row: law.stored(row, ref)))

    async def _name(self, claim: Claim) -> tuple[str, bool]:
        """Write the name of a snapshot down before it is made; return it, and whether it was not there already."""
        name = law.snapshot_id_of(claim.sandbox_id)

        def note() -> bool:
            with self.table.change():
                row = self.checked(claim)
                self.table.put(law.named(row, name))
            return name not in row.snapshots

        return name, await self.books(note)

    async def _go_on(self, claim: Claim, name: str, paused: Sandbox | None) -> None:
        """Undo a snapshot that failed while its sandbox lives: take back its name, and pause what was paused.

        A name that an earlier call wrote stays: what that call asked for may still be under way.
        """
        await self.books(lambda: self.table.edit(claim.sandbox_id, lambda row: law.unnamed(row, name)))
        if paused is not None:
            async with self.in_time("pause", claim.sandbox_id):
                await paused.pause()

    async def snapshots(self, row: Row) -> dict[str, SnapshotRef]:
        """Return those that can be restored, as far as this process knows."""
        async with self.in_time("list of snapshots", row.sandbox_id):
            return {ref.snapshot_id: ref for ref in (*law.durable_of(row), *await self.provider.snapshots())}

    async def kill(self, row: Row, *, reason: DeathReason) -> str:
        """Kill the sandbox of a row that is ending, and delete its snapshots.

        Returns:
            Why something may be left, which is in the row then; empty if nothing is.
        """
        with self.at_work(row.sandbox_id):
            try:
                async with self.in_time("kill", row.sandbox_id):
                    await self.provider.kill([row.sandbox_id], reason=reason)
                    if row.snapshots:
                        await self.provider.delete_snapshots(row.snapshots)
            except (SandboxError, DeadlineExceeded) as error:
                note, now_s = str(error), self.now_s()
                await self.edit(row, lambda one: law.kill_failed(one, now_s=now_s, note=note))
                return note
            await self.edit(row, lambda _: None)
            return ""
