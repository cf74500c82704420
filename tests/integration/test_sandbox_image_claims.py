"""What a snapshot on a disk stands on stays in the image store, whoever is killed, until the snapshot goes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from image_builders import add, new_store, small_root
from rollmill.errors import ImageError
from rollmill.sandboxes import Lease, NamespaceProvider, NamespaceSettings
from rollmill.sandboxes.images import ImageStore
from rollmill.sandboxes.leases import Keeper, KeeperSettings, LeaseTable
from sandbox_builders import why_no_namespaces

pytestmark = pytest.mark.integration

OWNER = """
import asyncio, os, signal, sys
from pathlib import Path
from rollmill.sandboxes import Lease, NamedImage, NamespaceProvider, NamespaceSettings, SandboxSpec
from rollmill.sandboxes.backends.namespaces.snapshot_disk import SnapshotDisk
from rollmill.sandboxes.images import ImageStoreSettings
from rollmill.sandboxes.images.holds import Holds
from rollmill.sandboxes.leases import Keeper, KeeperSettings, LeaseTable


def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)


async def main(root, moment):
    images = ImageStoreSettings(directory=root / "store", durable=False, form="tree")
    backend = NamespaceSettings(
        directory=root / "records", snapshot_directory=root / "snapshots", images=images
    )
    async with NamespaceProvider(backend) as provider:
        spec = SandboxSpec(image=NamedImage(name="plain"))
        sandbox = await provider.create(spec, id="one", lease=Lease(owner="first", ttl_s=300.0))
        await sandbox.write("/tmp/written", b"plain")
        if moment == "before its file":
            SnapshotDisk.write = die
        await sandbox.snapshot(id="kept", end=True)
        if moment == "after its file went":
            Holds.unpin = die
            await provider.delete_snapshots(["kept"])
        table = LeaseTable(root / "leases.sqlite")
        keeper = Keeper(table, provider, settings=KeeperSettings(name="real", provider="here"), owner="first")
        held = await keeper.start("rollout", SandboxSpec(image=NamedImage(name="leased")), policy_version=3)
        await held.sandbox.write("/tmp/written", b"leased")
        await keeper.suspend(held.claim, keep_memory=False)
        print("done", flush=True)
        await asyncio.sleep(1000)

asyncio.run(main(Path(sys.argv[1]), sys.argv[2]))
"""


@pytest.fixture(scope="module", autouse=True)
def works(tmp_path_factory: pytest.TempPathFactory) -> None:
    if reason := why_no_namespaces(tmp_path_factory.mktemp("probe")):
        pytest.skip(f"no namespace sandboxes here: {reason}")


@pytest.fixture
def store(tmp_path: Path) -> ImageStore:
    """A store with the images `plain` and `leased`, which share no file that differs between them."""
    store = new_store(tmp_path / "store")
    root = small_root(tmp_path / "root", programs=("sh",))
    for name in ("plain", "leased"):
        (root / "name").write_text(name, encoding="ascii")
        add(store, root, name=name)
    return store


def killed_owner(root: Path, moment: str = "") -> None:
    """Run an owner until it dies at the moment that is named, else until it is done, and then kill it."""
    with subprocess.Popen([sys.executable, "-c", OWNER, str(root), moment], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == ("" if moment else "done\n")
        owner.send_signal(signal.SIGKILL)
    assert owner.returncode == -signal.SIGKILL


def collect(store: ImageStore) -> dict[str, list[str]]:
    """Collect in another process as if there were no room at all; return who holds what is left, by name."""
    command = ["sandbox", "images", "--budget-gib", "0", "--store", os.fspath(store.layout.directory), "--json"]
    done = subprocess.run([sys.executable, "-m", "rollmill.cli", *command], capture_output=True, text=True, check=True)
    return {name: row["held_by"] for row in json.loads(done.stdout)["images"] for name in row["names"]}


def with_provider(root: Path, store: ImageStore, body: Callable[[NamespaceProvider], Awaitable[Any]]) -> None:
    settings = NamespaceSettings(
        directory=root / "records", snapshot_directory=root / "snapshots", images=store.settings
    )

    async def main() -> None:
        async with asyncio.timeout(90), NamespaceProvider(settings) as provider:
            await body(provider)

    asyncio.run(main())


def test_what_snapshots_and_leases_of_a_killed_owner_stand_on_is_not_collected(tmp_path, store):
    killed_owner(tmp_path)
    where = f"in {tmp_path / 'snapshots'}"
    held = collect(store)
    assert held["plain"] == [f"snapshot kept {where}"]
    (leased,) = held["leased"]
    assert leased.startswith("snapshot r") and leased.endswith(where)  # noqa: PT018 - one text

    async def body(provider: NamespaceProvider) -> None:
        (ref,) = [one for one in await provider.snapshots() if one.snapshot_id == "kept"]
        sandbox = await provider.restore(ref, id="two", lease=Lease(owner="second", ttl_s=300.0))
        table = LeaseTable(tmp_path / "leases.sqlite")
        keeper = Keeper(table, provider, settings=KeeperSettings(name="real", provider="here"), owner="second")
        await keeper.sweep()
        rollout = await keeper.resume("rollout")
        for one, name in ((sandbox, b"plain"), (rollout.sandbox, b"leased")):
            assert (await one.read("/name"), await one.read("/tmp/written")) == (name, name)
        await provider.delete_snapshots(["kept"])
        await sandbox.kill()
        await keeper.release(rollout.claim)
        assert await provider.snapshots() == ()
        table.close()

    with_provider(tmp_path, store, body)
    assert collect(store) == {}
    assert list(store.layout.part("holds").iterdir()) == []


@pytest.mark.parametrize("moment", ["before its file", "after its file went"])
def test_a_claim_whose_snapshot_is_not_there_stands_until_the_directory_is_opened(tmp_path, store, moment):
    killed_owner(tmp_path, moment)
    assert list(collect(store)) == ["plain"]

    async def body(provider: NamespaceProvider) -> None:
        assert await provider.snapshots() == ()

    with_provider(tmp_path, store, body)
    assert collect(store) == {}


def test_snapshots_of_before_there_were_claims_get_theirs_and_a_lost_image_is_told(tmp_path, store, caplog):
    killed_owner(tmp_path)
    for path in store.layout.part("holds").glob("pin-*"):
        path.unlink()
    store.remove("plain")

    async def body(provider: NamespaceProvider) -> None:
        (ref,) = [one for one in await provider.snapshots() if one.snapshot_id == "kept"]
        with pytest.raises(ImageError, match="is not in the store"):
            await provider.restore(ref, id="two", lease=Lease(owner="second", ttl_s=300.0))

    with_provider(tmp_path, store, body)
    assert f"snapshot kept in {tmp_path / 'snapshots'} cannot be restored: the image" in caplog.text
    assert list(collect(store)) == ["leased"]
