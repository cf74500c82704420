"""How a namespace sandbox is snapshotted, forked and restored: the order of the steps, and what follows if one fails.

    1  nothing runs, and the agent hands the layer out         else the sandbox goes on as it was
    2  the shelf holds the layer                               else the same
    3  the first process ends, so that nobody writes to it     else the sandbox ends: nobody knows what it holds
    4  the layer is stored or merged, if it is to be           else the sandbox goes on above it, without a snapshot
    5  a first process starts above the layer                  else the sandbox ends, and the snapshot is held

What is restored takes the fifth step alone, as one does that wakes: it was put to sleep by the first four, without a
snapshot.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any

from rollmill.errors import (
    ImageError,
    RollmillError,
    SandboxError,
    SandboxExhausted,
    SandboxRetryable,
)
from rollmill.sandboxes.backends.namespaces.carried import CarriedSnapshots
from rollmill.sandboxes.backends.namespaces.channel import SetupFailed
from rollmill.sandboxes.backends.namespaces.checks import explain_failure
from rollmill.sandboxes.backends.namespaces.sandbox import NamespaceSandbox
from rollmill.sandboxes.backends.namespaces.settings import MOST_LAYERS, NamespaceSettings
from rollmill.sandboxes.backends.namespaces.snapshot_book import Kept, Layer
from rollmill.sandboxes.backends.namespaces.snapshots import Snapshots
from rollmill.sandboxes.backends.namespaces.zygote_link import ZygoteLink
from rollmill.sandboxes.images.uses import ImageUses
from rollmill.sandboxes.lifecycle import dead_error, death
from rollmill.sandboxes.records import DeathReason, Lease, SandboxSpec, SnapshotRef

_log = logging.getLogger(__name__)
BACKEND = "namespaces"
_RETRY_AFTER_S = 1.0


class SnapshotCalls(CarriedSnapshots[NamespaceSandbox]):
    """The calls of a provider.

    Args:
        snapshots: what is held.
        images: what is used of the store.
    """

    backend = BACKEND
    _settings: NamespaceSettings

    def __init__(self, snapshots: Snapshots, *, images: ImageUses) -> None:
        super().__init__()
        self._snapshots = snapshots
        self._images = images
        self._waking: set[asyncio.Future[None]] = set()

    # -- what a provider has -------------------------------------------------------------------------------------------

    async def _make(
        self, spec: SandboxSpec, *, id: str, labels: Mapping[str, str], lease: Lease, kept: Kept | None = None
    ) -> NamespaceSandbox:
        raise NotImplementedError

    async def _start(self, sandbox: NamespaceSandbox, zygote: ZygoteLink) -> NamespaceSandbox:
        raise NotImplementedError

    async def _running_zygote(self) -> ZygoteLink:
        raise NotImplementedError

    async def _put_down(self, sandbox: NamespaceSandbox) -> None:
        raise NotImplementedError

    def _forget(self, sandbox: NamespaceSandbox, *, reason: DeathReason, detail: str) -> None:
        raise NotImplementedError

    def _fell_asleep(self, sandbox: NamespaceSandbox) -> None:
        raise NotImplementedError

    # -- the protocol --------------------------------------------------------------------------------------------------

    async def restore(
        self, ref: SnapshotRef, *, id: str, labels: Mapping[str, str] | None = None, lease: Lease
    ) -> NamespaceSandbox:
        """Start a sandbox with the files of a snapshot."""
        kept = self._snapshots.book.find(ref.snapshot_id)
        return await self._make(kept.ref.spec, id=id, labels=labels or {}, lease=lease, kept=kept)

    async def snapshots(self) -> tuple[SnapshotRef, ...]:
        """Return those that are held, the oldest first."""
        refs = (one.ref for one in self._snapshots.book.snapshots())
        return tuple(one for one in refs if one.snapshot_id not in self._forking)

    def snapshot_totals(self) -> tuple[int, int]:
        """Return bytes and inodes of all layers that are held, by snapshots or by sandboxes above them."""
        return self._snapshots.book.counts()

    async def delete_snapshots(self, ids: Sequence[str]) -> None:
        """Let go of these; one that is not known counts as deleted."""
        for one in ids:
            await asyncio.shield(asyncio.ensure_future(self._delete(one)))

    async def _delete(self, snapshot_id: str) -> None:
        """Let go of a snapshot, and only then of the image below it: no file ever leads to what is not there."""
        await self._snapshots.delete(snapshot_id)
        if self._snapshots.durable:
            await self._images.unpin(holder=self._snapshots.identity, name=snapshot_id)
        self._let_image_go(snapshot_id)

    # -- for a sandbox -------------------------------------------------------------------------------------------------

    def _begin(self, sandbox: NamespaceSandbox, *, id: str) -> None:
        self._snapshots.book.check_new(id)
        self._check_chain(sandbox)
        sandbox.begin_snapshot(forks=id in self._forking)

    def _check_chain(self, sandbox: NamespaceSandbox) -> None:
        """Refuse to keep files that would not be whole, or could not be mounted."""
        if not self._snapshots.book.is_whole(sandbox.chain):
            raise SandboxError(
                f"the layers below sandbox {sandbox.id} were lost with the process that kept them, so that no snapshot "
                "of it would be whole. It lives on: read what is needed out of it."
            )
        if len(sandbox.chain) >= MOST_LAYERS:
            raise SandboxExhausted(
                f"sandbox {sandbox.id} stands on {len(sandbox.chain)} layers, as many as the kernel mounts at once: "
                "several of its snapshots could not be stored or merged. It lives on; make room, and start another."
            )

    # -- sleep ---------------------------------------------------------------------------------------------------------

    async def put_to_sleep(self, sandbox: NamespaceSandbox) -> None:
        """End what runs in a sandbox, and keep its files alone; carried through when the caller is cancelled."""
        await sandbox.awake()
        self._check_chain(sandbox)
        sandbox.begin_snapshot()
        await self._carried(self._put_to_sleep(sandbox))

    async def _put_to_sleep(self, sandbox: NamespaceSandbox) -> None:
        before = sandbox.chain
        layer = await self._rest(sandbox, force=True)
        try:
            chain, new = await self._snapshots.settle(layer, before, to_keep=True)
        except BaseException as error:
            try:
                await self._go_on(sandbox, end=False)
            except RollmillError as further:
                error.add_note(f"and then: {further}")
            raise
        if sandbox.death is not None or sandbox.ordered is not None:
            await self._go_on(sandbox, end=False)  # closes its books, and says how it ended
            return
        self._stand_on(sandbox, chain, new=new)
        sandbox.fell_asleep()
        self._fell_asleep(sandbox)

    async def wake(self, sandbox: NamespaceSandbox) -> None:
        """Start a sandbox that sleeps anew, with its files; carried through when the caller is cancelled."""
        sandbox.wakes_up()
        await self._carried(self._go_on(sandbox, end=False))

    async def _carried(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._waking.add(task)
        task.add_done_callback(self._woken)
        await asyncio.shield(task)

    # -- the steps -----------------------------------------------------------------------------------------------------

    async def _take(self, sandbox: NamespaceSandbox, *, id: str, force: bool, end: bool, to_keep: bool) -> SnapshotRef:
        before, image = sandbox.chain, self._images.in_use(sandbox.id)
        layer = await self._rest(sandbox, force=force)
        try:
            chain, new = await self._snapshots.settle(layer, before, to_keep=to_keep)
            durable = to_keep and self._snapshots.durable
            ref = self._describe(sandbox, id=id, chain=chain, new=new, durable=durable)
            digest = "" if image is None else image.digest
            kept = Kept(ref=ref, chain=chain, id_base=sandbox.id_base, image_digest=digest)
            await self._keep(kept, new)
        except BaseException as error:
            try:
                await self._go_on(sandbox, end=False)
            except RollmillError as further:
                error.add_note(f"and then: {further}")
            raise
        if sandbox.death is None and self._snapshots.book.is_whole(chain):
            self._stand_on(sandbox, chain)
        if end:
            await self._go_on(sandbox, end=True)
            return ref
        # The files are safe, and that is all the caller waits for; calls on the sandbox wait until it answers.
        waking = asyncio.ensure_future(self._go_on(sandbox, end=False))
        self._waking.add(waking)
        waking.add_done_callback(self._woken)
        return ref

    async def _keep(self, kept: Kept, new: Sequence[Layer]) -> None:
        """Take a snapshot into the books; one that cannot be kept whole is in no list."""
        try:
            await self._snapshots.keep(kept, new, before=self._hold_image)
        except BaseException:
            await asyncio.shield(asyncio.ensure_future(self.delete_snapshots([kept.ref.snapshot_id])))
            raise

    def _woken(self, waking: asyncio.Future[None]) -> None:
        self._waking.discard(waking)
        if not waking.cancelled():
            waking.exception()  # the sandbox has ended of it, and says so to everybody who calls

    async def _rest(self, sandbox: NamespaceSandbox, *, force: bool) -> Layer:
        """Have the layer held, end the first process, and let the sandbox stand on the layer."""
        losses = self._snapshots.losses
        try:
            layer = await self._hold(sandbox, force=force)
            try:
                await sandbox.end_first_process()
            except BaseException as error:
                self._snapshots.drop([layer])
                sandbox.distrust(f"its first process did not end for a snapshot: {error}", DeathReason.PROVIDER_LOST)
                raise
            if self._snapshots.losses != losses:
                self._give_up(sandbox)
            if sandbox.death is not None:
                raise dead_error(sandbox.id, sandbox.death)
            self._stand_on(sandbox, (layer.layer_id, *sandbox.chain), new=[layer])
            return layer
        finally:
            self._snapshots.book.unreserve(sandbox.id)

    def _give_up(self, sandbox: NamespaceSandbox) -> None:
        """Close the books of a sandbox without a first process whose files were lost; nothing if they are closed."""
        detail = "its layers were lost with the process that kept them, in the middle of a snapshot"
        self._forget(sandbox, reason=sandbox.ordered or DeathReason.PROVIDER_LOST, detail=detail)

    async def _hold(self, sandbox: NamespaceSandbox, *, force: bool) -> Layer:
        """Have the layer held; if that fails the sandbox goes on as it was."""
        try:
            disk_bytes, inodes = await sandbox.hand_layer_out(force=force)
            self._snapshots.book.reserve(sandbox.id, disk_bytes=disk_bytes, inodes=inodes)
            return await self._snapshots.hold(sandbox.id)
        except BaseException:
            sandbox.end_snapshot()
            raise

    def _stand_on(self, sandbox: NamespaceSandbox, chain: tuple[str, ...], *, new: Sequence[Layer] = ()) -> None:
        """Let a sandbox have a chain of layers below what it writes next; `new` are not in the book yet."""
        gone = self._snapshots.book.hold_for_sandbox(sandbox.id, chain, layers=new)
        sandbox.chain = chain
        sandbox.layer_counts = self._snapshots.book.counts_of(chain)
        self._snapshots.drop(gone)

    def _describe(
        self, sandbox: NamespaceSandbox, *, id: str, chain: tuple[str, ...], new: Sequence[Layer], durable: bool
    ) -> SnapshotRef:
        found = {one.layer_id: one for one in new}
        layers = [found[one] if one in found else self._snapshots.book.layer(one) for one in chain]
        return SnapshotRef(
            snapshot_id=id,
            backend=self.backend,
            spec=sandbox.spec,
            disk_bytes=sum(one.disk_bytes for one in layers),
            inodes=sum(one.inodes for one in layers),
            depth=len(layers),
            durable=durable,
            created_wall_s=time.time(),
            full=self._is_full(id),
        )

    def _is_full(self, snapshot_id: str) -> bool:
        """Return whether a snapshot that is being taken has processes."""
        return False

    async def _hold_image(self, kept: Kept) -> None:
        """Hold the image below a snapshot, beyond this process if the snapshot goes beyond it."""
        if not kept.image_digest:
            return
        name = kept.ref.snapshot_id
        await self._images.acquire(kept.image_digest, user=_holder(name))
        if kept.ref.durable:
            what, holder = self._snapshots.words(name), self._snapshots.identity
            await self._images.pin(kept.image_digest, holder=holder, name=name, what=what)

    def _let_image_go(self, snapshot_id: str) -> None:
        """Let go of the image below a snapshot that is gone."""
        self._images.release(_holder(snapshot_id))

    async def _hold_images(self) -> None:
        """Hold the images below snapshots that an earlier provider left on the disk, and no others for it any more."""
        if not self._snapshots.durable:
            return
        found = self._snapshots.book.snapshots()
        for kept in found:
            try:
                await self._hold_image(kept)
            except ImageError as error:  # the others are of use without it
                _log.warning("%s cannot be restored: %s", self._snapshots.words(kept.ref.snapshot_id), error)
        names = {kept.ref.snapshot_id for kept in found}
        if left := await self._images.unpin_all_but(names, holder=self._snapshots.identity):
            _log.info("let go of the images of %d snapshots that are not there: %s", len(left), ", ".join(left))

    async def _go_on(self, sandbox: NamespaceSandbox, *, end: bool) -> None:
        """Start a first process in place of the one that ended; or let the sandbox end here."""
        if not self._snapshots.book.is_whole(sandbox.chain):
            self._give_up(sandbox)
        if sandbox.death is not None:
            self._snapshots.release(sandbox.id)
            raise dead_error(sandbox.id, sandbox.death)
        zygote: ZygoteLink | None = None
        try:
            zygote = await self._running_zygote()
        except SandboxError as error:
            sandbox.distrust(str(error), DeathReason.PROVIDER_LOST)
        if end:
            sandbox.order_end(DeathReason.RELEASED)
        if zygote is None or sandbox.ordered is not None:  # without a process nobody else closes its books
            reason = sandbox.ordered or DeathReason.PROVIDER_LOST
            self._forget(sandbox, reason=reason, detail=sandbox.complaint)
            if not end:
                raise dead_error(sandbox.id, death(reason, detail=sandbox.complaint))
            return
        try:
            async with asyncio.timeout(self._settings.start_s):
                await self._start(sandbox, zygote)
        except TimeoutError:
            await self._put_down(sandbox)
            raise SandboxRetryable(
                f"sandbox {sandbox.id} did not come back within {self._settings.start_s:g} s after its snapshot and "
                "has ended; if the snapshot is held, restore it. The machine is overloaded: start fewer at a time.",
                after_s=_RETRY_AFTER_S,
            ) from None
        except SetupFailed as error:
            await self._put_down(sandbox)
            raise explain_failure(error, sandbox_id=sandbox.id) from error
        except BaseException:
            await self._put_down(sandbox)
            raise


def _holder(snapshot_id: str) -> str:
    return f"snapshot {snapshot_id}"  # no sandbox has a space in its id
