"""The Firecracker adapter against a fake: what is asked in which order, connections that break, and what is left."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from microvm_builders import MachineRig, fake_kit, fake_settings, firecracker_rig
from rollmill.errors import ImageError, SandboxError, SandboxRetryable
from rollmill.sandboxes import Culprit, DeathReason, Lease, Provider, SandboxSpec, SandboxState
from rollmill.sandboxes.backends.firecracker import FirecrackerProvider, FirecrackerSettings
from sandbox_builders import LIMITS, new_id, start, until, why_no_namespaces

pytestmark = [pytest.mark.integration]


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("log") / "requests"


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory, log: Path) -> Iterator[MachineRig]:
    if reason := why_no_namespaces(tmp_path_factory.mktemp("probe")):
        pytest.skip(f"the fake runs its guest in namespaces, which do not work here: {reason}")
    with firecracker_rig(tmp_path_factory.mktemp("machines"), log=log) as rig:
        yield rig


def test_a_clone_asks_only_for_what_was_kept_of_its_template(rig, log):
    async def body(provider: Provider) -> None:
        await (await start(provider)).kill()
        seen = len(log.read_text().splitlines())
        await (await start(provider)).kill()
        new = [json.loads(line) for line in log.read_text().splitlines()[seen:]]
        backend = {"backend_type": "File", "backend_path": "memory"}
        assert new == [
            ["PUT", "/snapshot/load", {"snapshot_path": "state", "mem_backend": backend, "resume_vm": False}],
            ["PATCH", "/vm", {"state": "Resumed"}],
        ]

    rig.run(body)


def test_a_machine_is_set_up_started_paused_and_kept_in_this_order(rig, log):
    async def body(provider: Provider) -> None:
        await (await start(provider)).kill()
        first = [json.loads(line)[:2] for line in log.read_text().splitlines()][:8]
        assert first == [
            ["PUT", "/machine-config"], ["PUT", "/boot-source"], ["PUT", "/drives/disk0"], ["PUT", "/drives/disk1"],
            ["PUT", "/vsock"], ["PUT", "/actions"], ["PATCH", "/vm"], ["PUT", "/snapshot/create"],
        ]  # fmt: skip

    rig.run(body)


def test_a_sandbox_goes_on_over_a_new_connection_after_its_snapshot(rig):
    async def body(provider: Provider) -> None:
        sandbox = await start(provider)
        await sandbox.write("/tmp/kept", b"1")
        process = await sandbox.start_process(["cat"])
        ref = await sandbox.snapshot(id=new_id())
        assert sandbox.state is SandboxState.BUSY
        await process.write_stdin(b"still here")
        await process.close_stdin()
        assert (await process.wait()).stdout == b"still here"
        assert await sandbox.read("/tmp/kept") == b"1"
        assert [one.snapshot_id for one in await provider.snapshots()] == [ref.snapshot_id]
        await provider.delete_snapshots([ref.snapshot_id, "unknown"])
        assert await provider.snapshots() == ()
        with pytest.raises(ImageError, match="no snapshot"):
            await provider.restore(ref, id=new_id(), lease=Lease(owner="test"))
        await sandbox.kill()

    rig.run(body)


def test_a_snapshot_whose_caller_was_cancelled_is_carried_through_and_the_sandbox_goes_on(rig):
    async def body(provider: Provider) -> None:
        sandbox = await start(provider)
        name = new_id()
        taking = asyncio.ensure_future(sandbox.snapshot(id=name))
        while sandbox.state is not SandboxState.SNAPSHOTTING:  # noqa: ASYNC110
            await asyncio.sleep(0)  # each turn of the loop: it may take less time than any pause
        taking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await taking
        assert (await sandbox.exec(["echo", "on"])).stdout == b"on\n"
        assert [one.snapshot_id for one in await provider.snapshots()] == [name]
        await provider.delete_snapshots([name])
        await sandbox.kill()

    rig.run(body)


async def test_a_provider_that_is_closed_while_a_machine_boots_leaves_nothing(tmp_path):
    provider = FirecrackerProvider(fake_settings(tmp_path), make_kit=fake_kit)
    await provider.__aenter__()
    creating = asyncio.ensure_future(start(provider))
    await until(lambda: any(one.first_process is not None for one in provider.records.read_all()))
    await provider.close()
    with pytest.raises(SandboxError, match="closed"):
        await creating
    assert list((tmp_path / "records").iterdir()) == []
    with pytest.raises(SandboxError, match="closed"):
        await start(provider)


def test_nothing_of_a_machine_is_on_disk_once_it_has_ended(rig):
    async def body(provider: Provider) -> None:
        sandbox = await start(provider)
        directory = rig.provider.records.directory
        assert (directory / f"{sandbox.id}.machine").is_dir()
        await sandbox.kill()
        assert [one.name for one in directory.iterdir() if sandbox.id in one.name] == []

    rig.run(body)


async def test_a_machine_without_kvm_is_refused_with_what_is_missing(tmp_path):
    settings = FirecrackerSettings(directory=tmp_path, program="no-such-firecracker", kvm_device="/dev/null")
    with pytest.raises(SandboxError, match=r"no-such-firecracker is not installed.*needs KVM.*vmlinux"):
        async with FirecrackerProvider(settings):
            pytest.fail("it must not open")


def test_a_machine_that_is_killed_from_outside_is_the_providers_loss(rig):
    async def body(provider: Provider) -> None:
        sandbox = await start(provider)
        mark = rig.provider.records.read(sandbox.id).first_process
        os.kill(mark.pid, signal.SIGKILL)
        await until(lambda: sandbox.death is not None)
        assert (sandbox.death.reason, sandbox.death.culprit) == (DeathReason.PROVIDER_LOST, Culprit.INFRASTRUCTURE)

    rig.run(body)


async def test_what_firecracker_refuses_ends_the_start_with_its_words_and_leaves_nothing(tmp_path):
    async with FirecrackerProvider(fake_settings(tmp_path, refuses=True), make_kit=fake_kit) as provider:
        with pytest.raises(SandboxError, match=r"refused 'PUT /machine-config' \(400\): no more machines"):
            await start(provider)
        assert list((tmp_path / "records").iterdir()) == []
        assert await provider.list() == ()


async def test_snapshots_end_at_their_bound_and_there_is_room_again_when_one_is_deleted(tmp_path):
    settings = msgspec.structs.replace(fake_settings(tmp_path), snapshot_bytes=1)
    async with FirecrackerProvider(settings, make_kit=fake_kit) as provider:
        sandbox = await start(provider)
        first = await sandbox.snapshot(id="first")
        with pytest.raises(SandboxRetryable, match="snapshot_bytes"):
            await sandbox.snapshot(id="second")
        assert (await sandbox.exec(["true"])).exit_code == 0
        await provider.delete_snapshots([first.snapshot_id])
        await sandbox.snapshot(id="third")


async def test_the_template_used_longest_ago_goes_and_its_clones_go_on(tmp_path):
    log = tmp_path / "log"
    settings = msgspec.structs.replace(fake_settings(tmp_path, log=log), templates=1)
    large = SandboxSpec(limits=msgspec.structs.replace(LIMITS, memory_bytes=LIMITS.memory_bytes * 2))
    async with FirecrackerProvider(settings, make_kit=fake_kit) as provider:
        small = await start(provider)
        await start(provider, large)  # the small one's template goes
        await start(provider, large)
        assert (await small.exec(["echo", "on"])).stdout == b"on\n"
        await start(provider)  # boots again
        sizes = [
            json.loads(line)[2]["mem_size_mib"] for line in log.read_text().splitlines() if "machine-config" in line
        ]
        assert sizes == [256, 384, 256]  # 128 and 256 MiB, and 128 for the machine itself
