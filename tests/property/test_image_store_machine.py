"""The store under any order of preparations, claims, ends of processes, collections and damage by kills."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from image_builders import add_tars, file, new_store, tar
from rollmill.errors import ImageError
from rollmill.sandboxes.disk_records import ProcessMark, boot_id
from rollmill.sandboxes.images import HeldImage
from rollmill.sandboxes.images.holds import Holds

# Layers of one file each; two of them hold an equal file, so that the pool of shared files is in the game.
CONTENTS = {"a": b"1" * 5000, "b": b"1" * 5000, "c": b"2" * 9000, "d": b"3"}
LAYERS = {name: tar(file(name, data, mtime=1)) for name, data in CONTENTS.items()}
ENDED = ProcessMark(pid=2**22, started_ticks=1, boot_id="")

names = st.sampled_from(["one", "two", "three"])
numbers = st.integers(0, 5)
snapshots = st.sampled_from(["s1", "s2"])
chains = st.lists(st.sampled_from("abcd"), min_size=1, max_size=3, unique=True)


class Store(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.place = Path(tempfile.mkdtemp())
        self.store = new_store(self.place / "store")
        self.known: dict[str, list[str]] = {}
        self.held: list[tuple[str, HeldImage, list[str]]] = []
        self.pinned: dict[str, tuple[str, list[str]]] = {}

    def teardown(self) -> None:
        shutil.rmtree(self.place)

    @rule(name=names, chain=chains)
    def prepare(self, name: str, chain: list[str]) -> None:
        add_tars(self.store, *(LAYERS[one] for one in chain), name=name)
        self.known[name] = chain

    def pick(self, number: int) -> str:
        return sorted(self.known)[number % len(self.known)]

    @precondition(lambda self: self.known)
    @rule(number=numbers)
    def hold(self, number: int) -> None:
        name = self.pick(number)
        held = self.store.take(name, what="test")
        self.held.append((name, held, self.known[name]))

    @precondition(lambda self: self.known)
    @rule(number=numbers)
    def hold_by_a_process_that_has_ended(self, number: int) -> None:
        self.store.take(self.pick(number), what="ended", owner=ENDED)

    @precondition(lambda self: self.held)
    @rule(number=numbers)
    def release(self, number: int) -> None:
        self.held.pop(number % len(self.held))[1].release()

    @precondition(lambda self: self.known)
    @rule(number=numbers, snapshot=snapshots)
    def pin(self, number: int, snapshot: str) -> None:
        """A snapshot on a disk stands on it from now on; of one name the last counts."""
        name = self.pick(number)
        digest = self.store.show(name).digest
        self.store.pin(digest, holder="5eed", name=snapshot, what="test")
        self.pinned[snapshot] = (digest, self.known[name])

    @rule(snapshots=st.sets(snapshots))
    def open_a_directory_of_snapshots(self, snapshots: set[str]) -> None:
        """Those that are there keep their claims, others lose them, also where there never was one."""
        pins = Holds(self.store.layout.part("holds"))
        for name in pins.pinned("5eed") - snapshots:
            pins.unpin("5eed", name)
        self.pinned = {name: found for name, found in self.pinned.items() if name in snapshots}

    def held_digests(self) -> set[str]:
        return {held.digest for _, held, _ in self.held} | {digest for digest, _ in self.pinned.values()}

    @precondition(lambda self: self.known)
    @rule(number=numbers)
    def remove(self, number: int) -> None:
        name = self.pick(number)
        digest = self.store.show(name).digest
        others = [one for one in self.known if one != name and self.store.show(one).digest == digest]
        in_use = digest in self.held_digests()
        if in_use and not others:
            with pytest.raises(ImageError, match="is held by test"):
                self.store.remove(name)
            return
        self.store.remove(name)
        del self.known[name]

    @rule(budget=st.sampled_from([0, 15_000, 30_000]))
    def collect(self, budget: int) -> None:
        report = self.store.collect(budget_bytes=budget, grace_s=0.0)
        left = self._size({name for name in self.store.layout.all_layers()})
        assert report.left_bytes == left
        assert report.over_bytes == max(0, left - budget)
        if left > budget:  # then nothing is left but what is held
            kept = {layer for digest in self.held_digests() for layer in self.store.resolve(digest)[1].layers}
            assert set(self.store.layout.all_layers()) <= kept
        there = {one.name for one in self.store.layout.all_names()}
        self.known = {name: chain for name, chain in self.known.items() if name in there}

    def _size(self, layers: set[str]) -> int:
        found = [self.store.layout.read_layer(one) for one in layers]
        return sum(one.disk_bytes for one in found if one is not None)

    @rule()
    def kill_in_the_middle_and_open_again(self) -> None:
        """What a killed preparation leaves: half a layer, half a name."""
        tmp = self.store.layout.part("tmp") / f"{2**22}.1.{boot_id()}.x"
        (tmp / "layer/root").mkdir(parents=True, exist_ok=True)
        (self.store.layout.part("names") / f".one.json.{2**22}.x").write_text("{", encoding="ascii")
        self.store = new_store(self.place / "store")
        assert self.store.repaired == 2

    @invariant()
    def every_name_leads_to_a_whole_image(self) -> None:
        assert {one.name for one in self.store.layout.all_names()} == set(self.known)
        for name, chain in self.known.items():
            assert self.store.verify(name) == ()
            with self.store.hold(name, what="look") as held:
                assert [next(layer.iterdir()).name for layer in held.layers] == chain[::-1]

    @invariant()
    def what_is_held_is_there(self) -> None:
        for _, held, chain in self.held:
            for layer, name in zip(held.layers, chain[::-1], strict=True):
                assert (layer / name).read_bytes() == CONTENTS[name]

    @invariant()
    def what_snapshots_stand_on_is_whole(self) -> None:
        for digest, chain in self.pinned.values():
            with self.store.hold(digest, what="look") as held:
                assert [next(layer.iterdir()).name for layer in held.layers] == chain[::-1]

    @invariant()
    def nothing_lies_about(self) -> None:
        for part in ("tmp", "trash"):
            assert list(self.store.layout.part(part).iterdir()) == []


TestStore = Store.TestCase
TestStore.settings = settings(max_examples=15, stateful_step_count=15, deadline=None)
