"""Snapshots that are carried through, and forks: what is left when their callers are cancelled or a part fails."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from rollmill.errors import ConfigError, SandboxExhausted, SandboxIdInUse
from rollmill.sandboxes.backends.namespaces.carried import CarriedSnapshots
from rollmill.sandboxes.records import DeathReason, Lease, SandboxSpec, SnapshotRef

LEASE = Lease(owner="test")


class Sandbox:
    """One of which snapshots are taken."""

    def __init__(self, name: str) -> None:
        self.id, self.ended = name, None

    async def awake(self) -> None:
        """Answer at once."""

    def order_end(self, reason: DeathReason) -> None:
        self.ended = reason


class Home(CarriedSnapshots[Any]):
    """Takes each snapshot once `may_take` is set, and cannot restore the ids in `refused`."""

    def __init__(self, *, refused: Sequence[str] = ()) -> None:
        super().__init__()
        self.may_take = asyncio.Event()
        self.held: dict[str, SnapshotRef] = {}
        self.kept: dict[str, bool] = {}
        self.made: dict[str, Sandbox] = {}
        self.refused = refused
        self.cancelled: list[str] = []
        self.begun_for_a_fork: list[bool] = []

    def _begin(self, sandbox: Any, *, id: str) -> None:
        if id in self.held:
            raise SandboxIdInUse(f"there is a snapshot {id}")
        self.begun_for_a_fork.append(id in self._forking)

    async def _take(self, sandbox: Any, *, id: str, force: bool, end: bool, to_keep: bool) -> SnapshotRef:
        await self.may_take.wait()
        self.kept[id] = to_keep
        ref = SnapshotRef(
            snapshot_id=id, backend="test", spec=SandboxSpec(), disk_bytes=0, inodes=0, created_wall_s=0.0
        )
        self.held[id] = ref
        return ref

    async def restore(
        self, ref: SnapshotRef, *, id: str, labels: Mapping[str, str] | None = None, lease: Lease
    ) -> Sandbox:
        if id in self.refused:
            await asyncio.sleep(0)
            raise SandboxExhausted(f"no room for {id}")
        if id == "slow":
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                self.cancelled.append(id)
                raise
        self.made[id] = Sandbox(id)
        return self.made[id]

    async def delete_snapshots(self, ids: Sequence[str]) -> None:
        for one in ids:
            self.held.pop(one, None)

    def visible(self) -> list[str]:
        return [one for one in self.held if one not in self._forking]


async def turns(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def fork(home: Home, sandbox: Any, *ids: str) -> tuple[Any, ...]:
    return await home.fork_of(sandbox, ids, lease=LEASE, labels=None, stop_processes=False)


async def test_a_snapshot_whose_caller_is_cancelled_is_taken_and_held():
    home = Home()
    taking = asyncio.ensure_future(home.snapshot_of(Sandbox("a"), id="mine", stop_processes=False, end=False))
    await turns()
    taking.cancel()
    await asyncio.gather(taking, return_exceptions=True)
    assert home.visible() == []
    home.may_take.set()
    await turns()
    assert home.visible() == ["mine"]
    assert (home.kept, home.begun_for_a_fork) == ({"mine": True}, [False])


async def test_an_id_names_one_snapshot_also_while_it_is_being_taken():
    home = Home()
    taking = asyncio.ensure_future(home.snapshot_of(Sandbox("a"), id="mine", stop_processes=False, end=False))
    await turns()
    with pytest.raises(SandboxIdInUse, match="is being taken"):
        await home.snapshot_of(Sandbox("b"), id="mine", stop_processes=False, end=False)
    home.may_take.set()
    await taking
    with pytest.raises(SandboxIdInUse, match="there is a snapshot"):
        await home.snapshot_of(Sandbox("b"), id="mine", stop_processes=False, end=False)
    with pytest.raises(ConfigError):
        await home.snapshot_of(Sandbox("b"), id="../up", stop_processes=False, end=False)


async def test_a_fork_makes_all_in_order_of_a_snapshot_that_nobody_else_sees():
    home, sandbox = Home(), Sandbox("a")
    forking = asyncio.ensure_future(fork(home, sandbox, "x", "y"))
    await turns()
    assert home.begun_for_a_fork == [True]
    home.may_take.set()
    while not home.held:  # noqa: ASYNC110 - each turn of the loop
        await asyncio.sleep(0)
    assert home.visible() == []
    assert [one.id for one in await forking] == ["x", "y"]
    assert home.held == {}
    assert list(home.kept.values()) == [False]


async def test_a_fork_of_which_one_fails_ends_the_others_and_lets_its_snapshot_go():
    home = Home(refused=["full"])
    home.may_take.set()
    with pytest.raises(SandboxExhausted, match="no room for full"):
        await fork(home, Sandbox("a"), "quick", "full", "slow")
    assert home.made["quick"].ended is DeathReason.START_FAILED
    assert home.cancelled == ["slow"]
    assert home.held == {}


async def test_a_fork_that_is_cancelled_before_its_snapshot_is_taken_returns_once_that_is_gone():
    home, sandbox = Home(), Sandbox("a")
    forking = asyncio.ensure_future(fork(home, sandbox, "x"))
    await turns()
    forking.cancel()
    await turns()
    assert not forking.done()
    home.may_take.set()
    with pytest.raises(asyncio.CancelledError):
        await forking
    assert list(home.kept.values()) == [False]  # it was taken
    assert (home.held, home.made) == ({}, {})


async def test_a_fork_that_is_cancelled_while_it_starts_its_sandboxes_ends_them():
    home = Home()
    home.may_take.set()
    forking = asyncio.ensure_future(fork(home, Sandbox("a"), "quick", "slow"))
    while "quick" not in home.made:  # noqa: ASYNC110 - each turn of the loop
        await asyncio.sleep(0)
    await turns()
    forking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await forking
    assert home.made["quick"].ended is DeathReason.START_FAILED
    assert home.cancelled == ["slow"]
    assert home.held == {}


async def test_the_ids_of_a_fork_are_all_different():
    with pytest.raises(SandboxIdInUse, match="not all different"):
        await fork(Home(), Sandbox("a"), "x", "x")


async def test_a_snapshot_that_is_held_in_memory_alone_is_no_fork():
    home = Home()
    home.may_take.set()
    await home._snapshot(Sandbox("a"), id="whole", force=True, to_keep=False)  # as one with its processes is taken
    assert (home.begun_for_a_fork, home.visible()) == ([False], ["whole"])
