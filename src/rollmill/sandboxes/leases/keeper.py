"""Keeps rollouts' sandboxes by their leases: the row first, then the provider, then the row again.

| wait | ends after |
|---|---|
| for the provider to make, suspend, resume or end a sandbox | `call_s` |
| for the table | its `busy_s` |

Whatever is killed in between, a sweep makes table and provider agree. No lock is held across a call to the provider.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from typing import TypeVar

import msgspec

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
from rollmill.sandboxes.leases.keeping import OUTCOMES, Held, KeeperSettings, SweepReport
from rollmill.sandboxes.leases.law import Act, Claim, OnExpiry, Phase, Row, Step
from rollmill.sandboxes.leases.table import LeaseTable
from rollmill.sandboxes.protocol import Provider, Sandbox
from rollmill.sandboxes.records import DeathReason, Lease, SandboxSpec, SandboxState, SnapshotRef

T = TypeVar("T")
_log = logging.getLogger(__name__)


class Keeper:
    """Keeps the leases of one table on one provider.

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
        self._table, self._provider, self._settings, self._owner = table, provider, settings, owner
        self._clock = SystemClock() if clock is None else clock
        self._in_thread = in_thread
        self._busy: set[str] = set()
        self._moving: dict[str, asyncio.Future[bool]] = {}

    @property
    def settings(self) -> KeeperSettings:
        """Return how leases are kept."""
        return self._settings

    # -- a rollout's sandbox -----------------------------------------------------------------------------------------

    async def start(self, rollout_id: str, spec: SandboxSpec, *, policy_version: int) -> Held:
        """Make a sandbox for a rollout; one that it has is ended.

        Raises:
            SandboxError: what the provider raised; the row says so if something may be left.

        Cancellation:
            the row stays, and a sweep adopts or removes what was made.
        """
        row = await self._books(lambda: self._new_row(rollout_id, policy_version=policy_version))
        with self._at_work(row.sandbox_id):
            try:
                async with self._in_time("creation", row.sandbox_id):
                    sandbox = await self._provider.create(
                        spec, id=row.sandbox_id, labels=self._labels(row), lease=self._lease(row)
                    )
            except (CreateUnknown, DeadlineExceeded) as error:
                note = str(error)
                await self._edit(row, lambda one: law.ending(one, now_s=self._now_s(), note=note))
                raise
            except RollmillError:
                await self._edit(row, lambda _: None)  # of a creation that failed nothing is left
                raise
            return await self._running(row, sandbox)

    def _new_row(self, rollout_id: str, *, policy_version: int) -> Row:
        now_s = self._now_s()
        with self._table.change():
            if (old := self._table.current(rollout_id)) is not None:
                self._table.put(law.ending(old, now_s=now_s, note="the rollout was started again"))
            generation = self._table.next_generation(rollout_id)
            row = Row(
                sandbox_id=law.sandbox_id_of(rollout_id, generation=generation, salt=self._table.salt),
                rollout_id=rollout_id,
                generation=generation,
                provider=self._settings.provider,
                owner=self._owner,
                phase=Phase.CREATING,
                expires_s=now_s + self._settings.ttl_s,
                policy_version=policy_version,
                asked_s=now_s,
            )
            self._table.put(row)
        return row

    async def _running(self, row: Row, sandbox: Sandbox) -> Held:
        """Note that a sandbox runs for its owner, unless another one came in between."""

        def note() -> Row:
            with self._table.change():
                now = law.check_claim(law.claim_of(row), self._table.current(row.rollout_id), now_s=self._now_s())
                after = msgspec.structs.replace(now, phase=Phase.RUNNING)
                self._table.put(after)
            return after

        return Held(claim=law.claim_of(await self._books(note)), sandbox=sandbox)

    async def use(self, claim: Claim) -> Sandbox:
        """Return the sandbox of an owner whose claim holds.

        Raises:
            SandboxLeaseLost: if it does not, or a sweep has suspended the rollout as its files.
            SandboxDead: if the sandbox has ended.
        """
        await self._books(lambda: law.check_there(self._checked(claim)))
        return await self._provider.attach(claim.sandbox_id)

    def _checked(self, claim: Claim) -> Row:
        return law.check_claim(claim, self._table.current(claim.rollout_id), now_s=self._now_s())

    async def renew(self, claim: Claim) -> None:
        """Renew an owner's lease.

        Raises:
            SandboxLeaseLost: if the claim holds no more, or a sweep has suspended the rollout as its files.
        """
        await self._books(lambda: law.check_there(self._checked(claim)))
        row = await self._replaced(claim, expires_s=self._now_s() + self._settings.ttl_s)
        async with self._in_time("renewal", row.sandbox_id):
            await (await self._provider.attach(row.sandbox_id)).renew(self._lease(row))

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
        """
        row = await self._books(lambda: self._checked(claim))
        if row.phase is Phase.SUSPENDED and law.snapshot_id_of(claim.sandbox_id) in row.snapshots:
            await self._suspended(claim)
            return
        with self._at_work(claim.sandbox_id):
            if not keep_memory:
                await self._keep_files(claim, full=full)
                return
            async with self._in_time("pause", claim.sandbox_id):
                sandbox = await self._provider.attach(claim.sandbox_id)
                if sandbox.state is not SandboxState.PAUSED:
                    await sandbox.pause()
            row = await self._suspended(claim)
            async with self._in_time("renewal", claim.sandbox_id):
                await sandbox.renew(self._lease(row))

    async def to_disk(self, count: int) -> int:
        """Keep of rollouts that are suspended with their memory the files alone, for a node that is short.

        Those suspended for longest go first. Their programs end; lease, owner and time of each stay, and a resume makes
        a sandbox of its files.

        Returns:
            How many were moved. One that cannot be stays suspended, and its programs may have ended.

        Cancellation:
            the one that is being moved is carried through, and no further one begins.
        """
        rows = await self._books(lambda: self._table.rows(provider=self._settings.provider))
        moved = 0
        for row in law.to_move(rows, count=count, busy=frozenset(self._busy)):
            moving = self._moving[row.sandbox_id] = asyncio.ensure_future(self._move(row))
            moving.add_done_callback(lambda _, name=row.sandbox_id: self._moving.pop(name, None))
            moved += await asyncio.shield(moving)
        return moved

    async def _move(self, row: Row) -> bool:
        with self._at_work(row.sandbox_id):
            try:
                refs = await self._store(law.claim_of(row))
                await self._edit(row, lambda one: msgspec.structs.replace(one, refs=refs))
            except (SandboxError, DeadlineExceeded) as error:
                _log.warning("rollout %s was not moved to disk: %s", row.rollout_id, error)
                return False
        return True

    async def _keep_files(self, claim: Claim, *, full: bool = False) -> None:
        await self._suspended(claim, refs=await self._store(claim, full=full))

    async def _store(self, claim: Claim, *, full: bool = False) -> tuple[SnapshotRef, ...]:
        """Let a sandbox end as a snapshot whose name is in its row; one that was paused is again if that fails.

        Returns:
            The row's snapshots that outlive this process, with this one if it does.
        """
        name = law.snapshot_id_of(claim.sandbox_id)
        before = await self._books(lambda: self._checked(claim))
        await self._replaced(claim, snapshots=(*before.snapshots, name))
        paused: Sandbox | None = None
        try:
            async with self._in_time("snapshot", claim.sandbox_id):
                sandbox = await self._provider.attach(claim.sandbox_id)
                if sandbox.state is SandboxState.PAUSED:
                    paused = sandbox
                    await sandbox.resume()
                ref = await sandbox.snapshot(id=name, stop_processes=not full, end=True, full=full)
        except SandboxError:
            await self._edit(before, lambda one: msgspec.structs.replace(one, snapshots=before.snapshots))  # none is
            if paused is not None and paused.death is None:
                async with self._in_time("pause", claim.sandbox_id):
                    await paused.pause()
            raise
        return (*before.refs, ref) if ref.durable else before.refs

    async def _suspended(self, claim: Claim, **changes: object) -> Row:
        return await self._replaced(
            claim, phase=Phase.SUSPENDED, expires_s=self._now_s() + self._settings.suspended_ttl_s, **changes
        )

    async def resume(self, rollout_id: str, *, take_over: bool = False) -> Held:
        """Take a rollout's sandbox on: from now on its former owner is refused.

        Args:
            rollout_id: which.
            take_over: also from an owner that runs it.

        Raises:
            SandboxLeaseLost: if there is none, or it is another's.
            SandboxDead: if the sandbox has ended and no snapshot holds it; the next sweep drops the row.
        """
        row = await self._books(lambda: self._taken(rollout_id, take_over=take_over))
        if (moving := self._moving.get(row.sandbox_id)) is not None:
            await asyncio.wait([moving])  # bounded by `call_s`
        with self._at_work(row.sandbox_id):
            try:
                async with self._in_time("resume", row.sandbox_id):
                    sandbox = await self._provider.attach(row.sandbox_id)
                    await sandbox.renew(self._lease(row))
                    await sandbox.resume()
                return await self._running(row, sandbox)
            except SandboxDead:
                if not row.snapshots:
                    raise
        return await self._restore(row)

    async def _restore(self, row: Row) -> Held:
        """Make a sandbox from the snapshot of one that has ended."""
        async with self._in_time("list of snapshots", row.sandbox_id):
            held = {ref.snapshot_id: ref for ref in (*law.durable_of(row), *await self._provider.snapshots())}
        found = [held[name] for name in row.snapshots if name in held]
        if not found:
            raise SandboxLeaseLost(
                f"rollout {row.rollout_id!r} cannot be resumed: its sandbox has ended, and of its snapshots "
                f"{list(row.snapshots)} none is there any more; start it again",
                generation=row.generation,
            )
        after = await self._books(lambda: self._moved(row))
        with self._at_work(after.sandbox_id):
            try:
                async with self._in_time("restore", after.sandbox_id):
                    sandbox = await self._provider.restore(
                        found[-1], id=after.sandbox_id, labels=self._labels(after), lease=self._lease(after)
                    )
            except ImageError as error:
                await self._edit(after, lambda _: None)  # nothing is left of it
                raise SandboxLeaseLost(
                    f"rollout {row.rollout_id!r} cannot be resumed: {error}; start it again",
                    generation=after.generation,
                ) from error
            held_now = await self._running(after, sandbox)
            if after.refs:
                # A row with these is believed to have its snapshots; whoever is killed below leaves one without.
                await self._edit(after, lambda one: msgspec.structs.replace(one, refs=()))
            async with self._in_time("removal of snapshots", after.sandbox_id):
                await self._provider.delete_snapshots(after.snapshots)
            await self._edit(after, lambda one: msgspec.structs.replace(one, snapshots=(), refs=()))
            return held_now

    def _moved(self, row: Row) -> Row:
        """Give a rollout another sandbox id, as each names one sandbox for good."""
        with self._table.change():
            now = law.check_claim(law.claim_of(row), self._table.current(row.rollout_id), now_s=self._now_s())
            generation = self._table.next_generation(row.rollout_id)
            after = msgspec.structs.replace(
                now,
                sandbox_id=law.sandbox_id_of(row.rollout_id, generation=generation, salt=self._table.salt),
                generation=generation,
                phase=Phase.CREATING,
                asked_s=self._now_s(),
            )
            self._table.remove(row.sandbox_id)
            self._table.put(after)
        return after

    def _taken(self, rollout_id: str, *, take_over: bool) -> Row:
        now_s = self._now_s()
        with self._table.change():
            row = self._table.current(rollout_id)
            row = law.check_resume(rollout_id, row, owner=self._owner, now_s=now_s, take_over=take_over)
            after = msgspec.structs.replace(
                row,
                generation=self._table.next_generation(rollout_id),
                owner=self._owner,
                expires_s=now_s + self._settings.ttl_s,
            )
            self._table.put(after)
        return after

    async def release(self, claim: Claim) -> None:
        """End a rollout's sandbox. If it will not end, the row stays and sweeps try again.

        Raises:
            SandboxLeaseLost: if the claim holds no more.
        """

        def note() -> Row:
            with self._table.change():
                row = law.ending(self._checked(claim), now_s=self._now_s(), note=law.RELEASED)
                self._table.put(row)
            return row

        await self._kill(await self._books(note), reason=DeathReason.RELEASED)

    # -- the sweep ---------------------------------------------------------------------------------------------------

    async def sweep(self) -> SweepReport:
        """Make table and provider agree: adopt what was made, kill what nobody owns, try failed kills again."""
        labels, salt = {law.KEEPER_LABEL: self._settings.name}, self._table.salt
        async with self._in_time("list", "of all"):
            able = await self._provider.capabilities()
            statuses = await self._provider.list(labels=labels)
            names = [ref.snapshot_id for ref in await self._provider.snapshots()]
        keep_after_s = law.keep_after_s(able, before_s=self._settings.keep_before_s)
        suspends = law.can_suspend(self._settings.on_expiry, able)
        seen, busy = law.seen_of(statuses, names, salt=salt), frozenset(self._busy)
        rows = await self._books(lambda: self._table.rows(provider=self._settings.provider))
        steps = law.sweep(
            rows,
            seen,
            now_s=self._now_s(),
            busy=busy,
            grace_s=self._settings.grace_s,
            keep_after_s=keep_after_s,
            suspends=suspends,
        )
        done = [(step, await self._carry_out(step)) for step in steps if step.sandbox_id not in self._busy]
        return SweepReport(**{word: tuple(step for step, how in done if how == word) for word in OUTCOMES})

    async def _carry_out(self, step: Step) -> str:
        if step.act in (Act.KILL_ORPHAN, Act.DELETE_ORPHAN):
            return await self._remove_orphan(step)
        row = await self._books(lambda: self._table.find(step.sandbox_id))
        if row is None:
            return "dropped"  # by somebody else meanwhile
        now_s = self._now_s()
        if step.act is Act.DROP:
            await self._edit(row, lambda one: None if one == row else one)
            return "dropped"
        if step.act is Act.KEEP:
            return await self._kept_in_time(row)
        if step.act in (Act.ADOPT, Act.SUSPEND):
            phase = Phase.RUNNING if step.act is Act.ADOPT else Phase.SUSPENDED
            unowned = msgspec.structs.replace(row, phase=phase, owner="")
            await self._edit(row, lambda one: unowned if one == row else one)
            return "adopted"
        if step.act is Act.EXPIRE:
            return await self._expire(row, step)
        if step.act is Act.END:
            after = await self._edit(
                row, lambda one: law.ending(one, now_s=now_s, note=step.why) if one == row else one
            )
            if after is None or after.phase is not Phase.ENDING:
                return "renewed"
            row = after
        reason = DeathReason.RELEASED if row.note == law.RELEASED else DeathReason.LEASE_EXPIRED
        return "killed" if await self._kill(row, reason=reason) else "failed"

    async def _kept_in_time(self, row: Row) -> str:
        """Suspend a rollout as its files; its programs end, as they would with their sandbox."""
        try:
            with self._at_work(row.sandbox_id):
                await self._keep_files(law.claim_of(row))
        except (SandboxError, DeadlineExceeded):
            return "failed"  # the row stays, and the next sweep sees it again
        return "kept"

    async def _expire(self, row: Row, step: Step) -> str:
        """Suspend a sandbox whose lease ended; one that cannot be suspended ends."""
        name = law.snapshot_id_of(row.sandbox_id)
        is_new = self._settings.on_expiry is OnExpiry.FILES and name not in row.snapshots
        named = msgspec.structs.replace(row, snapshots=(*row.snapshots, name)) if is_new else row
        with self._at_work(row.sandbox_id):
            if await self._edit(row, lambda one: named if one == row else one) != named:
                return "renewed"
            problem, refs = await self._suspended_unowned(named, name)
            if not problem:
                held = msgspec.structs.replace(named, refs=(*named.refs, *refs))
                after = law.expired(held, now_s=self._now_s(), ttl_s=self._settings.suspended_ttl_s)
                await self._edit(named, lambda one: after if one == named else one)
                await self._prolong(after)
                return "suspended"
        note = f"{step.why}, and it could not be suspended: {problem}"
        ending = law.ending(named, now_s=self._now_s(), note=note)
        await self._edit(named, lambda one: ending if one == named else one)
        return "killed" if await self._kill(ending, reason=DeathReason.LEASE_EXPIRED) else "failed"

    async def _suspended_unowned(self, row: Row, name: str) -> tuple[str, tuple[SnapshotRef, ...]]:
        """Keep a sandbox's files or memory; return why that was not possible, and what any process can restore."""
        try:
            async with self._in_time("suspension", row.sandbox_id):
                sandbox = await self._provider.attach(row.sandbox_id)
                if self._settings.on_expiry is OnExpiry.MEMORY:
                    if sandbox.state is not SandboxState.PAUSED:
                        await sandbox.pause()
                    return "", ()
                if sandbox.state is SandboxState.PAUSED:
                    await sandbox.resume()
                ref = await sandbox.snapshot(id=name, stop_processes=True, end=True)
                return "", (ref,) if ref.durable else ()
        except (SandboxError, DeadlineExceeded) as error:
            return "" if await self._is_kept(row) else str(error), ()

    async def _is_kept(self, row: Row) -> bool:
        """Return whether a snapshot of it is there: made before whoever made it was killed."""
        if law.durable_of(row):
            return True
        try:
            async with self._in_time("list of snapshots", row.sandbox_id):
                return any(ref.snapshot_id in row.snapshots for ref in await self._provider.snapshots())
        except (SandboxError, DeadlineExceeded):
            return False

    async def _prolong(self, row: Row) -> None:
        """Let the provider keep what is paused; if it does not, a sweep sees that it is gone."""
        if self._settings.on_expiry is not OnExpiry.MEMORY:
            return
        with contextlib.suppress(SandboxError, DeadlineExceeded):
            async with self._in_time("renewal", row.sandbox_id):
                await (await self._provider.attach(row.sandbox_id)).renew(self._lease(row))

    async def _remove_orphan(self, step: Step) -> str:
        try:
            async with self._in_time("removal", step.sandbox_id):
                if step.act is Act.KILL_ORPHAN:
                    await self._provider.kill([step.sandbox_id], reason=DeathReason.LEASE_EXPIRED)
                else:
                    await self._provider.delete_snapshots([step.sandbox_id])
        except (SandboxError, DeadlineExceeded):
            return "failed"  # it has no row, and the next sweep sees it again
        return "killed"

    async def _kill(self, row: Row, *, reason: DeathReason) -> bool:
        """Kill the sandbox of a row that is ending; return whether nothing is left of it."""
        with self._at_work(row.sandbox_id):
            try:
                async with self._in_time("kill", row.sandbox_id):
                    await self._provider.kill([row.sandbox_id], reason=reason)
                    if row.snapshots:
                        await self._provider.delete_snapshots(row.snapshots)
            except (SandboxError, DeadlineExceeded) as error:
                note, now_s = str(error), self._now_s()
                await self._edit(row, lambda one: law.kill_failed(one, now_s=now_s, note=note))
                return False
            await self._edit(row, lambda _: None)
            return True

    # -- means -------------------------------------------------------------------------------------------------------

    def _now_s(self) -> float:
        return self._clock.wall_s()

    def _lease(self, row: Row) -> Lease:
        return Lease(
            owner=self._owner,
            ttl_s=max(1.0, row.expires_s - self._now_s()) + self._settings.slack_s,
            rollout_id=row.rollout_id,
            generation=row.generation,
            policy_version=row.policy_version,
        )

    def _labels(self, row: Row) -> dict[str, str]:
        return {
            law.KEEPER_LABEL: self._settings.name,
            law.ROLLOUT_LABEL: row.rollout_id,
            law.GENERATION_LABEL: str(row.generation),
        }

    async def _books(self, change: Callable[[], T]) -> T:
        return await asyncio.to_thread(change) if self._in_thread else change()

    async def _edit(self, row: Row, change: Callable[[Row], Row | None]) -> Row | None:
        return await self._books(lambda: self._table.edit(row.sandbox_id, change))

    async def _replaced(self, claim: Claim, **changes: object) -> Row:
        def change() -> Row:
            with self._table.change():
                row = msgspec.structs.replace(self._checked(claim), **changes)
                self._table.put(row)
            return row

        return await self._books(change)

    @contextlib.contextmanager
    def _at_work(self, sandbox_id: str) -> Iterator[None]:
        """Keep sweeps of this process away from a sandbox that a call works on."""
        self._busy.add(sandbox_id)
        try:
            yield
        finally:
            self._busy.discard(sandbox_id)

    @contextlib.asynccontextmanager
    async def _in_time(self, what: str, sandbox_id: str) -> AsyncIterator[None]:
        limit_s = self._settings.call_s
        try:
            async with asyncio.timeout(limit_s):
                yield
        except TimeoutError:
            raise DeadlineExceeded(
                f"the provider did not finish the {what} of sandbox {sandbox_id} within {limit_s:g} s (call_s); it is "
                "overloaded or cut off. The table keeps what it may have left, and a sweep cleans up"
            ) from None
