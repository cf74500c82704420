"""Snapshots and forks as every provider of this machine takes them: carried through, and let go of.

Half a snapshot leaves no sandbox, so one that was begun is carried through when its caller is cancelled. A fork is a
snapshot that nobody else sees: taken, restored once for each id, and let go of; all of its sandboxes are made, or none.
How files or machines are kept and come back is the provider's.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from typing import Generic, TypeVar

from rollmill.errors import SandboxIdInUse
from rollmill.sandboxes.backends.namespaces.sandbox import NamespaceSandbox
from rollmill.sandboxes.disk_records import check_id
from rollmill.sandboxes.records import DeathReason, Lease, SnapshotRef

S = TypeVar("S", bound=NamespaceSandbox)


class CarriedSnapshots(Generic[S]):
    """The calls of a provider for its sandboxes (`SnapshotHome`) that take snapshots."""

    def __init__(self) -> None:
        self._taking: dict[str, asyncio.Future[SnapshotRef]] = {}
        self._forking: set[str] = set()

    # -- what a provider has -------------------------------------------------------------------------------------------

    def _begin(self, sandbox: NamespaceSandbox, *, id: str) -> None:
        """Refuse a snapshot that cannot be, before anything is done for it."""
        raise NotImplementedError

    async def _take(self, sandbox: NamespaceSandbox, *, id: str, force: bool, end: bool, to_keep: bool) -> SnapshotRef:
        """Take one.

        Args:
            sandbox: whose.
            id: of the snapshot.
            force: end what runs.
            end: end the sandbox.
            to_keep: it is to be held for longer than a fork takes.
        """
        raise NotImplementedError

    async def restore(self, ref: SnapshotRef, *, id: str, labels: Mapping[str, str] | None = None, lease: Lease) -> S:
        """Start a sandbox from one."""
        raise NotImplementedError

    async def delete_snapshots(self, ids: Sequence[str]) -> None:
        """Let go of these; one that is not known counts as deleted."""
        raise NotImplementedError

    # -- for a sandbox -------------------------------------------------------------------------------------------------

    async def snapshot_of(self, sandbox: NamespaceSandbox, *, id: str, stop_processes: bool, end: bool) -> SnapshotRef:
        """Take a snapshot.

        Cancellation: it is carried through.
        """
        return await self._snapshot(sandbox, id=id, force=stop_processes, end=end)

    async def fork_of(
        self,
        sandbox: NamespaceSandbox,
        ids: Sequence[str],
        *,
        lease: Lease,
        labels: Mapping[str, str] | None,
        stop_processes: bool,
        snapshot_id: str = "",
    ) -> tuple[S, ...]:
        """Take a snapshot, restore it for each id, and let go of it: the sandboxes hold what they need of it.

        Cancellation: what was made is ended, and the snapshot let go of, before this returns.
        """
        if len(set(ids)) != len(ids):
            raise SandboxIdInUse(f"the ids of a fork are not all different: {list(ids)}")
        snapshot_id = snapshot_id or f"fork-{os.urandom(8).hex()}"
        self._forking.add(snapshot_id)  # nobody else's, and so in no list
        try:
            ref = await self._snapshot(sandbox, id=snapshot_id, force=stop_processes, to_keep=False)
            made = [asyncio.ensure_future(self.restore(ref, id=one, labels=labels, lease=lease)) for one in ids]
            try:
                return tuple(await asyncio.gather(*made))
            except BaseException:
                await self._undo(made)
                raise
        finally:
            await asyncio.shield(asyncio.ensure_future(self._end_fork(snapshot_id)))

    async def _snapshot(
        self, sandbox: NamespaceSandbox, *, id: str, force: bool, end: bool = False, to_keep: bool = True
    ) -> SnapshotRef:
        check_id(id)
        await sandbox.awake()
        if id in self._taking:
            raise SandboxIdInUse(f"a snapshot {id!r} is being taken; an id names one snapshot, so choose another")
        self._begin(sandbox, id=id)
        work = asyncio.ensure_future(self._take(sandbox, id=id, force=force, end=end, to_keep=to_keep))
        self._taking[id] = work
        work.add_done_callback(lambda done: self._taken(id, done))
        return await asyncio.shield(work)

    def _taken(self, snapshot_id: str, work: asyncio.Future[SnapshotRef]) -> None:
        self._taking.pop(snapshot_id, None)
        if not work.cancelled():
            work.exception()  # told to the caller, unless it was cancelled

    async def _end_fork(self, snapshot_id: str) -> None:
        try:
            if (work := self._taking.get(snapshot_id)) is not None:
                await asyncio.wait([work])  # whoever forks was cancelled before it was taken
            await self.delete_snapshots([snapshot_id])
        finally:
            self._forking.discard(snapshot_id)

    async def _undo(self, made: Sequence[asyncio.Future[S]]) -> None:
        """End what a fork has made that did not become whole."""
        for one in made:
            one.cancel()
        for found in await asyncio.gather(*made, return_exceptions=True):
            if not isinstance(found, BaseException):
                found.order_end(DeathReason.START_FAILED)
