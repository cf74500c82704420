"""Random trees come out of the store as they went in, and the store's law never removes what is held."""

from __future__ import annotations

import hashlib
import io
import os
import stat
import tarfile
import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from image_builders import add, add_tars, new_store, raw_tar, trees
from rollmill.sandboxes.images.canonical import CanonicalDigest, walk
from rollmill.sandboxes.images.collection import ImageStock, Inventory, choose
from rollmill.sandboxes.images.entries import Entry, Kind
from rollmill.sandboxes.images.tar_format import TarReader

AS_ROOT = os.geteuid() == 0

names = st.binary(min_size=1, max_size=12).filter(
    lambda name: not set(name) & {0, 0x2F} and name not in (b".", b"..") and not name.startswith(b".wh.")
)
times = st.integers(min_value=0, max_value=2**33 * 10**9)
contents = st.one_of(st.binary(max_size=50), st.sampled_from([b"x" * 4096, b"y" * 10_000]))
attributes = st.dictionaries(st.sampled_from([b"user.a", b"user.b"]), st.binary(max_size=20), max_size=2)


def owners() -> st.SearchStrategy[int]:
    return st.integers(0, 65_535) if AS_ROOT else st.just(0)


@st.composite
def entries(draw: st.DrawFn) -> list[tuple[Entry, bytes]]:
    """A tree in an order that an archive may have: what is linked to stands before the link."""
    found: dict[bytes, Entry] = {}
    data: dict[bytes, bytes] = {}
    directories, files = [b""], []
    for _ in range(draw(st.integers(0, 12))):
        above = draw(st.sampled_from(directories))
        path = above + b"/" * bool(above) + draw(names)
        if path in found:
            continue
        kind = draw(st.sampled_from([Kind.FILE, Kind.DIRECTORY, Kind.SYMBOLIC_LINK, Kind.HARD_LINK, Kind.FIFO]))
        if kind is Kind.HARD_LINK and not files:
            continue
        common = {"path": path, "kind": kind, "uid": draw(owners()), "gid": draw(owners()), "mtime_ns": draw(times)}
        # Bits that a policy clears are for other tests; the owner must be able to read for the comparison.
        mode = draw(st.integers(0, 0o777)) | (0o700 if kind is Kind.DIRECTORY else 0o400)
        xattrs = tuple(sorted(draw(attributes).items())) if kind in (Kind.FILE, Kind.DIRECTORY) else ()
        if kind is Kind.FILE:
            data[path] = draw(contents)
            files.append(path)
            found[path] = Entry(**common, mode=mode, size=len(data[path]), xattrs=xattrs)
        elif kind is Kind.SYMBOLIC_LINK:
            found[path] = Entry(
                **common, mode=0o777, link=draw(names) + draw(st.binary(max_size=150)).replace(b"\0", b"")
            )
        elif kind is Kind.HARD_LINK:
            target = draw(st.sampled_from(files))
            shown = {name: getattr(found[target], name) for name in ("uid", "gid", "mtime_ns", "mode")}
            found[path] = Entry(path=path, kind=kind, link=target, **shown)
        else:
            directories += [path] if kind is Kind.DIRECTORY else []
            found[path] = Entry(**common, mode=mode, xattrs=xattrs)
    return [(entry, data.get(path, b"")) for path, entry in found.items()]


def normal(entry: Entry, content: bytes) -> tuple[object, ...]:
    owner = (entry.uid, entry.gid) if AS_ROOT else ()
    return (entry.path, entry.kind, entry.mode, owner, entry.mtime_ns, entry.link, entry.xattrs, content)


@settings(max_examples=25, deadline=None)
@given(entries())
def test_a_random_tree_comes_out_as_it_went_in(tree: list[tuple[Entry, bytes]]) -> None:
    with tempfile.TemporaryDirectory() as place:
        store = new_store(Path(place) / "store")
        image = add_tars(store, raw_tar(tree))
        (root,) = trees(store)
        assert store.verify("image") == ()
        found: dict[bytes, tuple[object, ...]] = {}
        inodes: dict[int, set[bytes]] = {}
        for entry, content in walk(root):
            data = b""
            while piece := content.read(1000):
                data += piece
            path = root / os.fsdecode(entry.path)
            if path.is_file() and not path.is_symlink():
                inodes.setdefault(path.lstat().st_ino, set()).add(entry.path)
            found[entry.path] = normal(entry, data)
        del found[b"./"]
        # Which of two names of one file is told as the link depends on the order; so compare them as groups.
        wanted = {entry.path: normal(entry, data) for entry, data in tree}
        linked = {path for group in inodes.values() if len(group) > 1 for path in group}
        assert {k: v for k, v in found.items() if k not in linked} == {
            k: v for k, v in wanted.items() if k not in linked
        }
        groups: dict[bytes, set[bytes]] = {}
        for entry, _ in tree:
            if entry.kind in (Kind.FILE, Kind.HARD_LINK):
                groups.setdefault(entry.link or entry.path, set()).add(entry.path)
        assert {frozenset(group) for group in groups.values()} == {frozenset(group) for group in inodes.values()}
        # The directory that came out, taken in again, is a tree of the same files: all of them are shared or equal.
        again = add(store, root, name="again")
        assert [stat.S_IMODE(one.lstat().st_mode) for one in sorted(trees(store, "again")[0].rglob("*"))] == [
            stat.S_IMODE(one.lstat().st_mode) for one in sorted(root.rglob("*"))
        ]
        assert again.inodes == image.inodes + 1  # the root, which the first archive did not describe


@settings(max_examples=25, deadline=None)
@given(entries())
def test_our_archives_are_read_alike_by_us_and_by_the_standard_library(tree: list[tuple[Entry, bytes]]) -> None:
    data = raw_tar(tree)
    assert [(entry, body.read()) for entry, body in TarReader(io.BytesIO(data))] == [
        (entry if entry.kind is not Kind.DIRECTORY else with_slash(entry), content) for entry, content in tree
    ]
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        theirs = [(one.name.encode("utf-8", "surrogateescape"), one.size, one.mode) for one in archive]
    assert theirs == [(entry.path, entry.size, entry.mode) for entry, _ in tree]
    digest = CanonicalDigest()
    for entry, content in tree:
        digest.begin(entry)
        digest.content(content)
        digest.end(entry)
    assert digest.digest() == f"sha256:{hashlib.sha256(data).hexdigest()}"


def with_slash(entry: Entry) -> Entry:
    return Entry(**{**{name: getattr(entry, name) for name in entry.__struct_fields__}, "path": entry.path + b"/"})


layer_names = st.sampled_from([f"l{i}" for i in range(8)])


@st.composite
def inventories(draw: st.DrawFn) -> Inventory:
    sizes = draw(st.dictionaries(layer_names, st.integers(0, 100)))
    stock = st.builds(
        ImageStock,
        layers=st.lists(layer_names, max_size=4, unique=True).map(tuple),
        used_wall_s=st.floats(0, 1000),
        named=st.booleans(),
    )
    images = draw(st.dictionaries(st.sampled_from("abcdef"), stock))
    return Inventory(
        images=images,
        layers=sizes,
        held_images=draw(st.frozensets(st.sampled_from("abcdefgh"))),
        held_layers=draw(st.frozensets(layer_names)),
    )


@settings(max_examples=150, deadline=None)
@given(inventories(), st.none() | st.integers(0, 400), st.lists(st.sampled_from("abc")))
def test_what_is_held_stays_and_the_store_fits_its_budget_wherever_that_is_possible(inventory, budget, unwanted):
    removal = choose(inventory, now_wall_s=1000.0, budget_bytes=budget, grace_s=500.0, remove=unwanted)
    held = set(inventory.held_layers)
    for digest in inventory.held_images & inventory.images.keys():
        held |= set(inventory.images[digest].layers)
    assert not set(removal.images) & inventory.held_images
    assert not set(removal.layers) & held
    left = inventory.layers.keys() - set(removal.layers)
    kept = inventory.images.keys() - set(removal.images)
    # No image that stays has lost a layer, and no layer stays without somebody who needs it.
    needed = {layer for digest in kept for layer in inventory.images[digest].layers}
    assert needed & inventory.layers.keys() <= left
    assert left <= needed | held
    assert removal.left_bytes == sum(inventory.layers[one] for one in left)
    if budget is None:
        forgotten = {d for d, one in inventory.images.items() if not one.named and one.used_wall_s <= 500.0}
        assert set(removal.images) == (forgotten | (set(unwanted) & inventory.images.keys())) - inventory.held_images
        return
    # Above the budget only if nothing but what is held is left.
    if removal.left_bytes > budget:
        assert left <= held
        assert removal.over_bytes == removal.left_bytes - budget
    else:
        assert removal.over_bytes == 0
    spared = [d for d in kept if d not in inventory.held_images and inventory.images[d].named]
    for digest in removal.images:
        image = inventory.images[digest]
        if image.named and digest not in unwanted:  # by need: then nothing older that frees space was spared
            for other in spared:
                older = (inventory.images[other].used_wall_s, other) < (image.used_wall_s, digest)
                own = set(inventory.images[other].layers) & inventory.layers.keys()
                assert not older or own <= held
