"""Snapshots of machines: taken with what runs in them, bounded in all, and restored by starting others from them.

A snapshot waits for a machine to be still, to be stopped, to be kept and to go on, `answer_s` for each. It is carried
through when its caller is cancelled. The restores of a fork wait as any start does.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence

import msgspec

from rollmill.errors import ImageError, SandboxIdInUse, SandboxRetryable
from rollmill.sandboxes.backends.microvm.hypervisor import Hypervisor, Kept
from rollmill.sandboxes.backends.microvm.sandbox import MicroVmSandbox
from rollmill.sandboxes.backends.microvm.settings import MicroVmSettings
from rollmill.sandboxes.backends.namespaces.sandbox import NamespaceSandbox
from rollmill.sandboxes.disk_records import check_id
from rollmill.sandboxes.records import DeathReason, Lease, SandboxSpec, SnapshotRef

_RETRY_AFTER_S = 1.0


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """A sandbox that was kept, and what its copies must know."""

    ref: SnapshotRef
    kept: Kept
    protections: tuple[str, ...]
    next_number: int
    hidden: bool = False


class SnapshotCalls:
    """The calls of a provider that have to do with snapshots.

    Args:
        settings: how.
        hypervisor: runs the machines.
    """

    def __init__(self, settings: MicroVmSettings, *, hypervisor: Hypervisor) -> None:
        self._settings = settings
        self._hypervisor = hypervisor
        self._alive: dict[str, MicroVmSandbox] = {}
        self._snapshots: OrderedDict[str, Snapshot] = OrderedDict()
        self._taking: set[str] = set()
        self._carried: set[asyncio.Task[Snapshot]] = set()

    async def _make(
        self,
        spec: SandboxSpec,
        kept: Kept | None,
        *,
        id: str,
        labels: Mapping[str, str],
        lease: Lease,
        snapshot: Snapshot | None,
    ) -> MicroVmSandbox:
        """Start a sandbox from what was kept."""
        raise NotImplementedError

    async def kill(self, ids: Sequence[str], *, reason: DeathReason = DeathReason.RELEASED) -> None:
        """End sandboxes."""
        raise NotImplementedError

    async def restore(
        self, ref: SnapshotRef, *, id: str, labels: Mapping[str, str] | None = None, lease: Lease
    ) -> MicroVmSandbox:
        """Start a sandbox that goes on where the snapshot was taken, with its files and processes."""
        check_id(id)
        snapshot = self._find(ref.snapshot_id)
        return await self._make(
            snapshot.ref.spec, snapshot.kept, id=id, labels=labels or {}, lease=lease, snapshot=snapshot
        )

    async def snapshots(self) -> tuple[SnapshotRef, ...]:
        """Return those that are held, the oldest first."""
        return tuple(one.ref for one in self._snapshots.values() if not one.hidden)

    async def delete_snapshots(self, ids: Sequence[str]) -> None:
        """Let go of these; sandboxes that were made of them live on."""
        for one in ids:
            self._drop_snapshot(one)

    def _drop_snapshot(self, snapshot_id: str) -> None:
        if (snapshot := self._snapshots.pop(snapshot_id, None)) is not None:
            snapshot.kept.close()

    async def snapshot_of(self, sandbox: NamespaceSandbox, *, id: str, stop_processes: bool, end: bool) -> SnapshotRef:
        """Keep a sandbox as it is, with what runs in it."""
        assert isinstance(sandbox, MicroVmSandbox)  # no other is made here
        taking = self._begin(sandbox, id=check_id(id), stop_processes=stop_processes, end=end, hidden=False)
        return (await asyncio.shield(taking)).ref

    async def fork_of(
        self,
        sandbox: NamespaceSandbox,
        ids: Sequence[str],
        *,
        lease: Lease,
        labels: Mapping[str, str] | None,
        stop_processes: bool,
    ) -> tuple[MicroVmSandbox, ...]:
        """Keep a sandbox for a moment, and start others from it."""
        assert isinstance(sandbox, MicroVmSandbox)  # as above
        if len(set(ids)) != len(ids):
            raise SandboxIdInUse(f"each sandbox needs an id of its own, and these are {', '.join(ids)}")
        name = f"fork-{os.urandom(8).hex()}"
        taking = self._begin(sandbox, id=name, stop_processes=stop_processes, end=False, hidden=True)
        try:
            ref = (await asyncio.shield(taking)).ref
            made = await asyncio.gather(
                *(self.restore(ref, id=one, labels=labels, lease=lease) for one in ids), return_exceptions=True
            )
        except asyncio.CancelledError:
            for one in [one for one in self._alive.values() if one.origin == name]:
                one.order_end(DeathReason.RELEASED)
            raise
        finally:
            if taking.done():
                await self.delete_snapshots([name])
            else:
                taking.add_done_callback(lambda _: self._drop_snapshot(name))
        failures = [one for one in made if isinstance(one, BaseException)]
        good = [one for one in made if isinstance(one, MicroVmSandbox)]
        if failures:
            await self.kill([one.id for one in good])
            raise failures[0]
        return tuple(good)

    def _begin(
        self, sandbox: MicroVmSandbox, *, id: str, stop_processes: bool, end: bool, hidden: bool
    ) -> asyncio.Task[Snapshot]:
        """Begin to keep a sandbox; it is carried through whatever becomes of who waits."""
        task = asyncio.ensure_future(self._take(sandbox, id=id, stop_processes=stop_processes, end=end, hidden=hidden))
        self._carried.add(task)
        task.add_done_callback(self._carried.discard)
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        return task

    async def _take(
        self, sandbox: MicroVmSandbox, *, id: str, stop_processes: bool, end: bool, hidden: bool
    ) -> Snapshot:
        await sandbox.awake()
        if id in self._snapshots or id in self._taking:
            raise SandboxIdInUse(f"there is a snapshot {id} already; choose another id")
        self._check_room()
        self._taking.add(id)
        try:
            if stop_processes:
                await sandbox.stop_processes()
            usage = await sandbox.usage()
            sandbox.begin_snapshot(forks=hidden)
            try:
                kept = await sandbox.keep(end=end)
            finally:
                sandbox.end_snapshot()
        finally:
            self._taking.discard(id)
        ref = SnapshotRef(
            snapshot_id=id,
            backend=self._hypervisor.backend,
            spec=sandbox.spec,
            disk_bytes=usage.disk_bytes or 0,
            inodes=usage.inodes or 0,
            created_wall_s=time.time(),
            full=True,  # a machine's memory is in it, whatever was asked for
        )
        snapshot = Snapshot(
            ref=ref, kept=kept, protections=sandbox.protections, next_number=sandbox.line.next_number, hidden=hidden
        )
        self._snapshots[id] = snapshot
        if end:
            await sandbox.kill()
        return snapshot

    def _check_room(self) -> None:
        held = sum(one.kept.size_bytes for one in self._snapshots.values())
        if held >= self._settings.snapshot_bytes:
            raise SandboxRetryable(
                f"snapshots take {held} bytes, and may take {self._settings.snapshot_bytes} (snapshot_bytes); delete "
                "some, or raise it",
                after_s=_RETRY_AFTER_S,
            )

    def _find(self, snapshot_id: str) -> Snapshot:
        try:
            return self._snapshots[snapshot_id]
        except KeyError:
            raise ImageError(f"there is no snapshot {snapshot_id} here, or it was deleted") from None

    async def put_to_sleep(self, sandbox: NamespaceSandbox) -> None:
        """Refuse: a machine's files are kept with its memory."""
        raise NotImplementedError

    async def wake(self, sandbox: NamespaceSandbox) -> None:
        """Refuse: none sleeps."""
        raise NotImplementedError

    async def _let_snapshots_go(self) -> None:
        await asyncio.gather(*self._carried, return_exceptions=True)
        await self.delete_snapshots([*self._snapshots])
