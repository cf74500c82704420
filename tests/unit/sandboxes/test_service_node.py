"""The sandboxes of a service node on the fake provider, in virtual time: ends, pauses, limits, repeated calls."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from rollmill.clock import VirtualClock
from rollmill.errors import CreateUnknown, DeadlineExceeded, ImageError, SandboxRetryable
from rollmill.sandboxes import DeathReason, NamedImage, SandboxState
from rollmill.sandboxes.service.law import HttpProblem, Plan, Standing
from rollmill.sandboxes.service.node import Node
from rollmill.sandboxes.service.served import Order, Served
from rollmill.sandboxes.service.settings import ServiceSettings
from rollmill.sandboxes.service.stock import Stock
from rollmill.sandboxes.service.templates import Template
from rollmill.testing import FakeSandboxProvider, run_virtual
from rollmill.testing.faults import FaultInjector, Hang, Raise

Scenario = Callable[[Node, FakeSandboxProvider], Awaitable[Any]]
PAUSE = Plan(pause=True)


def at_node(scenario: Scenario, *, provider: dict[str, Any] | None = None, **settings: Any) -> Any:
    clock = VirtualClock(start_s=1000.0)

    async def main() -> Any:
        fake = FakeSandboxProvider(**(provider or {}))
        async with Node(
            fake, settings=ServiceSettings(**settings), templates={"base": Template()}, clock=clock
        ) as node:
            result = await scenario(node, fake)
        assert node.all() == {}
        alive = [one for one in await fake.list() if one.state not in (SandboxState.DEAD, SandboxState.LOST)]
        assert alive == []
        return result

    return run_virtual(main(), clock=clock)


def order(timeout_s: float = 100.0, **changes: Any) -> Order:
    return Order(template="base", timeout_s=timeout_s, **changes)


async def reason_of(provider: FakeSandboxProvider, sandbox_id: str) -> DeathReason | None:
    end = (await provider.status([sandbox_id]))[sandbox_id].death
    return None if end is None else end.reason


def test_a_sandbox_ends_at_its_timeout_and_its_lease_is_the_last_resort():
    async def scenario(node: Node, provider: FakeSandboxProvider) -> None:
        served = await node.create(order(100.0))
        status = (await provider.status([served.id]))[served.id]
        assert (status.lease.ttl_s, node.end_wall_s(served)) == (130.0, 1100.0)
        await asyncio.sleep(99.9)
        assert node.find(served.id) is served
        await asyncio.sleep(0.2)
        with pytest.raises(HttpProblem, match="is not here") as caught:
            node.find(served.id)
        assert caught.value.status == 404
        assert await reason_of(provider, served.id) is DeathReason.LEASE_EXPIRED

    at_node(scenario)


def test_a_renewal_just_before_the_end_moves_it_and_one_that_shortens_counts_too():
    async def scenario(node: Node, provider: FakeSandboxProvider) -> None:
        served = await node.create(order(100.0))
        await asyncio.sleep(99.0)
        await node.set_timeout(served.id, timeout_s=50.0)
        await asyncio.sleep(49.0)
        assert served.standing is Standing.RUNNING
        await node.set_timeout(served.id, timeout_s=0.5)
        await asyncio.sleep(0.6)
        assert served.standing is Standing.ENDED

    at_node(scenario)


def test_a_paused_sandbox_is_kept_and_ends_when_it_was_kept_long_enough():
    async def scenario(node: Node, provider: FakeSandboxProvider) -> None:
        served = await node.create(order(10.0, plan=PAUSE))
        await asyncio.sleep(11.0)
        assert (served.standing, served.sandbox.state) == (Standing.PAUSED, SandboxState.PAUSED)
        with pytest.raises(HttpProblem, match=r"was not found: it is paused") as caught:
            await node.for_traffic(served.id)
        assert caught.value.status == 502
        await asyncio.sleep(500.0)  # longer than the first lease
        again, resumed = await node.connect(served.id, timeout_s=20.0)
        assert (again, resumed, served.sandbox.state) == (served, True, SandboxState.READY)
        await asyncio.sleep(21.0)
        assert served.standing is Standing.PAUSED
        await asyncio.sleep(1001.0)
        assert await reason_of(provider, served.id) is DeathReason.LEASE_EXPIRED

    at_node(scenario, paused_ttl_s=1000.0)


def test_a_call_wakes_a_paused_sandbox_if_its_creator_chose_so_however_many_come():
    async def scenario(node: Node, provider: FakeSandboxProvider) -> None:
        served = await node.create(order(10.0, plan=Plan(pause=True, auto_resume=True)))
        await asyncio.sleep(11.0)
        found = await asyncio.gather(*(node.for_traffic(served.id) for _ in range(5)))
        assert (found, served.standing) == ([served] * 5, Standing.RUNNING)

    at_node(scenario)


class Storing:
    """A provider whose snapshots take a while after they have ended their sandbox."""

    def __init__(self, inner: FakeSandboxProvider, *, takes_s: float) -> None:
        self._inner, self._takes_s = inner, takes_s

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def create(self, *args: Any, **kwargs: Any) -> Any:
        sandbox = await self._inner.create(*args, **kwargs)
        snapshot = sandbox.snapshot

        async def slowly(**options: Any) -> Any:
            ref = await snapshot(**options)
            await asyncio.sleep(self._takes_s)
            return ref

        sandbox.snapshot = slowly  # type: ignore[method-assign]
        return sandbox


def test_a_sandbox_that_is_being_stored_is_not_taken_for_dead_nor_lost_when_its_caller_has_no_more_time():
    async def scenario(node: Node, provider: FakeSandboxProvider) -> None:
        slow: Any = Storing(provider, takes_s=8.0)
        node._provider, node._stock = slow, Stock(slow)
        served = await node.create(order())
        await served.sandbox.write("/state", b"kept")
        pausing = asyncio.ensure_future(node.pause(served.id, keep_memory=False))
        await asyncio.sleep(1.0)
        assert served.sandbox.death is not None
        assert node.get(served.id) is served
        with pytest.raises(DeadlineExceeded, match="the pause of sandbox"):
            await pausing
        await asyncio.sleep(5.0)
        assert (served.standing, len(await provider.snapshots())) == (Standing.PAUSED, 1)
        await node.connect(served.id, timeout_s=50.0)
        assert await served.sandbox.read("/state") == b"kept"
        assert await provider.snapshots() == ()

    at_node(scenario, transition_s=5.0)


def test_what_was_stored_of_a_sandbox_that_ended_meanwhile_is_removed():
    async def scenario(node: Node, provider: FakeSandboxProvider) -> None:
        slow: Any = Storing(provider, takes_s=8.0)
        node._provider, node._stock = slow, Stock(slow)
        served = await node.create(order())
        with pytest.raises(DeadlineExceeded):
            await node.pause(served.id, keep_memory=False)
        await node.kill(served.id)
        await asyncio.sleep(5.0)
        assert (served.standing, await provider.snapshots()) == (Standing.ENDED, ())

    at_node(scenario, transition_s=5.0)


def test_a_pause_and_a_kill_at_once_follow_each_other():
    async def scenario(node: Node, provider: FakeSandboxProvider) -> None:
        served = await node.create(order())
        results = await asyncio.gather(
            node.pause(served.id), node.kill(served.id), node.pause(served.id), return_exceptions=True
        )
        assert results[:2] == [None, None]
        assert isinstance(results[2], HttpProblem)
        assert results[2].status == 404
        assert await reason_of(provider, served.id) is DeathReason.RELEASED

    at_node(scenario)


def test_a_kill_that_hangs_is_told_in_time_and_the_lease_ends_what_is_left():
    async def scenario(node: Node, provider: FakeSandboxProvider) -> None:
        served = await node.create(order(100.0))
        with pytest.raises(DeadlineExceeded, match=r"the kill of sandbox .* within 5 s"):
            await node.kill(served.id)
        await asyncio.sleep(131.0)
        assert node.all() == {}
        assert await reason_of(provider, served.id) is DeathReason.LEASE_EXPIRED

    at_node(scenario, provider={"faults": FaultInjector({("kill", 1): Hang()})}, transition_s=5.0)


def test_no_more_sandboxes_are_made_than_may_be_counting_those_that_start():
    async def scenario(node: Node, provider: FakeSandboxProvider) -> None:
        results = await asyncio.gather(*(node.create(order()) for _ in range(5)), return_exceptions=True)
        refused = [one for one in results if isinstance(one, HttpProblem)]
        assert [(one.status, one.after_s) for one in refused] == [(429, 1.0)] * 2
        assert len(node.all()) == 3
        await node.kill(next(iter(node.all())))
        await node.create(order())

    at_node(scenario, provider={"start_s": 2.0}, max_sandboxes=3)


def test_a_start_that_failed_gives_its_place_back():
    full = Raise(lambda: SandboxRetryable("no room", after_s=3.0))

    async def scenario(node: Node, provider: FakeSandboxProvider) -> None:
        with pytest.raises(SandboxRetryable):
            await node.create(order())
        assert (await node.create(order())).standing is Standing.RUNNING

    at_node(scenario, provider={"faults": FaultInjector({("create", 1): full})}, max_sandboxes=1)


def test_a_creation_whose_answer_was_cut_off_is_looked_for_and_found():
    cut = Raise(lambda: CreateUnknown("cut off", sandbox_id="x"))

    async def scenario(node: Node, provider: FakeSandboxProvider) -> None:
        served = await node.create(order())
        assert served.sandbox.id == served.id
        await node.kill(served.id)

    at_node(scenario, provider={"faults": FaultInjector({("create", 1): cut})})


def test_calls_with_one_key_make_one_sandbox_and_after_its_end_another():
    async def scenario(node: Node, provider: FakeSandboxProvider) -> None:
        first, second = await asyncio.gather(*(node.create(order(key="k")) for _ in range(2)))
        assert first is second
        with pytest.raises(HttpProblem, match="was used for another sandbox"):
            await node.create(order(key="k", metadata={"other": "yes"}))
        await node.kill(first.id)
        assert (await node.create(order(key="k"))).id != first.id

    at_node(scenario, provider={"start_s": 1.0})


def test_a_sandbox_that_died_by_itself_is_gone_from_lists_with_its_reason_for_callers():
    async def scenario(node: Node, provider: FakeSandboxProvider) -> None:
        served = await node.create(order())
        provider.lose(detail="the node failed")
        with pytest.raises(HttpProblem, match="was not found: it has ended \\(provider_lost\\) the node failed"):
            await node.for_traffic(served.id)
        assert node.all() == {}

    at_node(scenario)


def test_a_template_without_a_name_in_the_settings_is_the_name_of_an_image_that_the_backend_may_know():
    async def scenario(node: Node, provider: FakeSandboxProvider) -> None:
        served = await node.create(Order(template="python:3", timeout_s=1.0))
        assert served.spec.image == NamedImage(name="python:3")
        with pytest.raises(HttpProblem, match="As the name of an image: no such image"):
            await node.create(Order(template="other", timeout_s=1.0))

    unknown = Raise(lambda: ImageError("no such image"))
    at_node(scenario, provider={"faults": FaultInjector({("create", 2): unknown})})


@pytest.mark.parametrize(
    ("asked", "status", "says"),
    [
        (Order(template="x", timeout_s=1.0), 404, "template 'x' is not known here; there are: base"),
        (Order(template="base", timeout_s=101.0), 400, "it must be between 0 and 100"),
        (Order(template="base", timeout_s=1.0, plan=Plan(pause=True, keep_memory=False)), 501, "paused as files"),
    ],
)
def test_what_cannot_be_made_is_refused_before_anything_starts(asked, status, says):
    async def scenario(node: Node, provider: FakeSandboxProvider) -> None:
        node._can_keep_files = False
        with pytest.raises(HttpProblem, match=says) as caught:
            await node.create(asked)
        assert caught.value.status == status
        assert await provider.list() == ()

    at_node(scenario, max_timeout_s=100.0, default_timeout_s=100.0, image_names=False)


class Trembling(VirtualClock):
    """A wall clock that moves against the loop's, as real ones do."""

    def wall_s(self) -> float:
        self.reads = getattr(self, "reads", 0) + 1
        return super().wall_s() + self.reads * 1e-5


def test_an_end_that_did_not_move_is_told_as_it_was():
    async def scenario(node: Node, provider: FakeSandboxProvider) -> None:
        node._clock = Trembling(start_s=1000.0)
        served = await node.create(order(100.0))
        told = node.end_wall_s(served)
        await node.connect(served.id, timeout_s=10.0)
        assert node.end_wall_s(served) == told
        await node.connect(served.id, timeout_s=200.0)
        assert node.end_wall_s(served) == pytest.approx(told + 100.0, abs=0.001)

    at_node(scenario)


# -- forks ------------------------------------------------------------------------------------------------------------


def test_forks_have_the_files_words_and_plan_of_their_sandbox_and_lives_of_their_own():
    async def scenario(node: Node, provider: FakeSandboxProvider) -> None:
        served = await node.create(order(500.0, metadata={"a": "b"}, envs={"X": "1"}, plan=PAUSE))
        await served.sandbox.write("/state", b"before")
        one, two = await node.fork(served.id, count=2, timeout_s=60.0)
        assert isinstance(one, Served)
        assert isinstance(two, Served)
        assert len({served.id, one.id, two.id}) == 3
        assert (one.order.metadata, one.order.plan, one.envs["X"]) == ({"a": "b"}, PAUSE, "1")
        assert (one.envs["E2B_SANDBOX_ID"], served.envs["E2B_SANDBOX_ID"]) == (one.id, served.id)
        await one.sandbox.write("/state", b"after")
        assert await served.sandbox.read("/state") == await two.sandbox.read("/state") == b"before"
        assert await provider.snapshots() == ()
        assert (node.end_wall_s(served), node.end_wall_s(one)) == (1500.0, 1060.0)
        await node.kill(one.id)
        assert set(node.all()) == {served.id, two.id}

    at_node(scenario)


def test_more_forks_than_there_is_room_for_are_refused_before_anything_is_done():
    async def scenario(node: Node, provider: FakeSandboxProvider) -> None:
        served = await node.create(order())
        with pytest.raises(HttpProblem, match=r"1 sandboxes are here and 3 may be .*no room for 3 more") as caught:
            await node.fork(served.id, count=3, timeout_s=60.0)
        assert (caught.value.status, set(node.all())) == (429, {served.id})
        assert len(await node.fork(served.id, count=2, timeout_s=60.0)) == 2

    at_node(scenario, max_sandboxes=3)


def test_a_fork_of_a_paused_sandbox_and_of_none_is_refused():
    async def scenario(node: Node, provider: FakeSandboxProvider) -> None:
        served = await node.create(order())
        await node.pause(served.id)
        for sandbox_id, count, status in ((served.id, 1, 409), (served.id, 0, 400), ("none", 1, 404)):
            with pytest.raises(HttpProblem) as caught:
                await node.fork(sandbox_id, count=count, timeout_s=60.0)
            assert caught.value.status == status

    at_node(scenario)


def test_a_fork_that_cannot_start_is_told_in_its_place_and_the_others_live():
    async def scenario(node: Node, provider: FakeSandboxProvider) -> None:
        served = await node.create(order())
        refusing: Any = RefusingOnce(provider)
        node._provider, node._stock = refusing, Stock(refusing)
        results = await node.fork(served.id, count=3, timeout_s=60.0)
        assert [type(one) for one in results].count(Served) == 2
        (refused,) = [one for one in results if not isinstance(one, Served)]
        assert "no room" in str(refused)
        assert (len(node.all()), await provider.snapshots()) == (3, ())

    at_node(scenario)


def test_files_that_were_kept_for_a_caller_who_has_left_are_let_go():
    async def scenario(node: Node, provider: FakeSandboxProvider) -> None:
        slow: Any = Storing(provider, takes_s=8.0)
        node._provider, node._stock = slow, Stock(slow)
        served = await node.create(order())
        for work in (node.fork(served.id, count=1, timeout_s=60.0), node.snapshot(served.id, name="mine")):
            asking = asyncio.ensure_future(work)
            await asyncio.sleep(1.0)
            assert len(await provider.snapshots()) == 1
            asking.cancel()
            await asyncio.wait([asking])
            await asyncio.sleep(10.0)
            assert await provider.snapshots() == ()
        assert (set(node.all()), node.shelf.ids()) == ({served.id}, ())

    at_node(scenario)


class RefusingOnce:
    """A provider that has no room for the first restore."""

    def __init__(self, inner: FakeSandboxProvider) -> None:
        self._inner, self._refused = inner, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def restore(self, *args: Any, **kwargs: Any) -> Any:
        if not self._refused:
            self._refused = True
            raise SandboxRetryable("no room", after_s=1.0)
        return await self._inner.restore(*args, **kwargs)
