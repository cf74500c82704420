"""The pool over the fake provider, in virtual time: what callers get, and that nothing is left of those who go."""

from __future__ import annotations

import asyncio

import pytest

from pool_builders import LEASE, SharedCores, in_virtual_time, pool_of
from rollmill.errors import (
    ConfigError,
    CreateUnknown,
    DeadlineExceeded,
    ImageError,
    SandboxDead,
    SandboxError,
    SandboxNotAdmitted,
    SandboxRetryable,
)
from rollmill.sandboxes import DeathReason, DirectoryImage, Lease, Limits, SandboxSpec, SandboxState
from rollmill.sandboxes.admission import Acquired, PressureSample, SandboxPool
from rollmill.sandboxes.watchdog import NodeGuard, NodeReading
from rollmill.testing import FakeSandbox
from rollmill.testing.faults import Delay, FaultInjector, Hang, Raise

SPEC = SandboxSpec()
OTHER = SandboxSpec(image=DirectoryImage(layers=("/other",)))


def faults(**actions) -> FaultInjector:
    """`create_2=Raise(...)` strikes the second creation."""
    plan = {}
    for name, action in actions.items():
        operation, _, call = name.rpartition("_")
        plan[(operation, int(call))] = action
    return FaultInjector(plan)


# -- hits and misses -------------------------------------------------------------------------------------------------


def test_a_ready_sandbox_is_given_without_a_start_under_its_own_id_and_the_callers_lease():
    async def body():
        provider = SharedCores(core_s=1.0)
        seen: list[Acquired] = []
        async with SandboxPool(provider, observe=seen.append) as pool:
            pool.demand(SPEC, 1)
            await asyncio.sleep(5.0)
            began_s = asyncio.get_running_loop().time()
            sandbox = await pool.acquire(SPEC, lease=LEASE, id="mine")
            assert asyncio.get_running_loop().time() == began_s
            assert sandbox.id == provider.created[0] != "mine"
            status = (await provider.status([sandbox.id]))[sandbox.id]
            assert (status.lease, status.labels) == (LEASE, {"rollmill.pool": "pool"})
            assert (await sandbox.exec(["echo", "x"])).stdout == b"x\n"
            fresh = await pool.acquire(SPEC, lease=LEASE, id="mine", labels={"run": "r"})
            assert fresh.id == "mine"
            assert (await provider.status(["mine"]))["mine"].labels == {"rollmill.pool": "pool", "run": "r"}
            assert [(one.hit, one.queue_s, one.create_s, one.check_s) for one in seen] == [
                (True, 0.0, 0.0, 0.0),
                (False, 0.0, 1.0, 0.0),
            ]
            assert (pool.statistics().hits, pool.statistics().misses) == (1, 1)

    in_virtual_time(body)


def test_whoever_gets_an_idle_sandbox_has_all_of_the_wall_time_it_asked_for():
    async def body():
        provider = SharedCores()
        async with pool_of(provider, pool={"max_age_s": 600.0, "watch_s": 20.0}) as pool:
            pool.demand(SPEC, 1)
            await asyncio.sleep(599.0)
            sandbox = await pool.acquire(SPEC, lease=LEASE)
            await asyncio.sleep(SPEC.limits.wall_s - 1.0)
            assert sandbox.death is None

    in_virtual_time(body)


def test_idle_sandboxes_outlive_a_pool_that_was_killed_by_their_lease_at_most():
    async def body():
        provider = SharedCores()
        async with pool_of(provider, pool={"max_age_s": 600.0}, start_s=120.0) as pool:
            pool.demand(SPEC, 1)
            await asyncio.sleep(1.0)
            (status,) = await provider.list()
            assert 715.0 < status.lease_left_s <= 720.0
            await asyncio.sleep(2000.0)
            assert pool.statistics().dead_idle == 0  # none reaches its end by itself: old ones are replaced before
            assert pool.statistics().aged == 3

    in_virtual_time(body)


def test_an_id_is_told_before_its_sandbox_is_made_or_handed_out():
    async def body():
        provider = SharedCores()
        told: list[tuple[str, bool]] = []

        async def before(name: str) -> None:
            status = (await provider.status([name])).get(name)
            told.append((name, status is not None and status.lease.owner == "me"))

        async with pool_of(provider) as pool:
            fresh = await pool.acquire(SPEC, lease=LEASE, id="x", before=before)
            pool.demand(OTHER, 1)
            await asyncio.sleep(1.0)
            ready = await pool.acquire(OTHER, lease=LEASE, before=before)
            assert told == [(fresh.id, False), (ready.id, False)]

    in_virtual_time(body)


def test_a_note_that_cannot_be_taken_stops_the_hand_out_and_leaves_nothing():
    async def body():
        provider = SharedCores()

        async def full(name: str) -> None:
            raise OSError(28, "No space left on device")

        async with pool_of(provider, breaker_failures=1) as pool:
            with pytest.raises(OSError, match="No space"):
                await pool.acquire(SPEC, lease=LEASE, id="x", before=full)
            pool.demand(SPEC, 1)
            await asyncio.sleep(1.0)
            with pytest.raises(OSError, match="No space"):
                await pool.acquire(SPEC, lease=LEASE, before=full)
            pool.demand(SPEC, 0)
            await asyncio.sleep(1.0)
            assert await provider.alive() == []
            assert pool.statistics().breakers == {"provider": "closed"}

    in_virtual_time(body)


def test_a_dead_idle_sandbox_is_replaced_in_the_pool_and_one_that_dies_at_the_hand_out_by_another():
    async def body():
        provider = SharedCores()
        async with pool_of(provider, initial_starting=4) as pool:
            pool.demand(SPEC, 2)
            await asyncio.sleep(0.5)
            provider.lose()
            await asyncio.sleep(2.0)
            assert (pool.statistics().dead_idle, pool.statistics().places["pooled"]) == (2, 2)
            provider.lose()
            sandbox = await pool.acquire(SPEC, lease=LEASE, deadline_s=5.0)
            assert sandbox.state is SandboxState.READY
            assert pool.statistics().dead_at_hand_out == 2

    in_virtual_time(body)


def test_one_that_does_not_answer_at_the_hand_out_is_replaced():
    class Silent(SharedCores):
        async def create(self, spec, **options):
            sandbox = await super().create(spec, **options)
            if len(self.created) == 1:
                sandbox.usage = asyncio.get_running_loop().create_future  # type: ignore[method-assign]
            return sandbox

    async def body():
        provider = Silent()
        async with pool_of(provider, pool={"check_s": 2.0}) as pool:
            pool.demand(SPEC, 1)
            await asyncio.sleep(0.5)
            sandbox = await pool.acquire(SPEC, lease=LEASE, deadline_s=5.0)
            assert sandbox.id == provider.created[1]
            assert "TimeoutError" in pool.statistics().last_failure
            assert asyncio.get_running_loop().time() == 2.5

    in_virtual_time(body)


def test_where_a_lease_cannot_be_renewed_everything_is_made_fresh():
    async def body():
        provider = SharedCores(capabilities={"extend_ttl": False})
        async with pool_of(provider) as pool:
            pool.demand(SPEC, 5)
            await asyncio.sleep(5.0)
            assert provider.created == []
            assert (await pool.acquire(SPEC, lease=LEASE, id="x")).id == "x"

    in_virtual_time(body)


# -- waits -----------------------------------------------------------------------------------------------------------


def test_callers_wait_for_the_cap_in_their_order_and_the_last_is_told_why_at_its_deadline():
    async def body():
        provider = SharedCores(core_s=1.0, cores=1)
        async with pool_of(provider, initial_starting=1, max_starting=1) as pool:
            callers = [
                asyncio.ensure_future(pool.acquire(SPEC, lease=LEASE, id=f"c{n}", deadline_s=2.5)) for n in range(4)
            ]
            done = await asyncio.gather(*callers, return_exceptions=True)
            assert provider.created == ["c0", "c1", "c2"]
            assert [getattr(one, "id", None) for one in done] == ["c0", "c1", None, None]
            cut, late = done[2:]
            assert isinstance(cut, SandboxNotAdmitted)
            assert isinstance(late, SandboxNotAdmitted)
            assert (cut.waiting_for, late.waiting_for, late.position) == ("creation", "starting_cap", 1)
            assert "1 start now and 1 may" in str(late)
            await asyncio.sleep(1.0)
            assert sorted(await provider.alive()) == ["c0", "c1"]

    in_virtual_time(body)


def test_a_creation_that_hangs_is_cut_off_at_the_deadline_and_frees_its_place():
    async def body():
        provider = SharedCores(faults=faults(create_1=Hang()))
        async with pool_of(provider, initial_starting=1, max_starting=1, start_s=1000.0) as pool:
            with pytest.raises(SandboxNotAdmitted, match="was not ready in time"):
                await pool.acquire(SPEC, lease=LEASE, id="hangs", deadline_s=10.0)
            assert (await pool.acquire(SPEC, lease=LEASE, id="next", deadline_s=1.0)).id == "next"
            await asyncio.sleep(1.0)
            assert (await provider.alive(), pool.statistics().unresolved) == (["next"], ())

    in_virtual_time(body)


def test_a_creation_that_takes_longer_than_any_may_is_the_providers_failure_and_tried_again():
    async def body():
        provider = SharedCores(faults=faults(create_1=Hang()))
        async with pool_of(provider, start_s=10.0) as pool:
            sandbox = await pool.acquire(SPEC, lease=LEASE, id="x", deadline_s=100.0)
            assert (sandbox.id, asyncio.get_running_loop().time()) == ("x-r2", 10.0)
            assert pool.statistics().failures == {"failed": 1}

    in_virtual_time(body)


def test_a_provider_without_room_is_asked_again_when_it_said_and_under_another_id():
    async def body():
        full = Raise(lambda: SandboxRetryable("429", after_s=7.0))
        provider = SharedCores(faults=faults(create_1=full, create_2=full))
        async with pool_of(provider) as pool:
            sandbox = await pool.acquire(SPEC, lease=LEASE, id="x", deadline_s=60.0)
            assert (sandbox.id, asyncio.get_running_loop().time()) == ("x-r3", 14.0)
            assert pool.statistics().failures == {"no_room": 2}

    in_virtual_time(body)


def test_a_pool_that_cannot_be_filled_leaves_the_provider_alone_more_and_more():
    async def body():
        provider = SharedCores(faults=FaultInjector(lambda *_: Raise(lambda: SandboxError("down"))))
        async with pool_of(provider, pool={"watch_s": 20.0}, breaker_open_s=10.0) as pool:
            pool.demand(SPEC, 500)
            await asyncio.sleep(3600.0)
            assert len(provider.created) < 60
            statistics = pool.statistics()
            assert statistics.breakers["provider"] in ("open", "half_open")
            assert "down" in statistics.last_failure

    in_virtual_time(body)


def test_a_broken_image_is_told_to_its_callers_and_keeps_nobody_else_waiting():
    async def body():
        broken = SandboxSpec(image=DirectoryImage(layers=("relative",)))
        async with pool_of(SharedCores(), image_failures=1) as pool:
            with pytest.raises(ImageError):
                await pool.acquire(broken, lease=LEASE)
            with pytest.raises(SandboxNotAdmitted, match="the image failed 1 times"):
                await pool.acquire(broken, lease=LEASE, deadline_s=5.0)
            await pool.acquire(SPEC, lease=LEASE, deadline_s=5.0)
            pool.demand(broken, 3)
            await asyncio.sleep(1.0)
            assert "ImageError" in pool.statistics().last_failure

    in_virtual_time(body)


def test_pressure_stops_what_would_start_and_drops_what_is_idle():
    async def body():
        sample = PressureSample()

        async def look() -> PressureSample:
            return sample

        provider = SharedCores()
        async with SandboxPool(provider, pressure=look) as pool:
            pool.demand(SPEC, 2)
            await asyncio.sleep(2.5)
            sample = PressureSample(memory_free=0.01)
            await asyncio.sleep(1.0)
            assert (await provider.alive(), pool.statistics().starting_cap) == ([], 0)
            with pytest.raises(SandboxNotAdmitted, match=r"memory_free is 0\.01"):
                await pool.acquire(SPEC, lease=LEASE, deadline_s=3.0)
            sample = PressureSample()
            await asyncio.sleep(1.0)
            assert len(await provider.alive()) == 2

    in_virtual_time(body)


def test_a_node_guard_can_stop_admission_and_evict():
    async def body():
        provider = SharedCores()

        async def to_disk(count: int) -> int:
            return count

        async with SandboxPool(provider, suspend_to_disk=to_disk) as pool:
            pool.demand(SPEC, 3)
            await asyncio.sleep(0.5)
            assert pool.evictable().pooled == 3
            assert await pool.evict_pooled(2) == 2
            await asyncio.sleep(1.0)
            assert pool.evictable().pooled == 3  # the demand stands
            pool.stop_admission("disk is full")
            assert await pool.evict_pooled(2) == 2
            await asyncio.sleep(5.0)
            assert (pool.evictable().pooled, pool.statistics().stopped) == (1, "disk is full")
            await pool.acquire(SPEC, lease=LEASE, deadline_s=1.0)  # the last ready one
            pool.resume_admission()
            await asyncio.sleep(0.1)
            assert len(await provider.alive()) == 3
            assert await pool.evict_suspended(2) == 2

    in_virtual_time(body)


def test_the_node_guard_of_the_watchdog_closes_a_pool_and_opens_it_again():
    async def body():
        provider, free = SharedCores(), 0.5

        async def read() -> NodeReading:
            return NodeReading(memory_free=free)

        async with SandboxPool(provider) as pool:
            guard = NodeGuard(pool, read=read)
            pool.demand(SPEC, 2)
            await asyncio.sleep(0.5)
            await guard.look()
            assert len(await provider.alive()) == 2
            free = 0.001
            await guard.look()
            await asyncio.sleep(0.1)
            assert len(await provider.alive()) == 1  # it evicts a quarter at a time, and one at least
            with pytest.raises(SandboxNotAdmitted, match="admission is stopped"):
                await pool.acquire(OTHER, lease=LEASE, deadline_s=1.0)
            free = 0.9
            await guard.look()
            await pool.acquire(OTHER, lease=LEASE, deadline_s=1.0)

    in_virtual_time(body)


# -- cut-off creations -----------------------------------------------------------------------------------------------


def unknown() -> CreateUnknown:
    return CreateUnknown("504", sandbox_id="x")


def test_a_creation_that_was_cut_off_is_adopted_if_its_sandbox_is_there():
    async def body():
        provider = SharedCores(faults=faults(create_1=Raise(unknown)))
        async with pool_of(provider) as pool:
            sandbox = await pool.acquire(SPEC, lease=LEASE, id="x", deadline_s=10.0)
            assert (sandbox.id, sandbox.state, pool.statistics().adopted) == ("x", SandboxState.READY, 1)

    in_virtual_time(body)


class Late(SharedCores):
    """Its first creation is cut off, and the sandbox appears later: its own creation runs on."""

    def __init__(self, *, appears_s: float) -> None:
        super().__init__()
        self._appears_s = appears_s

    async def create(self, spec, *, id, labels=None, lease):
        if self.created:
            return await super().create(spec, id=id, labels=labels, lease=lease)
        self.created.append(id)
        make = super().create(spec, id=id, labels=labels, lease=lease)
        self.task = asyncio.ensure_future(self._appear(make))
        raise CreateUnknown("504", sandbox_id=id)

    async def _appear(self, make):
        await asyncio.sleep(self._appears_s)
        await make


def test_one_that_appears_a_little_later_is_adopted_too():
    async def body():
        async with pool_of(Late(appears_s=2.0)) as pool:
            assert (await pool.acquire(SPEC, lease=LEASE, id="x", deadline_s=10.0)).id == "x"

    in_virtual_time(body)


def test_one_that_appears_after_everybody_gave_up_is_found_and_killed():
    async def body():
        provider = Late(appears_s=20.0)
        async with pool_of(provider, pool={"unknown_s": 60.0}) as pool:
            sandbox = await pool.acquire(SPEC, lease=LEASE, id="x", deadline_s=15.0)
            assert (sandbox.id, pool.statistics().unresolved) == ("x-r2", ("x",))
            await asyncio.sleep(60.0)
            assert await provider.alive() == ["x-r2"]
            end = (await provider.status(["x"]))["x"].death
            assert end is not None
            assert end.reason is DeathReason.START_FAILED
            assert pool.statistics().unresolved == ()

    in_virtual_time(body)


# -- nothing is left -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("after_s", [0.0, 0.5, 1.0, 1.5])
@pytest.mark.parametrize("pooled", [0, 1])
def test_a_cancelled_caller_leaves_nothing_whenever_it_goes(after_s, pooled):
    async def body():
        provider = SharedCores(core_s=1.0)
        async with pool_of(provider, initial_starting=1, max_starting=1) as pool:
            pool.demand(SPEC, pooled)
            callers = [asyncio.ensure_future(pool.acquire(SPEC, lease=LEASE)) for _ in range(3)]
            await asyncio.sleep(after_s)
            for one in callers:
                one.cancel()
            results = await asyncio.gather(*callers, return_exceptions=True)
            had = [one for one in results if not isinstance(one, BaseException)]
            pool.demand(SPEC, 0)
            await asyncio.sleep(10.0)
            assert sorted(await provider.alive()) == sorted(one.id for one in had)
            assert len(had) == (after_s > 1.0)
            places = pool.statistics().places
            assert {name: count for name, count in places.items() if count} == ({"running": 1} if had else {})

    in_virtual_time(body)


def test_a_caller_that_is_cancelled_while_it_takes_a_ready_one_leaves_nothing():
    async def body():
        provider = SharedCores()

        async def slow(name: str) -> None:
            await asyncio.sleep(5.0)

        async with pool_of(provider) as pool:
            pool.demand(SPEC, 1)
            await asyncio.sleep(1.0)
            caller = asyncio.ensure_future(pool.acquire(SPEC, lease=LEASE, before=slow))
            await asyncio.sleep(1.0)
            pool.demand(SPEC, 0)
            caller.cancel()
            await asyncio.wait({caller})
            await asyncio.sleep(1.0)
            assert await provider.alive() == []

    in_virtual_time(body)


def test_a_kill_that_fails_is_tried_again_until_it_succeeds_and_the_budget_waits_for_it():
    async def body():
        provider = SharedCores()
        async with pool_of(provider, max_running=1) as pool:
            sandbox = await pool.acquire(SPEC, lease=LEASE)
            provider.refuse_kill = [SandboxError("busy"), ConnectionResetError("cut")]
            releasing = asyncio.ensure_future(pool.release(sandbox))
            await pool.acquire(SPEC, lease=LEASE, deadline_s=10.0)
            await releasing
            assert asyncio.get_running_loop().time() == 1.5  # 0.5 + 1.0
            assert pool.statistics().kill_failures == 2
            assert provider.most_alive == 1

    in_virtual_time(body)


def test_one_that_does_not_go_holds_up_none_of_those_that_are_killed_with_it():
    class Stuck(SharedCores):
        async def kill(self, ids, *, reason=DeathReason.RELEASED):
            if self.created[0] in ids and asyncio.get_running_loop().time() < 100.0:
                await asyncio.sleep(50.0)
            await super().kill(ids, reason=reason)

    async def body():
        provider = Stuck()
        async with pool_of(provider, pool={"check_s": 2.0, "kill_s": 10.0, "close_s": 300.0}) as pool:
            pool.demand(SPEC, 5)
            await asyncio.sleep(1.0)
            pool.demand(SPEC, 0)
            await asyncio.sleep(2.5)
            assert await provider.alive() == provider.created[:1]
            assert pool.statistics().places["pooled"] == 1
            await asyncio.sleep(170.0)
            assert await provider.alive() == []

    in_virtual_time(body)


def test_idle_sandboxes_that_go_with_a_killed_one_are_released_and_not_blamed():
    async def body():
        provider = SharedCores()
        async with pool_of(provider) as pool:
            pool.demand(SPEC, 2)
            await asyncio.sleep(1.0)
            sandbox = await pool.acquire(SPEC, lease=LEASE)
            pool.demand(SPEC, 0)
            await pool.release(sandbox, reason=DeathReason.POLICY_MEMORY)
            await asyncio.sleep(1.0)
            ends = {one.sandbox_id: one.death.reason for one in await provider.list() if one.death is not None}
            assert ends.pop(sandbox.id) is DeathReason.POLICY_MEMORY
            assert set(ends.values()) == {DeathReason.RELEASED}

    in_virtual_time(body)


def test_the_end_of_a_pool_refuses_who_waits_ends_what_is_idle_and_leaves_what_was_handed_out():
    async def body():
        provider = SharedCores(core_s=1.0)
        async with pool_of(provider, initial_starting=1, max_starting=1) as pool:
            mine = await pool.acquire(SPEC, lease=LEASE)
            pool.demand(OTHER, 1)
            await asyncio.sleep(2.0)
            waits = [asyncio.ensure_future(pool.acquire(SPEC, lease=LEASE)) for _ in range(3)]
            await asyncio.sleep(0.5)
        for one in await asyncio.gather(*waits, return_exceptions=True):
            assert isinstance(one, SandboxError)
            assert "closed" in str(one)
        assert await provider.alive() == [mine.id]
        with pytest.raises(SandboxError, match="not open"):
            await pool.acquire(SPEC, lease=LEASE)
        await pool.release(mine)
        assert await provider.alive() == []

    in_virtual_time(body)


def test_a_pool_that_cannot_clean_up_says_which_sandboxes_it_may_have_left():
    async def body():
        provider = SharedCores()
        pool = await pool_of(provider, pool={"close_s": 5.0}).__aenter__()
        pool.demand(SPEC, 1)
        await asyncio.sleep(1.0)
        provider.refuse_kill = [SandboxError("down")] * 100
        with pytest.raises(SandboxError, match=r"may have left 1 sandboxes: pool-.*: down.*leases"):
            await pool.__aexit__(None, None, None)


def test_the_error_of_a_body_comes_out_as_it_is_and_a_bug_of_the_pool_ends_the_body():
    async def body():
        async def fails() -> None:
            async with pool_of(SharedCores()) as pool:
                pool.demand(SPEC, 1)
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            await fails()

        async def broken() -> PressureSample:
            raise AssertionError("a bug in a sampler")

        provider = SharedCores()

        async def waits() -> None:
            async with SandboxPool(provider, pressure=broken) as pool:
                pool.demand(SPEC, 1)
                await asyncio.sleep(1000.0)

        with pytest.raises(BaseExceptionGroup) as raised:
            await waits()
        assert raised.group_contains(AssertionError, match="a bug")
        assert await provider.alive() == []

    in_virtual_time(body)


def test_a_pool_whose_creations_hang_is_closed_within_its_time():
    async def body():
        provider = SharedCores(faults=FaultInjector(lambda operation, _: Hang() if operation == "create" else None))
        async with pool_of(provider, pool={"close_s": 5.0}) as pool:
            pool.demand(SPEC, 3)
            await asyncio.sleep(1.0)
        assert asyncio.get_running_loop().time() < 7.0
        assert await provider.alive() == []

    in_virtual_time(body)


# -- life ------------------------------------------------------------------------------------------------------------


def test_a_sandbox_that_ended_without_the_pool_gives_its_budget_back():
    async def body():
        provider = SharedCores()
        async with pool_of(provider, max_running=1) as pool:
            first = await pool.acquire(SPEC, lease=LEASE)
            await first.kill()
            await pool.acquire(SPEC, lease=LEASE, deadline_s=2.0)
            assert asyncio.get_running_loop().time() == 1.0  # watch_s

    in_virtual_time(body)


def test_a_sandbox_whose_end_only_the_provider_knows_is_found_by_asking_it():
    async def body():
        provider = SharedCores()
        async with pool_of(provider, max_running=1) as pool:
            first = await pool.acquire(SPEC, lease=LEASE)
            assert isinstance(first, FakeSandbox)
            first.end(DeathReason.EXITED)
            first._death = None  # as the object of a sandbox on another machine, which nobody called back
            await pool.acquire(SPEC, lease=LEASE, deadline_s=30.0)
            assert asyncio.get_running_loop().time() == 10.0

    in_virtual_time(body)


def test_a_suspended_sandbox_lets_another_one_run_and_goes_on_when_there_is_room():
    async def body():
        provider = SharedCores()
        async with pool_of(provider, max_running=1) as pool:
            first = await pool.acquire(SPEC, lease=LEASE)
            await pool.suspend(first)
            assert first.state is SandboxState.PAUSED
            second = await pool.acquire(SPEC, lease=LEASE)
            with pytest.raises(SandboxNotAdmitted):
                await pool.resume(first, deadline_s=1.0)
            assert first.state is SandboxState.PAUSED
            begins = asyncio.ensure_future(pool.acquire(SPEC, lease=LEASE, deadline_s=10.0))
            resumes = asyncio.ensure_future(pool.resume(first, deadline_s=10.0))
            await asyncio.sleep(1.0)
            await pool.release(second)
            await resumes
            assert (first.state, begins.done()) == (SandboxState.READY, False)
            await pool.release(first)
            await begins

    in_virtual_time(body)


def test_a_suspended_sandbox_that_died_says_so_when_it_is_to_go_on():
    async def body():
        provider = SharedCores()
        async with pool_of(provider, max_running=1) as pool:
            first = await pool.acquire(SPEC, lease=LEASE)
            await pool.suspend(first)
            await pool.acquire(SPEC, lease=LEASE)
            resumes = asyncio.ensure_future(pool.resume(first, deadline_s=10.0))
            await asyncio.sleep(0.5)
            await first.kill(DeathReason.POLICY_MEMORY)
            with pytest.raises(SandboxDead, match="killed_by_policy_memory"):
                await resumes

    in_virtual_time(body)


def test_a_restored_snapshot_is_admitted_before_those_that_begin_and_made_by_its_own_maker():
    async def body():
        provider = SharedCores(core_s=1.0)
        async with pool_of(provider, initial_starting=1, max_starting=1) as pool:
            made: list[str] = []

            async def restore(name: str):
                made.append(name)
                return await provider.create(SPEC, id=name, lease=LEASE)

            first = asyncio.ensure_future(pool.acquire(SPEC, lease=LEASE, id="first"))
            begins = asyncio.ensure_future(pool.acquire(SPEC, lease=LEASE, id="begins"))
            await asyncio.sleep(0.5)
            resumed = await pool.acquire(SPEC, lease=LEASE, id="resumed", resumes=True, make=restore)
            assert (resumed.id, made, begins.done()) == ("resumed", ["resumed"], False)
            await asyncio.gather(first, begins)

    in_virtual_time(body)


def test_a_maker_that_takes_another_id_is_refused_and_what_it_made_killed():
    async def body():
        provider = SharedCores()
        async with pool_of(provider) as pool:

            async def restore(name: str):
                return await provider.create(SPEC, id="another", lease=LEASE)

            with pytest.raises(ConfigError, match="was to make sandbox x and made another"):
                await pool.acquire(SPEC, lease=LEASE, id="x", make=restore)
            assert await provider.alive() == []
            assert pool.statistics().breakers == {"provider": "closed"}

    in_virtual_time(body)


@pytest.mark.parametrize("deadline_s", [0.0, -1.0, float("inf"), float("nan")])
def test_a_wait_without_an_end_is_refused(deadline_s):
    async def body():
        async with pool_of(SharedCores()) as pool:
            with pytest.raises(ConfigError, match="deadline_s"):
                await pool.acquire(SPEC, lease=LEASE, deadline_s=deadline_s)

    in_virtual_time(body)


def test_a_preparation_that_hangs_keeps_no_pool_from_its_end():
    class Hanging(SharedCores):
        async def prepare(self, image):
            await asyncio.get_running_loop().create_future()

    async def body():
        async with pool_of(Hanging()) as pool:
            pool.demand(SPEC, 1)
            await asyncio.sleep(1.0)
        assert asyncio.get_running_loop().time() == 1.0

    in_virtual_time(body)


def test_a_provider_whose_sandboxes_have_a_longest_life_is_not_asked_for_more_and_idle_ones_are_replaced_early():
    async def body():
        longest = SandboxSpec(limits=Limits(wall_s=1000.0))
        provider = SharedCores(capabilities={"max_lifetime_s": 1000.0})
        async with pool_of(provider) as pool:
            pool.demand(longest, 1)
            await asyncio.sleep(90.0)
            (only,) = pool._hands.sandboxes.values()
            assert isinstance(only, FakeSandbox)
            assert only.spec.limits.wall_s == 1000.0
            await asyncio.sleep(20.0)
            assert pool.statistics().aged == 1  # after a tenth of that life

    in_virtual_time(body)


def test_a_pause_that_hangs_is_given_up_and_the_sandbox_counts_as_running():
    async def body():
        async with pool_of(SharedCores(), pool={"check_s": 2.0}) as pool:
            sandbox = await pool.acquire(SPEC, lease=LEASE)
            sandbox.pause = asyncio.get_running_loop().create_future  # type: ignore[method-assign]
            with pytest.raises(DeadlineExceeded, match="was not paused"):
                await pool.suspend(sandbox)
            assert pool.statistics().places["running"] == 1

    in_virtual_time(body)


def test_starts_that_share_processors_settle_near_as_many_as_there_are():
    async def body():
        provider = SharedCores(core_s=0.025, cores=2)
        async with pool_of(provider, initial_starting=2, max_starting=64) as pool:

            async def rollout(number: int) -> None:
                async with pool.sandbox(SPEC, lease=Lease(owner="me"), deadline_s=600.0):
                    await asyncio.sleep(0)

            await asyncio.gather(*(rollout(number) for number in range(400)))
            assert 2 <= pool.statistics().adaptive_cap <= 10
            assert provider.most_starting <= 12

    in_virtual_time(body)


def test_a_slow_provider_does_not_hold_up_a_hand_out():
    async def body():
        provider = SharedCores(faults=faults(create_2=Delay(50.0)))
        async with pool_of(provider) as pool:
            pool.demand(SPEC, 1)
            await asyncio.sleep(0.5)
            slow = asyncio.ensure_future(pool.acquire(OTHER, lease=LEASE))
            await asyncio.sleep(0.1)
            await pool.acquire(SPEC, lease=LEASE)
            assert asyncio.get_running_loop().time() == 0.6
            await slow

    in_virtual_time(body)
