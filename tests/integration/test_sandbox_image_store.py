"""Sandboxes of images of the store: layers as an overlay shows them, and claims as long as one lives."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from image_builders import Layout, add, add_tars, directory, file, new_store, small_root, tar
from rollmill.cli.app import cli
from rollmill.errors import ImageError, SandboxIdInUse
from rollmill.sandboxes import NamedImage, Provider, SandboxSpec
from rollmill.sandboxes.images import ImageStore, erofs
from rollmill.sandboxes.images.canonical import walk
from rollmill.sandboxes.images.tar_format import END, encode_header
from sandbox_builders import LIMITS, RealRig, new_id, real_rig, start, until, why_no_namespaces

pytestmark = pytest.mark.integration

with tempfile.TemporaryDirectory() as _scratch:
    AS_FILES = erofs.missing(Path(_scratch))
SPEC = SandboxSpec(image=NamedImage(name="whole"), limits=LIMITS)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("images")


@pytest.fixture(scope="module")
def store(place: Path) -> ImageStore:
    return new_store(place / "store")


@pytest.fixture(scope="module")
def whole(store: ImageStore, place: Path) -> ImageStore:
    """A root file system as the lower layer, and one with whiteouts above it, as an OCI archive."""
    root = small_root(place / "root", programs=("sh", "cat", "ls", "stat"))
    for name in ("gone", "changed", "dir/old", "opaque/old", "opaque/deep/old"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("lower\n", encoding="ascii")
    (root / "tmp").mkdir()
    (root / "tmp").chmod(0o1777)
    add(store, root, name="lower")
    upper = tar(
        file(".wh.gone"),
        file("changed", b"upper\n", mode=0o640, uid=7),
        file("dir/.wh.old"),
        file("dir/new", b"new\n"),
        directory("opaque", mode=0o711),
        file("opaque/.wh..wh..opq"),
        file("opaque/new", b"new\n"),
        file("tmp/left", b""),
    )
    base = tar_of(store, "lower")
    source = place / "image.tar"
    source.write_bytes(Layout(base, upper).archive())
    add(store, source, name="whole")
    return store


def tar_of(store: ImageStore, name: str) -> bytes:
    """The canonical archive of a one-layer image."""
    with store.hold(name, what="test") as held:
        out = b""
        for entry, content in walk(held.layers[0]):
            data = b"".join(iter(lambda content=content: content.read(1 << 20), b""))
            out += encode_header(entry) + data + bytes(-len(data) % 512)
        return out + END


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory, whole: ImageStore) -> Iterator[RealRig]:
    if reason := why_no_namespaces(tmp_path_factory.mktemp("probe")):
        pytest.skip(f"no namespace sandboxes here: {reason}")
    with real_rig(tmp_path_factory.mktemp("records"), images=whole.settings) as rig:
        yield rig


def holders(store: ImageStore, name: str = "whole") -> tuple[str, ...]:
    return store.show(name).held_by


def test_layers_are_shown_as_oci_means_them_and_root_owns_them(rig, whole):
    async def body(provider: Provider) -> None:
        await provider.prepare(SPEC.image)
        sandbox = await start(provider, SPEC)
        line = "cat /changed /dir/new; ls -A /dir /opaque; stat -c '%a %u %n' /changed /opaque /tmp /usr/bin; ls /gone"
        result = await sandbox.exec(["sh", "-c", line])
        owner, others = ("7", "0") if os.geteuid() == 0 else ("0", "0")
        assert result.stdout.decode().splitlines() == [
            "upper",
            "new",
            "/dir:",
            "new",
            "",
            "/opaque:",
            "new",
            f"640 {owner} /changed",
            f"711 {others} /opaque",
            f"1777 {others} /tmp",
            f"755 {others} /usr/bin",
        ]
        assert b"No such file" in result.stderr
        # Everything may be changed inside, and nothing of it reaches the store.
        assert (
            await sandbox.exec(["sh", "-c", "echo x > /opaque/new; echo y > /dir/old; echo z > /gone"])
        ).exit_code == 0
        await sandbox.kill()

    rig.run(body)
    assert whole.verify("whole") == ()


def test_snapshots_that_were_lost_with_their_memory_hold_no_image(tmp_path, whole):
    async def body(provider: Any) -> None:
        sandbox = await start(provider, SPEC)
        await sandbox.snapshot(id=new_id())
        await sandbox.exec(["true"])
        os.kill(provider.records.read(sandbox.id).helper.pid, signal.SIGKILL)
        await until(lambda: sandbox.death is not None)
        assert await provider.snapshots() == ()
        await until(lambda: holders(whole) == ())

    with real_rig(tmp_path / "records", images=whole.settings) as rig:
        rig.run(body)


def test_an_image_is_held_while_a_sandbox_of_it_lives(rig, whole):
    async def body(provider: Provider) -> None:
        assert holders(whole) == ()
        one, two = await asyncio.gather(start(provider, SPEC), start(provider, SPEC))
        assert holders(whole) == (f"sandboxes of process {os.getpid()}",)
        with pytest.raises(ImageError, match="is held by sandboxes of process"):
            await asyncio.to_thread(whole.remove, "whole")
        report = await asyncio.to_thread(lambda: whole.collect(budget_bytes=0))
        assert report.over_bytes > 0
        assert (await two.exec(["cat", "/changed"])).stdout == b"upper\n"
        await one.kill()
        assert holders(whole) != ()
        await two.kill()
        assert holders(whole) == ()

    rig.run(body)


def test_an_image_of_a_sandbox_whose_zygote_was_killed_is_let_go(tmp_path, whole, rig):
    with real_rig(tmp_path / "records", images=whole.settings) as other:

        async def body(provider: Provider) -> None:
            await start(provider, SPEC)
            assert holders(whole) != ()
            zygote = other.provider._zygote
            assert zygote is not None
            assert zygote.mark is not None
            os.kill(zygote.mark.pid, 9)
            await until(lambda: holders(whole) == ())

        other.run(body)


def test_an_unknown_image_starts_nothing_and_leaves_nothing(rig):
    async def body(provider: Provider) -> None:
        unknown = NamedImage(name="nowhere")
        for call in (provider.prepare(unknown), start(provider, SandboxSpec(image=unknown, limits=LIMITS))):
            with pytest.raises(ImageError, match="'nowhere' is not in the store"):
                await call
        assert await provider.list(labels={"never": "set"}) == ()

    rig.run(body)
    assert list(rig.directory.glob("*.json")) == []


def test_a_start_with_the_id_of_one_that_lives_keeps_its_image(rig, whole):
    async def body(provider: Provider) -> None:
        name = new_id()
        one = await start(provider, SPEC, id=name)
        assert await start(provider, SPEC, id=name) is one
        await one.kill()
        assert holders(whole) == ()

    rig.run(body)


@pytest.mark.skipif(AS_FILES != "", reason=AS_FILES)
def test_layers_kept_as_files_are_mounted_while_they_are_used(tmp_path, place, rig):
    store = new_store(tmp_path / "store", form="erofs")
    add(store, place / "image.tar", name="whole")
    assert mounts(store) == 0
    with real_rig(tmp_path / "records", images=store.settings) as other:

        async def body(provider: Provider) -> None:
            one, two = await asyncio.gather(start(provider, SPEC), start(provider, SPEC))
            assert mounts(store) == 2
            await one.kill()
            read = await two.exec(["sh", "-c", "cat /changed; ls -A /opaque; ls /gone"])
            assert read.stdout == b"upper\nnew\n"
            await two.kill()
            await until(lambda: mounts(store) == 0)

        other.run(body)
    if os.fork() == 0:
        new_store(tmp_path / "store").take("whole", what="a process that is killed")
        os._exit(9)
    os.wait()
    assert mounts(store) == 2
    assert store.verify("whole") == ()
    new_store(tmp_path / "store")
    assert mounts(store) == 0
    store.remove("whole")


@pytest.mark.skipif(AS_FILES != "", reason=AS_FILES)
def test_a_claim_of_a_snapshot_on_a_disk_keeps_no_layer_mounted(tmp_path):
    store = new_store(tmp_path / "store", form="erofs")
    image = add_tars(store, tar(file("a", b"x")), tar(file("b", b"y")))
    store.pin(image.digest, holder="5eed", name="kept", what="snapshot kept")
    with store.hold("image", what="test"):
        assert mounts(store) == 2
    assert mounts(store) == 0
    assert store.collect(budget_bytes=0).images == ()
    with store.hold("image", what="test") as held:
        assert held.layers[0].joinpath("b").read_bytes() == b"y"


def mounts(store: ImageStore) -> int:
    return Path("/proc/mounts").read_text(encoding="utf-8").count(str(store.layout.part("mounts")))


def test_the_command_line_prepares_lists_runs_and_removes(rig, place, tmp_path):
    def call(*arguments: str) -> Any:
        return CliRunner().invoke(cli, ["sandbox", *arguments], catch_exceptions=False)

    store = ("--store", str(tmp_path / "store"))
    done = call("prepare", str(place / "root"), "--name", "mine", "--form", "tree", *store)
    assert done.exit_code == 0, done.output
    assert "mine is ready: 1 layers" in done.output
    assert call("prepare", "mine", *store).exit_code == 0
    records = ("--directory", str(tmp_path / "records"))
    ran = call("run", *records, "--image", "mine", *store, "sh", "-c", "cat /changed; exit 3")
    assert (ran.exit_code, ran.stdout_bytes) == (3, b"lower\n")
    assert "mine" in call("images", "--verify", *store).output
    assert call("run", *records, "--image", "other", *store, "true").exit_code == 1
    assert call("images", "--remove", "mine", *store).exit_code == 0
    assert "no images" in call("images", *store).output


def test_of_two_creations_of_one_id_with_different_images_the_second_takes_nothing_from_the_first(rig, whole):
    """Its image stays claimed, and what a restart stands on is the same."""

    async def body(provider: Provider) -> None:
        name = new_id()
        lower = SandboxSpec(image=NamedImage(name="lower"), limits=LIMITS)
        calls = (start(provider, SPEC, id=name), start(provider, lower, id=name))
        first, second = await asyncio.gather(*calls, return_exceptions=True)
        kept, refused = (first, second) if isinstance(second, BaseException) else (second, first)
        assert isinstance(refused, SandboxIdInUse), (first, second)
        spec = SPEC if kept is first else lower
        uses = provider._images  # type: ignore[attr-defined]
        assert uses.in_use(name).digest == whole.resolve(spec.image.name)[0]  # type: ignore[union-attr]
        assert not any(user.startswith("creation ") for users in uses._users.values() for user in users)
        await kept.kill()  # type: ignore[union-attr]
        assert uses.in_use(name) is None

    rig.run(body)
