"""Which models the embedded engine serves, and that it proves each before use."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import (
    Gemma2Config,
    GemmaConfig,
    MambaConfig,
    MistralConfig,
    MixtralConfig,
    OlmoHybridConfig,
    Qwen2Config,
    Qwen3Config,
)

from generator_builders import (
    SHAPE,
    SteppedEngine,
    llama,
    prompt_of,
    random_model,
    reference_logprobs,
    request,
    save_config,
    tensors_of,
)
from rollmill.errors import ModelError, WeightError
from rollmill.generator.engines.embedded.model import ServedModel, check_architecture
from rollmill.types import SamplingParams

SERVED = {"llama": type(llama()), "qwen2": Qwen2Config, "qwen3": Qwen3Config, "gemma": GemmaConfig}


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("family", SERVED)
def test_standard_architectures_are_served_exactly_before_and_after_a_swap(tmp_path, family, tied):
    config = SERVED[family](**SHAPE, tie_word_embeddings=tied)
    models = {1: random_model(config, seed=1), 2: random_model(config, seed=2)}
    engine = SteppedEngine(tmp_path, models[1])
    for version in (1, 2):
        if version == 2:
            engine.swap(models[2], policy_version=2, kv="keep")
        for number in range(2):
            name = f"v{version}r{number}"
            engine.submit(request(name, prompt_of(9, seed=number), seed=number))
        engine.finish()
        for number in range(2):
            turn = engine.turn(f"v{version}r{number}")
            expected = reference_logprobs(models[version], turn, SamplingParams())
            np.testing.assert_allclose(turn.behavior_logprobs, expected, atol=1e-4)


@pytest.mark.parametrize("family", SERVED)
def test_standard_architectures_run_in_bfloat16(tmp_path, family):
    config = SERVED[family](**SHAPE, tie_word_embeddings=True)
    engine = SteppedEngine(tmp_path, random_model(config, seed=1), dtype="bfloat16")
    engine.submit(request("a", prompt_of(9)))
    engine.finish()
    turn = engine.turn("a")
    expected = reference_logprobs(random_model(config, seed=1, dtype=torch.bfloat16), turn, SamplingParams())
    np.testing.assert_allclose(turn.behavior_logprobs, expected, atol=0.2)


def test_a_tied_head_follows_its_embedding_through_an_update(tmp_path):
    """The trap of engines that keep a packed copy of the head: new body, old head, no error."""
    old, new = random_model(seed=1), random_model(seed=2)
    engine = SteppedEngine(tmp_path, old)
    weights = tensors_of(new)
    assert "lm_head.weight" not in weights
    engine.swap(new, policy_version=2, kv="keep")
    ids = np.arange(1, 12)
    with torch.no_grad():
        expected = new(torch.from_numpy(ids)[None]).logits[0].log_softmax(-1)[range(10), range(2, 12)]
    np.testing.assert_allclose(engine.core.score(ids), expected.numpy(), atol=1e-4)


def test_a_tied_tensor_may_come_under_either_name_but_not_with_two_values(tmp_path):
    model = random_model(seed=1)
    weights = tensors_of(model)
    served = ServedModel(save_config(tmp_path, model.config), dtype=torch.float32, tensors=weights)
    embedding = weights.pop("model.embed_tokens.weight")
    assert len(served.check({**weights, "lm_head.weight": embedding})) == len(weights) + 1
    both = {**weights, "lm_head.weight": embedding, "model.embed_tokens.weight": embedding + 1}
    with pytest.raises(WeightError, match="tied in this model but differ"):
        served.check(both)


@pytest.mark.parametrize(
    ("config", "model_type", "reason"),
    [
        (MistralConfig(**SHAPE, sliding_window=32), "mistral", "sliding window of 32"),
        (Qwen2Config(**SHAPE, use_sliding_window=True, sliding_window=8, max_window_layers=1), "qwen2", "sliding"),
        (Gemma2Config(**SHAPE), "gemma2", "sliding_attention"),
        (
            Gemma2Config(**SHAPE, layer_types=["full_attention"] * 2),
            "gemma2",
            r"soft-capped logits \(attn_logit_softcapping\)",
        ),
        (MixtralConfig(**SHAPE, num_local_experts=4), "mixtral", "mixture of experts"),
        (OlmoHybridConfig(**SHAPE, layer_types=["linear_attention", "full_attention"]), "olmo_hybrid", "linear"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_other_architectures_are_refused_by_name_with_the_reason(config, model_type, reason):
    with pytest.raises(ModelError, match=f"model type '{model_type}'.*{reason}"):
        check_architecture(config)


def test_an_architecture_without_exchangeable_attention_is_refused_by_name(tmp_path):
    config = MambaConfig(vocab_size=96, hidden_size=16, num_hidden_layers=1, state_size=4)
    model = random_model(config)
    with pytest.raises(ModelError, match="model type 'mamba'"):
        ServedModel(save_config(tmp_path, config), dtype=torch.float32, tensors=tensors_of(model))


def test_weights_that_are_not_finite_are_refused_at_the_start(tmp_path):
    model = random_model()
    weights = {name: torch.full_like(value, torch.nan) for name, value in tensors_of(model).items()}
    with pytest.raises(ModelError, match="differ from the model's own by nan"):
        ServedModel(save_config(tmp_path, model.config), dtype=torch.float32, tensors=weights)


def test_a_missing_configuration_is_a_model_error(tmp_path):
    with pytest.raises(ModelError, match="no usable model configuration"):
        ServedModel(tmp_path / "nowhere", dtype=torch.float32, tensors={})


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_weights_are_copied_so_that_a_publication_can_be_retired(tmp_path, kernels):
    old, new = random_model(seed=1), random_model(seed=2)
    engine = SteppedEngine(tmp_path, old, kernels=kernels)
    weights = tensors_of(new)
    engine.core.pause()
    engine.core.update(weights, policy_version=2, digest="digest-2", kv="keep")
    before = engine.core.score(np.arange(1, 9))
    for value in weights.values():
        value.zero_()
    np.testing.assert_array_equal(engine.core.score(np.arange(1, 9)), before)
