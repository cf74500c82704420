"""A keeper between two effects: what other calls, its sweep, a failure or the end of its process find there."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rollmill.clock import VirtualClock
from rollmill.errors import DeadlineExceeded, ImageError, SandboxError, SandboxLeaseLost, SandboxRetryable
from rollmill.sandboxes import DeathReason, SandboxSpec, SnapshotRef
from rollmill.sandboxes.leases import Held, Keeper, KeeperSettings, LeaseTable, OnExpiry, Phase, SweepReport
from rollmill.sandboxes.leases.law import Row, snapshot_id_of
from rollmill.sandboxes.leases.means import Means
from rollmill.testing import FakeSandbox, FakeSandboxProvider, run_virtual
from rollmill.testing.faults import Delay, FaultInjector, Hang, Raise

SETTINGS = KeeperSettings(
    name="test", provider="fake", ttl_s=100.0, suspended_ttl_s=1000.0, slack_s=50.0, call_s=20.0, grace_s=40.0,
    keep_before_s=60.0,
)  # fmt: skip


def no_room() -> SandboxError:
    return SandboxRetryable("no room now", after_s=1.0)


class Slow(FakeSandboxProvider):
    """A provider whose answers take their way: others act between its list and the arrival of that."""

    way_s = 0.0

    async def snapshots(self) -> tuple[SnapshotRef, ...]:
        found = await super().snapshots()
        await asyncio.sleep(self.way_s)
        return found


class Rig:
    """A keeper, its table and its provider on one virtual clock."""

    def __init__(self, folder: Path, *, plan: dict[Any, Any] | None = None, **changes: Any) -> None:
        self.clock = VirtualClock(start_s=1000.0)
        self.table = LeaseTable(folder / "leases.sqlite")
        self.provider = Slow(faults=FaultInjector(plan or {}))
        self.settings = msgspec.structs.replace(SETTINGS, **changes)
        self.keeper = self.another("me")

    def another(self, owner: str) -> Keeper:
        calls: Any = self.provider
        return Keeper(self.table, calls, settings=self.settings, owner=owner, clock=self.clock, in_thread=False)

    def run(self, scenario: Callable[[], Awaitable[None]]) -> None:
        async def main() -> None:
            await scenario()
            await self.provider.close()

        try:
            run_virtual(main(), clock=self.clock)
        finally:
            self.table.close()

    async def started(self, name: str = "r") -> Held:
        held = await self.keeper.start(name, SandboxSpec(), policy_version=1)
        await held.sandbox.write("/state", name.encode())
        return held

    def row(self, name: str = "r") -> Row:
        found = self.table.current(name)
        assert found is not None
        return found


# -- a sweep and what happens meanwhile --------------------------------------------------------------------------------


def test_a_sandbox_that_was_started_while_a_sweep_asked_its_provider_is_not_taken_for_lost(tmp_path):
    rig = Rig(tmp_path)

    async def scenario() -> None:
        rig.provider.way_s = 5.0
        sweep = asyncio.ensure_future(rig.keeper.sweep())
        await asyncio.sleep(1.0)  # it has listed sandboxes, and waits for the rest
        held = await rig.started()
        assert (await sweep).dropped == ()
        assert await (await rig.keeper.use(held.claim)).read("/state") == b"r"
        assert await rig.keeper.sweep() == SweepReport()

    rig.run(scenario)


def test_a_sweep_leaves_a_rollout_alone_that_was_resumed_before_its_turn_came(tmp_path):
    """Two sweeps judge the same lease; what the slower one does must not hit the rollout that goes on again."""
    plan = {("kill", 1): Raise(no_room), ("kill", 2): Delay(10.0)}
    rig = Rig(tmp_path, plan=plan, on_expiry=OnExpiry.MEMORY, sweep_at_once=1)

    async def scenario() -> None:
        await rig.keeper.release((await rig.started("first")).claim)
        await rig.started("second")
        rig.clock.advance(101.0)
        slow = asyncio.ensure_future(rig.keeper.sweep())
        await asyncio.sleep(1.0)  # it kills the first, and has judged the second
        other = rig.another("other")
        assert len((await other.sweep()).suspended) == 1
        held = await other.resume("second")
        assert len((await slow).renewed) == 1
        assert rig.row("second").phase is Phase.RUNNING
        assert await (await other.use(held.claim)).read("/state") == b"second"

    rig.run(scenario)


def test_what_hangs_in_a_sweep_does_not_hold_up_the_others(tmp_path):
    """Each snapshot takes 5 s, and the provider itself ends what expired after 50 s."""
    count = 40
    plan = {("snapshot", number): Delay(5.0) for number in range(1, count + 1)} | {("snapshot", 1): Hang()}
    rig = Rig(tmp_path, plan=plan, on_expiry=OnExpiry.FILES)

    async def scenario() -> None:
        for number in range(count):
            await rig.started(str(number))
        await asyncio.sleep(101.0)
        report = await rig.keeper.sweep()
        assert len(report.suspended) == count - 1
        assert len(report.killed) == 1  # the one that hung could not be suspended

    rig.run(scenario)


def test_what_a_sweep_could_not_do_is_reported_with_the_error(tmp_path):
    rig = Rig(tmp_path, plan={("kill", 1): Raise(no_room), ("kill", 2): Raise(lambda: ValueError("a bug"))})

    async def scenario() -> None:
        held = await rig.started()
        await rig.started("other")
        await asyncio.sleep(101.0)
        rig.table.edit(held.claim.sandbox_id, lambda _: None)  # nobody's from now on
        report = await rig.keeper.sweep()
        assert sorted(step.act.value for step in report.failed) == ["end", "kill_orphan"]
        words = " ".join(step.why for step in report.failed)
        assert "no room now" in words
        assert "a bug" in words
        rig.clock.advance(2.0)
        assert len((await rig.keeper.sweep()).killed) == 2
        assert rig.table.rows() == ()

    rig.run(scenario)


# -- stores of one sandbox ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("second", ["to_disk", "suspend", "suspend_files"])
def test_two_calls_that_keep_the_files_of_one_rollout_lose_none(tmp_path, second):
    rig = Rig(tmp_path, plan={("snapshot", 1): Delay(3.0), ("snapshot", 2): Delay(3.0)})

    async def scenario() -> None:
        held = await rig.started()
        await rig.keeper.suspend(held.claim)
        calls: dict[str, Callable[[], Awaitable[Any]]] = {
            "to_disk": lambda: rig.keeper.to_disk(1),
            "suspend": lambda: rig.keeper.suspend(held.claim),
            "suspend_files": lambda: rig.keeper.suspend(held.claim, keep_memory=False),
        }
        await asyncio.gather(rig.keeper.to_disk(1), calls[second](), return_exceptions=True)
        await rig.keeper.sweep()
        again = await rig.keeper.resume("r")
        assert await again.sandbox.read("/state") == b"r"

    rig.run(scenario)


def test_a_snapshot_of_a_sandbox_that_ended_with_an_error_keeps_its_name(tmp_path):
    rig = Rig(tmp_path)

    class EndsBadly(FakeSandboxProvider):
        def keep(self, sandbox: FakeSandbox, *, id: str) -> SnapshotRef:
            super().keep(sandbox, id=id)
            sandbox.end(DeathReason.RELEASED)
            raise no_room()

    rig.provider = EndsBadly()  # pyright: ignore[reportAttributeAccessIssue]
    rig.keeper = rig.another("me")

    async def scenario() -> None:
        held = await rig.started()
        with pytest.raises(SandboxRetryable):
            await rig.keeper.suspend(held.claim, keep_memory=False)
        await rig.keeper.sweep()
        again = await rig.keeper.resume("r")
        assert await again.sandbox.read("/state") == b"r"

    rig.run(scenario)


def test_files_are_kept_even_if_an_earlier_call_wrote_their_name_and_was_stopped_before_it_kept_them(tmp_path):
    rig = Rig(tmp_path, plan={("snapshot", 1): Hang()})

    async def scenario() -> None:
        held = await rig.started()
        await rig.keeper.suspend(held.claim)
        assert await rig.keeper.to_disk(1) == 0
        assert (rig.row().snapshots, await rig.provider.snapshots()) == ((snapshot_id_of(held.claim.sandbox_id),), ())
        await rig.keeper.suspend(held.claim, keep_memory=False)
        assert len(await rig.provider.snapshots()) == 1
        assert await (await rig.keeper.resume("r")).sandbox.read("/state") == b"r"

    rig.run(scenario)


def test_a_sandbox_stays_at_work_until_the_last_call_on_it_has_ended(tmp_path):
    rig = Rig(tmp_path)
    calls: Any = rig.provider
    means = Means(rig.table, calls, settings=rig.settings, owner="me", clock=rig.clock, in_thread=False)
    with means.at_work("s"):
        with means.at_work("s"):
            pass
        assert means.busy == {"s"}
    assert means.busy == frozenset()
    rig.table.close()


def test_a_rollout_that_has_no_memory_does_not_keep_others_from_going_to_disk(tmp_path):
    rig = Rig(tmp_path, plan={("restore", 1): Raise(no_room)})

    async def scenario() -> None:
        first = await rig.started("first")
        await rig.keeper.suspend(first.claim, keep_memory=False)
        with pytest.raises(SandboxRetryable):
            await rig.keeper.resume("first")
        await asyncio.sleep(50.0)
        await rig.keeper.sweep()
        second = await rig.started("second")
        await rig.keeper.suspend(second.claim)
        assert await rig.keeper.to_disk(1) == 1
        assert rig.row("second").snapshots == (snapshot_id_of(second.claim.sandbox_id),)

    rig.run(scenario)


def test_a_pause_that_came_too_late_does_not_stop_the_sandbox_of_the_next_owner(tmp_path):
    rig = Rig(tmp_path)

    async def scenario() -> None:
        held = await rig.started()
        sandbox: Any = held.sandbox
        pause = sandbox.pause

        async def late() -> None:
            await asyncio.sleep(5.0)
            await pause()

        sandbox.pause = late
        suspension = asyncio.ensure_future(rig.keeper.suspend(held.claim))
        await asyncio.sleep(1.0)
        other = rig.another("other")
        taken = await other.resume("r", take_over=True)
        with pytest.raises(SandboxLeaseLost, match="'other' has generation 2 now"):
            await suspension
        assert await (await other.use(taken.claim)).read("/state") == b"r"

    rig.run(scenario)


# -- time --------------------------------------------------------------------------------------------------------------


def test_a_suspended_rollout_is_kept_for_its_time_by_the_provider_even_if_that_cannot_be_asked_twice(tmp_path):
    """Its row says 1000 s: whatever fails, or is killed, in between, the provider must have heard of that first."""
    rig = Rig(tmp_path)

    async def scenario() -> None:
        held = await rig.started()
        sandbox: Any = held.sandbox

        async def refuses(_: Any) -> None:
            raise no_room()

        sandbox.renew = refuses
        with pytest.raises(SandboxRetryable):
            await rig.keeper.suspend(held.claim)
        row = rig.row()
        (status,) = (await rig.provider.status([row.sandbox_id])).values()
        assert row.expires_s - rig.clock.wall_s() <= status.lease_left_s
        assert row.phase is Phase.RUNNING

    rig.run(scenario)


def test_a_renewal_that_its_provider_refuses_promises_nothing(tmp_path):
    """Else the provider ends at its own time what the table believes to be renewed, and no sweep can keep it."""
    rig = Rig(tmp_path, on_expiry=OnExpiry.FILES)

    async def scenario() -> None:
        held = await rig.started()
        sandbox: Any = held.sandbox

        async def refuses(_: Any) -> None:
            raise no_room()

        sandbox.renew = refuses
        for _ in range(4):
            await asyncio.sleep(30.0)
            with pytest.raises((SandboxRetryable, SandboxLeaseLost)):
                await rig.keeper.renew(held.claim)
        del sandbox.renew
        assert len((await rig.keeper.sweep()).suspended) == 1
        assert await (await rig.keeper.resume("r")).sandbox.read("/state") == b"r"

    rig.run(scenario)


def test_a_renewal_that_crosses_a_suspension_takes_none_of_its_time(tmp_path):
    rig = Rig(tmp_path)

    async def scenario() -> None:
        held = await rig.started()
        sandbox: Any = held.sandbox
        renew = FakeSandbox.renew

        async def late(lease: Any) -> None:
            if lease.ttl_s < 500.0:
                await asyncio.sleep(5.0)
            await renew(sandbox, lease)

        sandbox.renew = late
        renewal = asyncio.ensure_future(rig.keeper.renew(held.claim))
        await asyncio.sleep(1.0)
        await rig.keeper.suspend(held.claim)
        await renewal
        await asyncio.sleep(900.0)
        await rig.keeper.sweep()
        assert await (await rig.keeper.resume("r")).sandbox.read("/state") == b"r"

    rig.run(scenario)


@pytest.mark.parametrize("keep_memory", [True, False])
def test_a_resume_that_fails_takes_no_time_of_the_suspension_and_can_be_tried_at_once(tmp_path, keep_memory):
    rig = Rig(tmp_path, plan={("restore", 1): Raise(no_room)})

    async def scenario() -> None:
        held = await rig.started()
        await rig.keeper.suspend(held.claim, keep_memory=keep_memory)
        until_s = rig.row().expires_s
        if keep_memory:
            sandbox: Any = held.sandbox

            async def refuses() -> None:
                raise no_room()

            sandbox.resume = refuses
        with pytest.raises(SandboxRetryable):
            await rig.keeper.resume("r")
        assert (rig.row().phase, rig.row().expires_s) == (Phase.SUSPENDED, until_s)
        if keep_memory:
            del held.sandbox.resume  # type: ignore[attr-defined]
        await asyncio.sleep(900.0)
        await rig.keeper.sweep()
        again = await rig.keeper.resume("r")
        assert await again.sandbox.read("/state") == b"r"
        assert rig.row().expires_s == rig.clock.wall_s() + SETTINGS.ttl_s

    rig.run(scenario)


def test_a_rollout_whose_owner_was_killed_before_it_wrote_that_it_is_suspended_has_the_whole_time(tmp_path):
    rig = Rig(tmp_path)

    async def scenario() -> None:
        held = await rig.started()
        name = snapshot_id_of(held.claim.sandbox_id)
        rig.table.edit(held.claim.sandbox_id, lambda row: msgspec.structs.replace(row, snapshots=(name,)))
        await held.sandbox.snapshot(id=name, end=True)
        await rig.keeper.sweep()
        assert (rig.row().phase, rig.row().expires_s) == (Phase.SUSPENDED, rig.clock.wall_s() + 1000.0)

    rig.run(scenario)


def test_a_sandbox_that_cannot_be_found_in_time_is_an_error_with_the_limit(tmp_path):
    rig = Rig(tmp_path)

    async def scenario() -> None:
        held = await rig.started()

        async def hangs(_: str) -> Any:
            await asyncio.sleep(10_000.0)

        rig.provider.attach = hangs  # pyright: ignore[reportAttributeAccessIssue]
        with pytest.raises(DeadlineExceeded, match=r"within 20 s \(call_s\)"):
            await rig.keeper.use(held.claim)

    rig.run(scenario)


# -- snapshots ---------------------------------------------------------------------------------------------------------


def test_files_from_before_a_resume_are_never_taken_for_those_of_a_sandbox_that_went_on(tmp_path):
    """An owner is killed after its restoring, before the old snapshot was deleted; the next one goes on."""
    rig = Rig(tmp_path)

    async def scenario() -> None:
        held = await rig.started()
        await rig.keeper.suspend(held.claim, keep_memory=False)
        delete = rig.provider.delete_snapshots

        async def killed(_: Any) -> None:
            raise asyncio.CancelledError

        rig.provider.delete_snapshots = killed  # type: ignore[method-assign]
        with pytest.raises(asyncio.CancelledError):
            await rig.keeper.resume("r")
        rig.provider.delete_snapshots = delete  # type: ignore[method-assign]
        again = await rig.another("next").resume("r", take_over=True)
        await again.sandbox.write("/state", b"further")
        rig.provider.lose()
        await rig.keeper.sweep()
        with pytest.raises(SandboxLeaseLost):
            await rig.keeper.resume("r")
        await rig.keeper.sweep()
        assert (rig.table.rows(), await rig.provider.snapshots()) == ((), ())

    rig.run(scenario)


class Vendor(FakeSandboxProvider):
    """Keeps snapshots for good, and lists those alone that this process took: none."""

    broken = False

    async def snapshots(self) -> tuple[SnapshotRef, ...]:
        return ()

    def keep(self, sandbox: FakeSandbox, *, id: str) -> SnapshotRef:
        return msgspec.structs.replace(super().keep(sandbox, id=id), durable=True)

    async def restore(self, ref: SnapshotRef, **options: Any) -> Any:
        if self.broken:
            raise ImageError("the image of this snapshot cannot be used")
        return await super().restore(ref, **options)

    def has(self) -> int:
        return len(self._snapshots)


def at_a_vendor(tmp_path: Path) -> tuple[Rig, Vendor]:
    rig, vendor = Rig(tmp_path), Vendor()
    rig.provider = vendor  # pyright: ignore[reportAttributeAccessIssue]
    rig.keeper = rig.another("me")
    return rig, vendor


def test_a_row_goes_with_the_snapshots_that_nobody_lists(tmp_path):
    rig, vendor = at_a_vendor(tmp_path)

    async def scenario() -> None:
        held = await rig.started()
        name = snapshot_id_of(held.claim.sandbox_id)
        rig.table.edit(held.claim.sandbox_id, lambda row: msgspec.structs.replace(row, snapshots=(name,)))
        await held.sandbox.snapshot(id=name, end=True)  # and its owner is killed before it can write down the rest
        await rig.keeper.sweep()
        assert (rig.table.rows(), vendor.has()) == ((), 0)

    rig.run(scenario)


def test_a_snapshot_that_cannot_be_restored_any_more_is_deleted_with_its_row(tmp_path):
    rig, vendor = at_a_vendor(tmp_path)

    async def scenario() -> None:
        held = await rig.started()
        await rig.keeper.suspend(held.claim, keep_memory=False)
        vendor.broken = True
        with pytest.raises(SandboxLeaseLost, match="start it again"):
            await rig.keeper.resume("r")
        assert (rig.table.rows(), vendor.has()) == ((), 0)

    rig.run(scenario)
