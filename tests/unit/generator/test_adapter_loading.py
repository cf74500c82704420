"""Adapters come from the repositories of their runs, are proven before they serve, and disturb nobody."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import httpx2
import msgspec
import numpy as np
import pytest

from adapter_builders import MODEL, PAIRS, Job, asks
from generator_builders import (
    MemoryRepository,
    embedded,
    prompt_of,
    random_model,
    reference_logprobs,
    tensors_of,
)
from rollmill.clock import SystemClock, VirtualClock
from rollmill.config.serving import LimitSettings
from rollmill.errors import DeadlineExceeded, EngineError, ModelError, WeightError, WeightMismatch
from rollmill.generator.adapters import AdapterLoader
from rollmill.generator.engines.fake import FakeEngine
from rollmill.generator.http.app import HttpApp
from rollmill.generator.loading import Replica
from rollmill.generator.service import InferenceService
from rollmill.types import SamplingParams, VersionSpan
from rollmill.weights.bases import put_base
from rollmill.weights.repository import LocalModelRepository


@contextlib.asynccontextmanager
async def loader_of(
    folder: Path, sources: dict[str, Any], *, places: int = 2, before_step: Any = None, **changes: Any
) -> AsyncIterator[AdapterLoader]:
    digest = put_base(folder, tensors_of(MODEL), durable=False)
    engine = embedded(folder, MODEL, digest=digest, max_loras=places, max_lora_rank=2, before_step=before_step)
    options = {"kv_policy": "keep", "load_deadline_s": 20.0, "owner": "generator-0", "clock": SystemClock(), **changes}
    loader = AdapterLoader(engine, sources=sources, **options)
    try:
        yield loader
    finally:
        await loader.close()
        await engine.close()


def versions(loader: AdapterLoader) -> dict[str, int]:
    return {one.name: one.policy_version for one in loader.infos()}


async def test_the_newest_versions_are_served_and_a_later_one_changes_its_own_adapter_alone(tmp_path):
    maths, tools = Job(tmp_path / "maths"), Job(tmp_path / "tools")
    maths.publish(11)
    tools.publish(12)
    async with loader_of(tmp_path, {"maths": maths.repository, "tools": tools.repository}) as loader:
        await loader.start()
        before = {name: await loader.engine.generate(asks(name, f"{name}-1")) for name in ("maths", "tools", "")}
        maths.assert_of(before["maths"], 11)
        tools.assert_of(before["tools"], 12)
        assert maths.publish(13) == 2
        report = await loader.load("maths")
        assert (report.policy_version, report.changed, report.pause_s) == (2, True, 0.0)
        assert report.canary_difference is not None
        assert report.canary_difference < 1e-4
        assert report.nbytes == sum(tensor.nbytes for tensor in PAIRS[13].values())
        after = {name: await loader.engine.generate(asks(name, f"{name}-2")) for name in ("maths", "tools", "")}
        maths.assert_of(after["maths"], 13)
        assert after["maths"].version_spans == (VersionSpan(0, 8, 2),)
        for name in ("tools", ""):
            np.testing.assert_array_equal(after[name].output_ids, before[name].output_ids)
        assert not (await loader.load("maths", policy_version=2)).changed
        assert maths.repository.holders() == {2: ("generator-0-adapter-maths",)}
    assert maths.repository.holders() == tools.repository.holders() == {}


async def test_a_version_that_fails_its_proof_never_serves(tmp_path):
    job = Job(tmp_path / "job")
    job.publish(11)
    async with loader_of(tmp_path, {"job": job.repository}) as loader:
        await loader.start()
        job.publish(12, canary_of=13)
        with pytest.raises(WeightMismatch, match="log-probs on the canary differ"):
            await loader.load("job")
        assert versions(loader) == {"job": 1}
        assert job.repository.holders() == {1: ("generator-0-adapter-job",)}
        job.assert_of(await loader.engine.generate(asks("job", "r")), 11)
        job.publish(13)
        await loader.load("job")
        job.assert_of(await loader.engine.generate(asks("job", "s")), 13)


async def test_what_does_not_fit_is_refused_in_words_and_the_version_before_serves_on(tmp_path):
    job, other = Job(tmp_path / "job"), Job(tmp_path / "other", base=random_model(seed=2))
    job.publish(11)
    other.publish(11)
    whole, empty = (LocalModelRepository(tmp_path / name, transport="file") for name in ("whole", "empty"))
    whole.publish(
        tensors_of(MODEL),
        optimizer_step=0,
        parent=None,
        history_id="h",
        training_dtype="float32",
        canary=None,
        at_s=0.0,
    )
    sources = {"job": job.repository, "other": other.repository, "whole": whole, "empty": empty}
    async with loader_of(tmp_path, sources, places=4) as loader:
        await loader.load("job")
        for name, message in (
            ("other", r"was trained on weights with digest .* are served: it belongs to another base"),
            ("whole", "is whole weights: its run trains without"),
            ("empty", "nothing was published for adapter 'empty' yet"),
        ):
            with pytest.raises(WeightError, match=message):
                await loader.ensure(name)
        with pytest.raises(ModelError, match="adapter 'x' is unknown here; known are 'job', 'other', 'whole', 'empty'"):
            await loader.ensure("x")
        with pytest.raises(WeightError, match="7"):
            await loader.load("job", policy_version=7)
        with pytest.raises(WeightError, match="is whole weights and no adapter"):
            whole.load_adapter(1)
        with pytest.raises(WeightError, match="is whole weights and no adapter"):
            whole.load_base(1)
        assert versions(loader) == {"job": 1, "other": 0, "whole": 0, "empty": 0}


async def test_an_adapter_that_gave_way_comes_back_when_it_is_asked_for(tmp_path):
    jobs = {name: Job(tmp_path / name) for name in ("a", "b")}
    for job, seed in zip(jobs.values(), (11, 12), strict=True):
        job.publish(seed)
    async with loader_of(tmp_path, {name: job.repository for name, job in jobs.items()}, places=1) as loader:
        await loader.start()
        assert versions(loader) == {"a": 1, "b": 0}  # the one that was named first
        assert jobs["b"].repository.holders() == {}
        await loader.ensure("b")
        assert versions(loader) == {"a": 0, "b": 1}
        assert jobs["a"].repository.holders() == {}
        jobs["b"].assert_of(await loader.engine.generate(asks("b", "r")), 12)
        # Many who ask at once are one load.
        async with asyncio.TaskGroup() as tasks:
            for _ in range(5):
                tasks.create_task(loader.ensure("a"))
        jobs["a"].assert_of(await loader.engine.generate(asks("a", "s")), 11)


async def test_a_load_that_takes_too_long_ends_and_changes_nothing(tmp_path):
    job = Job(tmp_path / "job")
    job.publish(11)
    async with loader_of(tmp_path, {"job": job.repository}, load_deadline_s=1e-6) as loader:
        with pytest.raises(DeadlineExceeded, match="the load of adapter 'job' took longer than 1e-06 s"):
            await loader.load("job")
        assert versions(loader) == {"job": 0}


async def test_an_engine_that_serves_none_is_refused_with_those_that_do(tmp_path):
    fake, plain = FakeEngine(clock=VirtualClock()), embedded(tmp_path, MODEL)
    try:
        for engine in (fake, plain):
            with pytest.raises(ModelError, match=r"Engines that can .*: embedded, vllm, with generator\.max_loras"):
                AdapterLoader(
                    engine, sources={}, kv_policy="keep", load_deadline_s=1.0, owner="g", clock=VirtualClock()
                )
    finally:
        await fake.close()
        await plain.close()


@contextlib.asynccontextmanager
async def service_of(loader: AdapterLoader, *, limits: LimitSettings | None = None) -> AsyncIterator[InferenceService]:
    repository = MemoryRepository()
    repository.put(MODEL)
    replica = Replica(
        engine=loader.engine,
        repository=cast(Any, repository),
        kv_policy="keep",
        load_deadline_s=20.0,
        owner="generator-0",
        clock=SystemClock(),
    )
    await replica.start()
    async with asyncio.TaskGroup() as tasks:
        yield InferenceService(replica, tasks=tasks, limits=limits, models=["policy"], adapters=loader)


async def test_the_service_loads_scores_and_samples_by_adapter(tmp_path):
    job = Job(tmp_path / "job")
    job.publish(11)
    async with loader_of(tmp_path, {"job": job.repository}) as loader, service_of(loader) as service:
        turns = await service.generate(asks("job", "r"), siblings=2)  # which loads it
        assert {one.name: one.policy_version for one in service.status().adapters} == {"job": 1}
        for turn in turns:
            job.assert_of(turn, 11)
        ids = np.array(prompt_of(20))
        logprobs, version = await service.score(ids, adapter="job")
        assert version == 1
        assert np.abs(logprobs - (await service.score(ids))[0]).max() > 0.05
        job.publish(12)
        assert (await service.load_weights(0, adapter="job")).policy_version == 2
        late = msgspec.structs.replace(asks("job", "late"), min_policy_version=3)
        with pytest.raises(EngineError, match="wants policy version 3 or newer, this engine serves 2"):
            await service.generate(late)
        with pytest.raises(ModelError, match="adapter 'x' is unknown"):
            await service.generate(asks("x", "s"))
        with pytest.raises(ModelError, match="model 'x' is not served here; served is 'policy', 'job'"):
            service.check_model("x")
        assert service.status().running == 0


async def test_an_adapter_that_drains_lets_its_requests_finish_and_holds_its_new_ones_back(tmp_path):
    job, other = Job(tmp_path / "job"), Job(tmp_path / "other")
    job.publish(11)
    other.publish(12)
    slow = Slow()
    sources = {"job": job.repository, "other": other.repository}
    async with (
        loader_of(tmp_path, sources, kv_policy="drain", before_step=slow) as loader,
        service_of(loader) as service,
    ):
        await loader.start()
        job.publish(13)
        old = asyncio.ensure_future(service.generate(asks("job", "old", max_new_tokens=60)))
        await slow.until_running(service)
        loading = asyncio.ensure_future(service.load_weights(2, adapter="job"))
        await until(lambda: not loader.takes("job"))
        new = asyncio.ensure_future(service.generate(asks("job", "new")))
        slow.gone.set()
        ((others,),) = (await service.generate(asks("other", "others")),)  # not held back
        ((first,), (second,)), report = await asyncio.gather(old, new), await loading
        assert first.version_spans == (VersionSpan(0, 60, 1),)
        assert second.version_spans == (VersionSpan(0, 8, 2),)
        assert others.version_spans == (VersionSpan(0, 8, 1),)
        job.assert_of(first, 11)
        job.assert_of(second, 13)
        assert (report.cut, report.pause_s) == (0, 0.0)
        assert report.finish_s > 0


async def test_requests_of_an_adapter_that_do_not_finish_in_time_go_on_under_its_new_version(tmp_path):
    job = Job(tmp_path / "job")
    job.publish(11)
    slow = Slow()
    settings: dict[str, Any] = {"kv_policy": "drain", "drain_on_update_s": 0.05, "before_step": slow}
    async with loader_of(tmp_path, {"job": job.repository}, **settings) as loader, service_of(loader) as service:
        await loader.start()
        job.publish(13)
        running = asyncio.ensure_future(service.generate(asks("job", "r", max_new_tokens=60), siblings=2))
        await slow.until_running(service)
        loading = asyncio.ensure_future(service.load_weights(2, adapter="job"))
        await until(lambda: not loader.takes("job"))
        await until(lambda: loader.takes("job"))
        slow.gone.set()
        report = await loading
        turns = await running
        for turn in turns:
            assert [span.policy_version for span in turn.version_spans] == [1, 2]
            whole, at = job.whole(13), turn.version_spans[1].start_token
            expected = reference_logprobs(whole, turn, SamplingParams())[at:]
            np.testing.assert_allclose(turn.behavior_logprobs[at:], expected, atol=2e-4)
        assert report.cut == 2


async def until(ready: Any) -> None:
    async with asyncio.timeout(20):
        while not ready():  # noqa: ASYNC110 - the engine lives on another thread
            await asyncio.sleep(0)


class Slow:
    """Lets each step of an engine's thread take its time, until a test lets it go."""

    def __init__(self) -> None:
        self.gone = threading.Event()

    def __call__(self) -> None:
        self.gone.wait(0.01)

    async def until_running(self, service: InferenceService) -> None:
        await until(lambda: service.replica.engine.load().output_tokens > 0)


async def test_over_http_an_adapter_is_a_model_like_any_other(tmp_path):
    job = Job(tmp_path / "job")
    job.publish(11)
    async with loader_of(tmp_path, {"job": job.repository}) as loader, service_of(loader) as service:
        await loader.start()
        transport = httpx2.ASGITransport(HttpApp(service))
        async with httpx2.AsyncClient(transport=transport, base_url="http://replica") as client:
            models = (await client.get("/v1/models")).json()["data"]
            assert [(one["id"], one["policy_version"]) for one in models] == [("policy", 1), ("job", 1)]
            sampled = []
            for fields in ({"model": "job"}, {"adapter": "job"}, {"model": "policy"}):
                body = {"token_ids": prompt_of(12), "sampling_params": {"max_tokens": 8, "seed": 3}, **fields}
                answer = await client.post("/inference/v1/generate", json=body)
                assert answer.status_code == 200, answer.text
                sampled.append(answer.json()["choices"][0]["token_ids"])
            assert sampled[0] == sampled[1] != sampled[2]
            answer = await client.post("/inference/v1/generate", json={**body, "adapter": "x"})
            assert answer.status_code == 404
            assert "adapter 'x' is unknown" in answer.json()["error"]["message"]
