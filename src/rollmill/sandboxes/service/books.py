"""What a node writes into its ledger and reads from it at its start; without a ledger, nothing.

| wait | ends after |
|---|---|
| for the provider, to list snapshots and to end what an earlier service left | the caller's limit |
| for the ledger | its own |
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from rollmill.errors import RollmillError
from rollmill.sandboxes.protocol import Provider
from rollmill.sandboxes.records import DeathReason, SnapshotRef
from rollmill.sandboxes.service.adoption import Adoption, adoption
from rollmill.sandboxes.service.ledger import Ledger, SandboxRow
from rollmill.sandboxes.service.programs import Programs
from rollmill.sandboxes.service.served import Served
from rollmill.sandboxes.service.shelf import Kept

_log = logging.getLogger(__name__)


class Books:
    """The ledger of a node, if it has one.

    Args:
        ledger: the rows.
        provider: has what they speak of.
    """

    def __init__(self, ledger: Ledger | None, *, provider: Provider) -> None:
        self._ledger, self._provider = ledger, provider

    async def found(self, *, now_wall_s: float, paused_ttl_s: float, limit_s: float) -> Adoption:
        """Return what is taken on from an earlier service; what is not is ended, and the log says why."""
        ledger = self._ledger
        if ledger is None:
            return Adoption()
        rows, templates = await ledger.read()
        async with asyncio.timeout(limit_s):
            held = {ref.snapshot_id: ref for ref in await self._provider.snapshots()}
        found = adoption(rows, templates, held=held, salt=ledger.salt, now_wall_s=now_wall_s, paused_ttl_s=paused_ttl_s)
        await self._end(ledger, found, limit_s=limit_s)
        for row in found.adopted:
            _log.info("sandbox %s of an earlier service is taken on, paused as files", row.sandbox_id)
            await ledger.put(row)
        return found

    async def _end(self, ledger: Ledger, found: Adoption, *, limit_s: float) -> None:
        """End what is not taken on; a row of which something may be left stays for the next start."""
        for one in found.ended:
            _log.warning("sandbox %s of an earlier service ends: %s", one.sandbox_id, one.why)
        try:
            async with asyncio.timeout(limit_s):
                # Also of what is paused: a resume may have been under way.
                left = [one.backend_id for one in (*found.ended, *found.adopted)]
                await self._provider.kill(left, reason=DeathReason.LEASE_EXPIRED)
                await self._provider.delete_snapshots(found.orphans)
        except (RollmillError, TimeoutError) as error:
            _log.warning("what an earlier service left could not be ended, and the next start tries again: %r", error)
            return
        for one in found.ended:
            await ledger.remove(one.sandbox_id)
        for one in found.lost_templates:
            _log.warning("the template %s of an earlier service is gone: its snapshot is not there", one)
            await ledger.remove_template(one)

    def named(self, name: str) -> str:
        """Return a snapshot's name, which says of which ledger it is."""
        return name if self._ledger is None else f"{name}-{self._ledger.salt}"

    async def note(self, served: Served) -> None:
        """Write how a sandbox stands, and wait until it is written."""
        if self._ledger is not None:
            await self._ledger.put(_row(served))

    def noted(self, served: Served) -> None:
        """Write how a sandbox stands, beside everything else."""
        if self._ledger is not None:
            self._ledger.put(_row(served))

    def forget(self, served: Served) -> None:
        """Note that nothing of a sandbox is left."""
        if self._ledger is not None:
            self._ledger.remove(served.id)

    async def keep(self, kept: Kept) -> None:
        """Write that a snapshot is a template."""
        if self._ledger is not None:
            await self._ledger.put_template(kept)

    def let_go(self, snapshot_id: str) -> None:
        """Note that a template is gone."""
        if self._ledger is not None:
            self._ledger.remove_template(snapshot_id)

    def not_outliving(self, refs: Sequence[SnapshotRef]) -> list[str]:
        """Return the ids of those that end with this service."""
        return [ref.snapshot_id for ref in refs if self._ledger is None or not ref.durable]

    async def ended(self, sandbox_ids: Sequence[str], snapshot_ids: Sequence[str]) -> None:
        """Note what ended with this service."""
        if self._ledger is None:
            return
        changes = [self._ledger.remove(one) for one in sandbox_ids]
        changes += [self._ledger.remove_template(one) for one in snapshot_ids]
        await asyncio.gather(*changes)


def _row(served: Served) -> SandboxRow:
    return SandboxRow(
        sandbox_id=served.id,
        order=served.order,
        spec=served.spec,
        envs=served.envs,
        token=served.token,
        standing=served.standing,
        started_wall_s=served.started_wall_s,
        end_wall_s=served.end_wall_s,
        lives=served.lives,
        backend_id=served.last_backend_id(),
        snapshot=served.snapshot,
        files=served.files,
    )


def served_of(row: SandboxRow, *, stall_s: float) -> Served:
    """Return the sandbox of a row that is taken on: paused, as files."""
    served = Served(row.sandbox_id, row.order, spec=row.spec, envs=row.envs)
    served.token, served.standing, served.started_wall_s = row.token, row.standing, row.started_wall_s
    served.files, served.snapshot, served.lives = row.files, row.snapshot, row.lives
    served.programs = Programs(stall_s=stall_s)  # none run
    return served
