"""`rollmill bench generator` on a real service, over gRPC and over HTTP, with /metrics telling the same story."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from click.testing import CliRunner
from fake_replica import NoWeights
from prometheus_client.parser import text_string_to_metric_families

from rollmill.cli.app import cli
from rollmill.clock import SystemClock
from rollmill.generator.bench.http_client import HttpConnections
from rollmill.generator.engines.fake import FakeEngine, FakeLatency
from rollmill.generator.http import serve_http
from rollmill.generator.main import Addresses, serve
from rollmill.generator.metrics import ReplicaMetrics
from rollmill.generator.service import InferenceService

pytestmark = pytest.mark.integration


class HttpFace:
    name = "http"

    async def serve(self, service: InferenceService, *, stop: asyncio.Event, on_bound: Callable[[str], None]) -> None:
        metrics = ReplicaMetrics(service.replica, clock=SystemClock(), model_name="policy")
        service.observer = metrics
        await serve_http(
            service,
            host="127.0.0.1",
            port=0,
            metrics=metrics,
            stop=stop,
            on_bound=lambda port: on_bound(f"http://127.0.0.1:{port}"),
        )


@contextlib.asynccontextmanager
async def replica() -> AsyncIterator[Addresses]:
    stop, bound = asyncio.Event(), asyncio.get_running_loop().create_future()
    engine = FakeEngine(
        clock=SystemClock(), vocabulary_size=500, max_num_seqs=4, latency=FakeLatency(step_s=0.001), max_model_len=128
    )
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(
            serve(
                engine=engine,
                repository=NoWeights(),  # type: ignore[arg-type]
                kv_policy="keep",
                stop=stop,
                load_deadline_s=5.0,
                faces=(HttpFace(),),
                on_serving=bound.set_result,
            )
        )
        try:
            yield await asyncio.wait_for(bound, 20)
        finally:
            stop.set()


def bench(*arguments: str) -> Any:
    done = CliRunner().invoke(cli, ["bench", "generator", "--json", "--vocabulary", "400", *arguments])
    assert done.exit_code == 0, done.output
    return json.loads(done.output)


@pytest.mark.parametrize("face", ["grpc", "http"])
@pytest.mark.parametrize("more", [[], ["--no-stream"]])
async def test_the_figures_are_those_of_the_work_that_was_done(face, more):
    async with replica() as addresses:
        where = ["--target", addresses.grpc] if face == "grpc" else ["--http", addresses.others["http"]]
        load = ["--concurrency", "2,8", "--requests", "16", "--prompt-tokens", "6", "--new-tokens", "10..20", *more]
        reports = await asyncio.to_thread(bench, *where, *load)
        metrics = HttpConnections(addresses.others["http"])
        page = (await (await metrics.request("GET", "/metrics")).read()).decode()
        metrics.close()
    assert [report["load"]["concurrency"] for report in reports] == [2, 8]
    for report in reports:
        assert report["answered"] == 16
        assert report["errors"] == {}
        assert 16 * 10 <= report["tokens"] <= 16 * 20
        assert report["tokens_per_s"] == pytest.approx(report["tokens"] / report["wall_s"])
        assert report["latency_s"]["p50"] <= report["latency_s"]["p95"]
        if face == "grpc" or not more:
            assert 0 < report["first_token_s"]["p50"] <= report["latency_s"]["p50"]
    samples = {
        (s.name, tuple(s.labels.items())): s.value for f in text_string_to_metric_families(page) for s in f.samples
    }
    # One warm-up and both runs; all that was sampled is in the counter.
    assert samples["rollmill_requests_total", (("outcome", "ok"),)] == 33
    warm = samples["rollmill_generated_tokens_total", ()] - sum(report["tokens"] for report in reports)
    assert 10 <= warm <= 20
    assert samples["vllm:generation_tokens_total", (("model_name", "policy"),)] == warm + sum(
        report["tokens"] for report in reports
    )


def test_a_service_that_is_not_there_ends_the_command_with_its_address_in_the_message():
    done = CliRunner().invoke(cli, ["bench", "generator", "--target", "127.0.0.1:1", "--json"])
    assert done.exit_code == 1
    assert "engine_dead" in json.loads(done.output)["error"]["message"]


@pytest.mark.parametrize("arguments", [[], ["--target", "a:1", "--http", "http://a:1"]])
def test_exactly_one_address_is_needed(arguments):
    done = CliRunner().invoke(cli, ["bench", "generator", "--json", *arguments])
    assert done.exit_code == 2
    assert "--target" in json.loads(done.output)["error"]["message"]
