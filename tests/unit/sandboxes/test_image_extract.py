"""Layers become trees, and nothing outside of them is touched whatever they say."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import msgspec
import pytest

from image_builders import (
    add_tars,
    device,
    directory,
    file,
    hard_link,
    link,
    new_store,
    raw_file,
    raw_tar,
    small,
    tar,
    trees,
)
from rollmill.errors import ImageError
from rollmill.sandboxes.images import ImageStore, tree_files
from rollmill.sandboxes.images.entries import Entry, Kind, split_path
from rollmill.sandboxes.images.extract import LayerFacts
from rollmill.sandboxes.images.records import Layer, notes_of
from rollmill.sandboxes.images.refusals import Refusal


@pytest.fixture
def store(tmp_path: Path) -> ImageStore:
    return new_store(tmp_path / "store")


def refusal_of(store: ImageStore, *layers: bytes) -> Refusal:
    with pytest.raises(ImageError) as caught:
        add_tars(store, *layers)
    assert list(store.layout.part("layers").iterdir()) == []
    assert list(store.layout.part("tmp").iterdir()) == []
    return Refusal(caught.value.reason)


@pytest.mark.parametrize(
    ("members", "kind"),
    [
        ([file("/etc/passwd")], Refusal.TRAVERSAL),
        ([file("../out")], Refusal.TRAVERSAL),
        ([file("a/../../out")], Refusal.TRAVERSAL),
        ([link("a", "/etc"), file("a/passwd")], Refusal.TRAVERSAL),
        ([link("a", ".."), directory("a/b")], Refusal.TRAVERSAL),
        ([link("a", ".."), link("a/b", "x")], Refusal.TRAVERSAL),
        ([directory("d"), link("d/l", "../.."), file("d/l/x/y")], Refusal.TRAVERSAL),
        ([file("f"), file("f/x")], Refusal.TRAVERSAL),
        ([file("f"), file("f/.wh.x")], Refusal.TRAVERSAL),
        ([hard_link("h", "/etc/passwd")], Refusal.TRAVERSAL),
        ([hard_link("h", "../../etc/passwd")], Refusal.TRAVERSAL),
        ([link("l", "/etc"), hard_link("h", "l/passwd")], Refusal.TRAVERSAL),
        ([hard_link("h", "missing")], Refusal.HARD_LINK),
        ([hard_link("h", "missing/deep")], Refusal.HARD_LINK),
        ([directory("d"), hard_link("h", "d")], Refusal.HARD_LINK),
        ([hard_link("h", ".")], Refusal.HARD_LINK),
        ([file("f"), file("f")], Refusal.DUPLICATE),
        ([file("f"), file("./f")], Refusal.DUPLICATE),
        ([file("f"), directory("f")], Refusal.DUPLICATE),
        ([directory("d"), file("d")], Refusal.DUPLICATE),
        ([link("l", "x"), link("l", "y")], Refusal.DUPLICATE),
        ([link("l", "x"), directory("l")], Refusal.DUPLICATE),
        ([file("f"), hard_link("f", "f")], Refusal.DUPLICATE),
        ([device("sda", kind=b"4", major=8)], Refusal.DEVICE),
        ([device("opt/null")], Refusal.DEVICE),
        ([device("gone", major=0, minor=0)], Refusal.DEVICE),
        ([file("n" * 256)], Refusal.NAME),
        ([file("/".join("n" * 250 for _ in range(17)))], Refusal.NAME),
        ([file("d/" * 201 + "f")], Refusal.NAME),
        ([link("l", "")], Refusal.NAME),
        ([file(".wh.")], Refusal.NAME),
        ([file(".wh...")], Refusal.NAME),
        ([file("a/.wh.b/c")], Refusal.NAME),
        ([file(".")], Refusal.MALFORMED),
    ],
)
def test_what_a_layer_must_not_hold_is_refused_by_kind_and_nothing_stays(store, members, kind):
    assert refusal_of(store, tar(*members)) is kind


def test_nothing_outside_was_touched_by_an_entry_through_a_link(store, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    refusal_of(store, tar(link("a", str(outside)), file("a/x", b"evil")))
    assert list(outside.iterdir()) == []


@pytest.mark.parametrize("raw", [b"", b"a\0b"])
def test_a_name_that_no_file_can_have_is_refused(raw):
    with pytest.raises(ImageError) as caught:
        split_path(raw)
    assert caught.value.reason == Refusal.NAME.value


@pytest.mark.parametrize("attribute", [b"user.overlay.redirect", b"user.overlay.opaque", b"trusted.overlay.metacopy"])
def test_attributes_that_the_overlay_obeys_are_refused(store, attribute):
    entry, data = raw_file(b"f", b"", xattrs=((attribute, b"/../../etc"),))
    assert refusal_of(store, raw_tar([(entry, data)])) is Refusal.ATTRIBUTE
    entry = Entry(path=b"d", kind=Kind.DIRECTORY, mode=0o755, xattrs=((attribute, b"y"),))
    assert refusal_of(store, raw_tar([(entry, b"")])) is Refusal.ATTRIBUTE


def test_attributes_of_users_are_kept_and_others_counted(store):
    entry, data = raw_file(b"f", b"x", xattrs=((b"security.capability", b"\1"), (b"user.mine", b"\xff")))
    image = add_tars(store, raw_tar([(entry, data)]))
    (tree,) = trees(store)
    assert os.getxattr(tree / "f", "user.mine") == b"\xff"
    assert "security.capability" not in os.listxattr(tree / "f")
    assert image.notes == ("1 attributes without effect in a sandbox left out",)


def test_setuid_programs_lose_the_bit_and_are_counted_or_are_refused(store, tmp_path):
    data = tar(file("su", b"x", mode=0o4755), file("wall", b"y", mode=0o2755), directory("mail", mode=0o2775))
    image = add_tars(store, data)
    (tree,) = trees(store)
    assert [stat.S_IMODE((tree / name).stat().st_mode) for name in ("su", "wall", "mail")] == [0o755, 0o755, 0o2775]
    assert image.notes == ("2 setuid or setgid bits cleared",)
    strict = new_store(tmp_path / "strict", limits=small(setuid="refuse"))
    assert refusal_of(strict, data) is Refusal.SETUID


def test_devices_below_dev_are_left_out_and_counted_or_are_refused(store, tmp_path):
    data = tar(directory("dev"), device("dev/null"), file("dev/file", b"x"))
    image = add_tars(store, data)
    (tree,) = trees(store)
    assert [one.name for one in (tree / "dev").iterdir()] == ["file"]
    assert image.notes == ("1 device nodes below /dev left out",)
    strict = new_store(tmp_path / "strict", limits=small(devices="refuse"))
    assert refusal_of(strict, data) is Refusal.DEVICE


@pytest.mark.parametrize(
    ("limits", "members", "kind"),
    [
        ({"file_bytes": 9}, [file("f", b"x" * 10)], Refusal.TOO_LARGE),
        ({"total_bytes": 19}, [file("f", b"x" * 10), file("g", b"x" * 10)], Refusal.TOO_LARGE),
        ({"inodes": 2}, [file("f"), file("g"), file("h")], Refusal.TOO_MANY),
        ({"inodes": 2}, [file("a/b/c/d")], Refusal.TOO_MANY),
        ({"inodes": 2}, [file(".wh.a"), file(".wh.b"), file(".wh.c")], Refusal.TOO_MANY),
    ],
)
def test_an_image_above_its_limits_is_refused(tmp_path, limits, members, kind):
    assert refusal_of(new_store(tmp_path / "store", limits=small(**limits)), tar(*members)) is kind


def test_a_file_that_is_announced_larger_than_the_disk_is_refused_before_it_is_written(tmp_path):
    store = new_store(tmp_path / "store")
    entry = Entry(path=b"big", kind=Kind.FILE, size=2**50)
    assert refusal_of(store, raw_tar([(entry, b"")])) is Refusal.TOO_LARGE


def test_layers_above_their_number_are_refused(tmp_path):
    store = new_store(tmp_path / "store", limits=small(layers=1))
    with pytest.raises(ImageError, match="more than 1 layers"):
        add_tars(store, tar(file("a")), tar(file("b")))


def test_layers_that_were_there_count_for_the_size_of_an_image_too(tmp_path):
    one, two = tar(file("a", b"x" * 60)), tar(file("b", b"x" * 60))
    add_tars(new_store(tmp_path / "store"), one, name="one")
    store = new_store(tmp_path / "store", limits=small(total_bytes=100))
    with pytest.raises(ImageError, match="has 120 bytes, most is 100"):
        add_tars(store, two, base="one")
    store = new_store(tmp_path / "store", limits=small(inodes=1))
    with pytest.raises(ImageError, match="has 2 entries, most is 1"):
        add_tars(store, two, base="one")


def test_modes_times_and_links_are_as_in_the_archive(store):
    data = tar(
        directory("d", mode=0o1777, mtime=5),
        file("d/f", b"text", mode=0o604, mtime=7),
        link("d/l", "../../anywhere", mtime=9),
        hard_link("h", "d/f"),
        file("p", type=b"6", mode=0o600),
        directory("closed", mode=0),
    )
    add_tars(store, data)
    (tree,) = trees(store)
    told = (tree / "d/f").stat()
    assert (stat.S_IMODE(told.st_mode), told.st_mtime, told.st_nlink) == (0o604, 7, 2)
    assert (tree / "h").stat().st_ino == told.st_ino
    assert (stat.S_IMODE((tree / "d").stat().st_mode), (tree / "d").stat().st_mtime) == (0o1777, 5)
    assert (os.readlink(tree / "d/l"), (tree / "d/l").lstat().st_mtime) == ("../../anywhere", 9)
    assert stat.S_ISFIFO((tree / "p").stat().st_mode)
    assert stat.S_IMODE((tree / "closed").stat().st_mode) == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_owners_are_the_images_and_those_beyond_a_sandbox_become_nobody(store):
    image = add_tars(store, tar(file("a", uid=5, gid=6), file("b", uid=70_000, gid=3), directory("d", uid=9)))
    (tree,) = trees(store)
    owners = [((tree / name).stat().st_uid, (tree / name).stat().st_gid) for name in ("a", "b", "d")]
    assert owners == [(5, 6), (65_534, 3), (9, 0)]
    assert image.notes == ("1 entries of owners above 65535 given to nobody",)


def test_a_directory_may_be_described_after_what_is_in_it_and_twice(store):
    add_tars(store, tar(file("d/f"), directory("d", mode=0o711), directory("d", mode=0o700)))
    (tree,) = trees(store)
    assert stat.S_IMODE((tree / "d").stat().st_mode) == 0o700


def is_whiteout(path: Path) -> bool:
    told = path.lstat()
    return stat.S_ISCHR(told.st_mode) and told.st_rdev == 0


def is_opaque(path: Path) -> bool:
    return "user.overlay.opaque" in os.listxattr(path) and os.getxattr(path, "user.overlay.opaque") == b"y"


def test_whiteouts_become_the_overlays(store):
    lower = tar(file("gone"), file("d/old"), directory("e"), file("f/x"), file("deep/name"))
    upper = tar(
        file(".wh.gone"),
        file("d/.wh..wh..opq"),
        file("d/new"),
        file("d/.wh.old"),
        file("deep/.wh.name"),
        # Removed and made again: a directory hides what was in it, a file hides by being there.
        file(".wh.f"),
        directory("f"),
        file(".wh.e"),
        file("e", b"now a file"),
        file(".wh..wh.plnk"),
    )
    image = add_tars(store, lower, upper)
    _, tree = trees(store)
    assert is_whiteout(tree / "gone")
    assert is_whiteout(tree / "deep/name")
    assert is_opaque(tree / "d")
    assert is_opaque(tree / "f")
    assert not is_opaque(tree / "deep")
    assert sorted(one.name for one in (tree / "d").iterdir()) == ["new"]
    assert (tree / "e").read_bytes() == b"now a file"
    assert sorted(one.name for one in tree.iterdir()) == ["d", "deep", "e", "f", "gone"]
    assert image.notes == ("1 names of another union file system left out",)


def test_a_whiteout_that_hides_nothing_is_left_out_and_that_is_another_layer(store):
    upper = tar(directory("own"), file("own/.wh.x"), directory("d"), file("d/.wh.y"))
    add_tars(store, tar(file("d/y")), upper)
    tree = trees(store)[1]
    assert is_whiteout(tree / "d/y")
    assert list((tree / "own").iterdir()) == []
    add_tars(store, tar(file("d/z")), upper, name="other")
    assert list((trees(store, "other")[1] / "d").iterdir()) == []
    assert is_whiteout(tree / "d/y")
    assert store.resolve("image")[1].layers[1] != store.resolve("other")[1].layers[1]


def test_a_directory_that_only_lower_layers_describe_looks_as_it_does_there(store):
    lower = tar(directory("tmp", mode=0o1777, mtime=3), directory("var", mode=0o750))
    upper = tar(file("tmp/x"), file("var/y"), file("new/z"))
    add_tars(store, lower, upper, name="image")
    add_tars(store, tar(directory("tmp", mode=0o700)), upper, name="other")
    modes = [stat.S_IMODE((trees(store)[1] / name).stat().st_mode) for name in ("tmp", "var", "new")]
    assert modes == [0o1777, 0o750, 0o755]
    # The same archive above another layer is another layer: it must not change the first.
    assert stat.S_IMODE((trees(store, "other")[1] / "tmp").stat().st_mode) == 0o700


def test_equal_files_of_two_layers_are_one_and_of_one_layer_are_two(store):
    big, other = b"b" * 5000, b"c" * 5000
    add_tars(store, tar(file("a", big, mtime=1), file("b", big, mtime=1), file("c", other, mtime=1)), name="one")
    image = add_tars(
        store,
        tar(file("x", big, mtime=1), file("y", big, mtime=1), file("z", big, mtime=2), file("s", b"s", mtime=1)),
        name="two",
    )
    (one,), (two,) = trees(store, "one"), trees(store, "two")
    assert (two / "x").stat().st_ino in {(one / "a").stat().st_ino, (one / "b").stat().st_ino}
    numbers = [(tree / name).stat().st_ino for tree, name in ((one, "a"), (one, "b"), (two, "x"), (two, "y"))]
    assert len(set(numbers)) == 3
    assert (two / "z").stat().st_ino not in numbers  # another time is another inode
    layer = store.layout.read_layer(store.resolve("two")[1].layers[0])
    assert layer is not None
    assert layer.facts.shared_bytes == 5000
    assert image.inodes == 4
    assert [(two / name).read_bytes() for name in "xyz"] == [big] * 3


def test_a_damaged_shared_file_is_not_taken(store):
    add_tars(store, tar(file("a", b"b" * 5000, mtime=1)), name="one")
    (shared,) = [path for path in store.layout.part("objects").rglob("*") if path.is_file()]
    shared.unlink()
    shared.write_bytes(b"cut")
    add_tars(store, tar(file("x", b"b" * 5000, mtime=1)), name="two")
    assert (trees(store, "two")[0] / "x").read_bytes() == b"b" * 5000


@pytest.mark.parametrize("modern", [True, False])
def test_a_path_is_never_followed_through_a_link_with_and_without_openat2(tmp_path, monkeypatch, modern):
    monkeypatch.setattr(tree_files, "has_openat2", lambda: modern)
    (tmp_path / "root/a/b").mkdir(parents=True)
    (tmp_path / "root/out").symlink_to(tmp_path)
    root = tree_files.open_root(tmp_path / "root")
    try:
        os.close(tree_files.open_beneath(root, (b"a", b"b")))
        os.close(tree_files.open_beneath(root, ()))
        for parts in ((b"out",), (b"out", b"root"), (b"..",), (b"a", b"..", b"..")):
            with pytest.raises(OSError, match="Errno"):
                tree_files.open_beneath(root, parts)
    finally:
        os.close(root)


def test_removing_a_tree_spares_what_links_lead_to_and_opens_what_is_closed(tmp_path):
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept/file").write_bytes(b"x")
    (tmp_path / "tree/closed/in").mkdir(parents=True)
    (tmp_path / "tree/link").symlink_to(tmp_path / "kept")
    (tmp_path / "tree/closed").chmod(0)
    assert tree_files.remove_tree(tmp_path / "tree") == 4
    assert tree_files.remove_tree(tmp_path / "tree") == 0
    assert (tmp_path / "kept/file").exists()


def test_every_fact_that_loses_something_has_a_note():
    lossy = [name for name in LayerFacts.__struct_fields__ if name.startswith(("cleared", "dropped", "foreign"))]
    facts = LayerFacts(**dict.fromkeys(lossy, 2))
    layer = Layer(id="a", content="a", facts=facts)
    assert len(notes_of((layer, msgspec.structs.replace(layer, id="b")))) == len(lossy) == 6
    assert all(note.startswith("4 ") for note in notes_of((layer, layer)))
