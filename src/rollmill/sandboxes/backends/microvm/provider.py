"""The provider of sandboxes in machines: clones them from templates, keeps their leases, and cleans up.

    what it waits for                        who wakes it, and until when
    a template                               see `templates`
    an agent's first word, or its return     the agent, `start_s`
    the end of a machine                     its process, `end_s`

No lock is held across any of these. The record of a machine is on disk before its process does anything.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from rollmill.errors import SandboxError, SandboxUnsupported
from rollmill.sandboxes.backends.microvm.channel import fresh_word
from rollmill.sandboxes.backends.microvm.hypervisor import Hypervisor, Kept
from rollmill.sandboxes.backends.microvm.inside import GROUP, ID_BASE, IMAGES, SANDBOX
from rollmill.sandboxes.backends.microvm.kit import Kit
from rollmill.sandboxes.backends.microvm.sandbox import MicroVmSandbox
from rollmill.sandboxes.backends.microvm.scratch import tidy
from rollmill.sandboxes.backends.microvm.settings import MicroVmSettings
from rollmill.sandboxes.backends.microvm.snapshot_calls import Snapshot, SnapshotCalls
from rollmill.sandboxes.backends.microvm.templates import Templates
from rollmill.sandboxes.backends.namespaces.orders import creation
from rollmill.sandboxes.backends.namespaces.own import OwnSandboxes, ended_id
from rollmill.sandboxes.disk_records import DiskRecord, ProcessMark, check_id
from rollmill.sandboxes.images.uses import ImageUses
from rollmill.sandboxes.lifecycle import explain_end
from rollmill.sandboxes.reaper import ReaperStatistics, total
from rollmill.sandboxes.records import (
    Capabilities,
    DeathReason,
    Image,
    Lease,
    SandboxSpec,
)
from rollmill.sandboxes.tally import Observer

_LEAST_BYTES, _LEAST_INODES = 1024**2, 256


class MicroVmProvider(OwnSandboxes[MicroVmSandbox], SnapshotCalls):
    """Runs sandboxes in machines. Use it as an asynchronous context manager, or call `close`.

    Args:
        settings: how.
        hypervisor: runs the machines.
        observer: told of starts, ends and sweeps.
        make_kit: makes what machines boot, in a thread; `None`: from the distribution's packages.
    """

    def __init__(
        self,
        settings: MicroVmSettings,
        *,
        hypervisor: Hypervisor,
        observer: Observer | None = None,
        make_kit: Callable[[], Kit] | None = None,
    ) -> None:
        OwnSandboxes.__init__(self, settings, observer=observer)
        SnapshotCalls.__init__(self, settings, hypervisor=hypervisor)
        self._images = ImageUses(settings.images, what=f"machines of process {os.getpid()}")
        self._templates = Templates(
            settings, hypervisor=hypervisor, images=self._images, make_kit=make_kit,
            on_started=self._note_template, on_ended=self.records.remove,
        )  # fmt: skip

    async def __aenter__(self) -> MicroVmProvider:
        """Sweep what killed owners left."""
        if problems := [*self._hypervisor.missing()]:
            raise SandboxError(f"machines of {self._hypervisor.backend} cannot run here: " + "; ".join(problems))
        await self._sweep()
        for place in {None, self._settings.scratch}:
            await asyncio.to_thread(tidy, place)
        await self._images.unmount_left()
        return self

    # -- the protocol ------------------------------------------------------------------------------------------------

    async def capabilities(self) -> Capabilities:
        """Return what this backend can do; whether there is a Python depends on the image, and the default has none."""
        return Capabilities(
            files_snapshot=True,
            fork=True,
            full_snapshot=True,
            live_fork=True,
            sessions=True,
            terminals=True,
            pause=True,
            expose=True,
            extend_ttl=True,
            labels=True,
            idempotent_create=True,
            batch_status=True,
            users=True,
        )

    async def prepare(self, image: Image) -> None:
        """Make the disks of an image."""
        await self._templates.prepare(image)

    async def create(
        self, spec: SandboxSpec, *, id: str, labels: Mapping[str, str] | None = None, lease: Lease
    ) -> MicroVmSandbox:
        """Start a sandbox and wait until it answers; the first of an image and size waits for a machine to boot."""
        check_id(id)
        self._check_open()
        if id not in self._alive and id not in self._ends:
            if spec.expose:
                raise SandboxUnsupported(
                    "a machine shows nothing of the host's (expose); write the files into the sandbox",
                    capability="expose",
                )
            template = await self._templates.of(spec)
            return await self._make(spec, template.kept, id=id, labels=labels or {}, lease=lease, snapshot=None)
        return await self._make(spec, None, id=id, labels=labels or {}, lease=lease, snapshot=None)

    def trash(self) -> ReaperStatistics:
        """Return what was deleted of images, and what waits; looks at their directory."""
        return total(self._images.trash())

    async def close(self) -> None:
        """End every sandbox, and let snapshots and templates go."""
        self._closed = True
        try:
            await self.kill([*self._alive])
        finally:
            await self._let_snapshots_go()
            await self._templates.close()
            await self._images.close()
            await self._hypervisor.close()

    # -- creation ----------------------------------------------------------------------------------------------------

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
        self._check_open()
        origin = "" if snapshot is None else snapshot.ref.snapshot_id
        if (known_one := self._alive.get(id)) is not None:
            return await self._same(known_one, spec, origin=origin)
        if id in self._ends or kept is None:
            raise ended_id(id)
        sandbox = self._register(spec, sandbox_id=id, labels=labels, lease=lease, snapshot=snapshot)
        async with self._bounded_start(sandbox):
            await self._start(sandbox, kept, snapshot)
        return sandbox

    def _register(
        self,
        spec: SandboxSpec,
        *,
        sandbox_id: str,
        labels: Mapping[str, str],
        lease: Lease,
        snapshot: Snapshot | None,
    ) -> MicroVmSandbox:
        """Write the record, then take the sandbox into the books."""
        record = self._record(sandbox_id, labels)
        self._write_first(record)
        sandbox = MicroVmSandbox(
            sandbox_id,
            spec=spec,
            labels=labels,
            lease=lease,
            record=record,
            home=self,
            settings=self._settings,
            order_kill=self._order_kill,
            on_gone=self._on_inside_gone,
            origin="" if snapshot is None else snapshot.ref.snapshot_id,
            first_number=1 if snapshot is None else snapshot.next_number,
        )
        self._alive[sandbox_id] = sandbox
        return sandbox

    async def _start(self, sandbox: MicroVmSandbox, kept: Kept, snapshot: Snapshot | None) -> None:
        try:
            sandbox.machine = await self._hypervisor.start(
                kept,
                name=sandbox.id,
                on_started=lambda mark: self._note_first_process(sandbox, mark),
                on_ended=lambda what: self._on_ended(sandbox, what),
            )
        except Exception as error:
            if sandbox.record.first_process is None:  # no process: nobody will tell of its end
                self._forget(sandbox, reason=DeathReason.START_FAILED, detail=str(error))
            raise
        if sandbox.ordered is not None:  # while there was no machine yet that could be killed
            sandbox.machine.kill()
        await sandbox.machine.resume()
        await sandbox.connect()
        if snapshot is None:
            sandbox.line.tell_machine({**fresh_word("make"), "order": order(sandbox.spec, layers=kept.layers)})
            protections = await asyncio.shield(sandbox.channel.ready)
        else:
            await sandbox.line.say(fresh_word("go"), until="awake")
            protections = snapshot.protections
            if not sandbox.channel.ready.done():
                sandbox.channel.ready.set_result(protections)
        self._answers(sandbox, tuple(dict.fromkeys((*protections, self._hypervisor.protection))))

    # -- records -----------------------------------------------------------------------------------------------------

    def _record(self, name: str, labels: Mapping[str, str], first: ProcessMark | None = None) -> DiskRecord:
        return DiskRecord(
            sandbox_id=name,
            backend=self._hypervisor.backend,
            owner=self._owner,
            first_process=first,
            labels=dict(labels),
            created_wall_s=time.time(),
        )

    def _note_template(self, name: str, mark: ProcessMark | None) -> None:
        self._write(self._record(name, {"template": self._hypervisor.backend}, mark))

    def _note_first_process(self, sandbox: MicroVmSandbox, mark: ProcessMark) -> None:
        sandbox.first_process_s = asyncio.get_running_loop().time()
        sandbox.record = msgspec.structs.replace(sandbox.record, first_process=mark)
        self._write(sandbox.record)

    # -- ends --------------------------------------------------------------------------------------------------------

    def _order_kill(self, sandbox_id: str) -> None:
        sandbox = self._alive.get(sandbox_id)
        if sandbox is not None and sandbox.machine is not None:
            sandbox.machine.kill()

    def _on_inside_gone(self, sandbox: MicroVmSandbox, code: int, oom_kills: int) -> None:
        """What runs inside has ended: its machine is of no use any more."""
        sandbox.inside_ended = (code, oom_kills)
        if sandbox.machine is not None:
            sandbox.machine.kill()

    def _on_ended(self, sandbox: MicroVmSandbox, what: str) -> None:
        by_operator = self.records.kill_noted(sandbox.id)
        if sandbox.inside_ended is None and sandbox.ordered is None and not by_operator:
            self._forget(sandbox, reason=DeathReason.PROVIDER_LOST, detail=what)
            return
        code, oom_kills = sandbox.inside_ended or (0, 0)
        end = explain_end(
            ordered=sandbox.ordered,
            exit_code=code,
            usage={"oom_kills": oom_kills},
            by_operator=by_operator,
            memory_bytes=sandbox.spec.limits.memory_bytes,
            complaint=sandbox.complaint,
        )
        self._forget(sandbox, reason=end.reason, detail=end.detail)


def order(spec: SandboxSpec, *, layers: int) -> dict[str, Any]:
    """Return what the zygote inside a machine is ordered to make."""
    plan = {
        "name": SANDBOX,
        "lowers": [f"{IMAGES}/{number}" for number in range(layers)],
        "layers": [],
        "lent": [],
        "expose": [],
        "all_users": True,
        "size_bytes": max(_LEAST_BYTES, spec.limits.disk_bytes),
        "inodes": max(_LEAST_INODES, spec.limits.inodes),
    }
    return creation(spec.limits, id=SANDBOX, id_base=ID_BASE, groups=[(2, GROUP)], record="/run/record", plan=plan)
