"""What a router tells Prometheus, read back by Prometheus' own parser."""

from __future__ import annotations

import asyncio
import re

import pytest

from rollmill.clock import VirtualClock
from rollmill.errors import DataError
from rollmill.generator.router.membership import Entry, FixedList
from rollmill.generator.router.metrics import METRICS, RouterMetrics
from rollmill.generator.router.service import RouterService
from rollmill.testing.virtual_loop import run_virtual
from router_builders import MemoryReplica, message, settings

parser = pytest.importorskip("prometheus_client.parser")


def numbers(page: bytes) -> dict[tuple[str, ...], float]:
    """Name and label values -> number."""
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in parser.text_string_to_metric_families(page.decode())
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


def test_the_page_has_the_numbers_of_what_happened():
    clock = VirtualClock()

    async def test() -> None:
        replicas = {name: MemoryReplica(name, clock=clock) for name in ("a", "b")}
        service = RouterService(
            settings(jobs={"x": {"max_in_flight": 2}}, poll_s=1000.0),
            source=FixedList([Entry("a"), Entry("b")]),
            connect=replicas.__getitem__,
            clock=clock,
        )
        page = RouterMetrics(service, clock=clock)
        async with asyncio.TaskGroup() as tasks:
            loops = tasks.create_task(service.run())
            await asyncio.sleep(0.5)
            with pytest.raises(DataError):
                await service.generate_bytes(message("bad", prompt_ids=[9999]).SerializeToString())
            calls = [
                tasks.create_task(service.generate_bytes(message(f"r{n}", job=job, tokens=5).SerializeToString()))
                for n, job in enumerate(["x", "x", "x", "unlisted"])
            ]
            await asyncio.sleep(1.5)
            running = numbers(page.render())
            await asyncio.gather(*calls)
            over = numbers(page.render())
            loops.cancel()
        assert running["rollmill_router_queue_depth", "x"] == 1
        assert running["rollmill_router_in_flight", "x"] == 2
        assert running["rollmill_router_in_flight", "other"] == 1
        assert (
            running["rollmill_router_replica_in_flight", "a"] + running["rollmill_router_replica_in_flight", "b"] == 3
        )
        assert running["rollmill_router_replica_places", "a"] == 8
        assert running["rollmill_router_replica_state", "a", "serving"] == 1
        assert running["rollmill_router_replica_state", "a", "dirty"] == 0
        assert over["rollmill_router_requests_total", "ok"] == 4
        assert over["rollmill_router_requests_total", "data"] == 1
        assert over["rollmill_router_queue_depth", "x"] == 0
        # Four calls were answered: 5 tokens of 1 s each, and the one over its job's quota waited for another before.
        assert over["rollmill_router_latency_seconds_count",] == 4
        assert over["rollmill_router_latency_seconds_bucket", "10.0"] == 4
        assert over["rollmill_router_latency_seconds_sum",] == pytest.approx(5 + 5 + 5 + 10)
        assert over["rollmill_router_latency_quantile_seconds", "0.5"] == pytest.approx(5)
        assert over["rollmill_router_latency_quantile_seconds", "0.95"] == pytest.approx(10)
        assert over["rollmill_router_kv_cache_usage",] == 0
        assert over["rollmill_router_replica_kv_cache_usage", "b"] == 0
        names = {re.sub("_(bucket|count|sum)$", "", name) for name, *_ in over}
        assert names == set(METRICS)
        assert ("rollmill_router_latency_quantile_seconds", "0.5") not in running

    run_virtual(test(), clock=clock)


def test_kv_in_use_is_that_of_the_replicas_and_of_the_fleet():
    clock = VirtualClock()

    async def test() -> None:
        replicas = {name: MemoryReplica(name, clock=clock) for name in ("a", "b")}
        replicas["a"].kv, replicas["b"].kv = (300, 400), (0, 1200)
        service = RouterService(
            settings(poll_s=0.5),
            source=FixedList([Entry("a"), Entry("b")]),
            connect=replicas.__getitem__,
            clock=clock,
        )
        async with asyncio.TaskGroup() as tasks:
            loops = tasks.create_task(service.run())
            await asyncio.sleep(0.5)
            found = numbers(RouterMetrics(service, clock=clock).render())
            loops.cancel()
        shares = [found["rollmill_router_replica_kv_cache_usage", name] for name in ("a", "b")]
        assert shares == [0.75, 0.0]
        assert found["rollmill_router_kv_cache_usage",] == pytest.approx(300 / 1600)

    run_virtual(test(), clock=clock)
