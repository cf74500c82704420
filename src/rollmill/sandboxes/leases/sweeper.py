"""Makes table and provider agree: adopts what was made, suspends and kills what nobody owns, tries failed kills again.

| wait | ends after |
|---|---|
| for the provider's lists, together | `call_s` |
| for the provider to suspend, renew or end one sandbox | `call_s` each |

It works on `sweep_at_once` sandboxes at a time, and on none that a call of this process works on. What fails is
reported, and the next sweep sees it again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Mapping

from rollmill.errors import DeadlineExceeded, SandboxError
from rollmill.sandboxes.leases import law
from rollmill.sandboxes.leases.keeping import OUTCOMES, SweepReport
from rollmill.sandboxes.leases.law import Act, OnExpiry, Row, Step
from rollmill.sandboxes.leases.means import Means
from rollmill.sandboxes.records import Capabilities, DeathReason, SandboxState, SnapshotRef

_log = logging.getLogger(__name__)


class Sweeper:
    """Sweeps what a keeper keeps.

    Args:
        means: the keeper's.
    """

    def __init__(self, means: Means) -> None:
        self._means = means

    async def sweep(self) -> SweepReport:
        """Make table and provider agree once.

        Raises:
            SandboxError: if the table cannot be read, or the provider does not list what it has.
            DeadlineExceeded: if that takes longer than `call_s`.

        Cancellation:
            what was begun is seen again by the next sweep.
        """
        before = await self._rows()
        able, seen = await self._look()
        rows = await self._rows()
        settings = self._means.settings
        steps = law.sweep(
            rows.values(),
            seen,
            now_s=self._means.now_s(),
            busy=self._means.busy | law.unsettled(before.values(), rows.values()),
            grace_s=settings.grace_s,
            keep_after_s=law.keep_after_s(able, before_s=settings.keep_before_s),
            suspends=law.can_suspend(settings.on_expiry, able),
        )
        todo, done = iter(steps), list[tuple[str, Step]]()
        await asyncio.gather(*(self._work(todo, rows, done) for _ in range(min(len(steps), settings.sweep_at_once))))
        return SweepReport(**{word: tuple(step for how, step in done if how == word) for word in OUTCOMES})

    async def _rows(self) -> dict[str, Row]:
        found = await self._means.books(lambda: self._means.table.rows(provider=self._means.settings.provider))
        return {row.sandbox_id: row for row in found}

    async def _look(self) -> tuple[Capabilities, law.Seen]:
        provider, labels = self._means.provider, {law.KEEPER_LABEL: self._means.settings.name}
        async with self._means.in_time("list", "of all"):
            able = await provider.capabilities()
            statuses = await provider.list(labels=labels)
            names = [ref.snapshot_id for ref in await provider.snapshots()]
        return able, law.seen_of(statuses, names, salt=self._means.table.salt)

    async def _work(self, todo: Iterator[Step], rows: Mapping[str, Row], done: list[tuple[str, Step]]) -> None:
        for step in todo:
            if not law.is_on(step, self._means.busy):
                with self._means.at_work(step.sandbox_id):
                    done.append(await self._carry_out(step, rows.get(step.sandbox_id)))

    async def _carry_out(self, step: Step, row: Row | None) -> tuple[str, Step]:
        """Do a step to the row that it was decided for; one that has changed since is left alone."""
        try:
            return await (self._remove_orphan(step) if row is None else self._treat(step, row)), step
        except (SandboxError, DeadlineExceeded) as error:
            return "failed", law.failed(step, error)
        except (
            Exception
        ) as error:  # of a provider that breaks its promises; it must not keep the others from their turn
            _log.exception("sweep of leases: %s of %s", step.act.value, step.sandbox_id)
            return "failed", law.failed(step, error)

    async def _treat(self, step: Step, row: Row) -> str:
        means = self._means
        match step.act:
            case Act.DROP:
                return _word("dropped", await means.swap(row, None))
            case Act.ADOPT:
                return _word("adopted", await means.swap(row, law.adopted(row)))
            case Act.SUSPEND:
                return _word("adopted", await means.swap(row, law.unowned(row, until_s=self._until_s(row))))
            case Act.KEEP:
                await means.keep_files(law.claim_of(row))
                return "kept"
            case Act.EXPIRE:
                return await self._expire(step, row)
            case _:
                return await self._end(row, note=step.why)

    def _until_s(self, row: Row) -> float:
        return max(row.expires_s, self._means.now_s() + self._means.settings.suspended_ttl_s)

    async def _end(self, row: Row, *, note: str) -> str:
        ending = law.ending(row, now_s=self._means.now_s(), note=note)
        if not await self._means.swap(row, ending):
            return "renewed"
        if problem := await self._means.kill(ending, reason=law.reason_of(ending)):
            raise SandboxError(problem)
        return "killed"

    async def _expire(self, step: Step, row: Row) -> str:
        """Suspend a sandbox whose lease ended; one that cannot be suspended ends."""
        name = law.snapshot_id_of(row.sandbox_id)
        named = law.named(row, name) if self._means.settings.on_expiry is OnExpiry.FILES else row
        if not await self._means.swap(row, named):
            return "renewed"
        after = law.unowned(named, until_s=self._means.now_s() + self._means.settings.suspended_ttl_s)
        try:
            ref = await self._suspend(after, name)
        except (SandboxError, DeadlineExceeded) as error:
            if not await self._is_kept(named):
                return await self._end(named, note=f"{step.why}, and it could not be suspended: {error}")
            ref = None
        return _word("suspended", await self._means.swap(named, after if ref is None else law.stored(after, ref)))

    async def _suspend(self, row: Row, name: str) -> SnapshotRef | None:
        """Keep a sandbox's files or memory for as long as its row is about to say."""
        async with self._means.in_time("suspension", row.sandbox_id):
            sandbox = await self._means.provider.attach(row.sandbox_id)
            if self._means.settings.on_expiry is OnExpiry.MEMORY:
                await sandbox.renew(self._means.lease(row))
                if sandbox.state is not SandboxState.PAUSED:
                    await sandbox.pause()
                return None
            if sandbox.state is SandboxState.PAUSED:
                await sandbox.resume()
            return await sandbox.snapshot(id=name, stop_processes=True, end=True)

    async def _is_kept(self, row: Row) -> bool:
        """Return whether a snapshot of it is there: made before whoever made it was killed."""
        try:
            return any(name in row.snapshots for name in await self._means.snapshots(row))
        except (SandboxError, DeadlineExceeded):
            return bool(law.durable_of(row))

    async def _remove_orphan(self, step: Step) -> str:
        async with self._means.in_time("removal", step.sandbox_id):
            if step.act is Act.KILL_ORPHAN:
                await self._means.provider.kill([step.sandbox_id], reason=DeathReason.LEASE_EXPIRED)
            else:
                await self._means.provider.delete_snapshots([step.sandbox_id])
        return "killed"


def _word(done: str, is_done: bool) -> str:
    return done if is_done else "renewed"
