"""The store: names, claims, collections, two preparers, and what a killed one leaves."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from image_builders import add, add_tars, archive_layer, digest_of, file, new_store, new_work, tar, trees
from rollmill.errors import ConfigError, DeadlineExceeded, ImageError, SandboxError
from rollmill.sandboxes.disk_records import ProcessMark, boot_id, mark_of
from rollmill.sandboxes.images import ImageProgress, ImageStore, ImageStoreSettings, erofs, prepare_image
from rollmill.sandboxes.images.locks import locked
from rollmill.sandboxes.images.refusals import Refusal

ONE, TWO = tar(file("one", b"1" * 5000)), tar(file("two", b"2" * 5000))
GONE = ProcessMark(pid=1, started_ticks=1, boot_id="another boot")


@pytest.fixture
def store(tmp_path: Path) -> ImageStore:
    return new_store(tmp_path / "store")


def is_empty(store: ImageStore) -> bool:
    parts = ("layers", "images", "names", "holds", "tmp", "trash", "mounts")
    files = [path for path in store.layout.part("objects").rglob("*") if path.is_file()]
    return not files and not any(list(store.layout.part(part).iterdir()) for part in parts)


def reason_of(call: Callable[[], object]) -> Refusal:
    with pytest.raises(ImageError) as caught:
        call()
    return Refusal(caught.value.reason)


# -- names ------------------------------------------------------------------------------------------------------------


def test_an_image_is_found_by_its_names_and_its_digest(store):
    image = add_tars(store, ONE, name="registry.example/a/b:1.0")
    add_tars(store, ONE, name="other")
    assert store.show("other").digest == image.digest == store.show(image.digest).digest
    assert store.show("other").names == ("other", "registry.example/a/b:1.0")


def test_an_unknown_image_is_refused_with_those_that_are_known(store):
    add_tars(store, ONE, name="known")
    with pytest.raises(
        ImageError, match=r"'unknown' is not in the store .*: it has 'known'\. Prepare it first"
    ) as caught:
        store.resolve("unknown")
    assert caught.value.reason == Refusal.UNKNOWN.value
    assert reason_of(lambda: store.resolve("sha256:" + "0" * 64)) is Refusal.UNKNOWN


@pytest.mark.parametrize("name", ["", "../x", "/x", "a\nb", "a b", "n" * 161, "sha256:x", ".hidden"])
def test_names_that_no_image_can_have_are_refused(store, name):
    assert reason_of(lambda: store.resolve(name)) is Refusal.NAME
    assert reason_of(lambda: add_tars(store, ONE, name=name)) is Refusal.NAME


def test_a_name_moves_to_what_was_prepared_last(store):
    one, two = add_tars(store, ONE), add_tars(store, TWO)
    assert store.show("image").digest == two.digest != one.digest
    assert store.show(one.digest).names == ()


def test_an_image_stands_above_its_base(store):
    add_tars(store, ONE, name="base")
    image = add_tars(store, TWO, name="whole", base="base")
    assert image.layers == 2
    assert [one.name for tree in trees(store, "whole") for one in tree.iterdir()] == ["one", "two"]
    assert reason_of(lambda: add_tars(store, TWO, name="x", base="missing")) is Refusal.UNKNOWN
    assert reason_of(lambda: add_tars(store, name="x")) is Refusal.MALFORMED


# -- claims and removal -----------------------------------------------------------------------------------------------


def test_what_is_held_is_not_removed_and_goes_when_it_is_released(store):
    add_tars(store, ONE)
    with store.hold("image", what="somebody") as held:
        assert store.show("image").held_by == ("somebody",)
        with pytest.raises(ImageError, match="held by somebody") as caught:
            store.remove("image")
        assert caught.value.reason == Refusal.IN_USE.value
        assert store.collect(budget_bytes=0).over_bytes > 5000
        assert (held.layers[0] / "one").exists()
    report = store.remove("image")
    assert (len(report.images), len(report.layers), report.shared_files) == (1, 1, 1)
    assert is_empty(store)


def test_a_claim_ends_with_its_process_or_at_its_time_whichever_is_later(store):
    add_tars(store, ONE)
    now = time.time()
    claims = [
        (GONE, None, False),
        (mark_of(os.getpid()), None, True),
        (None, now + 100, True),
        (None, now - 1, False),
        (GONE, now + 100, True),
        (mark_of(os.getpid()), now - 1, True),
    ]
    for owner, until, stands in claims:
        held = store.take("image", what="claim", owner=owner, until_wall_s=until)
        assert (store.show("image").held_by == ("claim",)) is stands
        held.release()
        held.release()
    assert list(store.layout.part("holds").iterdir()) == []


def test_a_claim_with_a_time_can_be_renewed(store):
    add_tars(store, ONE)
    held = store.take("image", what="snapshot", until_wall_s=time.time() - 1)
    held.renew(time.time() + 100)
    assert reason_of(lambda: store.remove("image")) is Refusal.IN_USE
    held.renew(time.time() - 1)
    store.collect()  # now nothing is left to renew
    assert reason_of(lambda: held.renew(time.time() + 100)) is Refusal.UNKNOWN


def test_a_claim_that_cannot_be_read_keeps_everything(store):
    add_tars(store, ONE)
    (store.layout.part("holds") / "1-a.json").write_bytes(b"{")
    assert reason_of(lambda: store.collect(budget_bytes=0)) is Refusal.DAMAGED
    assert (trees(store)[0] / "one").exists()


def test_the_budget_evicts_what_was_not_used_for_longest_but_never_what_was_just_prepared(tmp_path):
    store = new_store(tmp_path / "store", budget_bytes=20_000)  # two layers of 12,288: directory and 5,000 in blocks
    for name, data in (("one", ONE), ("two", TWO)):
        add_tars(store, data, name=name)
        os.utime(store.layout.manifest(store.show(name).digest), (1, 1))
    assert [image.names for image in store.images()] == [("two",)]
    add_tars(store, tar(file("huge", b"h" * 50_000)), name="huge")
    assert [image.names for image in store.images()] == [("huge",)]


def test_removing_one_of_two_names_keeps_the_image(store):
    add_tars(store, ONE, name="a")
    add_tars(store, ONE, name="b")
    assert store.remove("a").images == ()
    assert store.show("b").names == ("b",)


def test_a_layer_that_two_images_share_goes_with_the_second(store):
    add_tars(store, ONE, name="a")
    add_tars(store, ONE, TWO, name="b")
    assert len(store.remove("b").layers) == 1
    assert (trees(store, "a")[0] / "one").exists()
    assert len(store.remove("a").layers) == 1
    assert is_empty(store)


def test_a_store_may_delete_in_the_background(tmp_path):
    store = ImageStore(ImageStoreSettings(directory=tmp_path / "store", durable=False, form="tree"), in_background=True)
    add_tars(store, ONE)
    removed = store.remove("image")
    assert len(removed.layers) == 1
    assert store.layout.reaper is not None
    assert store.layout.reaper.drain(limit_s=10.0)
    assert list(store.layout.part("trash").iterdir()) == []
    store.close()
    # The last link to what layers shared goes in the background; a collection after that frees it, the first or this.
    assert removed.shared_files + store.collect().shared_files == 1
    assert is_empty(store)


# -- damage -----------------------------------------------------------------------------------------------------------


def test_damage_is_found_by_reading_again(store):
    add_tars(store, ONE)
    assert store.verify("image") == ()
    (tree,) = trees(store)
    told = (tree / "one").stat()
    (tree / "one").write_bytes(b"1" * 4999 + b"0")
    os.utime(tree / "one", ns=(told.st_mtime_ns, told.st_mtime_ns))
    assert len(store.verify("image")) == 1


def test_a_missing_layer_is_told_and_preparing_again_mends_it(store):
    image = add_tars(store, ONE)
    (store.layout.layer(digest_of(ONE)) / "layer.json").write_bytes(b"{")
    with pytest.raises(ImageError, match=r"1 of 1 layers .* missing or damaged"):
        store.take("image", what="test")
    assert "DAMAGED" in store.images()[0].notes[0]
    assert add_tars(store, ONE).digest == image.digest
    assert (trees(store)[0] / "one").exists()


@pytest.mark.parametrize("text", [b"{", b'{"layers": [], "config": {}, "format": 1}'])
def test_a_manifest_that_is_not_what_its_name_says_is_refused_and_can_be_removed(store, text):
    image = add_tars(store, ONE)
    store.layout.manifest(image.digest).write_bytes(text)
    assert reason_of(lambda: store.resolve("image")) is Refusal.DAMAGED
    store.remove("image")
    assert is_empty(store)


def test_a_name_whose_manifest_is_missing_is_damage_and_can_be_removed(store):
    image = add_tars(store, ONE)
    store.layout.manifest(image.digest).unlink()
    assert reason_of(lambda: store.resolve("image")) is Refusal.DAMAGED
    store.remove("image")
    assert is_empty(store)


def test_a_store_of_another_format_or_of_somebody_else_is_not_opened(tmp_path):
    new_store(tmp_path / "store")
    (tmp_path / "store/store.json").write_text('{"format": 99}', encoding="ascii")
    with pytest.raises(ConfigError, match="has format 99"):
        new_store(tmp_path / "store")
    (tmp_path / "store/store.json").write_text("no", encoding="ascii")
    with pytest.raises(ConfigError, match=r"Is .* an image store"):
        new_store(tmp_path / "store")
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(ConfigError, match="writable to nobody else"):
        new_store(tmp_path / "open")
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="Name another directory"):
        new_store(tmp_path / "file")


def test_a_form_that_does_not_work_here_is_refused_when_it_was_asked_for(tmp_path, monkeypatch):
    monkeypatch.setattr(erofs, "missing", lambda scratch: "a trial failed")
    store = new_store(tmp_path / "store", form="erofs")
    with pytest.raises(ImageError, match="cannot be kept as erofs here: a trial failed") as caught:
        add_tars(store, ONE)
    assert caught.value.reason == Refusal.MACHINE.value
    add_tars(new_store(tmp_path / "store", form="auto"), ONE)
    assert (trees(store)[0] / "one").exists()


@pytest.mark.parametrize("wrong", [{"form": "squashfs"}, {"lock_s": 0}, {"budget_bytes": -1}])
def test_settings_that_cannot_be_meant_are_refused(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        ImageStoreSettings(**wrong)


def test_a_full_disk_is_told_with_what_is_free_and_leaves_nothing(store, monkeypatch):
    def full(descriptor: int, data: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("rollmill.sandboxes.images.extract.os.write", full)
    with pytest.raises(SandboxError, match=r"no room in .* bytes are free.*--budget-gib"):
        add_tars(store, ONE)
    monkeypatch.undo()
    assert is_empty(store)


# -- deadlines, progress, cancellation --------------------------------------------------------------------------------


def test_a_preparation_past_its_deadline_ends_and_says_how_far_it_was(store):
    work = new_work(store, deadline_s=0.0)
    with pytest.raises(DeadlineExceeded, match="0 bytes and 0 entries done"):
        store.add_image([archive_layer(ONE)], name="image", source="test", work=work)
    assert is_empty(store)


def test_progress_names_phases_and_never_falls(store, tmp_path):
    (tmp_path / "root").mkdir()
    (tmp_path / "root/f").write_bytes(bytes(17 * 1024**2))
    seen: list[ImageProgress] = []
    asyncio.run(prepare_image(store, str(tmp_path / "root"), name="image", report=seen.append))
    phases = list(dict.fromkeys(one.phase for one in seen))
    assert phases[1:] == [
        "write the layer to the disk",
        "name the layer",
        "named the layer",
        "write the manifest",
        "done",
    ]
    assert [one.done_bytes for one in seen] == sorted(one.done_bytes for one in seen)
    assert seen[-1] == ImageProgress(phase="done", done_bytes=17 * 1024**2, done_inodes=2)
    assert any(one.phase == phases[0] and one.done_bytes for one in seen)


def test_a_cancelled_preparation_ends_at_its_next_step_and_leaves_nothing(store, tmp_path):
    (tmp_path / "root").mkdir()
    (tmp_path / "root/f").write_bytes(bytes(5000))
    begun, cancelled = threading.Event(), threading.Event()

    def report(progress: ImageProgress) -> None:
        if progress.phase.startswith("write the layer"):
            begun.set()
            assert cancelled.wait(10)

    async def body() -> None:
        call = asyncio.ensure_future(prepare_image(store, str(tmp_path / "root"), name="image", report=report))
        assert await asyncio.to_thread(begun.wait, 10)
        call.cancel()
        asyncio.get_running_loop().call_soon(cancelled.set)
        with pytest.raises(asyncio.CancelledError):
            await call

    asyncio.run(body())
    assert is_empty(store)


def test_waiting_for_a_lock_ends_with_its_holder_or_at_its_limit(tmp_path):
    path = tmp_path / "lock"
    late = pytest.raises(DeadlineExceeded, match=r"waited 0.05 s for a test")
    with locked(path, what="a test", limit_s=1.0), late, locked(path, what="a test", limit_s=0.05):
        pass
    with locked(path, what="x", limit_s=0.05, shared=True), locked(path, what="x", limit_s=0.05, shared=True):
        pass


# -- several processes, and killed ones -------------------------------------------------------------------------------


def in_child(body: Callable[[], None]) -> int:
    """Run something in a fork that ends without any tidying; return its exit status."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            body()
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


KILLED = 9
PHASES = [
    "unpack a layer",
    "write the layer to the disk",
    "name the layer",
    "named the layer",
    "write the manifest",
    "done",
]


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("number", [1, 2])
def test_a_preparer_killed_at_any_phase_leaves_a_store_that_the_next_one_repairs(tmp_path, phase, number):
    def kill(progress: ImageProgress, seen: list[str] = []) -> None:  # noqa: B006
        seen.append(progress.phase)
        if progress.phase == phase and (seen.count(phase) == number or phase in PHASES[-2:]):
            os._exit(KILLED)

    def body() -> None:
        store = new_store(tmp_path / "store")
        work = new_work(store, report=kill)
        store.add_image([archive_layer(ONE), archive_layer(TWO)], name="image", source="test", work=work)

    assert in_child(body) == KILLED
    store = new_store(tmp_path / "store")
    assert list(store.layout.part("tmp").iterdir()) == list(store.layout.part("trash").iterdir()) == []
    if phase != "done":
        assert store.images() == ()
    image = add_tars(store, ONE, TWO)
    assert store.verify("image") == ()
    assert image.layers == 2
    store.remove("image")
    assert is_empty(store)


@pytest.mark.parametrize("call", ["unlink", "rename"])
@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_a_collector_killed_between_any_two_removals_leaves_no_name_that_leads_nowhere(tmp_path, call, number):
    add_tars(new_store(tmp_path / "store"), ONE, TWO, name="old")
    add_tars(new_store(tmp_path / "store"), ONE, name="kept")

    def body() -> None:
        store = new_store(tmp_path / "store")
        real, seen = getattr(Path, call), []

        def counted(self: Path, *args: object, **options: object) -> object:
            seen.append(self)
            if len(seen) == number:
                os._exit(KILLED)
            return real(self, *args, **options)

        setattr(Path, call, counted)
        store.remove("old")

    assert in_child(body) in (0, KILLED)
    store = new_store(tmp_path / "store")
    for image in store.images():
        assert store.verify(image.digest) == ()
    for name in store.layout.all_names():
        store.resolve(name.name)
    assert store.verify("kept") == ()
    store.collect(grace_s=0.0)
    store.remove("kept")
    if any(image.names for image in store.images()):
        store.remove("old")
    assert is_empty(store)


def test_what_a_living_process_is_at_is_not_repaired_away(store, tmp_path):
    with store.layout.scratch() as scratch:
        (scratch / "x").touch()
        assert new_store(tmp_path / "store").repaired == 0
        assert (scratch / "x").exists()
    dead = store.layout.part("tmp") / f"1.1.{boot_id()}.x"
    strange = store.layout.part("tmp") / "strange"
    for path in (dead, strange):
        path.mkdir()
    half = store.layout.part("names") / ".image.json.999999999.abc"
    half.touch()
    assert new_store(tmp_path / "store").repaired == 3
    assert is_empty(store)


def test_two_that_prepare_one_layer_at_once_make_it_once(tmp_path):
    opened: list[int] = []
    inside, go_on = threading.Event(), threading.Event()

    def prepare(name: str, *, slow: bool) -> None:
        store = new_store(tmp_path / "store")

        def report(progress: ImageProgress) -> None:
            if progress.phase == "write the layer to the disk":
                opened.append(1)
                inside.set()
                assert not slow or go_on.wait(10)

        work = new_work(store, report=report)
        store.add_image([archive_layer(ONE, content=digest_of(ONE))], name=name, source="test", work=work)

    first = threading.Thread(target=prepare, args=("first",), kwargs={"slow": True})
    first.start()
    assert inside.wait(10)
    second = threading.Thread(target=prepare, args=("second",), kwargs={"slow": False})
    second.start()
    second.join(0.1)
    assert second.is_alive()  # it waits for the first
    go_on.set()
    first.join(10)
    second.join(10)
    assert opened == [1]
    assert new_store(tmp_path / "store").show("first").names == ("first", "second")


def test_two_processes_that_prepare_the_same_directory_at_once_both_succeed(tmp_path):
    (tmp_path / "root").mkdir()
    for number in range(50):
        (tmp_path / f"root/{number}").write_bytes(b"x" * 5000)
    pids = []
    for name in ("one", "two"):
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                add(new_store(tmp_path / "store"), tmp_path / "root", name=name)
                status = 0
            finally:
                os._exit(status)
        pids.append(pid)
    assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids] == [0, 0]
    store = new_store(tmp_path / "store")
    (image,) = store.images()
    assert image.names == ("one", "two")
    assert store.verify("one") == ()
    assert json.loads((store.layout.directory / "store.json").read_bytes()) == {"format": 1}


def test_images_of_a_user_without_a_home_need_a_directory(monkeypatch):
    for name in ("HOME", "XDG_DATA_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name in ("geteuid", "getuid"):
        monkeypatch.setattr(f"os.{name}", lambda: 54321)
    with pytest.raises(ConfigError, match="has no home"):
        ImageStoreSettings().place()
