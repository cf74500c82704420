from __future__ import annotations

import asyncio

import numpy as np
import pytest

from rollmill.controller.replicas import ReplicaSet, choose
from rollmill.errors import ProducersGone, RequestAborted
from rollmill.types import GenerateRequest, SamplingParams, Turn


def test_siblings_follow_their_group_and_a_new_group_takes_the_idlest_replica() -> None:
    work = {"generator-0": 5, "generator-1": 2}
    assert choose("g1", homes={"g1": "generator-0"}, work=work) == "generator-0"
    assert choose("g2", homes={"g1": "generator-0"}, work=work) == "generator-1"


def test_a_group_whose_replica_left_moves() -> None:
    assert choose("g1", homes={"g1": "generator-9"}, work={"generator-0": 3}) == "generator-0"


def test_without_a_replica_the_error_says_so() -> None:
    with pytest.raises(ProducersGone, match="0 replicas"):
        choose("g1", homes={}, work={})


class Replica:
    """Answers every request with an abort once it is let go."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.arrived = 0

    async def generate(self, request: GenerateRequest) -> Turn:
        self.arrived += 1
        await self.go.wait()
        raise RequestAborted(request.request_id)


async def test_a_group_has_a_home_as_long_as_it_has_a_request_and_is_forgotten_then() -> None:
    replicas, clients = ReplicaSet(), [Replica(), Replica()]
    for number, client in enumerate(clients):
        replicas.join(f"generator-{number}", client)

    def ask(request_id: str, group_key: str) -> asyncio.Task[Turn]:
        prompt = np.arange(3, dtype=np.int32)
        request = GenerateRequest(
            request_id=request_id, prompt_ids=prompt, sampling=SamplingParams(), group_key=group_key
        )
        return asyncio.ensure_future(replicas.generate(request))

    tasks = [ask("a", "g1"), ask("b", "g1"), ask("c", "g2"), ask("d", "")]
    await asyncio.sleep(0)
    assert replicas.homes == {"g1": "generator-0", "g2": "generator-1"}
    tasks[0].cancel()
    await asyncio.gather(tasks[0], return_exceptions=True)
    assert replicas.homes["g1"] == "generator-0"  # its sibling still runs there
    for client in clients:
        client.go.set()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert [client.arrived for client in clients] == [2, 2]
    assert replicas.homes == {}
