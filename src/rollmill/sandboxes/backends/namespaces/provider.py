"""The provider of namespace sandboxes: creates them through its zygote, keeps their leases, and cleans up.

    what it waits for                          who wakes it, and until when
    an agent's first word                      the agent, `start_s`
    the end of a sandbox                       the zygote's `gone`, `end_s`
    the end of the zygote, when closing        the process, `end_s`

No lock is held across any of these. The record of a sandbox is on disk before the zygote hears of it.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import os
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any, Self

import msgspec

from rollmill.errors import SandboxRetryable
from rollmill.sandboxes.backends.namespaces.channel import SetupFailed
from rollmill.sandboxes.backends.namespaces.checks import check_image, check_spec
from rollmill.sandboxes.backends.namespaces.orders import creation
from rollmill.sandboxes.backends.namespaces.own import OwnSandboxes, ended_id
from rollmill.sandboxes.backends.namespaces.sandbox import NamespaceSandbox
from rollmill.sandboxes.backends.namespaces.settings import NamespaceSettings
from rollmill.sandboxes.backends.namespaces.snapshot_book import Kept
from rollmill.sandboxes.backends.namespaces.snapshot_calls import SnapshotCalls
from rollmill.sandboxes.backends.namespaces.snapshots import Snapshots
from rollmill.sandboxes.backends.namespaces.zygote_link import ZygoteLink
from rollmill.sandboxes.disk_records import DiskRecord, DiskRecords, ProcessMark, check_id, mark_of
from rollmill.sandboxes.guest import cgroups
from rollmill.sandboxes.guest.cgroups import Groups
from rollmill.sandboxes.images.uses import ImageUses
from rollmill.sandboxes.lifecycle import death, explain_end
from rollmill.sandboxes.reaper import ReaperStatistics, total
from rollmill.sandboxes.records import (
    Capabilities,
    Death,
    DeathReason,
    DirectoryImage,
    Image,
    Lease,
    NamedImage,
    SandboxSpec,
)
from rollmill.sandboxes.tally import Observer

_PREPARING = "prepare/"  # never a sandbox's id
_RETRY_AFTER_S = 1.0
_CLEAN_LOOK_S = 0.02
_LOOK_S = 1.0
_LAST_WORDS_S = 1.0


class NamespaceProvider(OwnSandboxes[NamespaceSandbox], SnapshotCalls):
    """Runs sandboxes of this machine. Use it as an asynchronous context manager, or call `close`.

    Args:
        settings: how.
        observer: told of starts, ends and sweeps.
    """

    _program = "zygote"
    _sandbox_type: type[NamespaceSandbox] = NamespaceSandbox

    def __init__(self, settings: NamespaceSettings | None = None, *, observer: Observer | None = None) -> None:
        self._settings = NamespaceSettings() if settings is None else settings
        OwnSandboxes.__init__(self, self._settings, observer=observer)
        images = ImageUses(self._settings.images, what=f"sandboxes of process {os.getpid()}")
        snapshots = Snapshots(self._settings, order=self._order_layers, on_lost=self._let_image_go)
        SnapshotCalls.__init__(self, snapshots, images=images)
        self._hierarchies = cgroups.discover()
        self._zygote: ZygoteLink | None = None
        self._starting: asyncio.Future[ZygoteLink] | None = None
        self._cleaning: set[asyncio.Future[None]] = set()
        # Providers of other processes begin elsewhere.
        self._numbers = itertools.count(os.getpid())
        self._claims = itertools.count(1)

    async def __aenter__(self) -> Self:
        """Sweep what killed owners left, and start the zygote."""
        await self._sweep()
        await self._images.unmount_left()
        await self._running_zygote()
        try:
            await self._hold_images()
        except BaseException:
            await self.close()
            raise
        return self

    # -- the protocol ------------------------------------------------------------------------------------------------

    async def capabilities(self) -> Capabilities:
        """Return what this backend can do on this machine."""
        return Capabilities(
            files_snapshot=True,
            fork=True,
            sessions=True,
            terminals=True,
            pause=any(one.version == 2 for one in self._hierarchies),
            pause_files=True,
            expose=True,
            extend_ttl=True,
            labels=True,
            idempotent_create=True,
            batch_status=True,
            fast_python=True,
            users=self._settings.maps_ranges(),
            attributes=_memory_carries_words(),
        )

    async def prepare(self, image: Image) -> None:
        """Check that an image can be used; one of the store gets its layers ready."""
        check_image(image)
        if isinstance(image, NamedImage):
            await self._images.acquire(image.name, user=_PREPARING)
            self._images.release(_PREPARING)

    async def create(
        self, spec: SandboxSpec, *, id: str, labels: Mapping[str, str] | None = None, lease: Lease
    ) -> NamespaceSandbox:
        """Start a sandbox and wait until it answers."""
        return await self._make(spec, id=id, labels=labels or {}, lease=lease)

    async def _make(
        self, spec: SandboxSpec, *, id: str, labels: Mapping[str, str], lease: Lease, kept: Kept | None = None
    ) -> NamespaceSandbox:
        check_id(id)
        if (known_one := self._alive.get(id)) is not None:
            return await self._same(known_one, spec, origin=_origin(kept))
        if id in self._ends:
            raise ended_id(id)
        check_spec(spec)
        zygote = await self._running_zygote()
        # Its own: another call may have the id by the time that this one has its image.
        claim = f"creation {next(self._claims)}"
        try:
            if isinstance(spec.image, NamedImage) and id not in self._alive:
                image = spec.image.name if kept is None or not kept.image_digest else kept.image_digest
                await self._images.acquire(image, user=claim)
            if id in self._alive:
                return await self._same(self._alive[id], spec, origin=_origin(kept))
            self._images.share(claim, to=id)
            try:
                sandbox = self._register(spec, sandbox_id=id, labels=labels, lease=lease, helper=zygote.mark, kept=kept)
            except BaseException:
                self._images.release(id)
                raise
        finally:
            self._images.release(claim)
        async with self._bounded_start(sandbox):
            await self._start(sandbox, zygote)
        return sandbox

    def alive(self) -> tuple[NamespaceSandbox, ...]:
        """Return those that live, or are being started or ended."""
        return tuple(self._alive.values())

    def trash(self) -> ReaperStatistics:
        """Return what was deleted of images and snapshots, and what waits; looks at their directories."""
        return total([*self._images.trash(), *self._snapshots.trash()])

    async def close(self) -> None:
        """End every sandbox, and the zygote."""
        self._closed = True
        self._snapshots.lose()
        try:
            await self.kill(list(self._alive))
        finally:
            if self._zygote is not None:
                await self._zygote.quit(limit_s=self._settings.end_s)
            for sandbox in list(self._alive.values()):
                self._forget(sandbox, reason=DeathReason.RELEASED, detail="its provider was closed")
            await self._images.close()
            self._snapshots.close()
            if self._cleaning:
                await asyncio.gather(*self._cleaning)

    # -- creation ----------------------------------------------------------------------------------------------------

    async def _running_zygote(self) -> ZygoteLink:
        self._check_open()
        if self._zygote is not None and self._zygote.alive:
            return self._zygote
        if self._starting is None:
            self._starting = asyncio.ensure_future(self._start_zygote())
            self._starting.add_done_callback(self._started_zygote)
        return await asyncio.shield(self._starting)

    async def _start_zygote(self) -> ZygoteLink:
        link = ZygoteLink(
            python=self._settings.python, on_report=self._on_report, on_lost=self._on_lost, program=self._program
        )
        await link.start()
        self._zygote = link
        return link

    def _started_zygote(self, _: asyncio.Future[ZygoteLink]) -> None:
        self._starting = None

    def _register(
        self,
        spec: SandboxSpec,
        *,
        sandbox_id: str,
        labels: Mapping[str, str],
        lease: Lease,
        helper: ProcessMark | None,
        kept: Kept | None,
    ) -> NamespaceSandbox:
        """Write the record, then take the sandbox into the books."""
        if kept is not None:
            self._snapshots.book.find(kept.ref.snapshot_id)  # it may have been deleted while an image was looked for
        groups = Groups.planned(self._hierarchies, name=f"{self._owner.pid}-{sandbox_id}")
        record = DiskRecord(
            sandbox_id=sandbox_id,
            backend=self.backend,
            owner=self._owner,
            helper=helper,
            groups=groups.directories,
            labels=dict(labels),
            created_wall_s=time.time(),
        )
        self._write_first(record)
        sandbox = self._sandbox_type(
            sandbox_id,
            spec=spec,
            labels=labels,
            lease=lease,
            groups=groups,
            start_s=self._settings.start_s + self._settings.store_s,
            answer_s=self._settings.answer_s,
            end_s=self._settings.end_s,
            order_kill=self._order_kill,
            record=record,
            home=self,
            origin=_origin(kept),
            id_base=self._settings.id_range(next(self._numbers)) if kept is None else kept.id_base,
        )
        self._alive[sandbox_id] = sandbox
        if kept is not None:
            self._stand_on(sandbox, kept.chain)
        return sandbox

    async def _start(self, sandbox: NamespaceSandbox, zygote: ZygoteLink) -> NamespaceSandbox:
        try:
            ours, theirs = _socketpair()
        except OSError as error:
            self._forget(sandbox, reason=DeathReason.START_FAILED, detail=str(error))
            raise SandboxRetryable(
                f"sandbox {sandbox.id}: this process has no descriptors left ({error}); end sandboxes, or raise its "
                "limit of open files (ulimit -n): each takes one.",
                after_s=_RETRY_AFTER_S,
            ) from error
        loop = asyncio.get_running_loop()
        if not zygote.order(self._order(sandbox), descriptors=[theirs]):
            ours.close()
            self._forget(sandbox, reason=DeathReason.PROVIDER_LOST, detail="the zygote ended before the order")
            raise SandboxRetryable(f"sandbox {sandbox.id}: the zygote ended just now; another one starts", after_s=0.0)
        await loop.create_unix_connection(lambda: sandbox.channel, sock=ours)
        self._answers(sandbox, await asyncio.shield(sandbox.channel.ready))
        return sandbox

    def _order(self, sandbox: NamespaceSandbox) -> dict[str, Any]:
        limits = sandbox.spec.limits
        layers, lent = self._snapshots.below(sandbox.chain)
        size_bytes, inodes = self._snapshots.room(sandbox.chain, disk_bytes=limits.disk_bytes, inodes=limits.inodes)
        plan = {
            "name": "sandbox",
            "lowers": self._lowers(sandbox),
            "layers": layers,
            "lent": lent,
            "expose": list(sandbox.spec.expose),
            "all_users": sandbox.id_base is not None,
            "size_bytes": size_bytes,
            "inodes": inodes,
        }
        return creation(
            limits,
            id=sandbox.id,
            id_base=sandbox.id_base,
            groups=sandbox.groups.directories,
            record=os.fspath(self.records.path(sandbox.id)),
            plan=plan,
        )

    def _lowers(self, sandbox: NamespaceSandbox) -> list[str]:
        """Return the directories of its image, the uppermost first; none for the host's own."""
        if isinstance(sandbox.spec.image, DirectoryImage):
            return list(sandbox.spec.image.layers)
        found = self._images.in_use(sandbox.id)
        return [] if found is None else list(found.layers)

    # -- what the zygote says ----------------------------------------------------------------------------------------

    def _order_kill(self, sandbox_id: str) -> None:
        sandbox = self._alive.get(sandbox_id)
        if sandbox is not None and sandbox.sleeps:  # nobody is there whose end the zygote could tell
            self._forget(sandbox, reason=sandbox.ordered or DeathReason.RELEASED, detail=sandbox.complaint)
            return
        if self._zygote is not None:
            self._zygote.order({"op": "kill", "id": sandbox_id})

    def _order_layers(self, order: dict[str, Any]) -> bool:
        return self._zygote is not None and self._zygote.order(order)

    def _on_report(self, report: dict[str, Any]) -> None:
        if report["op"] in ("kept", "shelf_lost"):
            self._snapshots.on_report(report)
            return
        sandbox = self._alive.get(report["id"])
        if sandbox is None:
            return  # ended for us already, when an older zygote was lost
        if report["op"] == "started":
            self._note_first_process(sandbox, report["pid"])
        elif report["op"] == "refused":
            failure = SetupFailed(report["message"], step="clone", errno=report["errno"])
            if not sandbox.channel.ready.done():
                sandbox.channel.ready.set_exception(failure)
            self._forget(sandbox, reason=sandbox.ordered or DeathReason.START_FAILED, detail=report["message"])
        elif report["op"] == "gone":
            self._on_gone(sandbox, report)

    def _note_first_process(self, sandbox: NamespaceSandbox, pid: int) -> None:
        sandbox.first_process_s = asyncio.get_running_loop().time()
        if (mark := mark_of(pid)) is not None:
            sandbox.record = msgspec.structs.replace(sandbox.record, first_process=mark)
            try:
                self.records.write(sandbox.record)
            except OSError as error:
                # Without a record nobody could clean up after this process, so it must not go on.
                sandbox.distrust(f"its record cannot be written: {error}", DeathReason.START_FAILED)

    def _on_gone(self, sandbox: NamespaceSandbox, report: dict[str, Any]) -> None:
        if sandbox.rested is not None and sandbox.ordered is None and not self.records.kill_noted(sandbox.id):
            if not sandbox.rested.done():
                sandbox.rested.set_result(None)
            return
        end = explain_end(
            ordered=sandbox.ordered,
            exit_code=report["exit"],
            usage=report["usage"],
            by_operator=self.records.kill_noted(sandbox.id),
            memory_bytes=sandbox.spec.limits.memory_bytes,
            complaint=sandbox.complaint,
        )

        def close_books(_: object = None) -> None:
            self._forget(sandbox, reason=end.reason, detail=end.detail)

        if sandbox.channel.ready.done() or sandbox.channel.closed.done():
            close_books()
            return
        # It never became ready: what it says about the reason may still lie in its socket, so that is read first.
        sandbox.channel.closed.add_done_callback(close_books)
        asyncio.get_running_loop().call_later(_LAST_WORDS_S, close_books)

    def _fell_asleep(self, sandbox: NamespaceSandbox) -> None:
        """Note on the disk that nothing of it runs, and look for an operator's word, which no end tells of now."""
        try:
            self.records.write(sandbox.record)
        except OSError as error:
            sandbox.distrust(f"its record cannot be written: {error}", DeathReason.PROVIDER_LOST)
            return
        self._look_for_word(sandbox)

    def _look_for_word(self, sandbox: NamespaceSandbox) -> None:
        if not sandbox.sleeps or sandbox.death is not None:
            return
        if self.records.kill_noted(sandbox.id):
            sandbox.distrust("ended by `rollmill sandbox kill`", DeathReason.KILLED_BY_OPERATOR)
            return
        asyncio.get_running_loop().call_later(_LOOK_S, self._look_for_word, sandbox)

    def _close(self, sandbox: NamespaceSandbox, end: Death) -> None:
        """Say that a sandbox has ended, and let go of what it stood on."""
        super()._close(sandbox, end)
        self._images.release(sandbox.id)
        self._snapshots.release(sandbox.id)

    def _on_lost(self, cause: str) -> None:
        """With the zygote the kernel has killed every sandbox; what stays are groups, removed beside the loop."""
        self._snapshots.lose()
        lost = list(self._alive.values())
        records = [one.record for one in lost]
        for sandbox in lost:
            self._alive.pop(sandbox.id, None)
            self._close(sandbox, death(sandbox.ordered or DeathReason.PROVIDER_LOST, detail=cause))
        loop = asyncio.get_running_loop()
        cleaning = loop.run_in_executor(None, _clean_up, self._zygote, self.records, records, self._settings.end_s)
        self._cleaning.add(cleaning)
        cleaning.add_done_callback(self._cleaning.discard)


@functools.cache
def _memory_carries_words() -> bool:
    """Return whether files in memory can have words: since Linux 6.6."""
    probe = os.memfd_create("probe", os.MFD_CLOEXEC)
    try:
        os.setxattr(probe, "user.a.b", b"1")
    except OSError:
        return False
    finally:
        os.close(probe)
    return True


def _origin(kept: Kept | None) -> str:
    return "" if kept is None else kept.ref.snapshot_id


def _socketpair() -> tuple[socket.socket, socket.socket]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    ours.setblocking(False)
    return ours, theirs


def _clean_up(zygote: ZygoteLink | None, records: DiskRecords, left: Sequence[DiskRecord], limit_s: float) -> None:
    """Remove the groups of sandboxes whose zygote was lost, then their records; a later sweep takes what stays."""
    if zygote is not None:
        zygote.reap(limit_s=limit_s)
    deadline = time.monotonic() + limit_s
    for record in left:
        groups = Groups(record.groups)
        groups.kill()
        while not groups.destroy() and time.monotonic() < deadline:
            time.sleep(_CLEAN_LOOK_S)
        if groups.destroy():
            records.remove(record.sandbox_id)
