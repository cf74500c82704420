"""Adapters at a server that speaks vLLM's dialect: one name for each version, and who ends under which."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from rollmill.clock import SystemClock
from rollmill.config.schema import GeneratorSettings
from rollmill.config.serving import VllmSettings
from rollmill.errors import EngineError, WeightError, WeightMismatch
from rollmill.generator.engines.meter import SecondsMeter
from rollmill.generator.engines.protocol import KvPolicy
from rollmill.generator.engines.remote.model import ServedModel
from rollmill.generator.engines.vllm.start import bring_up
from rollmill.types import Adapter, GenerateRequest, SamplingParams, TokenChunk, Turn
from vllm_fake import VOCABULARY, FakeVllm, logprob_of, token_of

PROMPT = [5, 6, 7]
LAYER = "model.layers.0.self_attn.q_proj"
BASE = {f"{LAYER}.weight": torch.zeros(6, 4), "model.embed_tokens.weight": torch.zeros(VOCABULARY, 4)}
SETTINGS = Adapter(base_digest="digest-1", rank=2, alpha=3.0)
GENERATE = "/inference/v1/generate"


def pairs(version: float) -> dict[str, torch.Tensor]:
    """An adapter by whose numbers the server says which one it used."""
    return {f"{LAYER}.lora_A.weight": torch.full((2, 4), version), f"{LAYER}.lora_B.weight": torch.ones(6, 2)}


class World:
    def __init__(self, folder: Path) -> None:
        self.server = FakeVllm(folder)
        clock = SystemClock()
        self.engine = bring_up(
            self.server,
            socket=self.server.socket,
            settings=GeneratorSettings(
                engine="vllm",
                dtype="float32",
                max_num_seqs=4,
                max_model_len=200,
                max_loras=1,
                max_lora_rank=2,
                vllm=VllmSettings(control_deadline_s=10.0, load_poll_s=60.0),
            ),
            model=ServedModel(name="tiny", vocabulary_size=VOCABULARY, max_positions=200, kv=None),
            tensors=BASE,
            policy_version=1,
            digest="digest-1",
            clock=clock,
            meter=SecondsMeter(clock, cause="startup"),
            wait=lambda ready: None,
        )
        assert self.engine.adapters is not None
        self.desk = self.engine.adapters

    async def stage(self, version: int, *, digest: str = "", tensors: Any = None) -> None:
        await self.desk.stage(
            pairs(version) if tensors is None else tensors,
            name="a",
            settings=SETTINGS,
            policy_version=version,
            digest=digest or f"digest-{version}",
        )

    async def load(self, version: int, *, kv: KvPolicy = "keep") -> None:
        await self.stage(version)
        assert await self.desk.serve("a", policy_version=version, kv=kv) == ()

    async def at(self, request_id: str, tokens: int, **how: Any) -> asyncio.Task[Turn]:
        """Start a request and return when the server has made just this many tokens of it, and they were heard."""
        self.server.allow(0)
        heard: list[TokenChunk] = []
        task = asyncio.ensure_future(self.engine.generate(asked(request_id, **how), on_tokens=heard.append))
        before = len(self.server.running)
        await self.until(lambda: len(self.server.running) > before)
        self.server.allow(tokens)
        await self.until(lambda: sum(len(chunk.output_ids) for chunk in heard) >= tokens)
        return task

    async def until(self, ready: Any) -> None:
        async with asyncio.timeout(10):
            while not ready():  # noqa: ASYNC110
                await asyncio.sleep(0.001)

    def names(self) -> list[str]:
        """Versions that the server knows a name of."""
        return [name.rpartition(".")[0] for name in self.server.adapters]


@pytest.fixture
async def world(tmp_path) -> AsyncIterator[World]:
    made = World(tmp_path)
    yield made
    made.server.hold(None)
    made.server.allow(math.inf)
    await made.engine.close()


def asked(request_id: str, *, adapter: str = "a", **sampling: Any) -> GenerateRequest:
    return GenerateRequest(
        request_id=request_id,
        prompt_ids=np.array(PROMPT, dtype=np.int32),
        sampling=SamplingParams(**{"max_new_tokens": 8, **sampling}),
        deadline_s=20.0,
        adapter=adapter,
    )


def spans(turn: Turn) -> list[tuple[int, int, int]]:
    return [(span.start_token, span.end_token, span.policy_version) for span in turn.version_spans]


def assert_sampled_under(turn: Turn, version: int, *, start: int = 0, end: int | None = None) -> None:
    """The tokens from `start` on are the server's, of a request that was sent with those before as its prompt."""
    prompt, ids = [*PROMPT, *turn.output_ids[:start].tolist()], turn.output_ids[start:end]
    assert ids.tolist() == [token_of(prompt, index) for index in range(len(ids))]
    expected = [logprob_of(version, index) for index in range(len(ids))]
    np.testing.assert_allclose(turn.behavior_logprobs[start:end], expected, rtol=1e-6)


async def test_the_server_gets_each_version_as_peft_writes_it_under_a_name_of_its_own(world):
    await world.load(20)
    assert_sampled_under(await world.engine.generate(asked("r")), 20)
    (name,) = world.server.adapters
    assert world.server.bodies[GENERATE][-1]["model"] == name
    folder = world.server.adapters[name]
    assert sorted(file.name for file in folder.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    config = json.loads((folder / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["target_modules"]) == (2, 3.0, ["q_proj"])
    written = load_file(folder / "adapter_model.safetensors")
    assert written.keys() == {f"base_model.model.{module}" for module in pairs(20)}
    await world.engine.generate(asked("base", adapter=""))
    assert "model" not in world.server.bodies[GENERATE][-1]
    await world.load(21)
    assert len({one["lora_name"] for one in world.server.bodies["/v1/load_lora_adapter"]}) == 2


async def test_spans_have_the_adapters_version_where_the_server_speaks_of_its_base(world):
    await world.load(20)
    turn = await world.engine.generate(asked("r", max_new_tokens=5))
    assert (spans(turn), world.engine.info().policy_version) == ([(0, 5, 20)], 1)
    with pytest.raises(EngineError, match="wants policy version 21 or newer, this engine serves 20"):
        await world.engine.generate(msgspec.structs.replace(asked("s"), min_policy_version=21))


async def test_with_keep_older_requests_end_under_their_version_and_its_name_goes_when_nobody_uses_it(world):
    await world.load(20)
    task = await world.at("old", 3)
    await world.load(21, kv="keep")
    world.server.allow(math.inf)
    assert spans(await world.engine.generate(asked("new"))) == [(0, 8, 21)]
    turn = await task
    assert spans(turn) == [(0, 8, 20)]
    assert_sampled_under(turn, 20)
    assert world.names() == ["a.20", "a.21"]
    folders = list(world.server.adapters.values())
    await world.load(22)
    assert world.names() == ["a.21", "a.22"]  # 21 was served when this load looked
    assert [folder.exists() for folder in folders] == [False, True]


async def test_with_recompute_older_requests_are_sent_anew_with_the_tokens_that_they_have(world):
    await world.load(20)
    task = await world.at("old", 3, seed=4)
    await world.load(21, kv="recompute")
    await world.until(lambda: len(world.server.bodies[GENERATE]) == 3)  # the warm-up, then twice
    world.server.allow(math.inf)
    turn = await task
    assert spans(turn) == [(0, 3, 20), (3, 8, 21)]
    assert_sampled_under(turn, 20, end=3)
    assert_sampled_under(turn, 21, start=3)
    first, again = (world.server.bodies[GENERATE][at] for at in (1, 2))
    assert again["token_ids"] == [*PROMPT, *turn.output_ids[:3].tolist()]
    assert (first["sampling_params"]["max_tokens"], again["sampling_params"]["max_tokens"]) == (8, 5)
    assert first["sampling_params"]["seed"] != again["sampling_params"]["seed"]
    assert turn.prompt_ids.tolist() == PROMPT


async def test_a_third_version_does_not_wait_for_requests_of_the_first(world):
    await world.load(20)
    task = await world.at("old", 3)
    await world.load(21, kv="keep")
    await world.load(22, kv="keep")
    await world.until(lambda: len(world.server.bodies[GENERATE]) == 3)
    world.server.allow(math.inf)
    turn = await task
    assert spans(turn) == [(0, 3, 20), (3, 8, 22)]
    assert_sampled_under(turn, 22, start=3)


async def test_a_request_that_waits_here_is_sent_under_the_version_of_then(world):
    await world.load(20)
    await world.engine.pause("keep")
    task = asyncio.ensure_future(world.engine.generate(asked("waits")))
    await asyncio.sleep(0)
    await world.load(21)
    await world.engine.resume()
    assert spans(await task) == [(0, 8, 21)]


async def test_a_version_that_the_server_refuses_changes_nothing_and_its_folder_goes(world):
    await world.load(20)
    world.server.fail["/v1/load_lora_adapter"] = 500
    with pytest.raises(WeightError, match=r"refuses adapter 'a', version 21.*told to refuse"):
        await world.stage(21)
    refused = Path(world.server.bodies["/v1/load_lora_adapter"][-1]["lora_path"])
    assert spans(await world.engine.generate(asked("r"))) == [(0, 8, 20)]
    await world.load(22)
    assert not refused.exists()  # noqa: ASYNC240
    assert spans(await world.engine.generate(asked("s"))) == [(0, 8, 22)]


async def test_a_matrix_that_the_model_has_not_is_refused_before_the_server_hears_of_it(world):
    for name, message in (("model.layers.9.q_proj", "no such linear layer"), ("model.embed_tokens", "no such linear")):
        tensors = {key.replace(LAYER, name): tensor for key, tensor in pairs(20).items()}
        with pytest.raises(WeightError, match=message):
            await world.stage(20, tensors=tensors)
    wide = {key: tensor.repeat(2, 1) if "lora_B" in key else tensor for key, tensor in pairs(20).items()}
    with pytest.raises(WeightError, match=r"by a matrix of 12 x 4, and the model that is served has one of 6 x 4"):
        await world.stage(20, tensors=wide)
    assert "/v1/load_lora_adapter" not in world.server.bodies


async def test_a_repeated_version_is_nothing_and_a_second_publication_of_one_is_refused(world):
    await world.load(20)
    await world.load(20)
    await world.stage(20, digest="other")
    with pytest.raises(WeightMismatch, match="two publications share a number"):
        await world.desk.serve("a", policy_version=20, kv="keep")
    world.desk.forget("a")
    await world.load(21)
    assert sorted(world.names()) == ["a.20", "a.21"]  # of 20 the one that was served when this load looked


async def test_an_aborted_request_that_was_to_be_sent_anew_ends_with_what_it_has(world):
    await world.load(20)
    task = await world.at("old", 3)
    world.server.hold(GENERATE)
    await world.load(21, kv="recompute")
    await world.until(lambda: len(world.server.bodies[GENERATE]) == 3)
    assert await world.engine.abort("old")
    turn = await task
    assert (spans(turn), turn.stop_reason.value) == ([(0, 3, 20)], "abort")


async def test_nothing_of_the_adapters_is_left_in_memory_when_the_engine_is_closed(tmp_path):
    world = World(tmp_path)
    await world.load(20)
    (folder,) = world.server.adapters.values()
    assert folder.exists()
    await world.engine.close()
    assert not folder.parent.exists()
