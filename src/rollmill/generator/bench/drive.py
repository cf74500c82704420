"""Puts a load on a service and watches it.

| waits for | woken by | gives up after |
|---|---|---|
| an answer | the service | the request's deadline: it counts as an error |
| the next look at the service | the clock, the last answer | `LOOK_S` |
"""

from __future__ import annotations

import asyncio
import time

from rollmill.generator.bench.cases import Answered, Load, Report, Standing, report_of, requests_of
from rollmill.generator.bench.targets import Target

LOOK_S = 0.25


async def measure(target: Target, load: Load, *, name: str) -> Report:
    """Ask everything of a load, as many at once as it says, and return the figures.

    Args:
        name: begins every request id; unlike those of other measurements of the same service.

    Cancellation:
        gives up what is in flight.
    """
    asked = requests_of(load, name=name)
    answers: list[Answered] = []
    looks: list[Standing] = []

    async def caller() -> None:
        for request in asked:  # one iterator for all callers: each takes the next
            answer = await target.ask(request)
            answers.append(answer)

    over = asyncio.Event()
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(_watch(target, looks=looks, over=over), name="watch")
        async with asyncio.TaskGroup() as callers:
            for index in range(min(load.concurrency, load.requests)):
                callers.create_task(caller(), name=f"caller {index}")
        wall_s = time.perf_counter() - wall_s
        over.set()
    return report_of(load, answers, looks=looks, wall_s=wall_s, cpu_s=time.process_time() - cpu_s)


async def _watch(target: Target, *, looks: list[Standing], over: asyncio.Event) -> None:
    """Note how busy the service is until all is over."""
    while not over.is_set():
        look = await target.look()
        if look is not None:
            looks.append(look)
        try:
            async with asyncio.timeout(LOOK_S):
                await over.wait()
        except TimeoutError:
            continue
