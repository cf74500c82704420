"""A pool over real sandboxes: ready ones, fresh ones, a dead one, and nothing left at the end."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from rollmill.sandboxes import Lease, Provider
from rollmill.sandboxes.admission import AdmissionSettings, NodePressure, PoolSettings, SandboxPool
from sandbox_builders import SPEC, real_rig, until, why_no_namespaces

pytestmark = pytest.mark.integration
LEASE = Lease(owner="test", ttl_s=120.0)


def test_three_ready_ones_and_three_fresh_ones_serve_six_callers_and_nothing_is_left(tmp_path: Path):
    if reason := why_no_namespaces(tmp_path / "probe"):
        pytest.skip(f"no namespace sandboxes here: {reason}")
    settings = PoolSettings(admission=AdmissionSettings(max_running=8, deadline_s=60.0))

    async def body(provider: Provider) -> None:
        pressure = NodePressure([tmp_path]).sample
        async with SandboxPool(provider, settings=settings, pressure=pressure) as pool:
            pool.demand(SPEC, 3)
            await until(lambda: pool.statistics().places["pooled"] == 3)
            (first, *_) = await provider.list()
            await provider.kill([first.sandbox_id])
            callers = [pool.acquire(SPEC, lease=LEASE, id=f"own-{n}-{os.getpid()}") for n in range(6)]
            sandboxes = await asyncio.gather(*callers)
            answers = await asyncio.gather(*(one.exec(["echo", one.id]) for one in sandboxes))
            assert [one.stdout.decode().strip() for one in answers] == [one.id for one in sandboxes]
            assert first.sandbox_id not in {one.id for one in sandboxes}
            statuses = await provider.status([one.id for one in sandboxes])
            assert {one.lease for one in statuses.values()} == {LEASE}
            statistics = pool.statistics()
            assert statistics.hits + statistics.misses == 6
            assert statistics.hits >= 2
            assert statistics.dead_at_hand_out + statistics.dead_idle == 1
            pool.demand(SPEC, 0)
            await asyncio.gather(*(pool.release(one) for one in sandboxes))
        assert [one for one in await provider.list() if one.death is None] == []

    with real_rig(tmp_path / "records") as rig:
        rig.run(body)
