"""Rollouts that are suspended with their memory go to disk: which, what their rows say, and who may resume them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from rollmill.clock import VirtualClock
from rollmill.errors import SandboxExhausted
from rollmill.sandboxes import SandboxSpec, SandboxState
from rollmill.sandboxes.leases import Keeper, KeeperSettings, LeaseTable, Phase
from rollmill.sandboxes.leases.law import Row, snapshot_id_of, to_move
from rollmill.testing import FakeSandboxProvider, run_virtual
from rollmill.testing.faults import Delay, FaultInjector, Raise

Scenario = Callable[[Keeper, LeaseTable, FakeSandboxProvider], Awaitable[Any]]


def with_keeper(tmp_path: Path, scenario: Scenario, *, faults: FaultInjector | None = None) -> None:
    clock = VirtualClock(start_s=1000.0)

    async def main() -> None:
        provider = FakeSandboxProvider(**({} if faults is None else {"faults": faults}))
        table = LeaseTable(tmp_path / "leases.sqlite")
        settings = KeeperSettings(name="test", provider="fake")
        keeper = Keeper(table, provider, settings=settings, owner="me", clock=clock, in_thread=False)
        await scenario(keeper, table, provider)
        await provider.close()
        table.close()

    run_virtual(main(), clock=clock)


async def suspended(keeper: Keeper, name: str) -> str:
    held = await keeper.start(name, SandboxSpec(), policy_version=1)
    await held.sandbox.write("/state", name.encode())
    await keeper.suspend(held.claim)
    await asyncio.sleep(1.0)
    return held.claim.sandbox_id


def row(name: str, *, phase: Phase = Phase.SUSPENDED, expires_s: float = 0.0, stored: bool = False) -> Row:
    snapshots = (snapshot_id_of(name),) if stored else ()
    return Row(
        sandbox_id=name, rollout_id=name, generation=1, provider="p", owner="o",
        phase=phase, snapshots=snapshots, expires_s=expires_s,
    )  # fmt: skip


def test_those_suspended_for_longest_go_first_and_only_those_that_have_memory():
    rows = [row("c", expires_s=3.0), row("a", expires_s=1.0), row("b", expires_s=2.0), row("stored", stored=True)]
    rows += [row(one.value, phase=one) for one in Phase if one is not Phase.SUSPENDED]
    assert [one.sandbox_id for one in to_move(rows, count=2)] == ["a", "b"]
    assert [one.sandbox_id for one in to_move(rows, count=9, busy=frozenset(["b"]))] == ["a", "c"]
    assert to_move(rows, count=0) == ()


def test_a_rollout_that_was_moved_keeps_lease_and_time_and_is_resumed_from_its_files(tmp_path):
    async def scenario(keeper: Keeper, table: LeaseTable, provider: FakeSandboxProvider) -> None:
        first, second = await suspended(keeper, "first"), await suspended(keeper, "second")
        before = table.find(first)
        assert before is not None
        assert await keeper.to_disk(1) == 1
        after = table.find(first)
        assert after is not None
        assert (after.snapshots, after.phase) == ((snapshot_id_of(first),), Phase.SUSPENDED)
        assert (after.expires_s, after.owner, after.generation) == (before.expires_s, "me", before.generation)
        states = {one.sandbox_id: one.state for one in await provider.list()}
        assert states == {first: SandboxState.DEAD, second: SandboxState.PAUSED}
        await keeper.sweep()
        held = await keeper.resume("first")
        assert await held.sandbox.read("/state") == b"first"
        assert await provider.snapshots() == ()
        assert await keeper.to_disk(5) == 1
        assert await keeper.to_disk(5) == 0

    with_keeper(tmp_path, scenario)


def test_one_that_finds_no_room_stays_suspended_with_its_memory(tmp_path):
    faults = FaultInjector({("snapshot", 1): Raise(lambda: SandboxExhausted("No space left on device"))})

    async def scenario(keeper: Keeper, table: LeaseTable, provider: FakeSandboxProvider) -> None:
        name = await suspended(keeper, "one")
        assert await keeper.to_disk(1) == 0
        found = table.find(name)
        assert found is not None
        assert (found.snapshots, (await provider.attach(name)).state) == ((), SandboxState.PAUSED)
        held = await keeper.resume("one")
        assert (held.claim.sandbox_id, await held.sandbox.read("/state")) == (name, b"one")

    with_keeper(tmp_path, scenario, faults=faults)


@pytest.mark.parametrize(("waits_s", "moved"), [(0.0, 0), (1.0, 1), (6.0, 1)], ids=["before", "during", "after"])
def test_a_resume_takes_it_before_it_is_moved_or_waits_until_it_was(tmp_path, waits_s, moved):
    faults = FaultInjector({("snapshot", 1): Delay(5.0)})

    async def scenario(keeper: Keeper, table: LeaseTable, provider: FakeSandboxProvider) -> None:
        await suspended(keeper, "one")
        moving = asyncio.ensure_future(keeper.to_disk(1))
        await asyncio.sleep(waits_s)
        held = await keeper.resume("one")
        assert await held.sandbox.read("/state") == b"one"
        assert held.sandbox.state is SandboxState.READY
        assert await moving == moved
        assert (await provider.snapshots(), [one.phase for one in table.rows()]) == ((), [Phase.RUNNING])

    with_keeper(tmp_path, scenario, faults=faults)
