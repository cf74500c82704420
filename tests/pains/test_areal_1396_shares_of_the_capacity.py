"""AReaL 1396: the capacity was divided by the number of workers twice; the share became zero, and the run hung.

Expected: what is admitted does not depend on how many replicas share it; the shares sum to it; none is zero while
there is work for it.
"""

from __future__ import annotations

import asyncio
from collections import Counter

import numpy as np
import pytest

from rollmill.controller.replicas import ReplicaSet
from rollmill.types import GenerateRequest, SamplingParams
from simulation.scheduling_world import World, settings


@pytest.mark.parametrize("replicas", [1, 2, 3, 5, 16])
def test_the_capacity_is_the_same_for_any_number_of_replicas(replicas: int) -> None:
    world = World(
        settings(batch_groups=4, group_size=1, max_staleness=2, total_steps=100, prior_group_s=1000.0), validate=True
    )
    world.begin(replicas=replicas, slots=8)
    # (2 + 1) * 4, whoever runs them.
    assert world.core.view().ceiling == 12
    assert len(world.flights) == 12


class Counting:
    """A replica that never answers and remembers whom it got."""

    def __init__(self) -> None:
        self.requests: list[str] = []

    async def generate(self, request: GenerateRequest):
        self.requests.append(request.request_id)
        await asyncio.get_running_loop().create_future()


@pytest.mark.parametrize("replicas", [1, 2, 3, 5])
async def test_the_shares_sum_to_the_whole_and_differ_by_one_at_most(replicas: int) -> None:
    clients = [Counting() for _ in range(replicas)]
    rotation = ReplicaSet()
    for number, client in enumerate(clients):
        rotation.join(f"r{number}", client)
    requests = [
        GenerateRequest(
            request_id=f"q{number}",
            prompt_ids=np.array([1], np.int32),
            sampling=SamplingParams(max_new_tokens=1),
            deadline_s=9.0,
            group_key=f"g{number}",
        )
        for number in range(12)
    ]
    calls = [asyncio.ensure_future(rotation.generate(request)) for request in requests]
    await asyncio.sleep(0)
    shares = Counter({number: len(client.requests) for number, client in enumerate(clients)})
    assert shares.total() == 12
    assert min(shares.values()) >= 1
    assert max(shares.values()) - min(shares.values()) <= 1
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
