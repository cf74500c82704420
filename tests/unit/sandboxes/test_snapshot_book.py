"""Which layers are held, and when one may go."""

import pytest

from rollmill.errors import ImageError, SandboxIdInUse, SandboxRetryable
from rollmill.sandboxes import SandboxSpec, SnapshotRef
from rollmill.sandboxes.backends.namespaces.snapshot_book import Kept, Layer, SnapshotBook


def layer(name: str, *, disk_bytes: int = 100, inodes: int = 10, on_disk: bool = False) -> Layer:
    return Layer(layer_id=name, disk_bytes=disk_bytes, inodes=inodes, on_disk=on_disk)


def kept(name: str, *chain: str) -> Kept:
    return Kept(ref=SnapshotRef(snapshot_id=name, backend="namespaces", spec=SandboxSpec()), chain=chain)


def book(*, most_bytes: int = 1000, most_inodes: int = 100) -> SnapshotBook:
    return SnapshotBook(most_bytes=most_bytes, most_inodes=most_inodes)


def names(layers: tuple[Layer, ...]) -> list[str]:
    return sorted(one.layer_id for one in layers)


def test_a_layer_goes_with_the_last_of_its_snapshots_and_sandboxes():
    one = book()
    one.hold_for_sandbox("s", ("a",), layers=[layer("a")])
    one.keep(kept("first", "a"))
    one.hold_for_sandbox("s", ("b", "a"), layers=[layer("b")])
    one.keep(kept("second", "b", "a"))
    assert one.counts() == (200, 20)
    assert names(one.delete("second")) == []  # the sandbox stands on both
    assert names(one.release_sandbox("s")) == ["b"]
    assert names(one.delete("first")) == ["a"]
    assert one.counts() == (0, 0)


def test_a_sandbox_that_stands_on_a_merged_layer_lets_the_others_go():
    one = book()
    one.hold_for_sandbox("s", ("b", "a"), layers=[layer("a"), layer("b")])
    one.keep(kept("merged", "m"), layers=[layer("m")])
    assert names(one.hold_for_sandbox("s", ("m",))) == ["a", "b"]


def test_an_id_names_one_snapshot():
    one = book()
    one.keep(kept("first", "a"), layers=[layer("a")])
    with pytest.raises(SandboxIdInUse, match="'first'"):
        one.check_new("first")
    one.check_new("second")


def test_what_has_no_room_is_refused_with_the_numbers():
    one = book(most_bytes=150, most_inodes=100)
    one.keep(kept("first", "a"), layers=[layer("a")])
    with pytest.raises(SandboxRetryable, match="51 bytes has no room: 100 of 150"):
        one.reserve("x", disk_bytes=51, inodes=1)
    with pytest.raises(SandboxRetryable, match="91 inodes has no room: 10 of 100"):
        one.reserve("x", disk_bytes=1, inodes=91)
    one.reserve("x", disk_bytes=50, inodes=90)


def test_room_that_is_set_aside_is_nobody_elses_until_it_is_given_back():
    one = book(most_bytes=150)
    one.reserve("x", disk_bytes=100, inodes=1)
    with pytest.raises(SandboxRetryable, match="100 of 150"):
        one.reserve("y", disk_bytes=51, inodes=1)
    one.reserve("x", disk_bytes=100, inodes=1)  # with its own it would be too much, if that counted twice
    one.unreserve("x")
    one.unreserve("x")
    one.reserve("y", disk_bytes=150, inodes=1)


def test_when_memory_is_lost_only_what_is_whole_on_the_disk_stays():
    one = book()
    one.keep(kept("disk", "d"), layers=[layer("d", on_disk=True)])
    one.keep(kept("mixed", "m", "d"), layers=[layer("m")])
    one.hold_for_sandbox("s", ("m", "d"))
    assert one.lose_memory() == ()
    assert not one.is_whole(("m", "d"))
    assert [found.ref.snapshot_id for found in one.snapshots()] == ["disk"]
    with pytest.raises(ImageError, match="snapshot_directory"):
        one.find("mixed")
    one.keep(kept("other", "e"), layers=[layer("e", on_disk=True)])
    assert names(one.delete("other")) == ["e"]
    assert names(one.release_sandbox("s")) == []
    assert names(one.delete("disk")) == ["d"]


def test_what_is_not_known_is_released_without_harm():
    one = book()
    assert one.delete("unknown") == ()
    assert one.release_sandbox("unknown") == ()
