"""Paused sandboxes that go to disk when their node is short: which, what is given back, what a resume finds."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from rollmill.clock import VirtualClock
from rollmill.errors import DeadlineExceeded, SandboxExhausted
from rollmill.sandboxes import SandboxState
from rollmill.sandboxes.admission import SandboxPool
from rollmill.sandboxes.protocol import Process
from rollmill.sandboxes.service.connect import RpcProblem
from rollmill.sandboxes.service.law import Plan, Standing
from rollmill.sandboxes.service.moving import move_to_disk
from rollmill.sandboxes.service.node import Node
from rollmill.sandboxes.service.programs import Asked
from rollmill.sandboxes.service.served import Order, Served
from rollmill.sandboxes.service.settings import ServiceSettings
from rollmill.sandboxes.service.stock import PooledStock
from rollmill.sandboxes.service.templates import Template
from rollmill.sandboxes.service.wire import ProcessConfig, Selector
from rollmill.sandboxes.watchdog import NodeGuard, NodeReading
from rollmill.testing import FakeSandboxProvider, run_virtual
from rollmill.testing.faults import Delay, FaultInjector, Raise

Scenario = Callable[[Node, SandboxPool, FakeSandboxProvider], Awaitable[Any]]
ORDER = Order(template="base", timeout_s=100.0, plan=Plan(pause=True))


def at_node(scenario: Scenario, *, faults: FaultInjector | None = None, **settings: Any) -> None:
    clock = VirtualClock(start_s=1000.0)

    async def main() -> None:
        fake = FakeSandboxProvider(**({} if faults is None else {"faults": faults}))

        async def to_disk(count: int) -> int:
            return await move_to_disk(node, count)

        async with SandboxPool(fake, suspend_to_disk=to_disk) as pool:
            stock = PooledStock(fake, pool, ready={})
            bounds = ServiceSettings(**settings)
            async with Node(fake, settings=bounds, templates={"base": Template()}, stock=stock, clock=clock) as node:
                await scenario(node, pool, fake)
        assert await fake.snapshots() == ()
        assert [one for one in await fake.list() if one.state not in (SandboxState.DEAD, SandboxState.LOST)] == []

    run_virtual(main(), clock=clock)


async def paused(node: Node, text: bytes) -> Served:
    served = await node.create(ORDER)
    await served.sandbox.write("/state", text)
    await node.pause(served.id)
    return served


def suspended(pool: SandboxPool) -> int:
    return pool.statistics().places["suspended"]


def add_program(served: Served, process: Process) -> int:
    return served.programs.add(process, Asked(config=ProcessConfig(cmd="sleep"))).pid


def test_a_node_that_is_short_of_memory_moves_those_that_were_paused_for_longest_and_resumes_restore_them():
    async def scenario(node: Node, pool: SandboxPool, fake: FakeSandboxProvider) -> None:
        reading = NodeReading(memory_free=0.01, disk_free=0.5)

        async def read() -> NodeReading:
            return reading

        guard = NodeGuard(pool, read=read)
        made: list[Served] = []
        for number in range(5):
            made.append(await paused(node, b"%d" % number))
            await asyncio.sleep(1.0)
        ends = [node.end_wall_s(one) for one in made]
        assert (pool.evictable().suspended, suspended(pool)) == (5, 5)
        await guard.look()  # a quarter at a time, and one at least
        assert guard.statistics().evicted_suspended == 1
        assert [one.files is not None for one in made] == [True, False, False, False, False]
        await asyncio.sleep(4.0)
        await guard.look()
        assert (guard.statistics().evicted_suspended, pool.evictable().suspended, suspended(pool)) == (2, 3, 3)
        assert len(await fake.snapshots()) == 2
        assert made[1].sandbox.death is not None
        assert [node.end_wall_s(one) for one in made] == ends  # its time counts from its pause
        reading = NodeReading(memory_free=0.9, disk_free=0.5)
        await guard.look()
        for number, served in enumerate(made):
            assert await node.connect(served.id, timeout_s=50.0) == (served, True)
            assert await served.sandbox.read("/state") == b"%d" % number
        assert (suspended(pool), pool.statistics().places["running"], await fake.snapshots()) == (0, 5, ())

    at_node(scenario)


def test_a_short_disk_takes_nothing_of_what_is_in_memory():
    async def scenario(node: Node, pool: SandboxPool, fake: FakeSandboxProvider) -> None:
        served = await paused(node, b"x")
        for free in (NodeReading(memory_free=0.01, disk_free=0.05), NodeReading(memory_free=0.01, inodes_free=0.05)):

            async def read(free: NodeReading = free) -> NodeReading:
                return free

            guard = NodeGuard(pool, read=read)
            await guard.look()
            assert (guard.statistics().evicted_suspended, served.files, suspended(pool)) == (0, None, 1)

    at_node(scenario)


def test_one_whose_callers_have_programs_goes_last_and_they_are_told_what_became_of_these():
    async def scenario(node: Node, pool: SandboxPool, fake: FakeSandboxProvider) -> None:
        served = await node.create(ORDER)
        process: Any = type("Sleeps", (), {"pid": 7})()
        assert add_program(served, process) == 7
        await node.pause(served.id)
        await asyncio.sleep(1.0)
        idle = await paused(node, b"x")
        assert await move_to_disk(node, 1) == 1
        assert (served.files is None, idle.files is None) == (True, False)
        assert await move_to_disk(node, 5) == 1
        assert await move_to_disk(node, 5) == 0
        await node.connect(served.id, timeout_s=50.0)
        with pytest.raises(RpcProblem, match="pid 7 runs here; those from before its last pause ended when this node"):
            served.programs.find(Selector(pid=7))

    at_node(scenario)


def test_one_that_finds_no_room_stays_paused_as_it_is_and_the_next_is_tried():
    faults = FaultInjector({("snapshot", 1): Raise(lambda: SandboxExhausted("No space left on device"))})

    async def scenario(node: Node, pool: SandboxPool, fake: FakeSandboxProvider) -> None:
        first = await paused(node, b"first")
        await asyncio.sleep(1.0)
        second = await paused(node, b"second")
        assert await move_to_disk(node, 2) == 1
        assert (first.standing, first.sandbox.state, first.files) == (Standing.PAUSED, SandboxState.PAUSED, None)
        assert second.files is not None
        assert suspended(pool) == 1
        await node.connect(first.id, timeout_s=50.0)
        assert await first.sandbox.read("/state") == b"first"

    at_node(scenario, faults=faults)


def test_one_that_was_resumed_or_ended_meanwhile_is_not_moved():
    async def scenario(node: Node, pool: SandboxPool, fake: FakeSandboxProvider) -> None:
        resumed, ended = await paused(node, b"x"), await paused(node, b"x")
        results = await asyncio.gather(
            node.connect(resumed.id, timeout_s=50.0), node.to_disk(resumed.id), node.kill(ended.id),
            move_to_disk(node, 5),
        )  # fmt: skip
        assert (results[1], results[3]) == (False, 0)
        assert (resumed.standing, resumed.files) == (Standing.RUNNING, None)
        assert await resumed.sandbox.read("/state") == b"x"

    at_node(scenario)


def test_one_that_takes_too_long_is_carried_through_for_whoever_comes_next():
    faults = FaultInjector({("snapshot", 1): Delay(8.0)})

    async def scenario(node: Node, pool: SandboxPool, fake: FakeSandboxProvider) -> None:
        served = await paused(node, b"kept")
        with pytest.raises(DeadlineExceeded, match="the move to disk of sandbox"):
            await node.to_disk(served.id)
        assert await move_to_disk(node, 5) == 0  # it is being moved already
        await asyncio.sleep(4.0)
        assert (served.files is not None, suspended(pool)) == (True, 0)
        await node.connect(served.id, timeout_s=50.0)
        assert await served.sandbox.read("/state") == b"kept"

    at_node(scenario, faults=faults, transition_s=5.0)


def test_a_node_that_ends_waits_for_what_is_half_written_and_leaves_nothing():
    faults = FaultInjector({("snapshot", 1): Delay(3.0)})

    async def scenario(node: Node, pool: SandboxPool, fake: FakeSandboxProvider) -> None:
        served = await paused(node, b"kept")
        moving = asyncio.ensure_future(move_to_disk(node, 1))
        await asyncio.sleep(1.0)
        moving.cancel()
        assert served.storing

    at_node(scenario, faults=faults)
