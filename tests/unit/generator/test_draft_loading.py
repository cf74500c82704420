"""Which model may guess for which: the same tokens, weights that can be read; and what its KV costs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import save_file

from generator_builders import (
    Always,
    close_to,
    embedded,
    llama,
    random_model,
    request,
    save_config,
    served_model,
    tensors_of,
)
from rollmill.clock import SystemClock
from rollmill.config.schema import GeneratorSettings
from rollmill.errors import ConfigError, ModelError
from rollmill.generator.draft import check_same_tokens, load_draft
from rollmill.generator.engines.embedded.drafting import DraftModel, draft_for
from rollmill.generator.engines.embedded.engine import EmbeddedEngine
from rollmill.generator.main import build_engine

MODEL = random_model(seed=1)
SMALL = random_model(llama(num_hidden_layers=1), seed=3)


def directory(folder: Path, model, *, tokens: list[str] | None = None, added: dict[str, int] | None = None) -> Path:
    save_config(folder, model.config)
    save_file(tensors_of(model), folder / "model.safetensors")
    if tokens is not None:
        vocabulary = {token: number for number, token in enumerate(tokens)}
        more = [{"id": number, "content": content} for content, number in (added or {}).items()]
        content = {"model": {"type": "BPE", "vocab": vocabulary, "merges": []}, "added_tokens": more}
        (folder / "tokenizer.json").write_text(json.dumps(content))
    return folder


def test_equal_tokens_are_taken_whatever_form_the_tokenizer_has(tmp_path):
    served = directory(tmp_path / "a", MODEL, tokens=["a", "b", "c"])
    check_same_tokens(served, directory(tmp_path / "b", SMALL, tokens=["a", "b"], added={"c": 2}))
    (tmp_path / "b" / "tokenizer.json").write_text(
        json.dumps({"model": {"type": "Unigram", "vocab": [["a", -1.0], ["b", -2.0], ["c", -3.0]]}})
    )
    check_same_tokens(served, tmp_path / "b")


def test_other_tokens_are_refused_with_how_many_differ_and_the_first(tmp_path):
    served = directory(tmp_path / "a", MODEL, tokens=["a", "b", "c"])
    draft = directory(tmp_path / "b", SMALL, tokens=["a", "x", "c", "d"])
    with pytest.raises(ConfigError, match=r"2 of 4 ids differ, first id 1, which is 'b' in the model and 'x'"):
        check_same_tokens(served, draft)


def test_tokens_that_cannot_be_compared_are_refused(tmp_path):
    served = directory(tmp_path / "a", MODEL, tokens=["a", "b", "c"])
    draft = directory(tmp_path / "b", SMALL)
    with pytest.raises(ConfigError, match=r"b has no tokenizer.json"):
        check_same_tokens(served, draft)
    with pytest.raises(ConfigError, match=r"b has no tokenizer.json"):
        check_same_tokens(draft, served)
    (draft / "tokenizer.model").write_bytes(b"x")
    with pytest.raises(ConfigError, match=r"it has tokenizer.model and no tokenizer.json"):
        check_same_tokens(served, draft)
    (draft / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match="cannot be read"):
        check_same_tokens(served, draft)


def test_a_draft_of_another_vocabulary_is_refused_with_both_sizes(tmp_path):
    other = served_model(tmp_path / "draft", random_model(llama(vocab_size=100)))
    with pytest.raises(ConfigError, match=r"has 100 tokens and .* has 96"):
        embedded(tmp_path, MODEL, speculation="draft", draft=DraftModel(other, tokens=2))


def test_speculation_by_a_draft_needs_one(tmp_path):
    with pytest.raises(ConfigError, match=r"name one in generator.draft_model"):
        embedded(tmp_path, MODEL, speculation="draft")
    with pytest.raises(ConfigError, match=r"generator.draft_model is not set"):
        load_draft(tmp_path, settings=GeneratorSettings(speculation="draft"), dtype="float32", kernels="auto")


def test_a_draft_that_nobody_asked_for_guesses_nothing(tmp_path):
    served, draft = (served_model(tmp_path / name, model) for name, model in (("a", MODEL), ("b", SMALL)))
    one = DraftModel(draft, tokens=2)
    assert draft_for(served, speculation="draft", draft=one) is one
    assert draft_for(served, speculation="ngram", draft=one) is None
    assert draft_for(served, speculation="off", draft=one) is None


def test_weights_under_other_names_are_refused_with_what_to_do(tmp_path):
    served, draft = directory(tmp_path / "a", MODEL), directory(tmp_path / "b", SMALL)
    save_file({f"old.{name}": value for name, value in tensors_of(SMALL).items()}, draft / "model.safetensors")
    settings = GeneratorSettings(speculation="draft", draft_model=str(draft))
    with pytest.raises(ModelError, match="save_pretrained"):
        load_draft(served, settings=settings, dtype="float32", kernels="auto")


async def test_the_settings_name_the_draft_and_its_kv_and_weights_count(tmp_path):
    served, draft = directory(tmp_path / "a", MODEL), directory(tmp_path / "b", SMALL)

    def built(**settings) -> EmbeddedEngine:
        engine = build_engine(
            served,
            settings=GeneratorSettings(dtype="float32", max_num_seqs=4, max_model_len=64, **settings),
            tensors=tensors_of(MODEL),
            policy_version=1,
            digest="d",
            clock=SystemClock(),
        )
        assert isinstance(engine, EmbeddedEngine)
        return engine

    plain, guessing = built(), built(speculation="draft", draft_model=str(draft), draft_tokens=3)
    limited = [
        built(memory_limit_bytes=370_000_000, **more)
        for more in ({}, {"speculation": "draft", "draft_model": str(draft)})
    ]
    try:
        turn = await guessing.generate(request("a", [1, 2, 3], max_new_tokens=20))
        assert len(turn.output_ids) == 20
        # One layer of the draft beside two of the model: half as much again.
        assert guessing.info().kv_bytes == 1.5 * plain.info().kv_bytes
        # 4 sequences of 4 blocks and 4 for scores; a block of a layer is 2 x 2 heads x 4 x 16 tokens x 4 bytes
        assert plain.info().kv_bytes == 20 * 2 * 1024
        assert guessing.info().kv_budget.endswith("0 MB of it for the draft model")
        assert "draft" not in plain.info().kv_budget
        assert {"speculation_draft", "speculation_ngram"} <= set(guessing.info().capabilities)
        without, beside = (engine.load().kv_capacity_tokens for engine in limited)
        assert 0.5 * without < beside < 0.67 * without
        assert all(engine.info().kv_bytes < 20_000_000 for engine in limited)
    finally:
        for engine in (plain, guessing, *limited):
            await engine.close()


async def test_the_load_says_how_many_guesses_there_were_and_how_many_counted(tmp_path):
    draft = DraftModel(served_model(tmp_path / "draft", close_to(MODEL)), tokens=3, law=Always())
    engine = embedded(tmp_path, MODEL, speculation="draft", draft=draft)
    try:
        await engine.generate(request("a", [1, 2, 3], max_new_tokens=40))
        load = engine.load()
        assert 0 < load.accepted_tokens < load.guessed_tokens
        assert load.decode_passes < 40
        assert load.output_tokens == 40
    finally:
        await engine.close()
