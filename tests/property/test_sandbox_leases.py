"""Leases of rollouts with owners that are killed before, inside or after any change of the table and any call.

The provider is the fake one and outlives its owners, as remote ones do; time is virtual. Whatever happened, once every
lease has had its time a sweep leaves no row, and no sandbox that no row speaks of.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from property.crash_world import scratch_folder
from rollmill.clock import VirtualClock
from rollmill.errors import ConfigError, SandboxDead, SandboxError, SandboxLeaseLost, SandboxRetryable
from rollmill.sandboxes import Capabilities, SandboxSpec, SandboxState, SnapshotRef
from rollmill.sandboxes.leases import (
    Attendant,
    AttendantSettings,
    Claim,
    Keeper,
    KeeperSettings,
    LeaseTable,
    OnExpiry,
    Phase,
    SweepReport,
    law,
)
from rollmill.testing import FakeSandboxProvider, run_virtual
from rollmill.testing.faults import FaultInjector, Raise

SETTINGS = KeeperSettings(
    name="test",
    provider="fake",
    ttl_s=100.0,
    suspended_ttl_s=300.0,
    slack_s=50.0,
    call_s=20.0,
    grace_s=40.0,
    keep_before_s=60.0,
    sweep_at_once=1,  # whoever is killed does nothing beside
)
LONGER_THAN_ANY_LEASE_S = 1000.0


class Killed(BaseException):
    """SIGKILL of the owner: nothing catches it."""


class Fate:
    """Kills the owner at a numbered moment: each change of the table has three, each call of the provider two."""

    def __init__(self) -> None:
        self.left = -1

    def pass_by(self) -> None:
        if self.left == 0:
            self.left = -1
            raise Killed
        self.left -= self.left > 0


class MortalTable(LeaseTable):
    def __init__(self, path: Path, fate: Fate) -> None:
        self.fate = fate
        super().__init__(path)

    @contextlib.contextmanager
    def change(self) -> Iterator[None]:
        self.fate.pass_by()
        with super().change():
            yield
            self.fate.pass_by()
        self.fate.pass_by()


class Aging(FakeSandboxProvider):
    """A provider that ends sandboxes at an age and cannot be asked for more."""

    def __init__(self, *, most_s: float | None, **options: Any) -> None:
        super().__init__(**options)
        self.most_s = most_s

    async def capabilities(self) -> Capabilities:
        has = await super().capabilities()
        if self.most_s is None:
            return has
        return msgspec.structs.replace(has, extend_ttl=False, max_lifetime_s=self.most_s)


class Durable:
    """A provider whose snapshots are said to outlive its process."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        called = getattr(self._inner, name)
        if not callable(called):
            return called

        async def call(*args: Any, **kwargs: Any) -> Any:
            result = await called(*args, **kwargs)
            if name == "snapshot":
                return msgspec.structs.replace(result, durable=True)
            return Durable(result) if name in ("create", "attach") else result

        return call


class MortalCalls:
    """The provider, or one of its sandboxes, as an owner calls it that may die before or after any call."""

    def __init__(self, inner: Any, fate: Fate) -> None:
        self._inner, self._fate = inner, fate

    def __getattr__(self, name: str) -> Any:
        called = getattr(self._inner, name)
        if not callable(called):
            return called

        async def call(*args: Any, **kwargs: Any) -> Any:
            self._fate.pass_by()
            result = await called(*args, **kwargs)
            self._fate.pass_by()
            return MortalCalls(result, self._fate) if name in ("create", "attach") else result

        return call


class World:
    """Owners of one table after each other, with what each of them believes to hold."""

    def __init__(
        self,
        folder: Path,
        clock: VirtualClock,
        *,
        failing_kills: int,
        most_s: float | None = None,
        on_expiry: OnExpiry = OnExpiry.END,
    ) -> None:
        self.folder, self.clock, self.fate = folder, clock, Fate()
        self.settings = msgspec.structs.replace(SETTINGS, on_expiry=on_expiry)
        refusal = Raise(lambda: SandboxRetryable("the provider does not kill now", after_s=1.0))
        faults = FaultInjector({("kill", number): refusal for number in range(1, failing_kills + 1)})
        self.provider = Aging(most_s=most_s, faults=faults, start_s=1.0)
        self.claims: dict[str, list[Claim]] = {}
        self.lives = 0
        self.table, self.keeper = self.new_owner()

    def new_owner(self) -> tuple[MortalTable, Keeper]:
        self.lives += 1
        table = MortalTable(self.folder / "leases.sqlite", self.fate)
        calls: Any = MortalCalls(self.provider, self.fate)
        owner = f"owner-{self.lives}"
        return table, Keeper(table, calls, settings=self.settings, owner=owner, clock=self.clock, in_thread=False)

    async def act(self, what: str, rollout: str, *, dies_at: int) -> None:
        self.fate.left = dies_at
        try:
            await getattr(self, what)(rollout)
        except Killed:
            self.table.close()
            self.fate.left = -1
            self.table, self.keeper = self.new_owner()
        except (SandboxLeaseLost, SandboxDead):
            pass
        finally:
            self.fate.left = -1
        await self.check(rollout)

    async def start(self, rollout: str) -> None:
        held = await self.keeper.start(rollout, SandboxSpec(), policy_version=3)
        self.claims.setdefault(rollout, []).append(held.claim)

    async def resume(self, rollout: str) -> None:
        held = await self.keeper.resume(rollout)
        self.claims.setdefault(rollout, []).append(held.claim)

    async def take_over(self, rollout: str) -> None:
        held = await self.keeper.resume(rollout, take_over=True)
        self.claims.setdefault(rollout, []).append(held.claim)

    async def suspend(self, rollout: str) -> None:
        if self.claims.get(rollout):
            await self.keeper.suspend(self.claims[rollout][-1])

    async def suspend_as_files(self, rollout: str) -> None:
        if self.claims.get(rollout):
            await self.keeper.suspend(self.claims[rollout][-1], keep_memory=False)

    async def renew(self, rollout: str) -> None:
        if self.claims.get(rollout):
            await self.keeper.renew(self.claims[rollout][-1])

    async def release(self, rollout: str) -> None:
        if self.claims.get(rollout):
            await self.keeper.release(self.claims[rollout][-1])

    async def sweep(self, _: str) -> None:
        await self.keeper.sweep()

    async def wait(self, _: str) -> None:
        self.clock.advance(60.0)

    async def lose(self, _: str) -> None:
        self.provider.lose()

    async def alive(self) -> set[str]:
        ended = (SandboxState.DEAD, SandboxState.LOST)
        return {one.sandbox_id for one in await self.provider.list() if one.state not in ended}

    async def check(self, rollout: str) -> None:
        rows = self.table.rows()
        # Whatever lives was written down before it was made.
        assert await self.alive() <= {row.sandbox_id for row in rows}
        kept = {ref.snapshot_id for ref in await self.provider.snapshots()}
        assert kept <= {name for row in rows for name in row.snapshots}
        current = self.table.current(rollout)
        for claim in self.claims.get(rollout, []):
            assert current is None or claim.generation <= current.generation
            if current is None or claim.generation < current.generation:
                with pytest.raises(SandboxLeaseLost):
                    await self.keeper.use(claim)

    async def end_of_time(self) -> None:
        for _ in range(12):
            self.clock.advance(LONGER_THAN_ANY_LEASE_S)
            await self.keeper.sweep()
        assert self.table.rows() == ()
        assert await self.alive() == set()
        assert await self.provider.snapshots() == ()


ACTIONS = st.sampled_from(
    [
        "start",
        "start",
        "resume",
        "take_over",
        "suspend",
        "suspend_as_files",
        "renew",
        "release",
        "sweep",
        "wait",
        "lose",
    ]
)
STEPS = st.lists(st.tuples(ACTIONS, st.sampled_from(["a", "b"]), st.sampled_from([-1, -1, 0, 1, 2, 3, 4, 5, 6, 8])))


@given(
    steps=STEPS,
    failing_kills=st.sampled_from([0, 0, 3]),
    most_s=st.sampled_from([None, None, 110.0]),
    on_expiry=st.sampled_from(OnExpiry),
)
@example(
    steps=[("start", "a", -1), ("suspend", "a", -1), ("suspend", "a", -1)],
    failing_kills=0,
    most_s=None,
    on_expiry=OnExpiry.END,
)
@example(
    steps=[("start", "a", -1), ("suspend", "a", -1), ("suspend_as_files", "a", -1)],
    failing_kills=0,
    most_s=None,
    on_expiry=OnExpiry.END,
)
@example(
    steps=[("start", "a", -1), ("suspend_as_files", "a", -1), ("suspend", "a", -1)],
    failing_kills=0,
    most_s=None,
    on_expiry=OnExpiry.FILES,
)
@example(
    steps=[("start", "a", -1), ("wait", "a", -1), ("sweep", "a", 3), ("resume", "a", -1)],
    failing_kills=0,
    most_s=110.0,
    on_expiry=OnExpiry.END,
)
@example(
    steps=[("start", "a", -1), ("wait", "a", -1), ("wait", "a", -1), ("sweep", "a", 7), ("sweep", "a", -1)],
    failing_kills=0,
    most_s=None,
    on_expiry=OnExpiry.FILES,
)
@settings(max_examples=60, deadline=None)
def test_whatever_is_killed_and_when_the_old_owner_is_refused_and_nothing_is_left_in_the_end(
    steps, failing_kills, most_s, on_expiry
):
    folder, clock = scratch_folder(), VirtualClock(start_s=1_000_000.0)

    async def whole() -> None:
        world = World(folder, clock, failing_kills=failing_kills, most_s=most_s, on_expiry=on_expiry)
        try:
            for what, rollout, dies_at in steps:
                await world.act(what, rollout, dies_at=dies_at)
            await world.end_of_time()
        finally:
            world.table.close()

    try:
        run_virtual(whole(), clock=clock)
    finally:
        shutil.rmtree(folder)


def test_an_owner_that_died_after_its_creation_leaves_a_sandbox_that_is_adopted_and_resumed(tmp_path):
    clock = VirtualClock(start_s=1000.0)

    async def whole() -> None:
        world = World(tmp_path, clock, failing_kills=0)
        # Moments: row before, inside, after; create before, after. It dies when its sandbox is there.
        await world.act("start", "a", dies_at=4)
        assert [(row.phase, row.generation) for row in world.table.rows()] == [(Phase.CREATING, 1)]
        assert len(await world.alive()) == 1
        with pytest.raises(SandboxLeaseLost, match="creating it"):
            await world.keeper.resume("a")
        clock.advance(41.0)
        report = await world.keeper.sweep()
        assert [step.why for step in report.adopted] == ["it was made, and whoever asked for it is gone"]
        held = await world.keeper.resume("a")
        assert (held.claim.generation, held.claim.owner) == (2, "owner-2")
        assert (await held.sandbox.exec(["echo", "hi"])).stdout == b"hi\n"
        world.table.close()

    run_virtual(whole(), clock=clock)


def test_a_rollout_suspended_as_files_goes_on_with_them_in_another_sandbox(tmp_path):
    clock = VirtualClock(start_s=1000.0)

    async def whole() -> None:
        world = World(tmp_path, clock, failing_kills=0)
        first = await world.keeper.start("a", SandboxSpec(), policy_version=7)
        await first.sandbox.write("/state", b"kept")
        await world.keeper.suspend(first.claim, keep_memory=False)
        assert await world.alive() == set()
        (row,) = world.table.rows()
        assert (row.phase, row.snapshots) == (Phase.SUSPENDED, (f"{first.claim.sandbox_id}-s",))
        assert await world.keeper.sweep() == SweepReport()
        second = await world.keeper.resume("a")
        assert second.claim.sandbox_id != first.claim.sandbox_id
        assert await second.sandbox.read("/state") == b"kept"
        (row,) = world.table.rows()
        assert (row.phase, row.snapshots, row.policy_version) == (Phase.RUNNING, (), 7)
        assert await world.provider.snapshots() == ()
        with pytest.raises(SandboxLeaseLost):
            await world.keeper.use(first.claim)
        world.table.close()

    run_virtual(whole(), clock=clock)


def test_a_rollout_that_comes_near_the_end_that_its_provider_sets_is_suspended_as_its_files_and_goes_on(tmp_path):
    clock = VirtualClock(start_s=1000.0)

    async def whole() -> None:
        world = World(tmp_path, clock, failing_kills=0, most_s=150.0)
        first = await world.keeper.start("a", SandboxSpec(), policy_version=7)
        await first.sandbox.write("/state", b"kept")
        await first.sandbox.start_process(["sleep", "600"])
        clock.advance(80.0)
        assert await world.keeper.sweep() == SweepReport()  # 60 s before the end of 150 s, and not earlier
        await world.keeper.renew(first.claim)
        clock.advance(10.0)
        (step,) = (await world.keeper.sweep()).kept
        assert (step.sandbox_id, step.why) == (
            first.claim.sandbox_id,
            "it was asked for 91 s ago, and its provider will end it soon",  # 1 s of it to start
        )
        assert await world.alive() == set()
        for call in (world.keeper.use, world.keeper.renew):
            with pytest.raises(SandboxLeaseLost, match="suspended as a snapshot of its files"):
                await call(first.claim)
        second = await world.keeper.resume("a")
        assert await second.sandbox.read("/state") == b"kept"
        clock.advance(80.0)
        await world.keeper.renew(second.claim)
        assert await world.keeper.sweep() == SweepReport()  # its own time began anew
        world.table.close()

    run_virtual(whole(), clock=clock)


def test_files_that_cannot_be_kept_are_tried_again_by_the_next_sweep(tmp_path):
    clock = VirtualClock(start_s=1000.0)

    async def whole() -> None:
        world = World(tmp_path, clock, failing_kills=0, most_s=150.0)
        first = await world.keeper.start("a", SandboxSpec(), policy_version=7)
        clock.advance(95.0)
        taken = law.snapshot_id_of(first.claim.sandbox_id)
        await first.sandbox.snapshot(id=taken)
        assert [step.act.value for step in (await world.keeper.sweep()).killed] == ["delete_orphan"]
        (row,) = world.table.rows()
        assert (row.phase, row.snapshots) == (Phase.RUNNING, ())
        assert len((await world.keeper.sweep()).kept) == 1
        world.table.close()

    run_virtual(whole(), clock=clock)


def test_files_that_their_vendor_keeps_are_resumed_by_a_process_that_has_never_seen_them(tmp_path):
    clock = VirtualClock(start_s=1000.0)

    class Vendor(FakeSandboxProvider):
        """It lists what this process took alone."""

        forgotten = False

        async def snapshots(self) -> tuple[SnapshotRef, ...]:
            return () if self.forgotten else await super().snapshots()

    async def whole() -> None:
        table, provider = LeaseTable(tmp_path / "leases.sqlite"), Vendor()
        calls: Any = Durable(provider)
        first = Keeper(table, calls, settings=SETTINGS, owner="first", clock=clock, in_thread=False)
        for rollout in ("a", "b"):
            held = await first.start(rollout, SandboxSpec(), policy_version=1)
            await held.sandbox.write("/state", rollout.encode())
            await first.suspend(held.claim, keep_memory=False)
        provider.forgotten = True  # a new process of the owner
        second = Keeper(table, calls, settings=SETTINGS, owner="second", clock=clock, in_thread=False)
        assert await second.sweep() == SweepReport()
        assert await (await second.resume("a")).sandbox.read("/state") == b"a"
        (row,) = [one for one in table.rows() if one.rollout_id == "b"]
        await provider.delete_snapshots(row.snapshots)  # somebody else did
        with pytest.raises(SandboxLeaseLost, match="start it again"):
            await second.resume("b")
        assert [one.rollout_id for one in table.rows()] == ["a"]
        table.close()

    run_virtual(whole(), clock=clock)


@pytest.mark.parametrize("dies_at", range(20))
def test_whenever_an_owner_dies_in_a_resume_what_is_left_suspended_can_be_resumed(tmp_path, dies_at):
    """Snapshots that outlive their process are believed to be there: before they are deleted that must end."""
    clock, fate, provider = VirtualClock(start_s=1000.0), Fate(), FakeSandboxProvider()

    async def whole() -> None:
        table = MortalTable(tmp_path / "leases.sqlite", fate)
        mortal: Any = Durable(MortalCalls(provider, fate))
        first = Keeper(table, mortal, settings=SETTINGS, owner="first", clock=clock, in_thread=False)
        held = await first.start("a", SandboxSpec(), policy_version=1)
        await first.suspend(held.claim, keep_memory=False)
        fate.left = dies_at
        with contextlib.suppress(Killed):
            await first.resume("a")
        fate.left = -1
        table.close()
        for status in await provider.list():  # they end with the owner, as those of a provider within it do
            await provider.kill([status.sandbox_id])
        clock.advance(SETTINGS.grace_s + 1.0)
        table, calls = LeaseTable(tmp_path / "leases.sqlite"), Durable(provider)
        second: Any = Keeper(table, calls, settings=SETTINGS, owner="second", clock=clock, in_thread=False)
        await second.sweep()
        for row in table.rows():
            assert row.phase is Phase.SUSPENDED
            await second.release((await second.resume("a")).claim)
        assert (table.rows(), await provider.snapshots()) == ((), ())
        table.close()

    run_virtual(whole(), clock=clock)


def test_a_table_of_the_first_version_is_taken_on_with_its_rows(tmp_path):
    clock, path = VirtualClock(start_s=1000.0), tmp_path / "leases.sqlite"

    async def whole() -> None:
        world = World(tmp_path, clock, failing_kills=0)
        held = await world.keeper.start("a", SandboxSpec(), policy_version=1)
        world.table.close()
        with contextlib.closing(sqlite3.connect(path)) as old:
            old.execute("ALTER TABLE leases DROP COLUMN refs")
            old.execute("PRAGMA user_version = 1")
            old.commit()
        world.table, world.keeper = world.new_owner()
        (row,) = world.table.rows()
        assert (row.sandbox_id, row.refs) == (held.claim.sandbox_id, ())
        assert (await world.keeper.resume("a", take_over=True)).claim.generation == 2
        world.table.close()

    run_virtual(whole(), clock=clock)


def test_a_kill_that_fails_stays_in_the_table_and_is_tried_again_later_each_time(tmp_path):
    clock = VirtualClock(start_s=1000.0)

    async def whole() -> None:
        world = World(tmp_path, clock, failing_kills=2)
        held = await world.keeper.start("a", SandboxSpec(), policy_version=1)
        await world.keeper.release(held.claim)
        (row,) = world.table.rows()
        assert (row.phase, row.attempts, row.retry_s - clock.wall_s()) == (Phase.ENDING, 1, 1.0)
        assert "does not kill now" in row.note
        assert (await world.keeper.sweep()).failed == ()  # not due
        clock.advance(1.0)
        assert len((await world.keeper.sweep()).failed) == 1
        (row,) = world.table.rows()
        assert (row.attempts, row.retry_s - clock.wall_s()) == (2, 2.0)
        clock.advance(2.0)
        assert len((await world.keeper.sweep()).killed) == 1
        assert world.table.rows() == ()
        world.table.close()

    run_virtual(whole(), clock=clock)


def test_of_two_owners_the_older_is_refused_with_what_the_newer_has(tmp_path):
    clock = VirtualClock(start_s=1000.0)

    async def whole() -> None:
        world = World(tmp_path, clock, failing_kills=0)
        first = await world.keeper.start("a", SandboxSpec(), policy_version=1)
        await world.keeper.suspend(first.claim)
        assert (await world.provider.status([first.claim.sandbox_id]))[first.claim.sandbox_id].state.value == "paused"
        second_table, second = world.new_owner()
        taken = await second.resume("a")
        assert taken.claim.generation == 2
        with pytest.raises(SandboxLeaseLost, match="'owner-2' has generation 2 now") as caught:
            await world.keeper.renew(first.claim)
        assert caught.value.generation == 2
        with pytest.raises(SandboxLeaseLost, match="runs it; let it suspend, or take it over"):
            await world.keeper.resume("a")
        assert (await world.keeper.resume("a", take_over=True)).claim.generation == 3
        status = (await world.provider.status([first.claim.sandbox_id]))[first.claim.sandbox_id]
        assert (status.lease.generation, status.lease.rollout_id, status.lease.policy_version) == (3, "a", 1)
        second_table.close()
        world.table.close()

    run_virtual(whole(), clock=clock)


def test_a_sandbox_that_no_row_speaks_of_is_killed_as_an_orphan_and_that_of_another_table_is_not(tmp_path):
    clock = VirtualClock(start_s=1000.0)

    async def whole() -> None:
        world = World(tmp_path, clock, failing_kills=0)
        await world.keeper.start("a", SandboxSpec(), policy_version=1)
        other = World(tmp_path / "other", clock, failing_kills=0)
        other.provider = world.provider
        (tmp_path / "leases.sqlite").rename(tmp_path / "lost")
        assert world.table.rows()  # the open file goes on; a new owner finds none
        table, keeper = world.new_owner()
        report = await keeper.sweep()
        assert [step.act.value for step in report.killed] == ["kill_orphan"]
        assert await world.alive() == set()
        for one in (table, world.table, other.table):
            one.close()

    run_virtual(whole(), clock=clock)


@pytest.mark.parametrize("damage", [b"not a database", b""])
def test_a_file_that_is_no_table_is_refused_or_made_new_but_never_overwritten(tmp_path, damage):
    path = tmp_path / "leases.sqlite"
    path.write_bytes(damage)
    if damage:
        with pytest.raises(SandboxError, match="cannot be used: file is not a database"):
            LeaseTable(path)
        assert path.read_bytes() == damage
    else:
        LeaseTable(path).close()


def expiring(tmp_path: Path, on_expiry: OnExpiry, scenario: Any) -> None:
    clock = VirtualClock(start_s=1000.0)

    async def whole() -> None:
        world = World(tmp_path, clock, failing_kills=0, on_expiry=on_expiry)
        try:
            held = await world.keeper.start("a", SandboxSpec(), policy_version=7)
            await held.sandbox.write("/state", b"kept")
            clock.advance(110.0)  # past the lease, and before the provider's own slack is over
            await scenario(world, held)
        finally:
            world.table.close()

    run_virtual(whole(), clock=clock)


@pytest.mark.parametrize("on_expiry", [OnExpiry.FILES, OnExpiry.MEMORY])
def test_a_lease_that_ends_is_suspended_first_and_ends_when_that_time_is_over_too(tmp_path, on_expiry):
    async def scenario(world: World, held: Any) -> None:
        report = await world.keeper.sweep()
        assert [step.why for step in report.suspended] == ["its lease, of 'owner-1', ended"]
        (row,) = world.table.rows()
        assert (row.phase, row.owner, row.expires_s) == (Phase.SUSPENDED, "", world.clock.wall_s() + 300.0)
        assert len(await world.alive()) == (on_expiry is OnExpiry.MEMORY)
        with pytest.raises(SandboxLeaseLost, match="'nobody' has generation 1 now"):
            await world.keeper.renew(held.claim)
        world.clock.advance(299.0)
        assert await world.keeper.sweep() == SweepReport()
        again = await world.keeper.resume("a")
        assert (again.claim.generation > 1, await again.sandbox.read("/state")) == (True, b"kept")
        world.clock.advance(110.0)
        assert len((await world.keeper.sweep()).suspended) == 1
        world.clock.advance(301.0)
        assert len((await world.keeper.sweep()).killed) == 1
        assert (world.table.rows(), await world.alive(), await world.provider.snapshots()) == ((), set(), ())

    expiring(tmp_path, on_expiry, scenario)


def test_a_lease_that_cannot_be_suspended_ends_and_the_row_says_why_until_it_has(tmp_path):
    async def scenario(world: World, held: Any) -> None:
        await held.sandbox.kill()
        report = await world.keeper.sweep()
        assert report.suspended == ()
        assert [step.act.value for step in report.dropped] == ["drop"]  # it had ended already

    expiring(tmp_path, OnExpiry.FILES, scenario)

    async def refused(world: World, held: Any) -> None:
        full = Raise(lambda: SandboxRetryable("no room for a snapshot", after_s=1.0))
        world.provider.faults = FaultInjector({("snapshot", 1): full, ("kill", 1): full})
        assert len((await world.keeper.sweep()).failed) == 1
        (row,) = world.table.rows()
        assert row.phase is Phase.ENDING
        assert "no room for a snapshot" in row.note
        world.clock.advance(2.0)
        assert len((await world.keeper.sweep()).killed) == 1
        assert (world.table.rows(), await world.alive()) == ((), set())

    expiring(tmp_path / "refused", OnExpiry.FILES, refused)


def test_an_owner_that_died_while_it_suspended_an_ended_lease_loses_nothing(tmp_path):
    async def scenario(world: World, held: Any) -> None:
        for moment in range(40):
            await world.act("sweep", "a", dies_at=moment)
            if world.table.rows() and world.table.rows()[0].phase is Phase.SUSPENDED:
                break
        assert world.lives > 3
        assert await (await world.keeper.resume("a")).sandbox.read("/state") == b"kept"

    expiring(tmp_path, OnExpiry.FILES, scenario)


# -- the attendant -----------------------------------------------------------------------------------------------------


def attended(tmp_path: Path, scenario: Any, **changes: float) -> None:
    clock = VirtualClock(start_s=1000.0)

    async def whole() -> None:
        world = World(tmp_path, clock, failing_kills=0, on_expiry=OnExpiry.FILES)
        lost: list[tuple[Claim, str]] = []
        settings = AttendantSettings(**{"beat_s": 30.0, "sweep_s": 10.0, **changes})
        try:
            async with Attendant(
                world.keeper, settings=settings, on_lost=lambda claim, error: lost.append((claim, str(error)))
            ) as attendant:
                await scenario(world, attendant, lost)
        finally:
            world.table.close()

    run_virtual(whole(), clock=clock)


def test_a_lease_that_is_held_is_renewed_as_long_as_its_process_lives(tmp_path):
    async def scenario(world: World, attendant: Attendant, lost: list[Any]) -> None:
        held = await world.keeper.start("a", SandboxSpec(), policy_version=1)
        attendant.hold(held.claim)
        await asyncio.sleep(1000.0)
        assert (await held.sandbox.exec(["echo", "hi"])).stdout == b"hi\n"
        assert lost == []
        assert attendant.statistics.renewed == 33
        attendant.let_go(held.claim)
        await asyncio.sleep(111.0)  # nobody renews it, and a sweep suspends it
        (row,) = world.table.rows()
        assert (row.phase, attendant.statistics.suspended) == (Phase.SUSPENDED, 1)
        await asyncio.sleep(320.0)
        assert (world.table.rows(), attendant.statistics.ended) == ((), 1)

    attended(tmp_path, scenario)


def test_a_claim_that_another_owner_took_is_told_once_and_renewed_no_more(tmp_path):
    async def scenario(world: World, attendant: Attendant, lost: list[Any]) -> None:
        held = await world.keeper.start("a", SandboxSpec(), policy_version=1)
        attendant.hold(held.claim)
        table, other = world.new_owner()
        await other.resume("a", take_over=True)
        await asyncio.sleep(61.0)
        ((claim, words),) = lost
        assert claim == held.claim
        assert "'owner-2' has generation 2 now" in words
        assert attendant.statistics.lost == 1
        assert words in attendant.statistics.last_failure
        table.close()

    attended(tmp_path, scenario)


def test_a_sweep_that_hangs_or_fails_is_given_up_with_its_reason_and_the_next_one_works(tmp_path):
    async def scenario(world: World, attendant: Attendant, lost: list[Any]) -> None:
        listed = world.provider.list

        async def hangs(**_: Any) -> Any:
            await asyncio.Event().wait()

        world.provider.list = hangs  # pyright: ignore[reportAttributeAccessIssue]
        await asyncio.sleep(20.0)
        assert attendant.statistics.failed_sweeps == 1
        assert "did not end within 3 s (sweep_limit_s)" in attendant.statistics.last_failure
        world.provider.list = listed
        before = attendant.statistics.sweeps
        await asyncio.sleep(20.0)
        assert attendant.statistics.sweeps > before

    attended(tmp_path, scenario, sweep_limit_s=3.0)


@pytest.mark.parametrize("changes", [{"beat_s": 34.0}, {"sweep_s": 50.0}])
def test_an_attendant_too_slow_for_its_leases_is_refused(tmp_path, changes):
    async def nothing(*_: Any) -> None: ...

    with pytest.raises(ConfigError):
        attended(tmp_path, nothing, **changes)
