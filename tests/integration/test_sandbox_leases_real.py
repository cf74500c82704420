"""Leases on namespace sandboxes whose owner is killed: what it suspended on disk goes on, nothing else is left."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rollmill.errors import SandboxLeaseLost
from rollmill.sandboxes import NamespaceProvider, NamespaceSettings
from rollmill.sandboxes.leases import Keeper, KeeperSettings, LeaseTable, Phase
from sandbox_builders import why_no_namespaces

pytestmark = pytest.mark.integration

OWNER = """
import asyncio, sys
from pathlib import Path
from rollmill.sandboxes import NamespaceProvider, NamespaceSettings, SandboxSpec
from rollmill.sandboxes.leases import Keeper, KeeperSettings, LeaseTable

async def main(root):
    backend = NamespaceSettings(directory=root / "records", snapshot_directory=root / "snapshots")
    async with NamespaceProvider(backend) as provider:
        settings = KeeperSettings(name="real", provider="here")
        keeper = Keeper(LeaseTable(root / "leases.sqlite"), provider, settings=settings, owner="first")
        can_pause = (await provider.capabilities()).pause
        for rollout in ("moved", "running", "paused", "stored") if can_pause else ("running", "stored"):
            held = await keeper.start(rollout, SandboxSpec(), policy_version=5)
            await held.sandbox.write("/root/notes", rollout.encode())
            if rollout != "running":
                await keeper.suspend(held.claim, keep_memory=rollout in ("moved", "paused"))
        if can_pause:
            assert await keeper.to_disk(1) == 1  # as a node does that is short
        print("done", flush=True)
        await asyncio.sleep(1000)

asyncio.run(main(Path(sys.argv[1])))
"""


def settings_of(root: Path) -> NamespaceSettings:
    return NamespaceSettings(directory=root / "records", snapshot_directory=root / "snapshots")


@pytest.fixture(scope="module", autouse=True)
def works(tmp_path_factory: pytest.TempPathFactory) -> None:
    if reason := why_no_namespaces(tmp_path_factory.mktemp("probe")):
        pytest.skip(f"no namespace sandboxes here: {reason}")


def test_a_rollout_that_was_stored_survives_its_owner_and_nothing_else_is_left(tmp_path):
    with subprocess.Popen([sys.executable, "-c", OWNER, str(tmp_path)], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "done\n"
        owner.send_signal(signal.SIGKILL)

    async def second() -> None:
        table = LeaseTable(tmp_path / "leases.sqlite")
        phases = {row.rollout_id: row.phase for row in table.rows()}
        async with NamespaceProvider(settings_of(tmp_path)) as provider:
            can_pause = (await provider.capabilities()).pause
            paused = {"paused": Phase.SUSPENDED} if can_pause else {}
            kept = ("moved", "stored") if can_pause else ("stored",)
            assert phases == {"running": Phase.RUNNING, **paused, **dict.fromkeys(kept, Phase.SUSPENDED)}
            settings = KeeperSettings(name="real", provider="here")
            keeper = Keeper(table, provider, settings=settings, owner="second")
            report = await keeper.sweep()
            assert [step.why for step in report.dropped] == ["the provider has lost it"] * (1 + len(paused))
            resumed = {name: await keeper.resume(name) for name in kept}
            for name, held in resumed.items():
                assert await held.sandbox.read("/root/notes") == name.encode()
                assert (held.claim.owner, table.rows()[0].policy_version) == ("second", 5)
            for lost in ("running", "paused"):
                with pytest.raises(SandboxLeaseLost, match="it has no sandbox"):
                    await keeper.resume(lost)
            for held in resumed.values():
                await keeper.release(held.claim)
            assert (table.rows(), await provider.snapshots()) == ((), ())
        table.close()

    asyncio.run(second())
    assert list((tmp_path / "records").glob("*.json")) == []
