"""What every engine must do that serves adapters beside a base: the embedded one, and a real vLLM."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from generator_builders import (
    adapter_for,
    canary_for,
    embedded,
    llama,
    merged_model,
    prompt_of,
    random_model,
    reference_logits,
    reference_logprobs,
    request,
    tensors_of,
)
from rollmill.clock import SystemClock
from rollmill.errors import EngineError, ModelError, Overloaded, WeightError, WeightMismatch
from rollmill.generator.adapters import AdapterLoader
from rollmill.generator.engines.protocol import Engine, KvPolicy
from rollmill.types import Adapter, GenerateRequest, SamplingParams, TokenChunk, Turn
from rollmill.weights.repository import LocalModelRepository
from vllm_server import SHAPE, SharedServer, why_not

MODEL = random_model(llama(**SHAPE), seed=1)
TARGETS = ("q_proj", "v_proj", "o_proj", "gate_proj", "down_proj")
"""Some of what vLLM keeps as one matrix (q, k, v; gate, up), so that the rest of it must stay untouched."""
SETTINGS = Adapter(base_digest="digest-1", rank=2, alpha=3.0)
PAIRS = {name: adapter_for(MODEL, seed=seed, targets=TARGETS) for name, seed in (("a", 11), ("b", 12), ("a2", 13))}
WHOLE = {name: merged_model(MODEL, pairs, settings=SETTINGS) for name, pairs in PAIRS.items()} | {"": MODEL}
PLACES, LARGEST_RANK = 2, 4
ATOL = 5e-4
"""Nats: log-probs reach -10 and are rounded at each of 4 layers; those of another version are 0.05 away."""
LONG = 120


class Rig:
    """An engine with two places for adapters."""

    def __init__(self, engine: Any, *, kind: str) -> None:
        self.engine: Engine = engine
        self.desk = engine.adapters
        self.kind = kind

    async def load(self, name: str, *, version: int = 7, pairs: str = "", kv: KvPolicy = "keep") -> tuple[str, ...]:
        await self.stage(name, version=version, pairs=pairs)
        return await self.desk.serve(name, policy_version=version, kv=kv)

    async def stage(self, name: str, *, version: int = 7, pairs: str = "") -> None:
        await self.desk.stage(
            PAIRS[pairs or name], name=name, settings=SETTINGS, policy_version=version, digest=f"digest-{version}"
        )

    async def running(self, asked: GenerateRequest, *, tokens: int = 4) -> asyncio.Task[Turn]:
        """Start a request and return when it has some tokens."""
        enough = asyncio.Event()

        def hear(chunk: TokenChunk) -> None:
            if chunk.start_token + len(chunk.output_ids) >= tokens:
                enough.set()

        task = asyncio.ensure_future(self.engine.generate(asked, on_tokens=hear))
        async with asyncio.timeout(30):
            await enough.wait()
        return task


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedServer]:
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    shared = SharedServer(tmp_path_factory.mktemp("vllm"), max_loras=PLACES, max_lora_rank=LARGEST_RANK)
    yield shared
    shared.stop()


KINDS = [
    "embedded",
    pytest.param("vllm", marks=[pytest.mark.slow, pytest.mark.integration, pytest.mark.timeout(600)]),
]


@contextlib.asynccontextmanager
async def rig_of(kind: str, folder: Path, pytest_request: pytest.FixtureRequest, **changes: Any) -> AsyncIterator[Rig]:
    if kind == "embedded":
        engine: Any = embedded(folder, MODEL, max_loras=PLACES, max_lora_rank=LARGEST_RANK, **changes)
    else:
        engine = pytest_request.getfixturevalue("server").engine(**changes)
    try:
        yield Rig(engine, kind=kind)
    finally:
        await engine.close()


@pytest.fixture(params=KINDS)
async def rig(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Rig]:
    async with rig_of(request.param, tmp_path, request) as made:
        yield made


def asks(adapter: str, request_id: str, prompt: list[int], **sampling: Any) -> GenerateRequest:
    return msgspec.structs.replace(request(request_id, prompt, **sampling), adapter=adapter)


def spans_of(turn: Turn) -> list[tuple[int, int, int]]:
    return [(span.start_token, span.end_token, span.policy_version) for span in turn.version_spans]


def assert_of(turn: Turn, whole: str, *, part: slice = slice(None)) -> None:
    """The log-probs are those of the trainer's merged weights."""
    expected = reference_logprobs(WHOLE[whole], turn, SamplingParams())
    np.testing.assert_allclose(turn.behavior_logprobs[part], expected[part], atol=ATOL)


def assert_not_of(turn: Turn, whole: str) -> None:
    other = reference_logprobs(WHOLE[whole], turn, SamplingParams())
    assert np.abs(turn.behavior_logprobs - other).max() > 0.05


def expected_scores(whole: str, ids: np.ndarray) -> np.ndarray:
    logits = reference_logits(WHOLE[whole], ids)[:-1].log_softmax(-1)
    return logits.gather(1, torch.from_numpy(ids[1:])[:, None])[:, 0].numpy()


async def test_requests_at_once_are_each_sampled_from_their_own_sum_of_weights(rig):
    await rig.load("a")
    await rig.load("b", version=3)
    names = ["a", "", "b", "a", ""]
    turns = await asyncio.gather(
        *(rig.engine.generate(asks(n, f"r{i}", prompt_of(20 + i, seed=i), seed=i)) for i, n in enumerate(names))
    )
    for name, turn in zip(names, turns, strict=True):
        assert_of(turn, name)
        assert_not_of(turn, "b" if name != "b" else "a")
        assert spans_of(turn) == [(0, 8, {"a": 7, "b": 3, "": 1}[name])]
    assert {one.name: one.policy_version for one in rig.engine.info().adapters} == {"a": 7, "b": 3}
    assert "adapters" in rig.engine.info().capabilities


async def test_a_staged_version_is_scored_before_it_serves_and_serves_nobody_until_then(rig):
    ids = np.array(prompt_of(60, seed=4))
    await rig.load("a")
    await rig.stage("a", version=8, pairs="a2")
    np.testing.assert_allclose(
        await rig.desk.score(ids, name="a", policy_version=8), expected_scores("a2", ids), atol=ATOL
    )
    np.testing.assert_allclose(await rig.desk.score(ids, name="a"), expected_scores("a", ids), atol=ATOL)
    np.testing.assert_allclose(await rig.engine.score(ids), expected_scores("", ids), atol=ATOL)
    assert_of(await rig.engine.generate(asks("a", "r", prompt_of(12))), "a")
    rig.desk.forget("a")
    with pytest.raises(ModelError, match="policy version 8 of adapter 'a' is not staged"):
        await rig.desk.serve("a", policy_version=8, kv="keep")
    await rig.load("b")
    with pytest.raises(ModelError, match="adapter 'c' is not loaded here; loaded are: 'a', 'b'"):
        await rig.engine.generate(asks("c", "s", prompt_of(4)))


async def test_equal_prompts_share_kv_within_a_version_and_never_across_adapters_and_versions(rig):
    await rig.load("a")
    await rig.load("b")
    prompt = prompt_of(70)
    for number in range(2):
        turns = [await rig.engine.generate(asks(n, f"{n}-{number}", prompt, seed=number)) for n in ("a", "", "b")]
        for name, turn in zip(("a", "", "b"), turns, strict=True):
            assert bool(turn.cached_tokens) == bool(number)
            assert_of(turn, name)
    await rig.load("a", version=8, pairs="a2")
    turn = await rig.engine.generate(asks("a", "new", prompt))
    assert turn.cached_tokens == 0
    assert_of(turn, "a2")


async def test_with_recompute_a_request_in_flight_goes_on_as_the_new_version_would(rig):
    await rig.load("a")
    await rig.load("b")
    prompts = {name: prompt_of(9, seed=number) for number, name in enumerate(("a", "b", ""))}
    tasks = [await rig.running(asks(n, n or "base", prompt, max_new_tokens=LONG)) for n, prompt in prompts.items()]
    await rig.load("a", version=8, pairs="a2", kv="recompute")
    moved, other, base = await asyncio.gather(*tasks)
    (start, cut, before), (_, end, after) = spans_of(moved)
    assert (start, before, end, after) == (0, 7, LONG, 8)
    assert cut >= 4
    assert_of(moved, "a", part=slice(0, cut))
    assert_of(moved, "a2", part=slice(cut, None))
    assert_of(other, "b")
    assert_of(base, "")
    assert (spans_of(other), spans_of(base)) == ([(0, LONG, 7)], [(0, LONG, 1)])


async def test_with_keep_every_token_is_of_the_version_that_its_span_names(rig):
    await rig.load("a")
    task = await rig.running(asks("a", "old", prompt_of(9), max_new_tokens=LONG))
    await rig.load("a", version=8, pairs="a2", kv="keep")
    new = await rig.engine.generate(asks("a", "new", prompt_of(9), seed=1))
    assert spans_of(new) == [(0, 8, 8)]
    assert_of(new, "a2")
    turn = await task
    if rig.kind == "embedded":  # it goes on over the KV that it has, under the new weights
        assert [version for *_, version in spans_of(turn)] == [7, 8]
        assert_of(turn, "a", part=slice(0, turn.version_spans[0].end_token))
    else:  # it ends under the version that it began with
        assert spans_of(turn) == [(0, LONG, 7)]
        assert_of(turn, "a")


async def test_beyond_the_places_the_least_recently_asked_for_goes_and_never_one_in_use(rig):
    await rig.load("a")
    await rig.load("b")
    await rig.engine.generate(asks("a", "r", prompt_of(5)))
    assert await rig.load("c", pairs="a2") == ("b",)
    assert_of(await rig.engine.generate(asks("c", "s", prompt_of(5))), "a2")
    with pytest.raises(ModelError, match="adapter 'b' is not loaded here"):
        await rig.engine.generate(asks("b", "t", prompt_of(5)))
    tasks = [await rig.running(asks(n, n, prompt_of(9), max_new_tokens=LONG)) for n in ("a", "c")]
    await rig.stage("b")
    with pytest.raises(EngineError, match="adapter 'c' is in use"):
        await rig.desk.drop("c")
    with pytest.raises(Overloaded, match="requests use every one"):
        await rig.desk.serve("b", policy_version=7, kv="keep")
    for name, turn in zip(("a", "a2"), await asyncio.gather(*tasks), strict=True):
        assert_of(turn, name)
    assert await rig.desk.drop("c")
    assert await rig.desk.serve("b", policy_version=7, kv="keep") == ()
    assert_of(await rig.engine.generate(asks("b", "u", prompt_of(5))), "b")


async def test_what_does_not_fit_is_refused_and_the_version_before_serves_on(rig):
    await rig.load("a")
    stranger = {f"other.{name}": tensor for name, tensor in PAIRS["a"].items()}
    wide = adapter_for(MODEL, seed=1, rank=LARGEST_RANK + 1)
    cases = (
        (stranger, SETTINGS, "other"),
        (wide, msgspec.structs.replace(SETTINGS, rank=LARGEST_RANK + 1), r"rank 5, and generator\.max_lora_rank is 4"),
        ({name: tensor[:, :1] for name, tensor in PAIRS["a"].items()}, SETTINGS, "shape|matrix"),
    )
    for tensors, settings, message in cases:
        with pytest.raises(WeightError, match=message):
            await rig.desk.stage(tensors, name="a", settings=settings, policy_version=9, digest="d")
    with pytest.raises(EngineError, match="versions only rise"):
        await rig.load("a", version=6)
    await rig.engine.pause("keep")
    with pytest.raises(EngineError, match="under the adapters 'a'"):
        await rig.engine.update(tensors_of(MODEL), policy_version=2, digest="digest-2", kv="keep")
    await rig.engine.resume()
    assert_of(await rig.engine.generate(asks("a", "r", prompt_of(10))), "a")


@pytest.mark.parametrize("kind", KINDS)
async def test_from_a_runs_repository_a_version_is_proven_before_it_serves(request, tmp_path, kind):
    repository = LocalModelRepository(tmp_path / "run", transport="file")
    digest = repository.put_base(tensors_of(MODEL))
    settings = msgspec.structs.replace(SETTINGS, base_digest=digest)

    def publish(pairs: str, *, canary_of: str) -> None:
        repository.publish(
            PAIRS[pairs],
            optimizer_step=0,
            parent=None,
            history_id="h",
            training_dtype="float32",
            canary=canary_for(WHOLE[canary_of]),
            at_s=0.0,
            adapter=settings,
        )

    publish("a", canary_of="a")
    async with rig_of(kind, tmp_path / "model", request, digest=digest) as rig:
        loader = AdapterLoader(
            rig.engine,
            sources={"maths": repository},
            kv_policy="keep",
            load_deadline_s=60.0,
            owner="replica",
            clock=SystemClock(),
        )
        await loader.start()
        publish("b", canary_of="a2")
        with pytest.raises(WeightMismatch, match="log-probs on the canary differ"):
            await loader.load("maths")
        turn = await rig.engine.generate(asks("maths", "r", prompt_of(12)))
        assert spans_of(turn) == [(0, 8, 1)]
        assert_of(turn, "a")
        publish("a2", canary_of="a2")
        report = await loader.load("maths")
        assert (report.policy_version, report.changed, report.pause_s) == (3, True, 0.0)
        assert report.canary_difference is not None
        assert report.canary_difference < 1e-4
        assert_of(await rig.engine.generate(asks("maths", "s", prompt_of(12))), "a2")
        await loader.close()
    assert repository.holders() == {}
