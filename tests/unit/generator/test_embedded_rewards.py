"""A reward head in the embedded engine, against transformers' own model for sequence classification."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification, LlamaConfig, Qwen2Config, Qwen3Config

from generator_builders import MAX_LEN, SHAPE, SteppedEngine, embedded, prompt_of, random_model, request, tensors_of
from rollmill.errors import ConfigError, DataError, DeadlineExceeded, EngineError, ModelError
from rollmill.generator.engines.embedded.rewards import outcome, request_of, scored_ids
from rollmill.generator.engines.remote.model import ServedModel as RemoteModel
from rollmill.generator.engines.sequence import Sequence

PAD = 0
LENGTHS = (3, 40, 17, 1, 64)


def reward_model(kind: Any = LlamaConfig, *, labels: int = 1, seed: int = 0, pad: int | None = PAD) -> Any:
    config = kind(**SHAPE, num_labels=labels, pad_token_id=pad)
    config.architectures = [f"{kind.__name__.removesuffix('Config')}ForSequenceClassification"]
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return AutoModelForSequenceClassification.from_config(config).eval()


def sequences(*lengths: int) -> list[list[int]]:
    return [prompt_of(length, seed=length) for length in lengths]


@torch.inference_mode()
def expected(model: Any, batch: list[list[int]]) -> np.ndarray:
    """What transformers says of a batch, padded on the right."""
    longest = max(map(len, batch))
    ids = torch.tensor([one + [PAD] * (longest - len(one)) for one in batch])
    mask = torch.tensor([[1] * len(one) + [0] * (longest - len(one)) for one in batch])
    return model(input_ids=ids, attention_mask=mask).logits.numpy()


class SteppedRewards(SteppedEngine):
    """The core moved by hand, asked for rewards."""

    def ask(self, name: str, ids: list[int], *, deadline_s: float = 60.0) -> Sequence:
        scored = scored_ids(self.core.model, np.array(ids), max_model_len=MAX_LEN)
        asked = request_of(scored, name=name, deadline_s=deadline_s)
        sequence = Sequence(
            asked,
            max_model_len=MAX_LEN,
            now_s=self.clock.now_s(),
            deliver=lambda result: self.results.update({name: result}),
        )
        self.core.submit(sequence)
        return sequence


@pytest.mark.parametrize("kernels", ["torch", "auto"])
@pytest.mark.parametrize("kind", [LlamaConfig, Qwen2Config, Qwen3Config])
@pytest.mark.parametrize("labels", [1, 3])
async def test_scores_equal_those_of_transformers_for_different_lengths_at_once(tmp_path, kind, labels, kernels):
    model, batch = reward_model(kind, labels=labels), sequences(*LENGTHS)
    engine = embedded(tmp_path, model, kernels=kernels)
    try:
        rewards = await asyncio.gather(*(engine.reward(np.array(ids), deadline_s=60) for ids in batch))
        info, load = engine.info(), engine.load()
    finally:
        await engine.close()
    scores = np.stack([one.scores for one in rewards])
    assert scores.shape == (len(LENGTHS), labels)
    np.testing.assert_allclose(scores, expected(model, batch), atol=1e-4)
    assert np.abs(scores).max() > 0.1  # the head is not silent
    assert "reward_score" in info.capabilities
    assert {"score", "canary", "streaming"}.isdisjoint(info.capabilities)
    assert (load.running, load.waiting, load.output_tokens) == (0, 0, 0)


def test_what_waits_is_scored_in_one_pass(tmp_path):
    model, batch = reward_model(labels=2), sequences(5, 33, 18)
    engine = SteppedRewards(tmp_path, model)
    asked = [engine.ask(f"r{index}", ids) for index, ids in enumerate(batch)]
    engine.steps(1)
    scores = np.stack([outcome(one, now_s=0.0).scores for one in asked])  # pyright: ignore[reportAttributeAccessIssue]
    np.testing.assert_allclose(scores, expected(model, batch), atol=1e-4)
    assert engine.core.prefill_tokens == 5 + 33 + 18
    assert engine.core.kv_used_tokens == 0


def test_a_long_sequence_is_scored_in_chunks_and_a_shared_beginning_is_computed_once(tmp_path):
    model = reward_model()
    start = prompt_of(48, seed=1)
    batch = [start + prompt_of(20, seed=2), start + prompt_of(9, seed=3)]
    engine = SteppedRewards(tmp_path, model, max_num_batched_tokens=16, max_num_seqs=4)
    asked = [engine.ask(f"r{index}", ids) for index, ids in enumerate(batch)]
    engine.finish()
    scores = np.stack([outcome(one, now_s=0.0).scores for one in asked])  # pyright: ignore[reportAttributeAccessIssue]
    np.testing.assert_allclose(scores, expected(model, batch), atol=1e-4)
    assert engine.core.prefill_tokens == 48 + 20 + 9


def test_the_longest_sequence_that_fits_is_scored(tmp_path):
    model, ids = reward_model(), prompt_of(MAX_LEN, seed=4)
    engine = SteppedRewards(tmp_path, model, max_num_seqs=1)
    asked = engine.ask("r", ids)
    engine.finish()
    np.testing.assert_allclose(asked.reward.scores, expected(model, [ids])[0], atol=1e-4)  # pyright: ignore[reportOptionalMemberAccess]


async def test_padding_behind_a_sequence_changes_nothing_and_padding_alone_is_refused(tmp_path):
    model, ids = reward_model(), prompt_of(12, seed=6)
    engine = embedded(tmp_path, model)
    try:
        plain = await engine.reward(np.array(ids), deadline_s=60)
        padded = await engine.reward(np.array([*ids, PAD, PAD]), deadline_s=60)
        np.testing.assert_allclose(padded.scores, plain.scores, atol=1e-6)
        with pytest.raises(DataError, match="all of them are padding"):
            await engine.reward(np.array([PAD, PAD]), deadline_s=60)
        for bad in ([], [1, SHAPE["vocab_size"]], [-1], [1] * (MAX_LEN + 1)):
            with pytest.raises(DataError, match=f"cannot score {len(bad)} token ids: 1 to {MAX_LEN}"):
                await engine.reward(np.array(bad, dtype=np.int64), deadline_s=60)
    finally:
        await engine.close()


async def test_without_a_padding_id_the_last_token_counts(tmp_path):
    model, ids = reward_model(pad=None), [*prompt_of(7, seed=8), PAD]
    engine = embedded(tmp_path, model)
    try:
        reward = await engine.reward(np.array(ids), deadline_s=60)
    finally:
        await engine.close()
    np.testing.assert_allclose(reward.scores, expected(model, [ids])[0], atol=1e-4)


async def test_a_swap_changes_the_scores_and_the_version_that_they_name(tmp_path):
    old, new, ids = reward_model(seed=1), reward_model(seed=2), prompt_of(20, seed=9)
    engine = embedded(tmp_path, old)
    try:
        before = await engine.reward(np.array(ids), deadline_s=60)
        await engine.pause("keep")
        waiting = asyncio.create_task(engine.reward(np.array(ids), deadline_s=60))
        await engine.stage(tensors_of(new), policy_version=2)
        await engine.update(tensors_of(new), policy_version=2, digest="digest-2", kv="recompute")
        await engine.resume()
        after = await waiting
    finally:
        await engine.close()
    assert (before.policy_version, after.policy_version) == (1, 2)
    np.testing.assert_allclose(before.scores, expected(old, [ids])[0], atol=1e-4)
    np.testing.assert_allclose(after.scores, expected(new, [ids])[0], atol=1e-4)


async def test_what_needs_an_output_head_is_refused_in_words(tmp_path):
    engine = embedded(tmp_path, reward_model(labels=2))
    try:
        with pytest.raises(EngineError, match=r"request a asks for tokens.*reward head and no output head.*2 score"):
            await engine.generate(request("a", [1, 2]))
        with pytest.raises(EngineError, match="log-probs are asked for"):
            await engine.score(np.array([1, 2]))
    finally:
        await engine.close()


async def test_a_model_without_a_head_is_refused_in_words(tmp_path):
    engine = embedded(tmp_path, random_model())
    try:
        with pytest.raises(EngineError, match=r"without a reward head.*ForSequenceClassification\): embedded, fake"):
            await engine.reward(np.array([1, 2]), deadline_s=60)
    finally:
        await engine.close()


@pytest.mark.parametrize("settings", [{"speculation": "ngram"}, {"max_loras": 1}])
def test_settings_that_would_do_nothing_for_a_reward_head_are_refused(tmp_path, settings):
    with pytest.raises(ConfigError, match=rf"generator\.{next(iter(settings))} is .* has a reward head"):
        embedded(tmp_path, reward_model(), **settings)


async def test_a_sequence_that_is_not_scored_in_time_ends_with_its_deadline(tmp_path):
    engine = embedded(tmp_path, reward_model())
    try:
        await engine.pause("keep")
        with pytest.raises(DeadlineExceeded, match=r"2 tokens was not scored within 0\.01 s"):
            await engine.reward(np.array([1, 2]), deadline_s=0.01)
        waiting = asyncio.create_task(engine.reward(np.array([1, 2]), deadline_s=60))
        while not engine.load().waiting:  # noqa: ASYNC110
            await asyncio.sleep(0)
        await engine.pause("abort")
        with pytest.raises(EngineError, match="was told to stop"):
            await waiting
    finally:
        await engine.close()


async def test_a_caller_that_leaves_takes_its_sequence_out_of_the_queue(tmp_path):
    engine = embedded(tmp_path, reward_model())
    try:
        await engine.pause("keep")
        waiting = asyncio.create_task(engine.reward(np.array([1, 2]), deadline_s=60))
        while not engine.load().waiting:  # noqa: ASYNC110
            await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await engine.flush()  # behind the abort
        assert engine.load().waiting == 0
    finally:
        await engine.close()


def test_a_score_that_is_not_finite_makes_the_engine_dirty(tmp_path):
    engine = SteppedRewards(tmp_path, reward_model())
    engine.core.paused = True
    spoilt = tensors_of(reward_model())
    spoilt["score.weight"].fill_(torch.inf)
    engine.core.update(spoilt, policy_version=2, digest="digest-2", kv="recompute")
    engine.core.resume()
    engine.ask("r", [1, 2, 3])
    engine.finish()
    assert isinstance(engine.results["r"], EngineError)
    assert "not finite" in str(engine.core.dirty_reason)


def test_engines_of_servers_refuse_a_reward_head_by_name(tmp_path: Path):
    reward_model(labels=2).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"LlamaForSequenceClassification.*Engines that serve one: embedded, fake"):
        RemoteModel.read(tmp_path)
