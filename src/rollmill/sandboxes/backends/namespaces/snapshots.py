"""The snapshots of one provider: has layers kept by the zygote's shelf or on a disk, by the book.

    what it waits for                          who wakes it, and until when
    a layer that is held                       the shelf, `answer_s`
    one that is merged or stored               a child of the shelf, `store_s`

The book decides what may go; this carries it out.
"""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec

from rollmill.errors import DeadlineExceeded, SandboxError, SandboxExhausted
from rollmill.sandboxes.backends.namespaces.settings import NamespaceSettings
from rollmill.sandboxes.backends.namespaces.snapshot_book import Kept, Layer, SnapshotBook
from rollmill.sandboxes.backends.namespaces.snapshot_disk import Manifest, SnapshotDisk
from rollmill.sandboxes.reaper import ReaperStatistics

_MAKES = ("hold", "merge")  # layers in memory
_LEAST_BYTES, _LEAST_INODES = 1024**2, 512


class Snapshots:
    """Layers, where they are, and the orders about them.

    Args:
        settings: of the provider.
        order: hands an order to the zygote; `False` if there is none.
        on_lost: called with the id of each snapshot that was lost with the memory that held it.

    Attributes:
        losses: how often what was in memory was lost.
    """

    def __init__(
        self,
        settings: NamespaceSettings,
        *,
        order: Callable[[dict[str, Any]], bool],
        on_lost: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._settings = settings
        self._order = order
        self._on_lost = on_lost
        self.losses = 0
        self.book = SnapshotBook(most_bytes=settings.snapshot_bytes, most_inodes=settings.snapshot_inodes)
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._late: dict[int, str] = {}
        self._doomed: list[str] = []
        self._disk: SnapshotDisk | None = None
        if settings.snapshot_directory is not None:
            self._disk = SnapshotDisk(settings.snapshot_directory)
            try:
                for manifest in self._disk.read_all():
                    self.book.keep(manifest.kept, layers=manifest.layers)
            except BaseException:
                self._disk.close()
                raise

    @property
    def durable(self) -> bool:
        """Return whether snapshots outlive this process."""
        return self._disk is not None

    @property
    def identity(self) -> str:
        """Return whose claims on images durable snapshots have, empty where there are none."""
        return "" if self._disk is None else self._disk.identity

    def trash(self) -> tuple[ReaperStatistics, ...]:
        """Return what was deleted of the disk's layers."""
        return () if self._disk is None else (self._disk.trash(),)

    def words(self, snapshot_id: str) -> str:
        """Return a snapshot in words, for those who wonder what holds an image."""
        return f"snapshot {snapshot_id}" + ("" if self._disk is None else f" in {self._disk.directory}")

    def close(self) -> None:
        """Let go of the disk. What is in memory ends with the zygote."""
        self.lose()
        if self._disk is not None:
            self._disk.close()

    # -- what a sandbox needs to know of its chain ---------------------------------------------------------------------

    def below(self, chain: Iterable[str]) -> tuple[list[str], list[str]]:
        """Return the layers as the zygote knows them, the uppermost first, and which of these are to be lent."""
        names, lent = [], []
        for one in chain:
            if self.book.layer(one).on_disk and self._disk is not None:
                names.append(self._disk.path(one))
            else:
                names.append(one)
                lent.append(one)
        return names, lent

    def room(self, chain: tuple[str, ...], *, disk_bytes: int, inodes: int) -> tuple[int, int]:
        """Return what limits leave above a chain; an empty sandbox can always start."""
        held_bytes, held_inodes = self.book.counts_of(chain)
        return max(_LEAST_BYTES, disk_bytes - held_bytes), max(_LEAST_INODES, inodes - held_inodes)

    # -- layers --------------------------------------------------------------------------------------------------------

    async def hold(self, sandbox_id: str) -> Layer:
        """Have the layer held that a sandbox's agent handed out.

        Raises:
            SandboxError: if it cannot be.
        """
        layer_id = self._new_id()
        answer = await self._ask({"op": "hold", "id": sandbox_id, "layer": layer_id}, limit_s=self._settings.answer_s)
        return Layer(layer_id=layer_id, disk_bytes=answer["bytes"], inodes=answer["inodes"])

    async def settle(
        self, layer: Layer, chain: tuple[str, ...], *, to_keep: bool
    ) -> tuple[tuple[str, ...], list[Layer]]:
        """Bring a layer to where snapshots are kept, above its chain; return the chain and the layers that are new.

        Args:
            layer: in memory.
            chain: below it.
            to_keep: whether somebody keeps it; what is gone in a moment need not go to a disk.

        Raises:
            SandboxError: if there is no room.
        """
        layers = [layer, *(self.book.layer(one) for one in chain)]
        is_deep = len(layers) > self._settings.snapshot_depth
        stored: list[Layer] = []
        merged: Layer | None = None
        try:
            # With a disk all of them, also one that could not be stored when its turn was.
            for i, one in enumerate(layers):
                if self._disk is not None and not one.on_disk and (to_keep or is_deep):
                    layers[i] = await self._store(self._disk, one)
                    stored.append(layers[i])
            if is_deep:
                merged = await self._merge(layers)
        except BaseException:
            self.drop(stored)
            raise
        if merged is not None:
            self.drop(stored)
            return (merged.layer_id,), [merged]
        return tuple(one.layer_id for one in layers), layers[: max(1, len(stored))]

    async def _store(self, disk: SnapshotDisk, layer: Layer) -> Layer:
        """Copy a layer from memory to the disk."""
        layer_id = await self._on_disk(disk, {"op": "store", "layer": layer.layer_id}, sources=())
        return msgspec.structs.replace(layer, layer_id=layer_id, on_disk=True)

    async def _merge(self, layers: list[Layer]) -> Layer:
        """Make one layer of several, the uppermost first; all of them are in the same place."""
        chain = tuple(one.layer_id for one in layers)
        disk_bytes, inodes = sum(one.disk_bytes for one in layers), sum(one.inodes for one in layers)
        if self._disk is not None:
            layer_id = await self._on_disk(self._disk, {"op": "join", "layer": chain[0]}, sources=chain)
            return Layer(layer_id=layer_id, disk_bytes=disk_bytes, inodes=inodes, on_disk=True)
        layer_id = self._new_id()
        order = {"op": "merge", "layer": layer_id, "layers": chain, "bytes": disk_bytes, "inodes": inodes}
        answer = await self._ask(order, limit_s=self._settings.store_s)
        return Layer(layer_id=layer_id, disk_bytes=answer["bytes"], inodes=answer["inodes"])

    async def _on_disk(self, disk: SnapshotDisk, order: dict[str, Any], *, sources: Sequence[str]) -> str:
        """Have a layer of the disk made by the shelf, which may read what a sandbox has closed to this user."""
        loop = asyncio.get_running_loop()
        layer_id = self._new_id()
        with _explained(f"it was not possible to {order['op']} the layer {order['layer']}"):
            target = await loop.run_in_executor(None, disk.begin, layer_id)
            try:
                order = {**order, "directories": [*map(disk.path, sources), target]}
                await self._ask(order, limit_s=self._settings.store_s)
                await loop.run_in_executor(None, disk.finish, layer_id)
            except BaseException:
                await loop.run_in_executor(None, disk.give_up, layer_id)
                raise
        return layer_id

    def drop(self, layers: Sequence[Layer]) -> None:
        """Let go of layers that nobody holds; their space is freed beside everything else.

        One that the disk does not let go of now is tried again with the next ones, and when the directory is opened.
        """
        in_memory = [one.layer_id for one in layers if not one.on_disk]
        if in_memory:
            self._order({"op": "drop", "layers": in_memory, "n": 0})
        if self._disk is not None:
            self._doomed += [one.layer_id for one in layers if one.on_disk]
            self._doomed = [one for one in self._doomed if not _discarded(self._disk, one)]

    async def keep(self, kept: Kept, layers: Sequence[Layer], *, before: Callable[[Kept], Awaitable[None]]) -> None:
        """Take a snapshot into the book, and on the disk if it is to outlive this process.

        Args:
            kept: the snapshot.
            layers: those of its chain that are new.
            before: holds what it stands on; done before its file says that it is there.

        Raises:
            SandboxError: if there is no room for its file.
        """
        self.book.keep(kept, layers=layers)
        await before(kept)
        if self._disk is not None and kept.ref.durable:
            manifest = Manifest(kept=kept, layers=tuple(self.book.layer(one) for one in kept.chain))
            with _explained(f"the file of snapshot {kept.ref.snapshot_id} was not written"):
                await asyncio.get_running_loop().run_in_executor(None, self._disk.write, manifest)

    async def delete(self, snapshot_id: str) -> None:
        """Let go of a snapshot."""
        if self._disk is not None:
            with _explained(f"snapshot {snapshot_id} was not deleted"):
                await asyncio.get_running_loop().run_in_executor(None, self._disk.remove, snapshot_id)
        self.drop(self.book.delete(snapshot_id))

    def release(self, sandbox_id: str) -> None:
        """A sandbox has ended: what it alone held goes."""
        self.drop(self.book.release_sandbox(sandbox_id))

    # -- the zygote ----------------------------------------------------------------------------------------------------

    def on_report(self, report: dict[str, Any]) -> None:
        """Take what the zygote says about layers."""
        if report["op"] == "shelf_lost":
            self.lose()
            return
        number = report["n"]
        if (future := self._waiting.pop(number, None)) is not None:
            if not future.done():
                future.set_result(report)
        elif (layer_id := self._late.pop(number, None)) is not None and "errno" not in report:
            self._order({"op": "drop", "layers": [layer_id], "n": 0})

    def lose(self) -> None:
        """What was in memory is gone, and nobody answers any more."""
        self.losses += 1
        before = self.book.snapshots()
        self.drop(self.book.lose_memory())
        left = {one.ref.snapshot_id for one in self.book.snapshots()}
        for one in before:
            if one.ref.snapshot_id not in left:
                self._on_lost(one.ref.snapshot_id)
        self._late.clear()
        for future in self._waiting.values():
            if not future.done():
                future.set_result({"errno": errno.EPIPE, "message": "the shelf of layers ended"})

    async def _ask(self, order: dict[str, Any], *, limit_s: float) -> dict[str, Any]:
        number = next(self._numbers)
        future = self._waiting[number] = asyncio.get_running_loop().create_future()
        what = f"to {order['op']} the layer {order['layer']}"
        try:
            if not self._order({**order, "n": number}):
                raise SandboxError(f"there is no zygote {what}; the sandboxes of this provider have ended")
            async with asyncio.timeout(limit_s):
                answer = await asyncio.shield(future)
        except TimeoutError:
            raise DeadlineExceeded(
                f"it took longer than {limit_s:g} s {what}; the machine is overloaded, or the files are many. Raise "
                "store_s, or lower limits.inodes and limits.disk_bytes."
            ) from None
        finally:
            if self._waiting.pop(number, None) is not None and not future.done() and order["op"] in _MAKES:
                self._late[number] = order["layer"]  # if it comes about after all, nobody holds it
        if "errno" in answer:
            raise _refused(answer["errno"], f"it was not possible {what}: {answer['message']}")
        return answer

    def _new_id(self) -> str:
        return f"layer-{os.urandom(8).hex()}"


def _discarded(disk: SnapshotDisk, layer_id: str) -> bool:
    try:
        disk.discard(layer_id)  # a rename
    except SandboxError:
        return False
    return True


@contextmanager
def _explained(what: str) -> Iterator[None]:
    """Say what a failing disk means."""
    try:
        yield
    except OSError as error:
        raise _refused(error.errno or 0, f"{what}: {error}") from error


def _refused(number: int, message: str) -> SandboxError:
    if number in (errno.ENOSPC, errno.ENAMETOOLONG, errno.EDQUOT):
        return SandboxExhausted(f"{message}. Free space where snapshots are kept, or delete files inside.")
    return SandboxError(message)
