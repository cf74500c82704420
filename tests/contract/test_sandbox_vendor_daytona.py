"""Daytona's own SDK against the fake that our adapter is tested against."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from test_sandbox_adapters_contract import engine  # noqa: F401

from adapter_rigs import DAYTONA_TOKEN, AdapterRig, adapter_rig
from rollmill.sandboxes import Lease, Provider
from sandbox_builders import SPEC, RealRig, new_id
from vendor_sdks import need

pytestmark = [
    pytest.mark.integration,
    pytest.mark.slow,
    # Its own.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*model_.*:UserWarning"),
]


@pytest.fixture(scope="module")
def rig(engine: RealRig, tmp_path_factory: pytest.TempPathFactory) -> Iterator[AdapterRig]:  # noqa: F811
    with adapter_rig("daytona", engine, tmp_path_factory.mktemp("daytona")) as opened:
        yield opened


def client(rig: AdapterRig):
    sdk = need("daytona")
    return sdk.AsyncDaytona(sdk.DaytonaConfig(api_key=DAYTONA_TOKEN, api_url=f"{rig.fake.server.url}/api", target="us"))


def test_the_sdk_alone_makes_uses_pauses_keeps_forks_and_ends_a_sandbox(rig):
    sdk = need("daytona")

    async def body(_: Provider) -> None:
        async with client(rig) as daytona:
            made = await daytona.create(
                sdk.CreateSandboxFromSnapshotParams(name=new_id(), labels={"step": "3"}, network_block_all=True)
            )
            ran = await made.process.exec("echo out; echo err >&2; exit 3")
            assert (ran.result, ran.exit_code) == ("out\nerr\n", 3)
            await made.fs.upload_file(b"\x00\xff", "/tmp/f")
            assert await made.fs.download_file("/tmp/f") == b"\x00\xff"
            with pytest.raises(sdk.DaytonaError):
                await made.fs.download_file("/tmp/missing")
            listed = [one.id async for one in daytona.list(sdk.ListSandboxesQuery(labels={"step": "3"}))]
            assert listed == [made.id]
            await made.set_ttl(30)
            assert rig.fake.sandboxes[made.id]["ttlMinutes"] == 30
            await made.pause()
            assert rig.fake.sandboxes[made.id]["state"] == "paused"
            await made.start()
            name = f"snapshot-{new_id()}"
            await made.create_snapshot(name)
            states = [(await daytona.snapshot.get(name)).state for _ in range(2)]
            assert states == ["snapshotting", "active"]
            copy = await daytona.create(sdk.CreateSandboxFromSnapshotParams(name=new_id(), snapshot=name))
            fork = await made.fork()
            for one in (copy, fork):
                assert await one.fs.download_file("/tmp/f") == b"\x00\xff"
            await daytona.snapshot.delete(name)
            with pytest.raises(sdk.DaytonaNotFoundError):
                await daytona.snapshot.get(name)
            for one in (made, copy, fork):
                await one.delete()
            with pytest.raises(sdk.DaytonaNotFoundError):
                await daytona.get(made.id)

    rig.run(body)


def test_the_sdk_sees_what_we_made_and_kept_and_we_what_it_made(rig):
    sdk = need("daytona")

    async def body(provider: Provider) -> None:
        name = new_id()
        sandbox = await provider.create(SPEC, id=name, labels={"step": "4"}, lease=Lease(owner="test", ttl_s=300.0))
        await sandbox.write("/tmp/f", b"ours")
        ref = await sandbox.snapshot(id=new_id())
        async with client(rig) as daytona:
            (theirs,) = [one async for one in daytona.list(sdk.ListSandboxesQuery(labels={"rollmill-id": name}))]
            assert (theirs.id, theirs.name, theirs.state) == (sandbox.found.ref, f"rollmill-{name}", "started")
            assert theirs.labels["step"] == "4"
            assert await theirs.fs.download_file("/tmp/f") == b"ours"
            await theirs.fs.upload_file(b"theirs", "/tmp/g")
            await theirs.pause()
            other = rig.another()
            attached = await other.attach(name)
            assert attached.state.value == "paused"
            await attached.resume()
            assert await attached.read("/tmp/g") == b"theirs"
            await other.close()
            kept = next(one for one in rig.fake.snapshots.values() if one["_ref"] is not None)
            assert (await daytona.snapshot.get(kept["name"])).state == "active"
        await sandbox.kill()
        await provider.delete_snapshots([ref.snapshot_id])

    rig.run(body)
