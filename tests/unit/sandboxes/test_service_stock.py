"""A service node over a pool: ready sandboxes first, a bounded number of starts, nothing kept for nobody."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from rollmill.clock import VirtualClock
from rollmill.errors import SandboxNotAdmitted
from rollmill.sandboxes import SandboxState
from rollmill.sandboxes.admission import AdmissionSettings, PoolSettings, SandboxPool
from rollmill.sandboxes.service.law import HttpProblem, Plan, Standing
from rollmill.sandboxes.service.node import Node
from rollmill.sandboxes.service.served import Order
from rollmill.sandboxes.service.settings import ServiceSettings
from rollmill.sandboxes.service.stock import PooledStock
from rollmill.sandboxes.service.templates import Template
from rollmill.testing import FakeSandboxProvider, run_virtual

TEMPLATES = {"base": Template(ready=3), "rare": Template(memory_mib=64)}
START_S = 0.5
Scenario = Callable[[Node, SandboxPool, FakeSandboxProvider], Awaitable[Any]]


def at_node(scenario: Scenario, *, most: int = 20, starting: int = 2, deadline_s: float = 50.0) -> Any:
    clock = VirtualClock(start_s=1000.0)
    settings = ServiceSettings(max_sandboxes=most)

    async def main() -> Any:
        fake = FakeSandboxProvider(start_s=START_S)
        admission = AdmissionSettings(
            max_running=most + 3, initial_starting=starting, max_starting=starting, deadline_s=deadline_s
        )
        async with SandboxPool(fake, settings=PoolSettings(admission=admission)) as pool:
            ready = {one.spec(wall_s=settings.max_lifetime_s): one.ready for one in TEMPLATES.values()}
            stock = PooledStock(fake, pool, ready=ready)
            async with Node(fake, settings=settings, templates=TEMPLATES, stock=stock, clock=clock) as node:
                result = await scenario(node, pool, fake)
        assert node.all() == {}
        alive = [one for one in await fake.list() if one.state not in (SandboxState.DEAD, SandboxState.LOST)]
        assert alive == []
        return result

    return run_virtual(main(), clock=clock)


def order(template: str = "base", timeout_s: float = 100.0, **changes: Any) -> Order:
    return Order(template=template, timeout_s=timeout_s, **changes)


async def took_s(call: Awaitable[Any]) -> float:
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    await call
    return loop.time() - began_s


def idle(pool: SandboxPool) -> int:
    return pool.statistics().places["pooled"]


def test_ready_sandboxes_are_given_at_once_and_made_up_for():
    async def scenario(node: Node, pool: SandboxPool, fake: FakeSandboxProvider) -> None:
        await asyncio.sleep(5.0)
        assert idle(pool) == 3
        assert [await took_s(node.create(order())) for _ in range(3)] == [0.0, 0.0, 0.0]
        await asyncio.sleep(5.0)
        assert idle(pool) == 3
        assert pool.statistics().hits == 3

    at_node(scenario)


def test_a_ready_one_has_its_callers_words_timeout_and_lease():
    async def scenario(node: Node, pool: SandboxPool, fake: FakeSandboxProvider) -> None:
        await asyncio.sleep(5.0)
        served = await node.create(order(metadata={"run": "a"}, envs={"NAME": "value"}))
        assert served.listed().metadata == {"run": "a"}
        assert served.envs["NAME"] == "value"
        status = (await fake.status([served.sandbox.id]))[served.sandbox.id]
        assert (status.lease.owner, status.lease.ttl_s) == ("service", 130.0)
        await asyncio.sleep(100.5)
        assert served.standing is Standing.ENDED
        assert served.sandbox.death is not None

    at_node(scenario)


def test_a_template_without_ready_ones_keeps_its_callers_labels():
    async def scenario(node: Node, pool: SandboxPool, fake: FakeSandboxProvider) -> None:
        served = await node.create(order("rare", metadata={"run": "a"}))
        status = (await fake.status([served.id]))[served.id]
        assert status.labels["run"] == "a"

    at_node(scenario)


def test_no_more_start_at_once_than_the_pool_lets_and_all_are_served():
    async def scenario(node: Node, pool: SandboxPool, fake: FakeSandboxProvider) -> None:
        waits = await asyncio.gather(*(took_s(node.create(order("rare"))) for _ in range(8)))
        assert sorted(waits)[-1] >= 8 / 2 * START_S
        assert len(node.all()) == 8

    at_node(scenario)


def test_who_is_not_served_by_the_deadline_is_told_and_nothing_is_left_for_them():
    async def scenario(node: Node, pool: SandboxPool, fake: FakeSandboxProvider) -> None:
        asked = [node.create(order("rare")) for _ in range(18)]
        found = await asyncio.gather(*asked, return_exceptions=True)
        late = [one for one in found if isinstance(one, BaseException)]
        assert late
        assert {type(one) for one in late} == {SandboxNotAdmitted}
        assert len(node.all()) == 18 - len(late)

    at_node(scenario, deadline_s=2.2)


def test_one_more_than_may_be_is_refused_before_the_queue():
    async def scenario(node: Node, pool: SandboxPool, fake: FakeSandboxProvider) -> None:
        for _ in range(4):
            await node.create(order())
        with pytest.raises(HttpProblem, match="4 sandboxes are here and 4 may be"):
            await node.create(order())

    at_node(scenario, most=4)


@pytest.mark.parametrize("how", ["killed", "died", "paused", "stored", "timed out"])
def test_what_is_not_in_use_any_more_is_not_counted_as_wanted(how):
    async def scenario(node: Node, pool: SandboxPool, fake: FakeSandboxProvider) -> None:
        served = await node.create(order())
        if how == "killed":
            await node.kill(served.id)
        elif how == "died":
            await fake.kill([served.sandbox.id])
            assert node.get(served.id) is None
        elif how == "timed out":
            await asyncio.sleep(101.0)
        else:
            await node.pause(served.id, keep_memory=how == "paused")
        await asyncio.sleep(5.0)
        (template,) = pool.statistics().templates
        assert (template.demand, template.idle, template.busy) == (3, 3, 0)
        assert pool.statistics().places["suspended"] == (how == "paused")

    at_node(scenario)


@pytest.mark.parametrize("keep_memory", [True, False])
def test_what_comes_back_is_in_use_again(keep_memory):
    async def scenario(node: Node, pool: SandboxPool, fake: FakeSandboxProvider) -> None:
        served = await node.create(order(plan=Plan(pause=True)))
        await node.pause(served.id, keep_memory=keep_memory)
        _, resumed = await node.connect(served.id, timeout_s=50.0)
        assert resumed
        await asyncio.sleep(5.0)
        (template,) = pool.statistics().templates
        assert (template.demand, template.idle, template.busy) == (4, 3, 1)
        await node.kill(served.id)
        await asyncio.sleep(5.0)
        (template,) = pool.statistics().templates
        assert (template.demand, template.idle, template.busy) == (3, 3, 0)

    at_node(scenario)
