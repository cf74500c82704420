"""The book of layers: which there are, who holds them, and when one may go. Pure.

A layer is what one sandbox wrote in one life. A snapshot, and a sandbox that was made of one, hold a chain of them. A
layer that nobody holds goes; one that is held never does.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rollmill.errors import ImageError, SandboxIdInUse, SandboxRetryable
from rollmill.sandboxes.records import Record, SnapshotRef

_RETRY_AFTER_S = 5.0


class Layer(Record, frozen=True, kw_only=True):
    """What a sandbox wrote.

    Attributes:
        layer_id: its name.
        disk_bytes: how much.
        inodes: files and directories among it.
        on_disk: whether it is a directory of the disk; else it is in memory.
    """

    layer_id: str
    disk_bytes: int
    inodes: int
    on_disk: bool = False


class Kept(Record, frozen=True, kw_only=True):
    """A snapshot that is held.

    Attributes:
        ref: as its owner knows it.
        chain: names of its layers, the uppermost first.
        id_base: on the host, the first of the ids that own its files; `None`: this user.
        image_digest: of the image of the store below it; empty for others.
    """

    ref: SnapshotRef
    chain: tuple[str, ...]
    id_base: int | None = None
    image_digest: str = ""


class SnapshotBook:
    """Layers and their holders.

    Args:
        most_bytes: that all layers may have together.
        most_inodes: the same.
    """

    def __init__(self, *, most_bytes: int, most_inodes: int) -> None:
        self._most_bytes, self._most_inodes = most_bytes, most_inodes
        self._layers: dict[str, Layer] = {}
        self._chains: dict[tuple[str, str], tuple[str, ...]] = {}
        self._kept: dict[str, Kept] = {}
        self._reserved: dict[str, tuple[int, int]] = {}

    # -- what there is -----------------------------------------------------------------------------------------------

    def counts(self) -> tuple[int, int]:
        """Return bytes and inodes of all layers."""
        return self.counts_of(self._layers)

    def counts_of(self, chain: Iterable[str]) -> tuple[int, int]:
        """Return bytes and inodes of these layers."""
        found = [self._layers[one] for one in chain]
        return sum(one.disk_bytes for one in found), sum(one.inodes for one in found)

    def is_whole(self, chain: Iterable[str]) -> bool:
        """Return whether none of these was lost."""
        return all(one in self._layers for one in chain)

    def layer(self, layer_id: str) -> Layer:
        """Return a layer that is held."""
        return self._layers[layer_id]

    def snapshots(self) -> tuple[Kept, ...]:
        """Return the snapshots in the order in which they were taken."""
        return tuple(self._kept.values())

    def find(self, snapshot_id: str) -> Kept:
        """Return a snapshot.

        Raises:
            ImageError: if it is not held.
        """
        if snapshot_id not in self._kept:
            raise ImageError(
                f"there is no snapshot {snapshot_id!r} here: it was deleted, or was held in memory by a provider that "
                "ended (set snapshot_directory to keep them on disk)"
            )
        return self._kept[snapshot_id]

    # -- what comes and goes -----------------------------------------------------------------------------------------

    def check_new(self, snapshot_id: str) -> None:
        """Refuse an id that names a snapshot already.

        Raises:
            SandboxIdInUse: if it does.
        """
        if snapshot_id in self._kept:
            raise SandboxIdInUse(f"a snapshot {snapshot_id!r} is held; an id names one snapshot, so choose another")

    def reserve(self, sandbox_id: str, *, disk_bytes: int, inodes: int) -> None:
        """Set room aside for the layer of a sandbox, until `unreserve`.

        Raises:
            SandboxRetryable: if there is none, with the numbers.
        """
        held_bytes, held_inodes = self.counts()
        others = [counts for name, counts in self._reserved.items() if name != sandbox_id]
        held_bytes, held_inodes = (
            held_bytes + sum(one for one, _ in others),
            held_inodes + sum(one for _, one in others),
        )
        for held, more, most, name in (
            (held_bytes, disk_bytes, self._most_bytes, "bytes"),
            (held_inodes, inodes, self._most_inodes, "inodes"),
        ):
            if held + more > most:
                raise SandboxRetryable(
                    f"a snapshot of {more} {name} has no room: {held} of {most} are held. Delete snapshots that nobody "
                    f"needs, or raise snapshot_{name} of the settings.",
                    after_s=_RETRY_AFTER_S,
                )
        self._reserved[sandbox_id] = (disk_bytes, inodes)

    def unreserve(self, sandbox_id: str) -> None:
        """The layer is in the book, or will not come."""
        self._reserved.pop(sandbox_id, None)

    def hold_for_sandbox(
        self, sandbox_id: str, chain: Sequence[str], *, layers: Iterable[Layer] = ()
    ) -> tuple[Layer, ...]:
        """Let a sandbox hold a chain, in place of what it held; return the layers that go. `layers` are new."""
        self._layers.update({one.layer_id: one for one in layers})
        self._chains["sandbox", sandbox_id] = tuple(chain)
        return self._sweep()

    def release_sandbox(self, sandbox_id: str) -> tuple[Layer, ...]:
        """A sandbox has ended; return the layers that go."""
        return self._release("sandbox", sandbox_id)

    def keep(self, kept: Kept, *, layers: Iterable[Layer] = ()) -> None:
        """Let a snapshot hold its chain; `layers` are those that are new."""
        self._layers.update({one.layer_id: one for one in layers})
        self._kept[kept.ref.snapshot_id] = kept
        self._chains["snapshot", kept.ref.snapshot_id] = kept.chain

    def delete(self, snapshot_id: str) -> tuple[Layer, ...]:
        """Let go of a snapshot; return the layers that go."""
        self._kept.pop(snapshot_id, None)
        return self._release("snapshot", snapshot_id)

    def lose_memory(self) -> tuple[Layer, ...]:
        """What was in memory is gone, and the snapshots with it; return the layers on the disk that go too.

        A sandbox that lives keeps what is below it, and with that its chain.
        """
        gone = {one.layer_id for one in self._layers.values() if not one.on_disk}
        for one in [one for one, kept in self._kept.items() if gone & set(kept.chain)]:
            del self._kept[one]
            del self._chains["snapshot", one]
        self._layers = {one: layer for one, layer in self._layers.items() if one not in gone}
        return self._sweep()

    def _release(self, kind: str, name: str) -> tuple[Layer, ...]:
        if self._chains.pop((kind, name), None) is None:
            return ()
        return self._sweep()

    def _sweep(self) -> tuple[Layer, ...]:
        held = {one for chain in self._chains.values() for one in chain}
        gone = tuple(layer for one, layer in self._layers.items() if one not in held)
        for layer in gone:
            del self._layers[layer.layer_id]
        return gone
