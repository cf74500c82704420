"""Daytona's pauses and snapshots, beyond the contract of all backends."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from adapter_rigs import AdapterRig, adapter_rig
from loopback_http import Fault, answer_json
from rollmill.errors import SandboxError, SandboxIdInUse, SandboxUnsupported
from rollmill.sandboxes import Lease, Provider, SandboxState
from sandbox_builders import new_id, real_rig, start, why_no_namespaces

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AdapterRig]:
    if reason := why_no_namespaces(tmp_path_factory.mktemp("probe")):
        pytest.skip(f"the fake runs programs in namespace sandboxes, and there are none here: {reason}")
    with (
        real_rig(tmp_path_factory.mktemp("records")) as engine,
        adapter_rig("daytona", engine, tmp_path_factory.mktemp("daytona"), call_s=5.0) as found,
    ):
        yield found


def test_who_waits_for_a_program_waits_through_a_pause(rig):
    async def body(provider: Provider) -> None:
        sandbox = await start(provider)
        process = await sandbox.start_process(["cat"])
        waiting = asyncio.ensure_future(process.wait())
        await process.write_stdin(b"before ")
        await sandbox.pause()
        await asyncio.sleep(0)
        seen = len(rig.fake.server.seen)
        for _ in range(20):
            await asyncio.sleep(0.01)  # several looks would have come
        asked = [one.path for one in rig.fake.server.seen[seen:]]
        assert len([one for one in asked if "toolbox" in one]) <= 1  # one was on its way
        assert sandbox.state is SandboxState.PAUSED
        assert not waiting.done()
        await sandbox.resume()
        await process.write_stdin(b"and after")
        await process.close_stdin()
        assert (await waiting).stdout == b"before and after"
        await sandbox.kill()

    rig.run(body)


def test_a_sandbox_that_somebody_else_paused_is_not_lost(rig):
    async def body(provider: Provider) -> None:
        sandbox = await start(provider)
        shown = rig.fake.sandboxes[sandbox.found.ref]
        shown["state"] = "paused"
        with pytest.raises(SandboxError, match="does not run"):
            await sandbox.exec(["true"])
        assert sandbox.death is None
        shown["state"] = "started"
        assert (await sandbox.exec(["echo", "on"])).stdout == b"on\n"
        await sandbox.kill()

    rig.run(body)


def test_a_sandbox_that_the_service_cannot_pause_goes_on(rig):
    async def body(provider: Provider) -> None:
        sandbox = await start(provider)
        path = f"POST /api/sandbox/{sandbox.found.ref}/pause"
        rig.fake.server.faults.append(Fault(path, answer=answer_json({"message": "containers do not pause"}, 400)))
        with pytest.raises(SandboxUnsupported, match="do not pause") as raised:
            await sandbox.pause()
        assert raised.value.capability == "pause"
        assert (await sandbox.exec(["true"])).exit_code == 0
        await sandbox.kill()

    rig.run(body)


def test_a_resumed_sandbox_has_its_time_limit_anew(rig):
    async def body(provider: Provider) -> None:
        sandbox = await start(provider, ttl_s=250.0)
        await sandbox.pause()
        rig.fake.sandboxes[sandbox.found.ref]["ttlMinutes"] = 0
        await sandbox.resume()
        assert rig.fake.sandboxes[sandbox.found.ref]["ttlMinutes"] == 5  # 250 s and 15 s more, in whole minutes
        await sandbox.kill()

    rig.run(body)


def test_a_snapshot_that_another_process_took_has_its_id_for_good_and_is_restored_by_it(rig):
    async def body(provider: Provider) -> None:
        sandbox, name = await start(provider), new_id()
        await sandbox.write("/tmp/a", b"kept")
        other = rig.another()
        ref = await (await other.attach(sandbox.id)).snapshot(id=name)
        with pytest.raises(SandboxIdInUse):
            await sandbox.snapshot(id=name)
        copy = await provider.restore(ref, id=new_id(), lease=Lease(owner="test", ttl_s=300.0))
        assert await copy.read("/tmp/a") == b"kept"
        await provider.delete_snapshots([name])
        assert [one for one in rig.fake.snapshots.values() if one["_ref"] is not None] == []
        await other.close()
        await sandbox.kill()
        await copy.kill()

    rig.run(body)


def test_files_of_a_virtual_machine_that_runs_are_refused_and_it_goes_on(rig):
    async def body(provider: Provider) -> None:
        rig.fake.containers = False
        try:
            sandbox = await start(provider)
        finally:
            rig.fake.containers = True
        with pytest.raises(SandboxUnsupported, match="linux-vm") as raised:
            await sandbox.snapshot(id=new_id())
        assert raised.value.capability == "files_snapshot"
        assert sandbox.state is SandboxState.READY
        assert (await sandbox.exec(["true"])).exit_code == 0
        await sandbox.kill()

    rig.run(body)
