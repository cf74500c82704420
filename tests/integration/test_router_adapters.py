"""A router in front of a mixed fleet: replicas with different adapters, and with none, over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from adapter_builders import MODEL, Job, asks
from generator_builders import MemoryRepository, embedded, prompt_of, reference_logprobs, request, tensors_of
from rollmill.clock import SystemClock
from rollmill.config.router import RouterSettings
from rollmill.errors import ModelError, NotServing
from rollmill.generator.client import GeneratorClient
from rollmill.generator.router.main import RouterAddresses, serve_router
from rollmill.generator.router.membership import Entry, FixedList
from rollmill.generator.router.service import RouterService
from rollmill.generator.router.upstream import GrpcUpstream
from rollmill.types import SamplingParams
from rollmill.weights.bases import put_base
from service_builders import service

pytestmark = pytest.mark.integration


@contextlib.asynccontextmanager
async def fleet(folder: Path, *served: dict[str, Job], **settings: Any) -> AsyncIterator[tuple[Any, list[Any]]]:
    """A router's service, and clients: of the router, then of each replica, which serve these adapters."""
    digest = put_base(folder, tensors_of(MODEL), durable=False)
    async with contextlib.AsyncExitStack() as stack:
        replicas = []
        for number, jobs in enumerate(served):
            engine = embedded(folder / str(number), MODEL, digest=digest, max_loras=len(jobs), max_lora_rank=2)
            repository = MemoryRepository()
            repository.put(MODEL)
            sources = {name: job.repository for name, job in jobs.items()}
            replicas.append(await stack.enter_async_context(service(engine, repository, adapters=sources or None)))
        addresses = [replica.address for replica in replicas]
        router, client = await stack.enter_async_context(routing(addresses, **settings))
        await until(lambda: [one.state for one in router.status_message().replicas] == ["serving"] * len(served))
        yield router, [client, *replicas]


@contextlib.asynccontextmanager
async def routing(addresses: list[str], **settings: Any) -> AsyncIterator[tuple[RouterService, GeneratorClient]]:
    stop, started = asyncio.Event(), asyncio.get_running_loop().create_future()
    router = RouterService(
        RouterSettings.model_validate({"poll_s": 0.1, "list_s": 0.1, **settings}),
        source=FixedList([Entry(address) for address in addresses]),
        connect=GrpcUpstream,
        clock=SystemClock(),
    )

    def on_serving(bound: RouterAddresses) -> None:
        started.set_result(bound.grpc)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(serve_router(router, stop=stop, drain_s=0.0, on_serving=on_serving))
        client = GeneratorClient(await started)
        try:
            yield router, client
        finally:
            await client.close()
            stop.set()


async def until(true: Any) -> None:
    async with asyncio.timeout(40):
        while not true():  # noqa: ASYNC110 - the router's own polling is what is waited for
            await asyncio.sleep(0.02)


async def test_requests_for_an_adapter_go_to_the_replicas_that_have_it_and_never_end_in_a_404(tmp_path):
    jobs = {"maths": (Job(tmp_path / "maths"), 11), "tools": (Job(tmp_path / "tools"), 12)}
    for job, seed in jobs.values():
        job.publish(seed)
    served: list[dict[str, Job]] = [{name: job} for name, (job, _) in jobs.items()]
    async with fleet(tmp_path, *served, {}) as (router, (client, *replicas)):
        asked = [asks(name, f"{name}-{number}", seed=number) for name in ("maths", "tools", "") for number in range(8)]
        turns = await asyncio.gather(*(client.generate(one) for one in asked))
        for one, turn in zip(asked, turns, strict=True):
            if one.adapter:
                job, seed = jobs[one.adapter]
                job.assert_of(turn, seed)
            else:
                expected = reference_logprobs(MODEL, turn, SamplingParams())
                np.testing.assert_allclose(turn.behavior_logprobs, expected, atol=2e-4)
        finished = [(await replica.status()).finished_turns for replica in replicas]
        assert sum(finished) == 24
        assert min(finished[:2]) >= 8
        members = router.status_message().replicas
        shown = {one.replica: {has.name: has.policy_version for has in one.adapters} for one in members}
        assert [shown[replica.address] for replica in replicas] == [{"maths": 1}, {"tools": 1}, {}]
        with pytest.raises(ModelError) as caught:
            await client.generate(asks("poems", "poems"))
        for replica, has in zip(replicas, ("'maths'", "'tools'", "none"), strict=True):
            assert f"{replica.address} has {has}" in str(caught.value)


async def test_a_request_that_wants_a_newer_adapter_waits_for_the_replica_that_loads_it(tmp_path):
    maths = Job(tmp_path / "maths")
    maths.publish(11)
    served = [{"maths": maths}, {"maths": maths}]
    async with fleet(tmp_path, *served, queue_wait_s=20.0) as (_, (client, first, second)):
        maths.publish(13)
        newer = msgspec.structs.replace(asks("maths", "newer"), min_policy_version=2)
        waiting = asyncio.ensure_future(client.generate(newer))
        # Of the base there is version 1 alone: what is wanted of the adapter does not count for it.
        assert len((await client.generate(request("base", prompt_of(5)))).output_ids) == 8
        assert not waiting.done()
        await second.load_weights(2, deadline_s=20, adapter="maths")
        maths.assert_of(await waiting, 13)
        assert (await first.status()).finished_turns + (await second.status()).finished_turns == 2


async def test_a_version_that_nobody_has_ends_with_who_has_which(tmp_path):
    maths = Job(tmp_path / "maths")
    maths.publish(11)
    async with fleet(tmp_path, {"maths": maths}, {}, queue_wait_s=0.3) as (_, (client, first, second)):
        late = msgspec.structs.replace(asks("maths", "late"), min_policy_version=9)
        with pytest.raises(NotServing) as caught:
            await client.generate(late)
        said = str(caught.value)
        assert "no replica serves adapter 'maths' in policy version 9 or newer: " in said
        assert f"{first.address} has version 1" in said
        assert f"{second.address} has none" in said
