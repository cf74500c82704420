"""Keeps rollouts' sandboxes by their leases.

A creation, and the name of a snapshot, is in the row before the provider is asked. With more time it is the other way
round: the provider hears of it first, so that a row never promises what nobody keeps.

| wait | ends after |
|---|---|
| for the provider to make, find, suspend, renew, resume or end a sandbox | `call_s` each |
| for another call of this process that suspends the same sandbox | `call_s` |
| for the table | its `busy_s` |

Whatever is killed in between, a sweep makes table and provider agree. The calls that suspend one and the same sandbox
wait for each other; no lock is held across a call to the provider otherwise.
"""

from __future__ import annotations

import asyncio
import logging

from rollmill.clock import Clock, SystemClock
from rollmill.errors import (
    CreateUnknown,
    DeadlineExceeded,
    ImageError,
    RollmillError,
    SandboxDead,
    SandboxError,
    SandboxLeaseLost,
)
from rollmill.sandboxes.leases import law
from rollmill.sandboxes.leases.keeping import Held, KeeperSettings, SweepReport
from rollmill.sandboxes.leases.law import Claim, Phase, Row
from rollmill.sandboxes.leases.means import Means
from rollmill.sandboxes.leases.sweeper import Sweeper
from rollmill.sandboxes.leases.table import LeaseTable
from rollmill.sandboxes.protocol import Provider, Sandbox
from rollmill.sandboxes.records import DeathReason, SandboxSpec, SandboxState, SnapshotRef

_log = logging.getLogger(__name__)


class Keeper:
    """Keeps the leases of one table on one provider.

    Every call raises `SandboxError` if the table cannot be used, with what its file says.

    Args:
        table: the rows.
        provider: makes the sandboxes.
        settings: how.
        owner: who this is, such as a run and its process.
        clock: of the table's times.
        in_thread: whether changes of the table run beside the loop, as they wait for the disk.
    """

    def __init__(
        self,
        table: LeaseTable,
        provider: Provider,
        *,
        settings: KeeperSettings,
        owner: str,
        clock: Clock | None = None,
        in_thread: bool = True,
    ) -> None:
        clock = SystemClock() if clock is None else clock
        self._means = Means(table, provider, settings=settings, owner=owner, clock=clock, in_thread=in_thread)
        self._table, self._provider, self._settings = table, provider, settings
        self._sweeper = Sweeper(self._means)
        self._moves: set[asyncio.Task[bool]] = set()

    @property
    def settings(self) -> KeeperSettings:
        """Return how leases are kept."""
        return self._settings

    async def sweep(self) -> SweepReport:
        """Make table and provider agree: adopt what was made, kill what nobody owns, try failed kills again.

        Raises:
            SandboxError: if the provider does not list what it has.
            DeadlineExceeded: if that takes longer than `call_s`.

        Cancellation:
            what was begun is seen again by the next sweep.
        """
        return await self._sweeper.sweep()

    # -- start -------------------------------------------------------------------------------------------------------

    async def start(self, rollout_id: str, spec: SandboxSpec, *, policy_version: int) -> Held:
        """Make a sandbox for a rollout; one that it has ends with the next sweep.

        Raises:
            SandboxError: what the provider raised; the row says so if something may be left.
            SandboxLeaseLost: if the rollout was started again meanwhile, or the creation took longer than the lease.
            DeadlineExceeded: if the provider took longer than `call_s`; a sweep ends what it makes after all.

        Cancellation:
            the row stays, and a sweep adopts or removes what was made.
        """
        row = await self._means.books(lambda: self._new_row(rollout_id, policy_version=policy_version))
        with self._means.at_work(row.sandbox_id):
            try:
                async with self._means.in_time("creation", row.sandbox_id):
                    sandbox = await self._provider.create(
                        spec, id=row.sandbox_id, labels=self._means.labels(row), lease=self._means.lease(row)
                    )
            except (CreateUnknown, DeadlineExceeded) as error:
                note = str(error)
                await self._means.edit(row, lambda one: law.ending(one, now_s=self._means.now_s(), note=note))
                raise
            except RollmillError:
                await self._means.edit(row, lambda _: None)  # of a creation that failed nothing is left
                raise
            return await self._running(row, sandbox)

    def _new_row(self, rollout_id: str, *, policy_version: int) -> Row:
        now_s = self._means.now_s()
        with self._table.change():
            if (old := self._table.current(rollout_id)) is not None:
                self._table.put(law.ending(old, now_s=now_s, note="the rollout was started again"))
            generation = self._table.next_generation(rollout_id)
            row = Row(
                sandbox_id=law.sandbox_id_of(rollout_id, generation=generation, salt=self._table.salt),
                rollout_id=rollout_id,
                generation=generation,
                provider=self._settings.provider,
                owner=self._means.owner,
                phase=Phase.CREATING,
                expires_s=now_s + self._settings.ttl_s,
                policy_version=policy_version,
                asked_s=now_s,
            )
            self._table.put(row)
        return row

    async def _running(self, row: Row, sandbox: Sandbox) -> Held:
        """Note that a sandbox runs for its owner, unless another one came in between."""
        until_s = self._means.now_s() + self._settings.ttl_s
        after = await self._means.change(law.claim_of(row), lambda now: law.running(now, until_s=until_s))
        return Held(claim=law.claim_of(after), sandbox=sandbox)

    # -- use ---------------------------------------------------------------------------------------------------------

    async def use(self, claim: Claim) -> Sandbox:
        """Return the sandbox of an owner whose claim holds.

        Raises:
            SandboxLeaseLost: if it does not, or a sweep has suspended the rollout as its files.
            SandboxDead: if the sandbox has ended.
            DeadlineExceeded: if the provider took longer than `call_s`.
        """
        await self._means.books(lambda: law.check_there(self._means.checked(claim)))
        return await self._means.attach(claim.sandbox_id)

    async def renew(self, claim: Claim) -> None:
        """Renew an owner's lease: with the provider, and then in the table.

        Raises:
            SandboxLeaseLost: if the claim holds no more, or a sweep has suspended the rollout as its files.
            SandboxDead: if the sandbox has ended.
            SandboxError: if the provider refuses; the lease is as it was.
            DeadlineExceeded: if the provider took longer than `call_s`; the lease is as it was.
        """
        row = await self._means.books(lambda: law.check_there(self._means.checked(claim)))
        wanted = law.renewed(row, until_s=self._means.now_s() + self._settings.ttl_s)
        await self._means.prolong(wanted)
        after = await self._means.change(claim, lambda now: law.renewed(law.check_there(now), until_s=wanted.expires_s))
        if after.expires_s > wanted.expires_s:  # it was suspended meanwhile; the provider may have heard of that first
            await self._means.prolong(after)

    async def release(self, claim: Claim) -> None:
        """End a rollout's sandbox. If it will not end, the row stays and sweeps try again.

        Raises:
            SandboxLeaseLost: if the claim holds no more.
        """
        row = await self._means.change(claim, lambda now: law.ending(now, now_s=self._means.now_s(), note=law.RELEASED))
        await self._means.kill(row, reason=DeathReason.RELEASED)

    # -- suspend -----------------------------------------------------------------------------------------------------

    async def suspend(self, claim: Claim, *, keep_memory: bool = True, full: bool = False) -> None:
        """Pause a rollout's sandbox, or keep its files alone; whoever resumes it gets the next generation.

        One that is suspended stays so, and its time begins anew.

        Args:
            claim: of its owner.
            keep_memory: its programs are stopped and go on later; else they are ended, and it takes no memory for them.
            full: without its memory, they are kept as an image with the files, and go on where that is restored.

        Raises:
            SandboxLeaseLost: if the claim holds no more.
            SandboxUnsupported: if the provider cannot do that; the sandbox runs on.
            SandboxDead: if the sandbox has ended. Where another call had it end as its files, the next sweep says so.
            SandboxError: if the provider refuses; the sandbox runs on, or is paused, and so says its row.
            DeadlineExceeded: if the provider took longer than `call_s`; a sweep finds out what it did.

        Cancellation:
            the row stays as it was, perhaps with the name of a snapshot that is made after all.
        """
        with self._means.at_work(claim.sandbox_id):
            if not keep_memory:
                await self._means.keep_files(claim, full=full)
                return
            async with self._means.alone(claim.sandbox_id):
                if await self._means.is_stored(claim):
                    await self._means.suspended(claim)
                else:
                    await self._pause(claim)

    async def _pause(self, claim: Claim) -> None:
        """Pause a sandbox, and have its provider keep it for as long as its row is about to say."""
        row = await self._means.books(lambda: self._means.checked(claim))
        await self._means.prolong(law.renewed(row, until_s=self._means.now_s() + self._settings.suspended_ttl_s))
        async with self._means.in_time("pause", claim.sandbox_id):
            sandbox = await self._provider.attach(claim.sandbox_id)
            if sandbox.state is not SandboxState.PAUSED:
                await sandbox.pause()
        try:
            await self._means.suspended(claim)
        except SandboxLeaseLost:
            await self._wake(claim, sandbox)
            raise

    async def _wake(self, claim: Claim, sandbox: Sandbox) -> None:
        """Let a sandbox go on that was paused for an owner who had lost it to one that runs it."""
        row = await self._means.books(lambda: self._table.find(claim.sandbox_id))
        if row is not None and row.phase is Phase.RUNNING:
            async with self._means.in_time("resume", claim.sandbox_id):
                await sandbox.resume()

    async def to_disk(self, count: int) -> int:
        """Keep of rollouts that are suspended with their memory the files alone, for a node that is short.

        Those suspended for longest go first. Their programs end; lease, owner and time of each stay, and a resume makes
        a sandbox of its files.

        Returns:
            How many were moved. One that cannot be stays suspended, and its programs may have ended.

        Cancellation:
            the one that is being moved is carried through, and no further one begins.
        """
        rows = await self._means.books(lambda: self._table.rows(provider=self._settings.provider))
        moved = 0
        for row in law.to_move(rows, count=count, busy=self._means.busy):
            move = asyncio.ensure_future(self._move(row))
            self._moves.add(move)
            move.add_done_callback(self._moves.discard)
            moved += await asyncio.shield(move)
        return moved

    async def _move(self, row: Row) -> bool:
        with self._means.at_work(row.sandbox_id):
            try:
                return await self._means.move(law.claim_of(row))
            except (SandboxError, DeadlineExceeded) as error:
                _log.warning("rollout %s was not moved to disk: %s", row.rollout_id, error)
                return False

    # -- resume ------------------------------------------------------------------------------------------------------

    async def resume(self, rollout_id: str, *, take_over: bool = False) -> Held:
        """Take a rollout's sandbox on: from now on its former owner is refused.

        Args:
            rollout_id: which.
            take_over: also from an owner that runs it.

        Raises:
            SandboxLeaseLost: if there is none, or it is another's.
            SandboxDead: if the sandbox has ended and no snapshot holds it; the next sweep drops the row.
            SandboxError: what the provider raised. If nothing is left of the try, the rollout is suspended as before.
            DeadlineExceeded: if the provider took longer than `call_s`. What it was to make from a snapshot is adopted
                or given up by a sweep after `grace_s`; until then the rollout cannot be resumed.

        Cancellation:
            as with `DeadlineExceeded`.
        """
        row = await self._means.books(lambda: self._taken(rollout_id, take_over=take_over))
        with self._means.at_work(row.sandbox_id):
            await self._means.settled(row.sandbox_id)
            try:
                return await self._go_on(row)
            except SandboxDead:
                if not row.snapshots:
                    raise
            return await self._restore(row)

    def _taken(self, rollout_id: str, *, take_over: bool) -> Row:
        now_s, owner = self._means.now_s(), self._means.owner
        with self._table.change():
            row = self._table.current(rollout_id)
            row = law.check_resume(rollout_id, row, owner=owner, now_s=now_s, take_over=take_over)
            generation, until_s = self._table.next_generation(rollout_id), now_s + self._settings.ttl_s
            after = law.taken(row, generation=generation, owner=owner, until_s=until_s)
            self._table.put(after)
        return after

    async def _go_on(self, row: Row) -> Held:
        """Resume a sandbox that lives."""
        async with self._means.in_time("resume", row.sandbox_id):
            sandbox = await self._provider.attach(row.sandbox_id)
            await sandbox.renew(self._means.lease(row))
            await sandbox.resume()
        held = await self._running(row, sandbox)
        await self._forget_older(row)
        return held

    async def _restore(self, row: Row) -> Held:
        """Make a sandbox from the snapshot of one that has ended."""
        ref = _newest(row, await self._means.snapshots(row))
        after = await self._means.books(lambda: self._moved(row))
        with self._means.at_work(after.sandbox_id):
            sandbox = await self._restored(after, ref)
            held = await self._running(after, sandbox)
            await self._forget_older(after)
            return held

    async def _restored(self, row: Row, ref: SnapshotRef) -> Sandbox:
        try:
            async with self._means.in_time("restore", row.sandbox_id):
                return await self._provider.restore(
                    ref, id=row.sandbox_id, labels=self._means.labels(row), lease=self._means.lease(row)
                )
        except ImageError as error:
            text = f"rollout {row.rollout_id!r} cannot be resumed: {error}; start it again"
            await self._end(row, note=text)
            raise SandboxLeaseLost(text, generation=row.generation) from error
        except (CreateUnknown, DeadlineExceeded):
            raise  # it may be there: a sweep finds out
        except RollmillError:
            await self._means.edit(row, law.given_back)  # of a restoring that failed nothing is left
            raise

    async def _end(self, row: Row, *, note: str) -> None:
        ending = await self._means.edit(row, lambda one: law.ending(one, now_s=self._means.now_s(), note=note))
        if ending is not None:
            await self._means.kill(ending, reason=DeathReason.LEASE_EXPIRED)

    def _moved(self, row: Row) -> Row:
        """Give a rollout another sandbox id, as each names one sandbox for good."""
        with self._table.change():
            now = self._means.checked(law.claim_of(row))
            generation = self._table.next_generation(row.rollout_id)
            name = law.sandbox_id_of(row.rollout_id, generation=generation, salt=self._table.salt)
            after = law.moved(now, generation=generation, sandbox_id=name, now_s=self._means.now_s())
            self._table.remove(row.sandbox_id)
            self._table.put(after)
        return after

    async def _forget_older(self, row: Row) -> None:
        """Delete the snapshots of earlier sandboxes of a rollout that runs: nobody may go on from them any more."""
        if not (names := law.older_snapshots(row)):
            return
        await self._means.edit(row, lambda one: law.doubted(one, names))
        async with self._means.in_time("removal of snapshots", row.sandbox_id):
            await self._provider.delete_snapshots(names)
        await self._means.edit(row, lambda one: law.without(one, names))


def _newest(row: Row, held: dict[str, SnapshotRef]) -> SnapshotRef:
    found = [held[name] for name in row.snapshots if name in held]
    if not found:
        raise SandboxLeaseLost(
            f"rollout {row.rollout_id!r} cannot be resumed: its sandbox has ended, and of its snapshots "
            f"{list(row.snapshots)} none is there any more; start it again",
            generation=row.generation,
        )
    return found[-1]
