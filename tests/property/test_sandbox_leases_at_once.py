"""Calls on one rollout that cross each other: whatever their order, it goes on with what was written last.

The provider takes its time for every call, so that the table and other calls go on in between; time is virtual.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import Awaitable
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from property.crash_world import scratch_folder
from rollmill.clock import VirtualClock
from rollmill.errors import DeadlineExceeded, SandboxError
from rollmill.sandboxes import SandboxSpec
from rollmill.sandboxes.leases import Held, Keeper, KeeperSettings, LeaseTable, OnExpiry
from rollmill.testing import FakeSandboxProvider, run_virtual

SETTINGS = KeeperSettings(name="test", provider="fake", ttl_s=10_000.0, suspended_ttl_s=20_000.0)
DELAYED = ("create", "attach", "list", "snapshots", "restore", "kill", "delete_snapshots")
DELAYED_INSIDE = ("snapshot", "pause", "resume", "renew")


class Far:
    """A provider, or a sandbox of one, at the end of a line on which each call and each answer takes a second or so."""

    def __init__(self, inner: Any, ways: list[float]) -> None:
        self._inner, self._ways = inner, ways

    async def _way(self) -> None:
        self._ways.append(self._ways.pop(0))
        await asyncio.sleep(self._ways[0])

    def __getattr__(self, name: str) -> Any:
        called = getattr(self._inner, name)
        if name not in (*DELAYED, *DELAYED_INSIDE):
            return called

        async def call(*args: Any, **kwargs: Any) -> Any:
            await self._way()
            result = await called(*args, **kwargs)
            await self._way()
            return Far(result, self._ways) if name in ("create", "attach", "restore") else result

        return call


class World:
    def __init__(self, folder: Any, clock: VirtualClock, *, ways: list[float], owners: int) -> None:
        self.clock, self.provider = clock, FakeSandboxProvider()
        self.table = LeaseTable(folder / "leases.sqlite")
        far: Any = Far(self.provider, ways)
        kept = msgspec.structs.replace(SETTINGS, on_expiry=OnExpiry.FILES)
        self.keepers = [
            Keeper(self.table, far, settings=kept, owner=f"owner-{number}", clock=clock, in_thread=False)
            for number in range(owners)
        ]
        self.held: list[Held | None] = [None] * owners
        self.written = 0

    async def write(self, held: Held) -> None:
        """As whoever holds the rollout does; a sandbox that ends or stands still takes nothing."""
        with contextlib.suppress(SandboxError):
            await held.sandbox.write("/state", str(self.written + 1).encode())
            self.written += 1

    async def act(self, what: str, who: int, begins_s: float) -> None:
        await asyncio.sleep(begins_s)
        with contextlib.suppress(SandboxError, DeadlineExceeded):
            await getattr(self, what)(self.keepers[who], who)

    async def resume(self, keeper: Keeper, who: int) -> None:
        self.held[who] = held = await keeper.resume("r", take_over=True)
        await self.write(held)

    async def sweep(self, keeper: Keeper, _: int) -> None:
        await keeper.sweep()

    async def to_disk(self, keeper: Keeper, _: int) -> None:
        await keeper.to_disk(1)

    async def with_claim(self, who: int, call: Any, **options: Any) -> None:
        if (held := self.held[who]) is not None:
            await call(held.claim, **options)

    async def suspend(self, keeper: Keeper, who: int) -> None:
        await self.with_claim(who, keeper.suspend)

    async def suspend_as_files(self, keeper: Keeper, who: int) -> None:
        await self.with_claim(who, keeper.suspend, keep_memory=False)

    async def renew(self, keeper: Keeper, who: int) -> None:
        await self.with_claim(who, keeper.renew)

    async def last(self) -> bytes:
        """Return what the rollout goes on with when everything is still."""
        await asyncio.sleep(SETTINGS.grace_s + 1.0)
        keeper = self.keepers[0]
        await keeper.sweep()
        try:
            held = await keeper.resume("r", take_over=True)
        except SandboxError as error:
            raise AssertionError(f"{error}; {self.table.rows()}; {await self.provider.snapshots()}") from error
        state = await held.sandbox.read("/state")
        await keeper.release(held.claim)
        await keeper.sweep()
        assert (self.table.rows(), await self.provider.snapshots()) == ((), ())
        return state


CALLS = st.tuples(
    st.sampled_from(["resume", "suspend", "suspend_as_files", "to_disk", "sweep", "sweep", "renew"]),
    st.integers(0, 1),
    st.floats(0.0, 30.0).map(lambda value: round(value, 1)),
)
WAYS = st.lists(st.sampled_from([0.0, 0.1, 0.5, 1.0, 3.0]), min_size=5, max_size=12)


@given(calls=st.lists(CALLS, max_size=8), ways=WAYS, owners=st.sampled_from([1, 2]))
@settings(max_examples=100, deadline=None)
def test_whatever_crosses_a_rollout_goes_on_with_what_was_written_last(calls, ways, owners):
    folder, clock = scratch_folder(), VirtualClock(start_s=1_000_000.0)

    async def whole() -> None:
        world = World(folder, clock, ways=ways, owners=owners)
        world.held[0] = held = await world.keepers[0].start("r", SandboxSpec(), policy_version=1)
        await world.write(held)
        work: list[Awaitable[None]] = [world.act(what, who % owners, begins_s) for what, who, begins_s in calls]
        await asyncio.gather(*work)
        assert await world.last() == str(world.written).encode()
        await world.provider.close()
        world.table.close()

    try:
        run_virtual(whole(), clock=clock)
    finally:
        shutil.rmtree(folder)
