"""What a restarted service takes on and what it ends: the law, the rows, and a node after another on one provider."""

from __future__ import annotations

import asyncio
import stat
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rollmill.clock import VirtualClock
from rollmill.errors import ConfigError
from rollmill.sandboxes.records import SandboxSpec, SnapshotRef
from rollmill.sandboxes.service.adoption import adoption
from rollmill.sandboxes.service.law import HttpProblem, Plan, Standing
from rollmill.sandboxes.service.ledger import Ledger, SandboxRow
from rollmill.sandboxes.service.node import Node
from rollmill.sandboxes.service.served import Order
from rollmill.sandboxes.service.settings import ServiceSettings
from rollmill.sandboxes.service.shelf import Kept
from rollmill.sandboxes.service.templates import Template
from rollmill.testing import FakeSandboxProvider, run_virtual

SETTINGS = ServiceSettings(paused_ttl_s=500.0)
ORDER = Order(template="base", timeout_s=60.0, metadata={"of": "test"}, plan=Plan(pause=True, keep_memory=False))
ROW = SandboxRow(
    sandbox_id="sbx1",
    order=ORDER,
    spec=SandboxSpec(),
    envs={"A": "1"},
    token="secret",
    standing=Standing.PAUSED,
    started_wall_s=1.0,
    end_wall_s=200.0,
    lives=1,
    backend_id="sbx1-1",
    snapshot="sbx1-files-1-5eed",
)


def ref(name: str, *, durable: bool = False) -> SnapshotRef:
    return SnapshotRef(snapshot_id=name, backend="fake", spec=SandboxSpec(), durable=durable)


def kept(name: str) -> Kept:
    return Kept(ref=ref(name), name="", sandbox_id="sbx1", envs={})


def decided(*rows: SandboxRow, held: tuple[str, ...] = (), templates: tuple[Kept, ...] = (), now_s: float = 100.0):
    found = {name: ref(name) for name in held}
    return adoption(rows, templates, held=found, salt="5eed", now_wall_s=now_s, paused_ttl_s=500.0)


def test_what_is_paused_as_files_is_adopted_while_they_are_there_and_its_time_lasts():
    (found,) = decided(ROW, held=("sbx1-files-1-5eed",)).adopted
    assert found == msgspec.structs.replace(ROW, files=ref("sbx1-files-1-5eed"))
    (gone,) = decided(ROW).ended
    assert "sbx1-files-1-5eed of its files is not there" in gone.why
    late = decided(ROW, held=("sbx1-files-1-5eed",), now_s=203.0)
    assert [one.why for one in late.ended] == ["its time as a paused one ended 3 s ago"]
    assert late.orphans == ("sbx1-files-1-5eed",)


def test_what_ran_ends_unless_its_files_were_kept_in_that_moment():
    running = msgspec.structs.replace(ROW, standing=Standing.RUNNING)
    (gone,) = decided(running).ended
    assert (gone.backend_id, gone.why) == ("sbx1-1", "it was running in the service that ended, with what ran in it")
    (found,) = decided(running, held=("sbx1-files-1-5eed",)).adopted
    assert (found.standing, found.end_wall_s) == (Standing.PAUSED, 600.0)


def test_snapshots_of_this_ledger_that_no_row_names_are_orphans_and_those_of_others_are_not():
    found = decided(
        held=("frk1-5eed", "snp1-5eed", "snp2-beef", "mine"), templates=(kept("snp1-5eed"), kept("snp3-5eed"))
    )
    assert found.orphans == ("frk1-5eed",)
    assert ([one.id for one in found.templates], found.lost_templates) == (["snp1-5eed"], ("snp3-5eed",))


# -- the file ----------------------------------------------------------------------------------------------------------


def test_rows_are_read_as_they_were_written_by_the_next_owner_alone(tmp_path):
    path = tmp_path / "made" / "leases.sqlite"
    ledger = Ledger(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with pytest.raises(ConfigError, match="another service has its leases"):
        Ledger(path)

    async def write() -> None:
        await ledger.put(msgspec.structs.replace(ROW, standing=Standing.RUNNING, snapshot=""))
        await ledger.put(ROW)
        await ledger.put(msgspec.structs.replace(ROW, sandbox_id="sbx2"))
        await ledger.remove("sbx2")
        await ledger.put_template(kept("snp1"))

    asyncio.run(write())
    salt = ledger.salt
    ledger.close()
    again = Ledger(path)
    assert (again.sandboxes(), again.templates(), again.salt) == ((ROW,), (kept("snp1"),), salt)
    again.close()


def test_another_file_is_refused_and_left_as_it_is(tmp_path):
    path = tmp_path / "other"
    path.write_bytes(b"no database, but a text that is long enough to be looked at as one" * 20)
    before = path.read_bytes()
    with pytest.raises(ConfigError, match="Name another file"):
        Ledger(path)
    assert path.read_bytes() == before


# -- one service after another -----------------------------------------------------------------------------------------


class Generations:
    """Services one after the other, with one ledger, on a provider that outlives them."""

    def __init__(self, folder: Path, clock: VirtualClock) -> None:
        self.folder, self.clock, self.provider = folder, clock, FakeSandboxProvider()
        self.ledger: Ledger | None = None
        self.node: Node | None = None

    async def start(self) -> Node:
        self.ledger = Ledger(self.folder / "leases.sqlite", in_thread=False)
        templates = {"base": Template()}
        self.node = Node(self.provider, settings=SETTINGS, templates=templates, clock=self.clock, ledger=self.ledger)
        return await self.node.__aenter__()

    async def kill(self) -> None:
        """End a service as SIGKILL does: nothing is tidied up."""
        assert self.ledger is not None
        assert self.node is not None
        for one in self.node._served.values():
            if one.timer is not None:
                one.timer.cancel()
        self.ledger.close()

    async def stop(self) -> None:
        assert self.ledger is not None
        assert self.node is not None
        await self.node.__aexit__(None, None, None)
        self.ledger.close()

    async def alive(self) -> set[str]:
        return {one.sandbox_id for one in await self.provider.list() if one.death is None}


def generations(tmp_path: Path, scenario: Callable[[Generations], Awaitable[Any]]) -> None:
    clock = VirtualClock(start_s=1000.0)
    run_virtual(scenario(Generations(tmp_path, clock)), clock=clock)  # pyright: ignore[reportArgumentType]


def test_after_a_crash_paused_files_and_templates_are_there_and_everything_else_is_ended(tmp_path):
    async def scenario(world: Generations) -> None:
        node = await world.start()
        paused, running, frozen = [await node.create(ORDER) for _ in range(3)]
        await paused.sandbox.write("/state", b"kept")
        await node.snapshot(running.id, name="mine")
        await node.pause(paused.id, keep_memory=False)
        await node.pause(frozen.id)
        await world.kill()
        assert len(await world.alive()) == 2
        node = await world.start()
        assert await world.alive() == set()
        found = node.find(paused.id)
        assert (found.token, found.envs, found.order) == (paused.token, paused.envs, paused.order)
        assert (found.standing, found.end_wall_s) == (Standing.PAUSED, paused.end_wall_s)
        for one in (running, frozen):
            with pytest.raises(HttpProblem, match="is not here"):
                node.find(one.id)
        with pytest.raises(HttpProblem, match="connect to it first"):
            await node.fork(paused.id, count=1, timeout_s=60.0)
        again, resumed = await node.connect(paused.id, timeout_s=60.0)
        assert (resumed, await again.sandbox.read("/state")) == (True, b"kept")
        assert (await node.create(Order(template="mine", timeout_s=60.0))).standing is Standing.RUNNING
        assert [ref.snapshot_id for ref in await world.provider.snapshots()] == list(node.shelf.ids())
        await node.pause(paused.id, keep_memory=False)  # under another name than before
        await world.kill()
        node = await world.start()
        assert [one.id for one in node.all().values()] == [paused.id]
        await asyncio.sleep(501.0)  # and it ends at its time
        assert node.all() == {}
        await world.stop()
        assert (await world.alive(), await world.provider.snapshots()) == (set(), ())

    generations(tmp_path, scenario)


def test_what_a_crash_left_half_done_is_ended_or_goes_on(tmp_path):
    async def scenario(world: Generations) -> None:
        node = await world.start()
        one = await node.create(ORDER)
        await one.sandbox.write("/state", b"kept")
        # Killed after the snapshot, before anybody heard of it; and with a fork's snapshot under way.
        name = f"{one.id}-files-1-{world.ledger.salt}"  # pyright: ignore[reportOptionalMemberAccess]
        one.snapshot = name
        await world.ledger.put(
            msgspec.structs.replace(ROW, sandbox_id=one.id, snapshot=name, standing=Standing.RUNNING)
        )  # pyright: ignore
        await one.sandbox.snapshot(id=f"frk-{world.ledger.salt}")  # pyright: ignore[reportOptionalMemberAccess]
        await one.sandbox.snapshot(id=name, end=True)
        await world.kill()
        node = await world.start()
        assert [ref.snapshot_id for ref in await world.provider.snapshots()] == [name]
        again, _ = await node.connect(one.id, timeout_s=60.0)
        assert await again.sandbox.read("/state") == b"kept"
        await world.stop()

    generations(tmp_path, scenario)


def test_without_durable_snapshots_a_service_that_is_stopped_leaves_nothing(tmp_path):
    async def scenario(world: Generations) -> None:
        node = await world.start()
        one = await node.create(ORDER)
        await node.snapshot(one.id, name="mine")
        await node.pause(one.id, keep_memory=False)
        await world.stop()
        assert (await world.alive(), await world.provider.snapshots()) == (set(), ())
        node = await world.start()
        assert (node.all(), node.shelf.ids()) == ({}, ())
        await world.stop()

    generations(tmp_path, scenario)
