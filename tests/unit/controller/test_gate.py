from __future__ import annotations

import asyncio

import pytest

from rollmill.controller.shell import Gate
from rollmill.errors import DeadlineExceeded
from rollmill.testing import VirtualClock, run_virtual


def test_a_load_waits_until_the_evaluation_ends() -> None:
    clock, order = VirtualClock(), []

    async def load(gate: Gate) -> None:
        async with gate.load(deadline_s=100.0):
            order.append(("load", clock.now_s()))

    async def main() -> None:
        gate = Gate()
        async with asyncio.TaskGroup() as tasks, gate.closed(deadline_s=1.0):
            tasks.create_task(load(gate))
            await asyncio.sleep(7.0)
            order.append(("evaluated", clock.now_s()))

    run_virtual(main(), clock=clock)
    assert order == [("evaluated", 7.0), ("load", 7.0)]


def test_an_evaluation_waits_for_the_load_under_way_so_that_it_sees_one_version() -> None:
    clock, order = VirtualClock(), []

    async def load(gate: Gate) -> None:
        async with gate.load(deadline_s=100.0):
            await asyncio.sleep(3.0)
            order.append(("loaded", clock.now_s()))

    async def main() -> None:
        gate = Gate()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(load(gate))
            await asyncio.sleep(1.0)
            async with gate.closed(deadline_s=10.0):
                order.append(("evaluating", clock.now_s()))

    run_virtual(main(), clock=clock)
    assert order == [("loaded", 3.0), ("evaluating", 3.0)]


def test_a_load_does_not_slip_between_two_evaluations() -> None:
    order: list[str] = []

    async def load(gate: Gate) -> None:
        async with gate.load(deadline_s=100.0):
            order.append("load")

    async def main() -> None:
        gate = Gate()
        async with asyncio.TaskGroup() as tasks:
            for number in (1, 2):
                async with gate.closed(deadline_s=1.0):
                    if number == 1:
                        tasks.create_task(load(gate))
                    await asyncio.sleep(1.0)
                    order.append(f"evaluation {number}")

    run_virtual(main())
    assert order == ["evaluation 1", "evaluation 2", "load"]


def test_a_load_that_waits_too_long_names_the_setting() -> None:
    async def main() -> None:
        gate = Gate()
        async with gate.closed(deadline_s=1.0), gate.load(deadline_s=5.0):
            pass

    with pytest.raises(DeadlineExceeded, match=r"evaluation\.deadline_s"):
        run_virtual(main())


def test_a_gate_opens_again_when_the_evaluation_fails() -> None:
    async def fail(gate: Gate) -> None:
        async with gate.closed(deadline_s=1.0):
            raise ValueError("evaluation failed")

    async def main() -> str:
        gate = Gate()
        with pytest.raises(ValueError, match="evaluation failed"):
            await fail(gate)
        async with gate.load(deadline_s=1.0):
            return "loaded"

    assert run_virtual(main()) == "loaded"
