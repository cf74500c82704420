"""Snapshots of machines: taken with what runs in them, bounded in all, and restored by starting others from them.

A snapshot waits for a machine to be still, to be stopped, to be kept and to go on, `answer_s` for each. The restores of
a fork wait as any start does.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence

import msgspec

from rollmill.errors import ImageError, SandboxIdInUse, SandboxRetryable
from rollmill.sandboxes.backends.microvm.hypervisor import Hypervisor, Kept
from rollmill.sandboxes.backends.microvm.sandbox import MicroVmSandbox
from rollmill.sandboxes.backends.microvm.settings import MicroVmSettings
from rollmill.sandboxes.backends.namespaces.carried import CarriedSnapshots
from rollmill.sandboxes.backends.namespaces.sandbox import NamespaceSandbox
from rollmill.sandboxes.disk_records import check_id
from rollmill.sandboxes.records import Lease, SandboxSpec, SnapshotRef

_RETRY_AFTER_S = 1.0


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """A sandbox that was kept, and what its copies must know."""

    ref: SnapshotRef
    kept: Kept
    protections: tuple[str, ...]
    next_number: int


class SnapshotCalls(CarriedSnapshots[MicroVmSandbox]):
    """The calls of a provider that have to do with snapshots.

    Args:
        settings: how.
        hypervisor: runs the machines.
    """

    def __init__(self, settings: MicroVmSettings, *, hypervisor: Hypervisor) -> None:
        super().__init__()
        self._settings = settings
        self._hypervisor = hypervisor
        self._snapshots: OrderedDict[str, Snapshot] = OrderedDict()

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
        return tuple(one.ref for name, one in self._snapshots.items() if name not in self._forking)

    async def delete_snapshots(self, ids: Sequence[str]) -> None:
        """Let go of these; sandboxes that were made of them live on."""
        for one in ids:
            if (snapshot := self._snapshots.pop(one, None)) is not None:
                snapshot.kept.close()

    def _begin(self, sandbox: NamespaceSandbox, *, id: str) -> None:
        if id in self._snapshots:
            raise SandboxIdInUse(f"there is a snapshot {id} already; choose another id")
        self._check_room()

    async def _take(self, sandbox: NamespaceSandbox, *, id: str, force: bool, end: bool, to_keep: bool) -> SnapshotRef:
        """Keep a machine, in memory whatever it is for."""
        assert isinstance(sandbox, MicroVmSandbox)  # no other is made here
        if force:
            await sandbox.stop_processes()
        usage = await sandbox.usage()
        sandbox.begin_snapshot(forks=id in self._forking)
        try:
            kept = await sandbox.keep(end=end)
        finally:
            sandbox.end_snapshot()
        ref = SnapshotRef(
            snapshot_id=id,
            backend=self._hypervisor.backend,
            spec=sandbox.spec,
            disk_bytes=usage.disk_bytes or 0,
            inodes=usage.inodes or 0,
            created_wall_s=time.time(),
            full=True,  # a machine's memory is in it, whatever was asked for
        )
        self._snapshots[id] = Snapshot(
            ref=ref, kept=kept, protections=sandbox.protections, next_number=sandbox.line.next_number
        )
        if end:
            await sandbox.kill()
        return ref

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
        await asyncio.gather(*self._taking.values(), return_exceptions=True)
        await self.delete_snapshots([*self._snapshots])
