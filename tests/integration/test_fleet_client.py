"""The client of a fleet, over a real channel: whose requests they are, how many, and whose weights are served."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from generator_builders import MemoryRepository
from rollmill.clock import SystemClock
from rollmill.config.fleet import FleetSettings
from rollmill.errors import WeightError, WeightMismatch
from rollmill.generator.engines.fake import FakeEngine, FakeLatency
from rollmill.generator.main import Addresses, serve
from rollmill.runtime.fleet import FleetClient
from rollmill.types import GenerateRequest, SamplingParams, Turn

pytestmark = pytest.mark.integration


class Watched(FakeEngine):
    """Notes what it is asked, and how much at once."""

    asked: list[GenerateRequest]
    now = most = 0

    async def generate(self, request: GenerateRequest, **options: Any) -> Turn:
        self.asked.append(request)
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            return await super().generate(request, **options)
        finally:
            self.now -= 1


def request(number: int = 0) -> GenerateRequest:
    return GenerateRequest(
        request_id=f"g0/{number}.1/turn0",
        prompt_ids=np.array([1, 2], dtype=np.int32),
        sampling=SamplingParams(max_new_tokens=4, seed=number),
        group_key="g0",
    )


def against_a_fleet(check: Callable[[FleetClient, Watched], Awaitable[None]], **settings: Any) -> None:
    """Serve version 1, with version 2 in the repository, and run a check with a client of it."""

    async def main() -> None:
        repository = MemoryRepository()
        for number in (1.0, 2.0):
            repository.publish(
                {"weight": torch.full((2,), number)},
                optimizer_step=int(number),
                parent=None,
                history_id="h",
                training_dtype="float32",
                canary=None,
                at_s=0.0,
            )
        engine = Watched(
            clock=SystemClock(),
            vocabulary_size=64,
            policy_version=1,
            digest=repository.manifest(1).digest,
            latency=FakeLatency(step_s=0.01),
        )
        engine.asked = []
        stop, served = asyncio.Event(), asyncio.get_running_loop().create_future()
        digest_of = settings.pop("digest_of", lambda version: repository.manifest(version).digest)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(
                serve(
                    engine=engine,
                    repository=repository,
                    kv_policy="keep",
                    stop=stop,
                    load_deadline_s=5.0,
                    on_serving=lambda addresses: served.set_result(addresses),
                )
            )
            addresses: Addresses = await served
            client = FleetClient(FleetSettings(address=addresses.grpc, **settings), digest_of=digest_of)
            try:
                await check(client, engine)
            finally:
                await client.close()
                stop.set()

    asyncio.run(main())


def test_two_runs_may_use_the_same_ids_at_once() -> None:
    async def check(client: FleetClient, engine: Watched) -> None:
        other = FleetClient(client.settings, digest_of=lambda version: "")
        try:
            turns = await asyncio.gather(client.generate(request()), other.generate(request()))
        finally:
            await other.close()
        assert [turn.request_id for turn in turns] == ["g0/0.1/turn0"] * 2
        assert len({one.request_id for one in engine.asked}) == 2
        assert len({one.group_key for one in engine.asked}) == 2
        assert {one.job for one in engine.asked} == {"main"}

    against_a_fleet(check, job="main")


def test_no_more_are_in_flight_than_the_run_may_have() -> None:
    async def check(client: FleetClient, engine: Watched) -> None:
        await asyncio.gather(*(client.generate(request(number)) for number in range(9)))
        assert (len(engine.asked), engine.most) == (9, 2)

    against_a_fleet(check, slots=2)


def test_requests_ask_for_what_was_loaded_last() -> None:
    async def check(client: FleetClient, engine: Watched) -> None:
        await client.generate(request())
        await client.load_weights(2, deadline_s=5.0)
        await client.generate(request(1))
        assert [one.min_policy_version for one in engine.asked] == [0, 2]

    against_a_fleet(check)


def test_weights_of_another_run_under_the_same_number_are_refused_and_nothing_is_asked_of_them(tmp_path: Path) -> None:
    async def check(client: FleetClient, engine: Watched) -> None:
        with pytest.raises(WeightMismatch, match="policy version 2 of another run") as caught:
            await client.load_weights(2, deadline_s=5.0)
        assert caught.value.published == "ours"

    against_a_fleet(check, digest_of=lambda version: "ours")


def test_a_version_that_cannot_be_loaded_leaves_the_older_one_to_be_asked_for() -> None:
    async def check(client: FleetClient, engine: Watched) -> None:
        with pytest.raises(WeightError, match="policy version 7 is unknown"):
            await client.load_weights(7, deadline_s=5.0)
        assert (await client.generate(request())).output_ids.size == 4
        assert engine.asked[-1].min_policy_version == 0

    against_a_fleet(check)
