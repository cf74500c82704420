"""A model directory with a reward head, served: gRPC, a router, and HTTP in front of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import httpx2
import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification

from generator_builders import llama, prompt_of, request
from rollmill.clock import SystemClock
from rollmill.config.load import load_config
from rollmill.config.router import RouterSettings
from rollmill.errors import EngineError
from rollmill.generator.http import serve_http
from rollmill.generator.router.main import RouterAddresses, serve_router
from rollmill.generator.router.membership import Entry, FixedList
from rollmill.generator.router.service import RouterService
from rollmill.generator.router.upstream import GrpcUpstream
from rollmill.runtime.serving import ServeOptions, engine_and_repository
from service_builders import service

pytestmark = pytest.mark.integration

LABELS = 2


async def test_a_directory_with_a_reward_head_is_served_over_grpc_and_through_a_router_over_http(tmp_path):
    torch.manual_seed(3)
    model = AutoModelForSequenceClassification.from_config(llama(num_labels=LABELS, pad_token_id=0)).eval()
    model.save_pretrained(tmp_path)
    batch = [prompt_of(length, seed=length) for length in (5, 31, 12)]
    with torch.inference_mode():
        expected = [model(input_ids=torch.tensor([ids])).logits[0].numpy() for ids in batch]
    config = load_config(None, overrides=("generator.max_model_len=64", "generator.dtype=float32")).config
    repository, engine = engine_and_repository(ServeOptions(config=config), path=tmp_path, clock=SystemClock())
    async with service(engine, repository) as client:
        rewards = await asyncio.gather(*(client.reward(np.array(ids)) for ids in batch))
        for reward, scores in zip(rewards, expected, strict=True):
            np.testing.assert_allclose(reward.scores, scores, atol=1e-4)
            assert reward.policy_version == 1
        with pytest.raises(EngineError, match="reward head and no output head"):
            await client.generate(request("a", [1, 2]))
        replies = await over_http(client.address, [{"token_ids": ids, "what": "reward"} for ids in [*batch, []]])
        assert [code for code, _ in replies] == [200, 200, 200, 400]
        for (_, reply), scores in zip(replies, expected, strict=False):
            np.testing.assert_allclose(reply["rewards"], scores, atol=1e-4)
            assert reply["policy_version"] == 1
        assert "cannot score 0 token ids" in replies[-1][1]["error"]["message"]


async def over_http(replica: str, bodies: list[dict]) -> list[tuple[int, dict]]:
    """What a router in front of a replica answers."""

    async def http(router: RouterService, stop: asyncio.Event, on_bound: Callable[[str], None]) -> None:
        await serve_http(router, stop=stop, on_bound=lambda port: on_bound(f"http://127.0.0.1:{port}"))

    router = RouterService(
        RouterSettings.model_validate({"poll_s": 0.05}),
        source=FixedList([Entry(replica)]),
        connect=GrpcUpstream,
        clock=SystemClock(),
    )
    stop = asyncio.Event()
    started: asyncio.Future[RouterAddresses] = asyncio.get_running_loop().create_future()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(serve_router(router, faces=[http], stop=stop, drain_s=0.0, on_serving=started.set_result))
        async with asyncio.timeout(20), httpx2.AsyncClient(base_url=(await started).faces[0]) as client:
            while [one.state for one in router.status_message().replicas] != ["serving"]:
                router.changed.clear()
                await router.changed.wait()
            answers = [await client.post("/inference/v1/score", json=body) for body in bodies]
        stop.set()
    return [(answer.status_code, answer.json()) for answer in answers]
