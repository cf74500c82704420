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
from collections import OrderedDict
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

import msgspec

from rollmill.errors import (
    DeadlineExceeded,
    SandboxError,
    SandboxIdInUse,
    SandboxRetryable,
    SandboxUnsupported,
)
from rollmill.sandboxes.backends.microvm.channel import fresh_word
from rollmill.sandboxes.backends.microvm.hypervisor import Hypervisor, Kept
from rollmill.sandboxes.backends.microvm.inside import GROUP, ID_BASE, IMAGES, SANDBOX
from rollmill.sandboxes.backends.microvm.kit import Kit
from rollmill.sandboxes.backends.microvm.sandbox import MicroVmSandbox
from rollmill.sandboxes.backends.microvm.scratch import tidy
from rollmill.sandboxes.backends.microvm.settings import MicroVmSettings
from rollmill.sandboxes.backends.microvm.snapshot_calls import Snapshot, SnapshotCalls
from rollmill.sandboxes.backends.microvm.templates import Templates
from rollmill.sandboxes.backends.namespaces.channel import SetupFailed
from rollmill.sandboxes.backends.namespaces.checks import explain_failure
from rollmill.sandboxes.backends.namespaces.own import OwnSandboxes
from rollmill.sandboxes.disk_records import DiskRecord, DiskRecords, ProcessMark, check_id, mark_of
from rollmill.sandboxes.images.uses import ImageUses
from rollmill.sandboxes.isolation import known, require
from rollmill.sandboxes.lifecycle import dead_error, death, explain_end
from rollmill.sandboxes.reaper import ReaperStatistics, total
from rollmill.sandboxes.records import (
    Capabilities,
    DeathReason,
    Image,
    Lease,
    SandboxSpec,
    SandboxStatus,
)
from rollmill.sandboxes.sweep import sweep
from rollmill.sandboxes.tally import Observer

_REMEMBERED_ENDS = 1000
_RETRY_AFTER_S = 1.0
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
        super().__init__(settings, hypervisor=hypervisor)
        self._observer = observer
        self.records = DiskRecords(settings.records_directory())
        self._images = ImageUses(settings.images, what=f"machines of process {os.getpid()}")
        self._templates = Templates(
            settings, hypervisor=hypervisor, images=self._images, make_kit=make_kit,
            on_started=self._note_template, on_ended=self.records.remove,
        )  # fmt: skip
        self._ends: OrderedDict[str, SandboxStatus] = OrderedDict()
        self._closed = False
        mark = mark_of(os.getpid())
        if mark is None:
            raise SandboxError("/proc does not show this process; sandboxes need a mounted /proc")
        self._owner = mark

    async def __aenter__(self) -> MicroVmProvider:
        """Sweep what killed owners left."""
        if problems := [*self._hypervisor.missing()]:
            raise SandboxError(f"machines of {self._hypervisor.backend} cannot run here: " + "; ".join(problems))
        report = await asyncio.to_thread(sweep, self.records)
        for place in {None, self._settings.scratch}:
            await asyncio.to_thread(tidy, place)
        if self._observer is not None:
            self._observer.swept(removed=len(report.removed), left=len(report.left))
        await self._images.unmount_left()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close."""
        await self.close()

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
            return await self._same(known_one, spec, origin)
        if id in self._ends or kept is None:
            raise SandboxIdInUse(f"sandbox {id} has ended; an id names one sandbox for good, so choose another")
        sandbox = self._register(spec, sandbox_id=id, labels=labels, lease=lease, snapshot=snapshot)
        try:
            async with asyncio.timeout(self._settings.start_s):
                await self._start(sandbox, kept, snapshot)
                return sandbox
        except TimeoutError:
            await self._put_down(sandbox)
            raise SandboxRetryable(
                f"sandbox {id} did not answer within {self._settings.start_s:g} s and was removed. The machine is "
                "overloaded: start fewer at a time.",
                after_s=_RETRY_AFTER_S,
            ) from None
        except SetupFailed as error:
            await self._put_down(sandbox)
            raise explain_failure(error, sandbox_id=id) from error
        except asyncio.CancelledError:
            sandbox.order_end(DeathReason.START_FAILED)
            raise
        except Exception as error:
            ordered = sandbox.ordered
            await self._put_down(sandbox)
            if ordered is not None and sandbox.death is not None:
                raise dead_error(id, sandbox.death) from error  # it was ended while it started, and that is why
            raise

    def _check_open(self) -> None:
        if self._closed:
            raise SandboxError("this provider is closed; open another one")

    async def _same(self, sandbox: MicroVmSandbox, spec: SandboxSpec, origin: str) -> MicroVmSandbox:
        if sandbox.spec != spec or sandbox.origin != origin:
            raise SandboxIdInUse(
                f"sandbox {sandbox.id} lives and has another spec, or comes from another snapshot; choose another id, "
                "or end it first"
            )
        try:
            async with asyncio.timeout(self._settings.start_s):
                await asyncio.shield(sandbox.channel.ready)
        except TimeoutError:
            what = f"sandbox {sandbox.id} is being started by another call, for more than {self._settings.start_s:g} s"
            raise SandboxRetryable(what, after_s=_RETRY_AFTER_S) from None
        except SetupFailed as error:
            raise explain_failure(error, sandbox_id=sandbox.id) from error
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
        if self.records.path(sandbox_id).exists():
            raise SandboxIdInUse(f"a record of sandbox {sandbox_id} exists: another process's, or one to be swept")
        record = self._record(sandbox_id, labels)
        self._write(record)
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
        sandbox.became_ready(tuple(dict.fromkeys((*protections, self._hypervisor.protection))))
        require(self._settings.minimum_isolation, known(sandbox.protections))
        if self._observer is not None:
            create_s, ready_s = sandbox.start_phases()
            self._observer.started(create_s=create_s, ready_s=ready_s)

    async def _put_down(self, sandbox: MicroVmSandbox) -> None:
        """Remove what is left of a start that failed."""
        if sandbox.death is not None:
            return
        try:
            await asyncio.shield(asyncio.ensure_future(sandbox.kill(DeathReason.START_FAILED)))
        except DeadlineExceeded:
            return  # ordered; its record stays until its process is seen to end

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

    def _write(self, record: DiskRecord) -> None:
        try:
            self.records.write(record)
        except OSError as error:
            raise SandboxError(
                f"the record of sandbox {record.sandbox_id} cannot be written ({error}), and nothing is started that "
                f"could not be cleaned up. Make room in {self.records.directory}, or name another directory."
            ) from error

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

    def _forget(self, sandbox: MicroVmSandbox, *, reason: DeathReason, detail: str) -> None:
        """Close the books of a sandbox of which nothing is left."""
        if sandbox.death is not None:
            return
        self._alive.pop(sandbox.id, None)
        try:
            self.records.remove(sandbox.id)  # if this fails the loop reports it, and a later sweep tries again
        finally:
            end = death(reason, detail=detail)
            sandbox.ended(end)
            if self._observer is not None:
                self._observer.ended(end)
            self._ends[sandbox.id] = sandbox.status()
            while len(self._ends) > _REMEMBERED_ENDS:
                self._ends.popitem(last=False)


def order(spec: SandboxSpec, *, layers: int) -> dict[str, Any]:
    """Return what the zygote inside a machine is ordered to make."""
    limits = spec.limits
    processes = limits.pids + 1  # its agent is one
    plan = {
        "name": SANDBOX,
        "lowers": [f"{IMAGES}/{number}" for number in range(layers)],
        "layers": [],
        "lent": [],
        "expose": [],
        "all_users": True,
        "size_bytes": max(_LEAST_BYTES, limits.disk_bytes),
        "inodes": max(_LEAST_INODES, limits.inodes),
        "seccomp": True,
        "landlock": True,
        "limits": {
            "pids": processes,
            "open_files": limits.open_files,
            "disk_bytes": limits.disk_bytes,
            "cpu_s": limits.cpu_s,
            "memory_bytes": limits.memory_bytes,
        },
    }
    caps = {"memory_bytes": limits.memory_bytes, "pids": processes, "cpus": limits.cpus}
    return {
        "op": "create",
        "id": SANDBOX,
        "id_base": ID_BASE,
        "groups": [(2, GROUP)],
        "caps": caps,
        "record": "/run/record",
        "plan": plan,
    }
