"""Adapters beside the base: each request is sampled from its own sum of weights, and from nobody else's."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from generator_builders import (
    MAX_LEN,
    SteppedEngine,
    adapter_for,
    all_ids,
    embedded,
    merged_model,
    prompt_of,
    random_model,
    reference_logits,
    reference_logprobs,
    request,
)
from rollmill.clock import VirtualClock
from rollmill.errors import DataError, EngineError, ModelError, Overloaded, WeightError, WeightMismatch
from rollmill.generator.engines.embedded.desk import drop_adapter, serve_adapter
from rollmill.generator.engines.embedded.low_rank import ServedAdapter, groups_of
from rollmill.generator.engines.embedded.native import KernelsUnavailable, load_kernels
from rollmill.generator.engines.fake import FakeEngine
from rollmill.generator.engines.protocol import AdapterEngine, KvPolicy
from rollmill.generator.engines.shelf import Shelf
from rollmill.types import Adapter, GenerateRequest, SamplingParams, Turn, VersionSpan

MODEL = random_model(seed=1)
SETTINGS = Adapter(base_digest="base", rank=2, alpha=3.0)
PAIRS = {name: adapter_for(MODEL, seed=seed) for name, seed in (("a", 11), ("b", 12), ("a2", 13))}
WHOLE = {name: merged_model(MODEL, pairs, settings=SETTINGS) for name, pairs in PAIRS.items()} | {"": MODEL}


def with_places(folder: Path, *, places: int = 2, **changes: Any) -> SteppedEngine:
    return SteppedEngine(folder, MODEL, max_loras=places, **changes)


def packed(engine: SteppedEngine, name: str, *, policy_version: int = 7, pairs: str = "") -> ServedAdapter:
    low_rank = engine.core.model.low_rank
    assert low_rank is not None
    version = {"name": name, "settings": SETTINGS, "policy_version": policy_version, "digest": f"d{policy_version}"}
    return low_rank.pack(PAIRS[pairs or name], **version)


def load(
    engine: SteppedEngine, name: str, *, policy_version: int = 7, pairs: str = "", kv: KvPolicy = "keep"
) -> tuple[str, ...]:
    return serve_adapter(engine.core, packed(engine, name, policy_version=policy_version, pairs=pairs), kv=kv)


def asks(adapter: str, request_id: str, prompt: list[int], **sampling: Any) -> GenerateRequest:
    return msgspec.structs.replace(request(request_id, prompt, **sampling), adapter=adapter)


def run(engine: SteppedEngine, *asked: GenerateRequest) -> list[Turn]:
    for one in asked:
        engine.submit(one)
    engine.finish()
    return [engine.turn(one.request_id) for one in asked]


def assert_of(turn: Turn, whole: str) -> None:
    expected = reference_logprobs(WHOLE[whole], turn, SamplingParams())
    np.testing.assert_allclose(turn.behavior_logprobs, expected, atol=2e-4)


def assert_not_of(turn: Turn, whole: str) -> None:
    other = reference_logprobs(WHOLE[whole], turn, SamplingParams())
    assert np.abs(turn.behavior_logprobs - other).max() > 0.05


# -- one batch, several adapters


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_requests_of_one_batch_are_each_sampled_from_their_own_sum_of_weights(tmp_path, kernels):
    engine = with_places(tmp_path, kernels=kernels)
    load(engine, "a")
    load(engine, "b", policy_version=3)
    names = ["a", "", "b", "a", ""]
    turns = run(engine, *(asks(n, f"r{i}", prompt_of(20 + i, seed=i), seed=i) for i, n in enumerate(names)))
    for name, turn in zip(names, turns, strict=True):
        assert_of(turn, name)
        assert_not_of(turn, "b" if name != "b" else "a")
        assert turn.version_spans == (VersionSpan(0, 8, {"a": 7, "b": 3, "": 1}[name]),)


def test_the_tokens_of_a_request_do_not_depend_on_whose_requests_it_shares_a_batch_with(tmp_path):
    try:
        load_kernels()
    except KernelsUnavailable as why:
        pytest.skip(str(why))
    engine = with_places(tmp_path)
    load(engine, "a")
    load(engine, "b")
    names = ["a", "", "b", "a"]
    asked = [asks(n, f"r{i}", prompt_of(20, seed=i), seed=i) for i, n in enumerate(names)]
    together = run(engine, *asked)
    engine.core.flush()
    for before, one in zip(together, asked, strict=True):
        (alone,) = run(engine, one)
        np.testing.assert_array_equal(alone.output_ids, before.output_ids)
        np.testing.assert_array_equal(alone.behavior_logprobs, before.behavior_logprobs)
        engine.core.flush()


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("bfloat16", 0.06)])
def test_a_score_is_that_of_the_adapter_it_was_asked_of(tmp_path, dtype, tolerance):
    engine = with_places(tmp_path, dtype=dtype)
    ids = np.array(prompt_of(90, seed=4))
    for name in ("a", "b", ""):
        adapter = packed(engine, name) if name else None  # ready, and not served
        logits = reference_logits(WHOLE[name], ids)[:-1].log_softmax(-1)
        expected = logits.gather(1, torch.from_numpy(ids[1:])[:, None])[:, 0].numpy()
        assert np.abs(engine.core.score(ids, adapter=adapter) - expected).mean() < tolerance


@pytest.mark.parametrize("max_num_batched_tokens", [16, 512])
def test_long_prompts_in_chunks_and_short_batches_change_nothing(tmp_path, max_num_batched_tokens):
    engine = with_places(tmp_path, max_num_batched_tokens=max_num_batched_tokens)
    load(engine, "a")
    turns = run(engine, asks("a", "long", prompt_of(100)), asks("", "base", prompt_of(60, seed=3)))
    assert_of(turns[0], "a")
    assert_of(turns[1], "")


def test_a_model_of_rounded_weights_adds_the_adapter_unrounded(tmp_path):
    try:
        load_kernels()
    except KernelsUnavailable as why:
        pytest.skip(str(why))
    engine = with_places(tmp_path, quantization="int8")
    load(engine, "a")
    ids = np.array(prompt_of(60, seed=4))
    adapter = engine.core.shelf.ask("a")
    logits = reference_logits(WHOLE["a"], ids)[:-1].log_softmax(-1)
    expected = logits.gather(1, torch.from_numpy(ids[1:])[:, None])[:, 0].numpy()
    differences = np.abs(engine.core.score(ids, adapter=adapter) - expected)
    assert differences.mean() < 0.05 < np.abs(engine.core.score(ids) - expected).mean()


def test_what_a_draft_guesses_is_judged_by_the_adapter(tmp_path):
    turns, accepted = [], []
    for name, draft in (("plain", None), ("of the sum", WHOLE["a"]), ("of the base", MODEL)):
        engine = with_places(tmp_path / name, draft=draft)
        load(engine, "a")
        turns += run(engine, asks("a", "r", prompt_of(20), temperature=0.0, max_new_tokens=30))
        if engine.drafter is not None:
            accepted.append(engine.drafter.accepted / engine.drafter.guessed)
    assert accepted[0] > 0.9 > 0.5 > accepted[1]
    for turn in turns[1:]:
        np.testing.assert_array_equal(turn.output_ids, turns[0].output_ids)
        np.testing.assert_allclose(turn.behavior_logprobs, turns[0].behavior_logprobs, atol=2e-4)


# -- what is shared


def test_equal_prompts_share_kv_within_an_adapter_and_never_across(tmp_path):
    engine = with_places(tmp_path)
    load(engine, "a")
    load(engine, "b")
    prompt = prompt_of(40)
    # In one pass first: nobody reads what another's weights write.
    for number in range(2):
        turns = run(engine, *(asks(name, f"{name}-{number}", prompt, seed=number) for name in ("a", "", "b")))
        for name, turn in zip(("a", "", "b"), turns, strict=True):
            assert turn.cached_tokens == (39 if number else 0)
            assert_of(turn, name)


def test_siblings_of_one_group_share_a_prefill_and_another_adapter_is_no_sibling(tmp_path):
    engine = with_places(tmp_path)
    load(engine, "a")
    asked = [asks(n, f"r{i}", prompt_of(40), group_key="g", seed=i) for i, n in enumerate(["a", "", "a", ""])]
    turns = run(engine, *asked)
    assert [turn.cached_tokens for turn in turns] == [0, 0, 40, 40]
    assert engine.core.prefill_tokens == 80
    for asker, turn in zip(asked, turns, strict=True):
        assert_of(turn, asker.adapter)


def test_kv_that_came_back_from_the_host_tier_is_that_of_the_same_adapter(tmp_path):
    engine = with_places(tmp_path, kv_blocks=10, tier_blocks=40)
    load(engine, "a")
    load(engine, "b")
    first = msgspec.structs.replace(asks("a", "first", prompt_of(50)), session_id="s")
    (turn,) = run(engine, first)
    run(engine, asks("", "crowd", prompt_of(150, seed=9), max_new_tokens=10))
    for name, cached in (("b", 0), ("a", 57)):
        (second,) = run(engine, asks(name, f"second-{name}", [*all_ids(turn), 7, 8]))
        assert second.cached_tokens == cached
        assert_of(second, name)


# -- a new version


@pytest.mark.parametrize("kv", ["keep", "recompute"])
def test_a_new_version_goes_on_where_the_old_one_was_and_nobody_else_notices(tmp_path, kv):
    def with_a_new_version(engine: SteppedEngine) -> None:
        load(engine, "a", policy_version=8, pairs="a2", kv=kv)

    finals = []
    for between in (lambda engine: None, with_a_new_version):
        engine = with_places(tmp_path)
        load(engine, "a")
        load(engine, "b")
        for name in ("a", "", "b"):
            engine.submit(asks(name, name or "base", prompt_of(30, seed=2), max_new_tokens=12, seed=3))
        engine.steps(5)
        between(engine)
        engine.finish()
        finals.append([engine.turn(name or "base") for name in ("a", "", "b")])
    (before, *others), (after, *same) = finals
    for one, other in zip(others, same, strict=True):
        np.testing.assert_array_equal(one.output_ids, other.output_ids)
        np.testing.assert_array_equal(one.behavior_logprobs, other.behavior_logprobs)
    assert after.version_spans == (VersionSpan(0, 5, 7), VersionSpan(5, 12, 8))
    np.testing.assert_array_equal(after.output_ids[:5], before.output_ids[:5])
    new = reference_logprobs(WHOLE["a2"], after, SamplingParams())[5:]
    if kv == "recompute":  # as if the whole sequence had been fed to the new weights
        np.testing.assert_allclose(after.behavior_logprobs[5:], new, atol=2e-4)
    else:  # the first of them reads KV of the old weights
        assert abs(after.behavior_logprobs[5] - new[0]) > 1e-3


@pytest.mark.parametrize("kv", ["keep", "recompute"])
def test_a_new_version_hits_no_kv_of_the_old_one_not_even_what_an_old_request_leaves_later(tmp_path, kv):
    engine = with_places(tmp_path)
    load(engine, "a")
    engine.submit(asks("a", "old", prompt_of(40), max_new_tokens=6))
    engine.steps(2)
    load(engine, "a", policy_version=8, pairs="a2", kv=kv)
    engine.finish()
    (turn,) = run(engine, asks("a", "new", prompt_of(40), seed=1))
    # Recomputed KV is the new version's own, and may be hit.
    assert turn.cached_tokens == (39 if kv == "recompute" else 0)
    assert_of(turn, "a2")


def test_a_chunked_prompt_starts_again_under_a_new_version(tmp_path):
    engine = with_places(tmp_path, max_num_batched_tokens=16)
    load(engine, "a")
    engine.submit(asks("a", "long", prompt_of(100)))
    engine.steps(3)
    load(engine, "a", policy_version=8, pairs="a2")
    engine.finish()
    assert engine.turn("long").version_spans == (VersionSpan(0, 8, 8),)
    assert_of(engine.turn("long"), "a2")


def test_versions_rise_a_repeated_one_is_nothing_and_a_second_publication_of_one_is_refused(tmp_path):
    engine = with_places(tmp_path)
    load(engine, "a", policy_version=8)
    run(engine, asks("a", "r", prompt_of(40)))
    load(engine, "a", policy_version=8)
    (again,) = run(engine, asks("a", "s", prompt_of(40)))
    assert again.cached_tokens == 39
    with pytest.raises(EngineError, match="policy version 7 was to be loaded, and 8 is served: versions only rise"):
        load(engine, "a", policy_version=7)
    other = dataclasses.replace(packed(engine, "a", policy_version=8), digest="other")
    with pytest.raises(WeightMismatch, match="two publications share a number"):
        serve_adapter(engine.core, other, kv="keep")


def test_a_request_that_wants_a_newer_version_of_its_adapter_is_refused(tmp_path):
    engine = with_places(tmp_path)
    load(engine, "a", policy_version=7)
    engine.submit(msgspec.structs.replace(asks("a", "r", prompt_of(4)), min_policy_version=7))
    with pytest.raises(EngineError, match="wants policy version 8 or newer, this engine serves 7"):
        engine.submit(msgspec.structs.replace(asks("a", "s", prompt_of(4)), min_policy_version=8))
    engine.finish()


def test_whatever_comes_and_changes_every_token_is_of_the_version_that_its_span_names(tmp_path):
    engine = with_places(tmp_path, kv_blocks=14, tier_blocks=6)
    numbers = itertools.count(1)

    @settings(max_examples=12, deadline=None)
    @given(data=st.data())
    def holds(data: st.DataObject) -> None:
        engine.core.abort_all()  # what an example left that failed
        engine.core.flush()
        served: dict[tuple[str, int], str] = {}

        def load_another(name: str, kv: KvPolicy) -> None:
            version, pairs = next(numbers), data.draw(st.sampled_from(["a", "b", "a2"]))
            served[name, version] = pairs
            load(engine, name, policy_version=version, pairs=pairs, kv=kv)

        load_another("a", "keep")
        load_another("b", "keep")
        asked: list[GenerateRequest] = []
        kept = set()
        for number in range(data.draw(st.integers(2, 8))):
            name = data.draw(st.sampled_from(["a", "b", "a", ""]))
            prompt = prompt_of(data.draw(st.integers(3, 50)), seed=data.draw(st.integers(0, 2)))
            one = asks(name, f"r{number}", prompt, max_new_tokens=10, seed=number)
            engine.submit(msgspec.structs.replace(one, session_id=data.draw(st.sampled_from(["", "s"]))))
            asked.append(one)
            engine.steps(data.draw(st.integers(0, 4)))
            if data.draw(st.booleans()):
                changed, kv = data.draw(st.sampled_from(["a", "b"])), data.draw(st.sampled_from(["keep", "recompute"]))
                if kv == "keep":
                    kept |= {other.request_id for other in asked if other.adapter == changed}
                load_another(changed, kv)
        engine.finish()
        for one in asked:
            turn = engine.turn(one.request_id)
            # Behind a change under kept KV, what follows depends on both versions.
            spans = turn.version_spans[: 1 if one.request_id in kept else None]
            for span in spans:
                whole = WHOLE[served[one.adapter, span.policy_version] if one.adapter else ""]
                where = slice(span.start_token, span.end_token)
                expected = reference_logprobs(whole, turn, SamplingParams())[where]
                np.testing.assert_allclose(turn.behavior_logprobs[where], expected, atol=3e-4)
        assert engine.core.kv_used_tokens == 0

    holds()
    tier = engine.core.kv.tier
    assert tier is not None
    assert tier.counts.damaged == 0


# -- places


def test_the_least_recently_asked_for_gives_way_and_never_one_in_use(tmp_path):
    engine = with_places(tmp_path)
    load(engine, "a")
    load(engine, "b")
    run(engine, asks("a", "r", prompt_of(4)))
    assert load(engine, "c", pairs="a2") == ("b",)
    with pytest.raises(ModelError, match="adapter 'b' is not loaded here; loaded are: 'a', 'c'"):
        engine.submit(asks("b", "s", prompt_of(4)))
    for name in ("a", "c"):
        engine.submit(asks(name, f"busy-{name}", prompt_of(4)))
    with pytest.raises(Overloaded, match=r"2 are loaded \(generator\.max_loras 2\) and requests use every one") as full:
        load(engine, "b")
    assert full.value.retry_after_s > 0
    with pytest.raises(EngineError, match="adapter 'a' is in use"):
        drop_adapter(engine.core, "a")
    engine.finish()
    assert drop_adapter(engine.core, "a")
    assert not drop_adapter(engine.core, "a")
    assert load(engine, "b") == ()
    assert [one.name for one in engine.core.shelf.loaded] == ["c", "b"]


def test_new_weights_of_the_base_are_refused_under_adapters(tmp_path):
    engine = with_places(tmp_path)
    load(engine, "a")
    with pytest.raises(EngineError, match="version 2 of the base was to be loaded under the adapters 'a'"):
        engine.swap(random_model(seed=2), policy_version=2, kv="keep")
    engine.core.resume()
    drop_adapter(engine.core, "a")
    engine.swap(random_model(seed=2), policy_version=2, kv="keep")
    assert engine.core.policy_version == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model.layers.0.self_attn.q_proj.lora_B.weight": torch.zeros(15, 2)}, "and the model .* has 16 x 16 there"),
        (
            {"layers.9.x.lora_A.weight": torch.zeros(2, 3), "layers.9.x.lora_B.weight": torch.zeros(3, 2)},
            "has no such linear layer",
        ),
        ({"lm_head.lora_A.weight": torch.zeros(2, 16), "lm_head.lora_B.weight": torch.zeros(96, 2)}, "no such linear"),
        ({"stray": torch.zeros(1)}, "stray"),
    ],
)  # fmt: skip
def test_an_adapter_of_another_model_is_refused_and_nothing_changes(tmp_path, change, message):
    engine = with_places(tmp_path)
    low_rank = engine.core.model.low_rank
    assert low_rank is not None
    with pytest.raises(WeightError, match=message):
        low_rank.pack({**PAIRS["a"], **change}, name="a", settings=SETTINGS, policy_version=1, digest="d")
    with pytest.raises(WeightError, match="holds no pair"):
        low_rank.pack({}, name="a", settings=SETTINGS, policy_version=1, digest="d")


def test_rows_are_grouped_by_adapter_and_a_run_of_them_needs_no_index():
    one, other = (
        ServedAdapter(name=name, policy_version=1, digest="", pairs={}, nbytes=0, space=name.encode())
        for name in ("a", "b")
    )
    (first, scattered), second = groups_of([(one, 2), (None, 1), (other, 2), (one, 3)])
    assert first is one
    assert isinstance(scattered, torch.Tensor)
    assert scattered.tolist() == [0, 1, 5, 6, 7]
    assert second == (other, slice(3, 5))
    assert groups_of([(None, 2), (one, 2), (one, 1)]) == ((one, slice(2, 5)),)
    assert groups_of([(None, 4)]) == ()


def test_running_sequences_stand_by_adapter(tmp_path):
    engine = with_places(tmp_path)
    load(engine, "a")
    load(engine, "b")
    for index, name in enumerate(["b", "", "a", "b", "a"]):
        engine.submit(asks(name, f"{name}{index}", prompt_of(4, seed=index), seed=index))
    engine.steps(2)
    assert [one.request.request_id for one in engine.core.running] == ["1", "a2", "a4", "b0", "b3"]
    engine.finish()


def test_a_shelf_serves_the_base_to_whoever_names_no_adapter():
    assert Shelf(1).served("") is None


# -- the engine


async def test_the_engine_stages_proves_and_serves_an_adapter_while_others_run(tmp_path):
    engine = embedded(tmp_path, MODEL, max_loras=1, max_lora_rank=2)
    try:
        assert isinstance(engine, AdapterEngine)
        desk = engine.adapters
        assert desk is not None
        assert "adapters" in engine.info().capabilities
        ids = np.array(prompt_of(20))
        await desk.stage(PAIRS["a"], name="a", settings=SETTINGS, policy_version=4, digest="d4")
        assert engine.info().adapters == ()
        scored = await desk.score(ids, name="a", policy_version=4)
        with pytest.raises(ModelError, match="'a' is not loaded"):
            await desk.score(ids, name="a")
        with pytest.raises(ModelError, match="'a' is not loaded"):
            await engine.generate(asks("a", "early", prompt_of(4)))
        with pytest.raises(ModelError, match="policy version 5 of adapter 'a' is not staged"):
            await desk.serve("a", policy_version=5, kv="keep")
        assert await desk.serve("a", policy_version=4, kv="keep") == ()
        np.testing.assert_array_equal(await desk.score(ids, name="a"), scored)
        assert [(one.name, one.policy_version, one.digest) for one in engine.info().adapters] == [("a", 4, "d4")]
        assert_of(await engine.generate(asks("a", "r", prompt_of(10))), "a")
        larger = Adapter(base_digest="", rank=3, alpha=1)
        with pytest.raises(WeightError, match=r"rank 3, and generator\.max_lora_rank is 2"):
            await desk.stage({}, name="a", settings=larger, policy_version=5, digest="")
        assert await desk.drop("a")
    finally:
        await engine.close()


async def test_an_engine_without_places_refuses_and_names_those_that_have_them(tmp_path):
    fake = FakeEngine(clock=VirtualClock(), max_num_seqs=2, max_model_len=MAX_LEN)
    engine = embedded(tmp_path, MODEL)
    try:
        assert engine.adapters is None
        assert not isinstance(fake, AdapterEngine)
        for one in (engine, fake):
            assert "adapters" not in one.info().capabilities
            with pytest.raises(ModelError, match=r"asks for adapter 'a', and this engine .* beside them: embedded"):
                await one.generate(asks("a", "r", prompt_of(4)))
        with pytest.raises(DataError, match="empty prompt"):
            await engine.generate(asks("", "s", []))
    finally:
        await engine.close()
        await fake.close()


async def test_places_for_adapters_are_set_aside_from_the_memory_of_kv(tmp_path):
    kv_bytes = []
    for places in (0, 3):
        engine = embedded(tmp_path, MODEL, max_loras=places, max_lora_rank=8, memory_limit_bytes=360_000_000)
        kv_bytes.append(engine.info().kv_bytes)
        await engine.close()
    # Inputs and outputs of a layer: q and o 32 each, k and v 24 each, gate, up and down 48 each: 256. Two layers, rank
    # 8, 4 bytes: 16,384 an adapter. Three and one that is made ready: 65,536, which are 32 blocks of 2,048.
    assert kv_bytes[0] - kv_bytes[1] == 65_536
