"""Modal's own SDK, over gRPC on loopback: by itself, and under our adapter for the whole contract of all sandboxes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from test_sandbox_adapters_contract import *  # noqa: F403

import adapter_rigs
from adapter_rigs import AdapterRig, Opened, adapter_rig
from rollmill.errors import ImageError, SandboxDead, SandboxRetryable
from rollmill.sandboxes import DeathReason, Lease, NamedImage, Provider, SandboxSpec
from rollmill.sandboxes.backends.modal import ModalProvider, ModalSettings
from sandbox_builders import LIMITS, SPEC, RealRig, new_id, start
from vendor_sdks import need

pytestmark = [
    pytest.mark.integration,
    pytest.mark.slow,
    # Its own: of what it imports, and of a connection that it lets go by a finalizer.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

LEASE = Lease(owner="test", ttl_s=300.0)


async def open_modal_sdk(engine: Provider, directory: Path, **settings: Any) -> Opened:
    from modal_server import ModalServer

    server = ModalServer(engine, page=2)
    await server.start()
    return ModalProvider(ModalSettings(**settings)), server


@pytest.fixture(scope="module")
def rig(engine: RealRig, tmp_path_factory: pytest.TempPathFactory) -> Iterator[AdapterRig]:
    modal = need("modal")
    from modal_server import TOKEN_ID, TOKEN_SECRET

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MODAL_CONFIG_PATH", str(tmp_path_factory.mktemp("config") / "modal.toml"))
        patch.setenv("MODAL_TOKEN_ID", TOKEN_ID)
        patch.setenv("MODAL_TOKEN_SECRET", TOKEN_SECRET)
        patch.setitem(adapter_rigs.OPENERS, "modal", open_modal_sdk)
        with adapter_rig("modal", engine, tmp_path_factory.mktemp("modal")) as opened:
            patch.setenv("MODAL_SERVER_URL", opened.fake.url)
            yield opened

            async def let_go(_: Provider) -> None:
                client = await modal.Client.from_env.aio()
                await client.close.aio()

            opened.run(let_go)


def test_the_sdk_alone_makes_uses_keeps_and_ends_a_sandbox(rig):
    modal = need("modal")
    need("modal.experimental")

    async def body(_: Provider) -> None:
        app = await modal.App.lookup.aio("theirs", create_if_missing=True)
        image = modal.Image.from_registry("python:3.12-slim")
        options = {"app": app, "timeout": 100, "block_network": True}
        sandbox = await modal.Sandbox.create.aio(name="one", tags={"step": "3"}, image=image, **options)
        process = await sandbox.exec.aio("sh", "-c", "cat >/tmp/f; echo out; echo err >&2; exit 3", text=False)
        process.stdin.write(b"\x00\xff")
        process.stdin.write_eof()
        await process.stdin.drain.aio()
        read = [b"".join([piece async for piece in stream]) for stream in (process.stdout, process.stderr)]
        assert (read, await process.wait.aio()) == ([b"out\n", b"err\n"], 3)
        listed = [one.object_id async for one in modal.Sandbox.list.aio(app_id=app.app_id, tags={"step": "3"})]
        assert listed == [sandbox.object_id]
        assert (await modal.Sandbox.from_name.aio("theirs", "one")).object_id == sandbox.object_id
        kept = await sandbox.snapshot_filesystem.aio()
        assert await sandbox.terminate.aio(wait=True) == 137
        copy = await modal.Sandbox.create.aio(name="two", image=kept, **options)
        process = await copy.exec.aio("cat", "/tmp/f", text=False)
        assert b"".join([piece async for piece in process.stdout]) == b"\x00\xff"
        await copy.terminate.aio(wait=True)
        await modal.experimental.image_delete.aio(kept.object_id)
        with pytest.raises(modal.exception.NotFoundError):
            await modal.Sandbox.create.aio(name="three", image=modal.Image.from_id(kept.object_id), **options)

    rig.run(body)


def test_what_we_made_is_seen_by_the_sdk_with_our_tags_and_without_network(rig):
    modal = need("modal")

    async def body(provider: Provider) -> None:
        name = new_id()
        sandbox = await provider.create(SPEC, id=name, labels={"step": "3"}, lease=LEASE)
        app = await modal.App.lookup.aio("rollmill", create_if_missing=True)
        tags = {"rollmill-id": name, "step": "3"}
        (theirs,) = [one async for one in modal.Sandbox.list.aio(app_id=app.app_id, tags=tags)]
        assert tags.items() <= (await theirs.get_tags.aio()).items()
        definition = rig.fake.sandboxes[theirs.object_id].request.definition
        assert (definition.name, definition.timeout_secs) == (f"rollmill-{name}", 315)  # 300 s and 15 s more
        assert definition.resources.memory_mb == definition.resources.memory_mb_max == 128
        await sandbox.kill()

    rig.run(body)


def test_no_room_is_to_be_tried_again_and_an_image_that_is_not_there_is_an_image_error(rig):
    async def body(provider: Provider) -> None:
        rig.fake.busy = 1
        with pytest.raises(SandboxRetryable, match="too many"):
            await start(provider)
        for name in ("nothing", "im-nothing"):
            with pytest.raises(ImageError):
                await start(provider, SandboxSpec(image=NamedImage(name=name), limits=LIMITS))

    rig.run(body)


def test_a_sandbox_that_modal_lost_is_infrastructures_fault(rig):
    async def body(provider: Provider) -> None:
        sandbox = await start(provider)
        await rig.fake.sandboxes[sandbox.found.ref].sandbox.kill()
        with pytest.raises(SandboxDead) as raised:
            await sandbox.exec(["true"])
        assert raised.value.fault == "infrastructure"

    rig.run(body)


def test_a_sandbox_whose_time_ran_out_there_ended_by_its_wall_limit_and_by_the_services_where_that_is_shorter(rig):
    async def body(provider: Provider) -> None:
        for wall_s, reason in ((3600.0, DeathReason.POLICY_WALL), (200_000.0, DeathReason.PROVIDER_LOST)):
            sandbox = await start(provider, SandboxSpec(limits=msgspec.structs.replace(LIMITS, wall_s=wall_s)))
            theirs = rig.fake.sandboxes[sandbox.found.ref]
            assert theirs.request.definition.timeout_secs == min(wall_s + 15, 86_400)
            await theirs.sandbox.kill(DeathReason.POLICY_WALL)
            assert (await provider.driver.explain(sandbox.found)).reason is reason  # type: ignore[attr-defined]
            await sandbox.kill()

    rig.run(body)


def test_another_process_finds_a_snapshot_by_its_id(rig):
    async def body(provider: Provider) -> None:
        sandbox = await start(provider)
        await sandbox.write("/tmp/a", b"kept")
        ref = await sandbox.snapshot(id=new_id(), end=True)
        other = rig.another()
        copy = await other.restore(ref, id=new_id(), lease=LEASE)
        assert await copy.read("/tmp/a") == b"kept"
        await copy.kill()
        await other.delete_snapshots([ref.snapshot_id])
        await other.close()
        third = rig.another()
        with pytest.raises(ImageError):
            await third.restore(ref, id=new_id(), lease=LEASE)
        await third.close()
        await provider.delete_snapshots([ref.snapshot_id])

    rig.run(body)


def test_sandboxes_are_listed_page_by_page(rig):
    async def body(provider: Provider) -> None:
        label = {"many": new_id()}
        made = [await provider.create(SPEC, id=new_id(), labels=label, lease=LEASE) for _ in range(5)]
        other = rig.another()
        assert {one.sandbox_id for one in await other.list(labels=label)} == {one.id for one in made}
        await other.close()
        for one in made:
            await one.kill()

    rig.run(body)
