"""Sandboxes out of a pool: a ready one, and a demand that jumps between 96 and 960."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from common import LEASE, SMALL, Record, opened, spread

from rollmill.errors import RollmillError
from rollmill.sandboxes.admission import AdmissionSettings, NodePressure, PoolSettings, SandboxPool
from rollmill.sandboxes.backends.namespaces import NamespaceProvider

FILL_S = 60.0
LOOK_S = 0.05


def pool_over(provider: NamespaceProvider, *, running: int) -> SandboxPool:
    """Return a pool with room for so many, that follows the pressure of this machine."""
    settings = PoolSettings(admission=AdmissionSettings(max_running=running, deadline_s=120.0))
    return SandboxPool(provider, settings=settings, pressure=NodePressure([Path("/")]).sample)


async def hits(*, repeats: int) -> Record:
    """Measure how long a caller waits for a ready sandbox, alone, and for its first command."""
    handed: list[float] = []
    first: list[float] = []
    async with opened() as provider, pool_over(provider, running=64) as pool:
        pool.demand(SMALL, 8)
        for _ in range(repeats):
            await _filled(pool, 1)
            at_s = time.perf_counter()
            async with pool.sandbox(SMALL, lease=LEASE) as sandbox:
                handed.append(time.perf_counter() - at_s)
                await sandbox.exec(["true"])
                first.append(time.perf_counter() - at_s)
        statistics = pool.statistics()
        pool.demand(SMALL, 0)
    return {
        "hit": spread(handed),
        "hit_to_first_exec": spread(first),
        "hits": statistics.hits,
        "misses": statistics.misses,
    }


class Rollout:
    """Holds a sandbox of a pool from when it gets one until it is told to stop; runs one command in it."""

    def __init__(self, pool: SandboxPool) -> None:
        self.stop, self.served = asyncio.Event(), asyncio.Event()
        self.wait_s: float | None = None
        self.failure = ""
        self.task = asyncio.create_task(self._run(pool))

    async def _run(self, pool: SandboxPool) -> None:
        at_s = time.perf_counter()
        try:
            async with pool.sandbox(SMALL, lease=LEASE) as sandbox:
                await sandbox.exec(["true"], timeout_s=60.0)
                self.wait_s = time.perf_counter() - at_s
                self.served.set()
                await self.stop.wait()
        except RollmillError as error:
            self.failure = f"{type(error).__name__}: {error}"[:200]
        finally:
            self.served.set()


async def square_wave(*, low: int, high: int, hold_s: float) -> Record:
    """Let the rollouts in flight jump from `low` to `high` and back, twice, without notice.

    A rollout runs one command in its sandbox, holds it, and lets go of it when the wave falls.
    """
    levels: list[Record] = []
    made: list[Rollout] = []
    async with opened() as provider, pool_over(provider, running=high + 40) as pool:
        alive: list[Rollout] = []
        for count in (low, high, low, high, low, 0):
            began_s = time.perf_counter()
            pool.demand(SMALL, count)
            ending = [alive.pop() for _ in range(max(0, len(alive) - count))]
            fresh = [Rollout(pool) for _ in range(count - len(alive))]
            alive += fresh
            made += fresh
            for one in ending:
                one.stop.set()
            await asyncio.gather(*(one.task for one in ending), *(one.served.wait() for one in fresh))
            waits = [one.wait_s for one in fresh if one.wait_s is not None]
            levels.append(
                {
                    "rollouts": count,
                    "new": len(fresh),
                    "ended": len(ending),
                    "until_all_served_or_gone_s": time.perf_counter() - began_s,
                    "wait_to_first_exec": spread(waits) if waits else None,
                }
            )
            await asyncio.sleep(hold_s)
        statistics = pool.statistics()
    return {
        "levels": levels,
        "failed": [one.failure for one in made if one.failure],
        "started": statistics.started,
        "unused": statistics.unused,
        "hits": statistics.hits,
        "misses": statistics.misses,
        "refused": dict(statistics.refused),
    }


async def _filled(pool: SandboxPool, count: int) -> None:
    """Wait until so many are ready."""
    async with asyncio.timeout(FILL_S):
        while pool.statistics().places["pooled"] < count:  # noqa: ASYNC110 - a pool tells its state when asked
            await asyncio.sleep(LOOK_S)
