"""Disks that are really full, below everything of sandboxes that writes: a typed error, nothing left, and it goes on.

Each is a small file system of its own, so only root runs this.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import shutil
import sqlite3
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from image_builders import add_tars, file, new_store, tar
from rollmill.errors import ConfigError, SandboxError, SandboxExhausted
from rollmill.sandboxes import (
    DeathReason,
    Lease,
    NamespaceProvider,
    NamespaceSettings,
    Provider,
    SandboxSpec,
    SandboxState,
)
from rollmill.sandboxes.disk_records import DiskRecord, DiskRecords, mark_of
from rollmill.sandboxes.images import ImageStore, ImageStoreSettings
from rollmill.sandboxes.leases import Keeper, KeeperSettings, LeaseTable
from rollmill.sandboxes.service import Node
from rollmill.sandboxes.service.law import Standing
from rollmill.sandboxes.service.moving import move_to_disk
from rollmill.sandboxes.service.served import Order
from rollmill.sandboxes.service.templates import Template
from rollmill.testing import FakeSandboxProvider
from sandbox_builders import new_id, real_rig, start, why_no_namespaces

pytestmark = pytest.mark.integration

MIB = 1024**2
PAGE = os.sysconf("SC_PAGE_SIZE")


class Disk:
    """A file system of 4 MiB."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self._names = place / "names"

    def fill(self, *, but: int = 0) -> None:
        """Take every byte that is left, or leave so many."""
        filler = self.place / "filler"
        with contextlib.suppress(OSError), open(filler, "wb", buffering=0) as stream:
            while True:
                stream.write(bytes(PAGE))
        os.truncate(filler, filler.stat().st_size - but)
        assert self.free() == but

    def fill_inodes(self) -> None:
        """Take every name that is left."""
        self._names.mkdir()
        with contextlib.suppress(OSError):
            for number in itertools.count():
                (self._names / str(number)).touch()

    def make_room_for_names(self) -> None:
        shutil.rmtree(self._names)

    def make_room(self) -> None:
        (self.place / "filler").unlink()

    def free(self) -> int:
        found = os.statvfs(self.place)
        return found.f_bavail * found.f_frsize

    def files(self, part: str = ".") -> list[str]:
        """All files below a directory, but for the filler; what is being removed meanwhile may be left out."""
        found = [
            Path(folder, name).relative_to(self.place)
            for folder, _, names in os.walk(self.place / part)
            for name in names
        ]
        return sorted(str(path) for path in found if path.name != "filler")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=4m,nr_inodes=400,mode=700", "tmpfs", str(place)]
    mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.strip()}")
    yield Disk(place)
    subprocess.run(["umount", "--lazy", str(place)], check=True)


@pytest.fixture(scope="module")
def namespaces(tmp_path_factory: pytest.TempPathFactory) -> None:
    if reason := why_no_namespaces(tmp_path_factory.mktemp("probe")):
        pytest.skip(f"no namespace sandboxes here: {reason}")


# -- images ----------------------------------------------------------------------------------------------------------

LARGE, SMALL = tar(file("large", os.urandom(6 * MIB))), tar(file("small", os.urandom(50_000)))


def test_an_image_that_finds_no_room_is_refused_in_words_and_gives_all_room_back(disk):
    store = new_store(disk.place / "store")
    add_tars(store, SMALL, name="before")
    free, files = disk.free(), disk.files()
    with pytest.raises(SandboxError, match=r"no room in .* to prepare 'large': \d+ bytes are free.*--budget-gib"):
        add_tars(store, SMALL, LARGE, name="large")
    store.collect()  # the layer that was finished is kept for another try, until somebody collects
    assert (disk.free(), disk.files()) == (free, files)
    assert [one.names for one in store.images()] == [("before",)]
    assert add_tars(store, tar(file("other", os.urandom(MIB))), name="after").names == ("after",)


def test_a_store_without_a_byte_refuses_opens_and_removes_and_works_again(disk):
    store = new_store(disk.place / "store")
    digest = add_tars(store, SMALL, name="before").digest
    files = disk.files()
    disk.fill()
    with pytest.raises(SandboxError, match="no room in"):
        add_tars(store, tar(file("x", b"x")), name="other")
    with pytest.raises(SandboxError, match="no room in"), store.hold("before", what="test"):
        pass
    with pytest.raises(SandboxError, match="no room in"):
        store.pin(digest, holder="5eed", name="kept", what="snapshot kept")
    assert disk.files() == files
    assert new_store(disk.place / "store").show("before").digest == digest
    with pytest.raises(ConfigError, match="No space left"):
        ImageStore(ImageStoreSettings(directory=disk.place / "another"))
    assert store.remove("before").images == (digest,)  # which makes room
    assert store.images() == ()
    disk.make_room()
    add_tars(store, SMALL, name="again")
    with store.hold("again", what="test") as held:
        assert held.layers[0].joinpath("small").stat().st_size == 50_000


# -- snapshots -------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("namespaces")
@pytest.mark.parametrize("left", [0, 4 * PAGE], ids=["nothing", "four pages"])
def test_a_snapshot_that_finds_no_room_leaves_the_sandbox_alive_and_nothing_on_the_disk(tmp_path, disk, left):
    with real_rig(tmp_path / "records", snapshot_directory=disk.place / "snapshots") as own:

        async def body(provider: Provider) -> None:
            sandbox = await start(provider)
            await sandbox.write("/workspace/kept", os.urandom(6 * PAGE))
            first = await sandbox.snapshot(id="first")
            await sandbox.write("/workspace/more", os.urandom(6 * PAGE))
            files = disk.files("snapshots")
            disk.fill(but=left)
            for end in (False, True):  # what was to end with it lives on too
                with pytest.raises(SandboxExhausted, match="No space left"):
                    await sandbox.snapshot(id="second", end=end)
            assert await provider.snapshots() == (first,)
            assert len(await sandbox.read("/workspace/more")) == 6 * PAGE
            await wait_for(lambda: disk.files("snapshots") == files)
            await provider.delete_snapshots(["first"])  # letting go needs no room
            disk.make_room()
            ref = await sandbox.snapshot(id="second", end=True)
            copy = await provider.restore(ref, id=new_id(), lease=Lease(owner="test", ttl_s=300.0))
            assert len(await copy.read("/workspace/kept")) == 6 * PAGE
            await copy.kill()
            await provider.delete_snapshots(["second"])
            await wait_for(lambda: disk.files("snapshots") == ["snapshots/identity", "snapshots/lock"])

        own.run(body)


@pytest.mark.slow
@pytest.mark.usefixtures("namespaces")
def test_the_file_of_a_snapshot_without_a_byte_for_it_is_not_left_half_written(tmp_path, disk):
    with real_rig(tmp_path / "records", snapshot_directory=disk.place / "snapshots") as own:

        async def body(provider: Provider) -> None:
            sandbox = await start(provider)
            said: list[str] = []
            for pages in range(20):  # until there is room for its layer, and then for its file too
                disk.fill(but=pages * PAGE)
                try:
                    await sandbox.snapshot(id="mine")
                    break
                except SandboxExhausted as error:
                    said.append(str(error))
                assert await provider.snapshots() == ()
                await wait_for(lambda: disk.files("snapshots") == ["snapshots/identity", "snapshots/lock"])
                disk.make_room()
            assert said[-1].startswith("the file of snapshot mine was not written: [Errno 28] No space left"), said
            assert [one.snapshot_id for one in await provider.snapshots()] == ["mine"]
            await provider.delete_snapshots(["mine"])
            await sandbox.kill()

        own.run(body)


@pytest.mark.usefixtures("namespaces")
def test_a_snapshot_that_finds_no_inode_leaves_the_sandbox_alive(tmp_path, disk):
    with real_rig(tmp_path / "records", snapshot_directory=disk.place / "snapshots") as own:

        async def body(provider: Provider) -> None:
            sandbox = await start(provider)
            await sandbox.write("/workspace/kept", b"x")
            disk.fill_inodes()
            with pytest.raises(SandboxExhausted, match="No space left"):
                await sandbox.snapshot(id="mine")
            assert (await provider.snapshots(), await sandbox.read("/workspace/kept")) == ((), b"x")
            disk.make_room_for_names()
            await wait_for(lambda: disk.files("snapshots") == ["snapshots/identity", "snapshots/lock"])
            assert (await sandbox.snapshot(id="mine", end=True)).durable
            await provider.delete_snapshots(["mine"])

        own.run(body)


@pytest.mark.usefixtures("namespaces")
def test_a_paused_sandbox_for_which_the_disk_has_no_room_stays_paused_with_its_files(tmp_path, disk):
    with real_rig(tmp_path / "records", snapshot_directory=disk.place / "snapshots") as own:

        async def body(provider: Provider) -> None:
            if not (await provider.capabilities()).pause:
                pytest.skip("no pauses that keep memory here: a cgroup v2 that may be written to is missing")
            async with Node(provider, templates={"base": Template()}) as node:
                served = await node.create(Order(template="base", timeout_s=100.0))
                await served.sandbox.write("/workspace/kept", b"x")
                await served.sandbox.start_process(["sleep", "1000"])
                await node.pause(served.id)
                disk.fill()
                assert await move_to_disk(node, 1) == 0
                assert (served.standing, served.sandbox.state) == (Standing.PAUSED, SandboxState.PAUSED)
                await node.connect(served.id, timeout_s=100.0)
                assert await served.sandbox.read("/workspace/kept") == b"x"
                await node.pause(served.id)
                disk.make_room()
                assert await move_to_disk(node, 1) == 1
                await node.connect(served.id, timeout_s=100.0)
                assert await served.sandbox.read("/workspace/kept") == b"x"
            await wait_for(lambda: disk.files("snapshots") == ["snapshots/identity", "snapshots/lock"])

        own.run(body)


def test_a_directory_of_snapshots_on_a_disk_without_a_byte_is_refused(tmp_path, disk):
    settings = NamespaceSettings(directory=tmp_path / "records", snapshot_directory=disk.place / "snapshots")
    disk.fill()
    with pytest.raises(ConfigError, match=r"snapshots cannot be kept in .*No space left"):
        NamespaceProvider(settings)
    disk.make_room()
    asyncio.run(NamespaceProvider(settings).close())


async def wait_for(holds) -> None:
    async with asyncio.timeout(20):
        while not holds():  # noqa: ASYNC110 - the reaper's thread tells nobody
            await asyncio.sleep(0.01)


# -- leases ----------------------------------------------------------------------------------------------------------


def test_a_table_of_leases_without_a_byte_asks_for_nothing_it_does_not_know_and_works_again(disk):
    table = LeaseTable(disk.place / "leases.sqlite")
    provider = FakeSandboxProvider()
    settings = KeeperSettings(name="real", provider="here")

    async def body() -> None:
        keeper = Keeper(table, provider, settings=settings, owner="first")
        held = await keeper.start("before", SandboxSpec(), policy_version=1)
        disk.fill()
        failures = 0
        for number in range(200):  # the log's last page takes some rows more
            try:
                await keeper.start(f"rollout-{number}", SandboxSpec(), policy_version=1)
            except SandboxError as error:
                assert "leases.sqlite cannot be used: database or disk is full" in str(error)  # noqa: PT017
                failures += 1
        assert failures >= 150
        rows = {row.sandbox_id for row in table.rows()}
        assert {one.sandbox_id for one in await provider.list() if one.death is None} <= rows
        with pytest.raises(SandboxError, match="cannot be used"):
            await keeper.suspend(held.claim)
        assert {row.sandbox_id for row in table.rows()} == rows  # reading needs no room
        disk.make_room()
        await keeper.sweep()
        await keeper.renew(held.claim)
        again = await keeper.start("after", SandboxSpec(), policy_version=2)
        await keeper.release(again.claim)
        await keeper.release(held.claim)
        await provider.close()

    asyncio.run(body())
    table.close()
    with contextlib.closing(sqlite3.connect(disk.place / "leases.sqlite")) as found:
        assert found.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


def test_a_table_of_leases_that_cannot_be_made_is_refused_and_can_be_made_later(disk):
    path = disk.place / "leases.sqlite"
    for left in (0, PAGE, 2 * PAGE, 8 * PAGE):
        disk.fill(but=left)
        with pytest.raises(SandboxError, match="cannot be used"):
            LeaseTable(path)
        disk.make_room()
        for one in disk.files():
            (disk.place / one).unlink()
    disk.fill()
    with pytest.raises(SandboxError, match="cannot be used"):
        LeaseTable(path)
    disk.make_room()
    table = LeaseTable(path)  # over what the other left
    assert table.rows() == ()
    table.close()


# -- records ---------------------------------------------------------------------------------------------------------


def test_a_record_is_written_whole_or_not_at_all_and_leaves_no_half(disk):
    mark = mark_of(os.getpid())
    assert mark is not None
    records = DiskRecords(disk.place / "records")
    before = DiskRecord(sandbox_id="one", backend="test", owner=mark)
    records.write(before)
    disk.fill()
    for name in ("one", "two"):
        with pytest.raises(OSError, match="No space left"):
            records.write(DiskRecord(sandbox_id=name, backend="test", owner=mark, labels={"a": "b"}))
    assert (records.read_all(), disk.files()) == ((before,), ["records/one.json"])
    records.note_kill("one")
    records.remove("one")
    assert disk.files() == []
    disk.make_room()
    records.write(before)
    assert records.read("one") == before


@pytest.mark.usefixtures("namespaces")
def test_no_sandbox_starts_without_a_record_that_others_could_clean_up_by(disk):
    with real_rig(disk.place / "records") as own:

        async def body(provider: Provider) -> None:
            before = await start(provider)
            files = disk.files()
            disk.fill()
            with pytest.raises(SandboxError, match=r"record .*cannot be written.*No space left"):
                await start(provider)
            assert (disk.files(), disk.free()) == (files, 0)
            assert [one.sandbox_id for one in await provider.list() if one.death is None] == [before.id]
            assert (await before.exec(["true"])).exit_code == 0
            assert (await before.kill()).reason is DeathReason.RELEASED  # ending needs no room
            disk.make_room()
            await (await start(provider)).kill()
            assert disk.files() == []

        own.run(body)
