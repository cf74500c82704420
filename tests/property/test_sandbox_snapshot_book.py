"""Whatever comes and goes: a layer that somebody holds stays, and one that nobody holds goes at once."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from rollmill.sandboxes import SandboxSpec, SnapshotRef
from rollmill.sandboxes.backends.namespaces.snapshot_book import Kept, Layer, SnapshotBook

SANDBOXES = st.sampled_from("xyz")


class Books(RuleBasedStateMachine):
    """Sandboxes are snapshotted, restored, ended; snapshots deleted; memory lost."""

    def __init__(self) -> None:
        super().__init__()
        self.book = SnapshotBook(most_bytes=10**9, most_inodes=10**9)
        self.there: set[str] = set()
        self.sandboxes: dict[str, tuple[str, ...]] = {}
        self.snapshots: dict[str, tuple[str, ...]] = {}
        self.lost: set[str] = set()
        self.made = 0

    def gone(self, layers: tuple[Layer, ...]) -> None:
        names = {one.layer_id for one in layers}
        assert len(names) == len(layers)
        assert names <= self.there
        assert not names & self.held()
        self.there -= names

    def held(self) -> set[str]:
        found = {one for chain in (*self.sandboxes.values(), *self.snapshots.values()) for one in chain}
        return found - self.lost

    @rule(name=SANDBOXES, on_disk=st.booleans(), merged=st.booleans())
    def snapshot(self, name: str, on_disk: bool, merged: bool) -> None:
        if not self.book.is_whole(self.sandboxes.get(name, ())):
            assert self.lost & set(self.sandboxes[name])
            return
        self.made += 1
        layer = Layer(layer_id=f"l{self.made}", disk_bytes=1, inodes=1, on_disk=on_disk)
        self.there.add(layer.layer_id)
        chain = (layer.layer_id,) if merged else (layer.layer_id, *self.sandboxes.get(name, ()))
        snapshot_id = f"s{self.made}"
        ref = SnapshotRef(snapshot_id=snapshot_id, backend="namespaces", spec=SandboxSpec())
        self.snapshots[snapshot_id] = chain
        self.book.keep(Kept(ref=ref, chain=chain), layers=[layer])
        self.sandboxes[name] = chain
        self.gone(self.book.hold_for_sandbox(name, chain))

    @rule(name=SANDBOXES, data=st.data())
    def restore(self, name: str, data: st.DataObject) -> None:
        if self.snapshots and name not in self.sandboxes:
            found = data.draw(st.sampled_from(sorted(self.snapshots)))
            self.sandboxes[name] = self.book.find(found).chain
            self.gone(self.book.hold_for_sandbox(name, self.sandboxes[name]))

    @rule(name=SANDBOXES)
    def end(self, name: str) -> None:
        self.sandboxes.pop(name, None)
        self.gone(self.book.release_sandbox(name))

    @rule(data=st.data())
    def delete(self, data: st.DataObject) -> None:
        if self.snapshots:
            found = data.draw(st.sampled_from(sorted(self.snapshots)))
            del self.snapshots[found]
            self.gone(self.book.delete(found))

    @rule()
    def lose_memory(self) -> None:
        lost = {one for one in self.there if not self.book.layer(one).on_disk}
        self.snapshots = {name: chain for name, chain in self.snapshots.items() if not lost & set(chain)}
        self.there -= lost
        self.lost |= lost
        self.gone(self.book.lose_memory())

    @invariant()
    def there_is_what_is_held(self) -> None:
        assert self.there == self.held()
        assert self.book.counts() == (len(self.there), len(self.there))
        assert {one.ref.snapshot_id for one in self.book.snapshots()} == set(self.snapshots)


TestBooks = Books.TestCase
