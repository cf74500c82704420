"""Weights made ready beside those that serve: equal to the last bit once swapped in, invisible until then."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig

from generator_builders import (
    SHAPE,
    SteppedEngine,
    embedded,
    llama,
    prompt_of,
    random_model,
    request,
    tensors_of,
)
from rollmill.clock import VirtualClock
from rollmill.config import ModelFacts, load_config
from rollmill.config.derive import derive
from rollmill.config.precision import packed_precision
from rollmill.errors import EngineDead, EngineError, WeightError
from rollmill.generator.engines.embedded.engine import EmbeddedEngine
from rollmill.generator.engines.embedded.linears import KernelChoice
from rollmill.generator.engines.fake import FakeEngine, FakeLatency
from rollmill.generator.engines.protocol import KvPolicy
from rollmill.priority import NICENESS
from rollmill.testing import run_virtual
from rollmill.types import GenerateRequest

IDS = np.arange(1, 12)
Tensors = Mapping[str, torch.Tensor]


def never() -> bool:
    return False


def model_of(seed: int, *, tied: bool = True) -> Any:
    return random_model(llama(tie_word_embeddings=tied), seed=seed)


def made_ready(engine: SteppedEngine, tensors: Tensors, *, policy_version: int = 2) -> Tensors:
    assert engine.core.staging.write(tensors, policy_version=policy_version, gives_up=never)
    return tensors


def update(engine: SteppedEngine, tensors: Tensors, *, policy_version: int = 2, kv: KvPolicy = "keep") -> None:
    engine.core.pause()
    engine.core.update(tensors, policy_version=policy_version, digest=f"digest-{policy_version}", kv=kv)
    engine.core.resume()


def ask(number: int, *, tokens: int = 12) -> GenerateRequest:
    # the first one greedy, the second sampled
    return request(f"r{number}", prompt_of(9, seed=number), temperature=float(number % 2), max_new_tokens=tokens)


def answers(engine: SteppedEngine, numbers: range) -> list[tuple[list[int], list[float]]]:
    turns = [engine.turn(f"r{number}") for number in numbers]
    return [(turn.output_ids.tolist(), turn.behavior_logprobs.tolist()) for turn in turns]


def asked_later(engine: SteppedEngine) -> list[tuple[list[int], list[float]]]:
    for number in range(2, 4):
        engine.submit(ask(number))
    engine.finish()
    return answers(engine, range(2, 4))


def places(engine: SteppedEngine) -> set[int]:
    return {buffer.data_ptr() for buffer in engine.core.model.buffers()}


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("kernels", ["auto", "torch"])
@pytest.mark.parametrize(("dtype", "kv"), [("float32", "keep"), ("float32", "recompute"), ("bfloat16", "keep")])
def test_a_staged_swap_gives_the_bits_of_a_copy_in_the_pause_and_of_a_new_engine(tmp_path, tied, kernels, dtype, kv):
    old, new = model_of(1, tied=tied), model_of(2, tied=tied)
    found = []
    for staged in (True, False):
        engine = SteppedEngine(tmp_path, old, dtype=dtype, kernels=kernels)
        tensors = tensors_of(new)
        for number in range(2):
            engine.submit(ask(number))
        engine.steps(5)
        before = places(engine)
        if staged:
            made_ready(engine, tensors)
            engine.steps(2)
        else:
            engine.steps(2)
        update(engine, tensors, kv=kv)
        assert (places(engine) == before) == (not staged)
        engine.finish()
        found.append((answers(engine, range(2)), asked_later(engine)))
    assert found[0] == found[1]
    fresh = SteppedEngine(tmp_path, new, dtype=dtype, kernels=kernels)
    assert found[0][1] == asked_later(fresh)


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_weights_that_are_ready_and_not_swapped_in_change_no_bit(tmp_path, kernels):
    old, new = model_of(1), model_of(2)
    found = []
    for staged in (True, False):
        engine = SteppedEngine(tmp_path, old, kernels=kernels)
        for number in range(2):
            engine.submit(ask(number))
        engine.steps(5)
        if staged:
            made_ready(engine, tensors_of(new))
        engine.finish()
        found.append((answers(engine, range(2)), engine.core.score(IDS).tolist()))
    assert found[0] == found[1]


def with_tensors(tensors: Tensors) -> Any:
    model = random_model()
    model.load_state_dict(tensors, strict=False)
    return model


def other_numbers_in_the_same_tensors(tensors: Tensors) -> tuple[Tensors, int]:
    for tensor in tensors.values():
        tensor.mul_(1.5)
    return tensors, 3


def other_tensors(_: Tensors) -> tuple[Tensors, int]:
    return tensors_of(model_of(3)), 2


def one_other_tensor(tensors: Tensors) -> tuple[Tensors, int]:
    return {**tensors, "model.norm.weight": tensors["model.norm.weight"] + 1}, 2


@pytest.mark.parametrize("changed", [other_numbers_in_the_same_tensors, other_tensors, one_other_tensor])
def test_an_update_of_anything_but_what_is_ready_takes_the_tensors_it_is_given(
    tmp_path, changed: Callable[[Tensors], tuple[Tensors, int]]
):
    engine = SteppedEngine(tmp_path, model_of(1))
    tensors = made_ready(engine, tensors_of(model_of(2)))
    given, version = changed(tensors)
    update(engine, given, policy_version=version)
    assert engine.core.policy_version == version
    expected = SteppedEngine(tmp_path, with_tensors(given)).core.score(IDS)
    np.testing.assert_array_equal(engine.core.score(IDS), expected)


def test_of_two_stagings_in_a_row_the_second_is_ready_and_the_first_is_still_loaded_right(tmp_path):
    first, second = model_of(2), model_of(3)
    engine = SteppedEngine(tmp_path, model_of(1))
    ready = [
        made_ready(engine, tensors_of(model), policy_version=version) for version, model in ((2, first), (3, second))
    ]
    update(engine, ready[0], policy_version=2)
    np.testing.assert_array_equal(engine.core.score(IDS), SteppedEngine(tmp_path, first).core.score(IDS))
    update(engine, ready[1], policy_version=3)
    np.testing.assert_array_equal(engine.core.score(IDS), SteppedEngine(tmp_path, second).core.score(IDS))


def test_what_is_ready_keeps_none_of_the_tensors_it_was_made_from(tmp_path):
    engine = SteppedEngine(tmp_path, model_of(1))
    tensors = made_ready(engine, tensors_of(model_of(2)))
    kept = [weakref.ref(tensor) for tensor in tensors.values()]
    del tensors
    assert [reference() for reference in kept] == [None] * len(kept)
    # the same numbers in other tensors are not what was made ready
    update(engine, tensors_of(model_of(2)))
    np.testing.assert_array_equal(engine.core.score(IDS), SteppedEngine(tmp_path, model_of(2)).core.score(IDS))


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_five_swaps_use_the_buffers_of_the_first(tmp_path, kernels: KernelChoice):
    models = [model_of(seed) for seed in (1, 2)]
    engine = SteppedEngine(tmp_path, models[0], kernels=kernels)
    expected = [SteppedEngine(tmp_path, model, kernels=kernels).core.score(IDS) for model in models]
    alone = engine.core.model.buffers()
    first: set[int] = set()
    for version in range(2, 7):
        tensors = made_ready(engine, tensors_of(models[(version + 1) % 2]), policy_version=version)
        if version == 2:
            first = places(engine)
            assert len(first) == 2 * len(alone)
            assert nbytes(engine.core.model.buffers()) == 2 * nbytes(alone)
        update(engine, tensors, policy_version=version)
        assert places(engine) == first
        np.testing.assert_array_equal(engine.core.score(IDS), expected[(version + 1) % 2])


def nbytes(buffers: list[torch.Tensor]) -> int:
    return sum(buffer.nbytes for buffer in buffers)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("kernels", ["auto", "torch"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_planned_memory_is_that_of_the_buffers(tmp_path, tied, kernels, dtype):
    # every layer has a multiple of 32 outputs, so that packed panels have no padding
    shape = {**SHAPE, "hidden_size": 32, "head_dim": 8, "num_key_value_heads": 4, "tie_word_embeddings": tied}
    engine = SteppedEngine(tmp_path, random_model(LlamaConfig(**shape)), dtype=dtype, kernels=kernels)
    model = engine.core.model
    serving = nbytes(model.buffers())
    made_ready(engine, tensors_of(random_model(LlamaConfig(**shape), seed=2)))
    facts = ModelFacts(
        parameters=sum(parameter.numel() for parameter in random_model(LlamaConfig(**shape)).parameters()),
        layers=2,
        hidden_size=32,
        kv_heads=4,
        head_dim=8,
        vocabulary_size=96,
        max_positions=160,
        tied=tied,
    )
    used = "native" if model.native_kernels else "torch"
    config = load_config(None, overrides=[f"generator.dtype={dtype}", f"generator.kernels={used}"]).config
    parts = next(memory.parts for memory in derive(config, facts=facts).memory if memory.process == "generator-0")
    planned = parts["weights"] + parts.get("packed_head", 0)
    # the plan takes norms (5 of 32 numbers) for packed, which may be two bytes wider than bfloat16
    norms = 5 * 32 * 2 if dtype == "bfloat16" and packed_precision(dtype, kernels=used) == "float32" else 0
    assert planned - norms == serving
    assert parts["spare_weights"] - norms == nbytes(model.buffers()) - serving


class Cut(torch.Tensor):
    """A tensor whose numbers are gone when they are asked for, as behind a map whose file was cut."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func in (torch.Tensor.copy_, torch.Tensor.contiguous):
            raise RuntimeError("bus error")
        return super().__torch_function__(func, types, args, kwargs or {})


@pytest.mark.parametrize(
    "name", ["model.embed_tokens.weight", "model.layers.1.mlp.up_proj.weight", "model.norm.weight"]
)
def test_a_tensor_that_cannot_be_read_fails_the_staging_and_nothing_else(tmp_path, name):
    engine = SteppedEngine(tmp_path, model_of(1))
    before = engine.core.score(IDS)
    tensors = tensors_of(model_of(2))
    # what was ready before is not ready any more: its buffers were written over
    made_ready(engine, tensors)
    broken = tensors_of(model_of(3))
    broken[name] = broken[name].as_subclass(Cut)
    with pytest.raises(EngineError, match=r"version 3 could not be made ready: bus error.*Nothing was changed"):
        engine.core.staging.write(broken, policy_version=3, gives_up=never)
    assert engine.core.dirty_reason is None
    np.testing.assert_array_equal(engine.core.score(IDS), before)
    update(engine, tensors, policy_version=2)
    np.testing.assert_array_equal(engine.core.score(IDS), SteppedEngine(tmp_path, model_of(2)).core.score(IDS))


def test_tensors_that_do_not_fit_are_refused_before_the_pause_and_what_was_ready_stays_ready(tmp_path):
    engine = SteppedEngine(tmp_path, model_of(1))
    tensors = made_ready(engine, tensors_of(model_of(2)))
    spare = places(engine)
    with pytest.raises(WeightError, match=r"model\.norm\.weight is missing"):
        engine.core.staging.write(
            {name: value for name, value in tensors.items() if name != "model.norm.weight"},
            policy_version=3,
            gives_up=never,
        )
    assert engine.core.staging.swap(tensors, policy_version=2)
    assert places(engine) == spare
    # the spare set holds the old version now: swapping once more would bring it back
    assert not engine.core.staging.swap(tensors, policy_version=2)


def test_a_staging_that_is_given_up_leaves_nothing_ready(tmp_path):
    engine = SteppedEngine(tmp_path, model_of(1))
    before, tensors, asked = engine.core.score(IDS), tensors_of(model_of(2)), []

    def gives_up() -> bool:
        asked.append(len(asked))
        return len(asked) == 4

    assert not engine.core.staging.write(tensors, policy_version=2, gives_up=gives_up)
    assert len(asked) == 4
    assert not engine.core.staging.swap(tensors, policy_version=2)
    np.testing.assert_array_equal(engine.core.score(IDS), before)


def test_a_dirty_engine_is_made_whole_by_a_staged_swap(tmp_path):
    engine = SteppedEngine(tmp_path, model_of(1))
    new = tensors_of(model_of(2))
    engine.core.pause()
    with pytest.raises(EngineError, match="failed after weights had been changed"):
        engine.core.update(
            {**new, "model.norm.weight": new["model.norm.weight"].as_subclass(Cut)},
            policy_version=2,
            digest="digest-2",
            kv="keep",
        )
    update(engine, made_ready(engine, new, policy_version=3), policy_version=3)
    np.testing.assert_array_equal(engine.core.score(IDS), SteppedEngine(tmp_path, model_of(2)).core.score(IDS))


class Held(torch.Tensor):
    """A tensor that is read only when the test lets it."""

    arrived: threading.Event
    let: threading.Event

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Held:
        held = tensor.as_subclass(cls)
        held.arrived, held.let = threading.Event(), threading.Event()
        return held

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func in (torch.Tensor.copy_, torch.Tensor.contiguous):
            held = next(argument for argument in args if isinstance(argument, cls))
            if not held.let.is_set():
                held.arrived.set()
                assert held.let.wait(20)
        return super().__torch_function__(func, types, args, kwargs or {})


def held_tensors() -> tuple[dict[str, torch.Tensor], Held]:
    tensors = tensors_of(model_of(2))
    held = Held.of(tensors["model.layers.0.mlp.up_proj.weight"])
    return {**tensors, "model.layers.0.mlp.up_proj.weight": held}, held


async def begun(engine: EmbeddedEngine, tensors: Tensors, held: Held) -> asyncio.Task[None]:
    """A staging that stands in the middle of its work."""
    staging = asyncio.ensure_future(engine.stage(tensors, policy_version=2))
    assert await asyncio.to_thread(held.arrived.wait, 20)
    return staging


async def load(engine: EmbeddedEngine, tensors: Tensors, *, policy_version: int) -> None:
    await engine.pause("keep")
    await engine.update(tensors, policy_version=policy_version, digest=f"digest-{policy_version}", kv="keep")
    await engine.resume()


async def test_tokens_are_produced_while_weights_are_made_ready(tmp_path):
    engine = embedded(tmp_path, model_of(1))
    tensors, held = held_tensors()
    try:
        staging = await begun(engine, tensors, held)
        turn = await engine.generate(ask(1))
        assert not staging.done()
        assert [span.policy_version for span in turn.version_spans] == [1]
        undisturbed = SteppedEngine(tmp_path, model_of(1))
        undisturbed.submit(ask(1))
        undisturbed.finish()
        assert turn.output_ids.tolist() == undisturbed.turn("r1").output_ids.tolist()
        held.let.set()
        await staging
        await load(engine, tensors, policy_version=2)
        expected = SteppedEngine(tmp_path, model_of(2)).core.score(IDS)
        np.testing.assert_array_equal(await engine.score(IDS), expected)
    finally:
        held.let.set()
        await engine.close()


class Seen(dict[str, torch.Tensor]):
    """Tensors that note the niceness of whoever takes them."""

    def __init__(self, tensors: Tensors) -> None:
        super().__init__(tensors)
        self.niceness: set[int] = set()

    def __getitem__(self, name: str) -> torch.Tensor:
        self.niceness.add(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        return super().__getitem__(name)


@pytest.mark.skipif(sys.platform != "linux", reason="threads have priorities of their own on Linux alone")
async def test_making_weights_ready_lets_decoding_go_first(tmp_path):
    engine = embedded(tmp_path, model_of(1))
    tensors = Seen(tensors_of(model_of(2)))
    try:
        await engine.stage(tensors, policy_version=2)
    finally:
        await engine.close()
    own = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    assert tensors.niceness == {min(19, own + NICENESS)}


async def test_a_cancelled_staging_gives_up_at_the_next_tensor_and_the_next_one_waits_for_it(tmp_path):
    engine = embedded(tmp_path, model_of(1))
    tensors, held = held_tensors()
    try:
        staging = await begun(engine, tensors, held)
        staging.cancel()
        with pytest.raises(asyncio.CancelledError):
            await staging
        newer = tensors_of(model_of(3))
        waiting = asyncio.ensure_future(engine.stage(newer, policy_version=3))
        before = await engine.score(IDS)
        assert not waiting.done()
        held.let.set()
        await waiting
        np.testing.assert_array_equal(await engine.score(IDS), before)
        await load(engine, newer, policy_version=3)
        np.testing.assert_array_equal(await engine.score(IDS), SteppedEngine(tmp_path, model_of(3)).core.score(IDS))
    finally:
        held.let.set()
        await engine.close()


async def test_an_engine_that_is_closed_ends_a_staging_at_the_next_tensor(tmp_path):
    engine = embedded(tmp_path, model_of(1))
    tensors, held = held_tensors()
    staging = await begun(engine, tensors, held)
    closing = asyncio.ensure_future(engine.close())
    await asyncio.sleep(0)
    held.let.set()
    await closing
    with pytest.raises(EngineDead, match="was closed"):
        await staging
    with pytest.raises(EngineDead, match="was closed"):
        await engine.stage(tensors, policy_version=2)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("rollmill-staging")]


def test_the_fake_engine_produces_tokens_while_it_makes_weights_ready():
    clock = VirtualClock()
    engine = FakeEngine(clock=clock, latency=FakeLatency(step_s=1.0, stage_s=10.0))

    async def both() -> tuple[float, float]:
        staging = asyncio.ensure_future(engine.stage({}, policy_version=2))
        await engine.generate(ask(1, tokens=4))
        generated_s = clock.now_s()
        await staging
        return generated_s, clock.now_s()

    assert run_virtual(both(), clock=clock) == (4.0, 10.0)
