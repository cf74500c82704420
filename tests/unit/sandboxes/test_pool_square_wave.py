"""A square wave of demand, 96 and 960 in turn: nobody waits for too long, and little is wasted."""

from __future__ import annotations

import asyncio

from pool_builders import LEASE, SharedCores, in_virtual_time, pool_of
from rollmill.sandboxes import SandboxSpec

SPEC = SandboxSpec()
LOW, HIGH = 96, 960
CORE_S, CORES = 0.025, 2  # 80 starts a second at best
PERIOD_S = 60.0
NOTICE_S = 15.0
WAVE = (LOW, HIGH, LOW)


def machine() -> SharedCores:
    return SharedCores(core_s=CORE_S, cores=CORES, capabilities={"batch_status": False})


class Wave:
    """Keeps as many rollouts in flight as the wave says; each releases its sandbox when it is not wanted any more."""

    def __init__(self, pool) -> None:
        self.pool = pool
        self.waits_s: list[float] = []
        self._rollouts: list[tuple[asyncio.Task[None], asyncio.Event]] = []

    async def level(self, count: int) -> None:
        while len(self._rollouts) > count:
            self._rollouts.pop()[1].set()
        while len(self._rollouts) < count:
            stop = asyncio.Event()
            self._rollouts.append((asyncio.ensure_future(self._rollout(stop)), stop))
        await asyncio.sleep(PERIOD_S - NOTICE_S)

    async def _rollout(self, stop: asyncio.Event) -> None:
        loop = asyncio.get_running_loop()
        asked_s = loop.time()
        async with self.pool.sandbox(SPEC, lease=LEASE, deadline_s=60.0):
            self.waits_s.append(loop.time() - asked_s)
            await stop.wait()

    async def end(self) -> None:
        tasks = [task for task, _ in self._rollouts]
        await self.level(0)
        await asyncio.gather(*tasks)


def test_with_notice_every_rollout_of_a_wave_finds_a_ready_sandbox_and_every_sandbox_a_rollout():
    async def body():
        provider = machine()
        async with pool_of(provider, max_running=1000) as pool:
            wave = Wave(pool)
            for count in WAVE:
                pool.demand(SPEC, count)
                await asyncio.sleep(NOTICE_S)  # rollouts about to start are known that much ahead
                await wave.level(count)
            pool.demand(SPEC, 0)
            await wave.end()
            statistics = pool.statistics()
        assert statistics.refused == {}
        assert len(wave.waits_s) == HIGH
        assert max(wave.waits_s) == 0.0
        assert (statistics.hits, statistics.misses) == (len(wave.waits_s), 0)
        # The spare covers one warm-up: 864 taken within ten seconds, and a start takes up to 0.08 s.
        assert HIGH <= provider.most_alive <= HIGH + 7
        assert statistics.unused / statistics.started < 0.01
        assert await provider.alive() == []

    in_virtual_time(body)


def test_without_notice_nobody_waits_for_longer_than_all_starts_take_and_nothing_is_wasted():
    async def body():
        provider = machine()
        async with pool_of(provider, max_running=1000) as pool:
            wave = Wave(pool)
            for count in WAVE:
                pool.demand(SPEC, count)
                await wave.level(count)
            pool.demand(SPEC, 0)
            await wave.end()
            statistics = pool.statistics()
        assert statistics.refused == {}
        # 864 starts at 80 a second are 10.8 s; with fewer than two under way at times a little more.
        assert 10.0 < max(wave.waits_s) < 13.0
        assert statistics.unused / statistics.started < 0.01
        assert await provider.alive() == []

    in_virtual_time(body)


def test_a_demand_that_falls_while_the_pool_fills_wastes_what_is_starting_and_what_is_idle_and_no_more():
    async def body():
        provider = machine()
        async with pool_of(provider, max_running=1000) as pool:
            pool.demand(SPEC, HIGH)
            await asyncio.sleep(2.0)
            before = len(provider.created)
            pool.demand(SPEC, LOW)
            await asyncio.sleep(0.5)
            assert len(provider.created) == before
            assert (len(await provider.alive()), pool.statistics().places["pooled"]) == (LOW, LOW)
            pool.demand(SPEC, 0)
            await asyncio.sleep(0.5)
            assert await provider.alive() == []
            assert len(provider.created) <= 2.0 / CORE_S * CORES + 10

    in_virtual_time(body)
