"""Low-rank differences: what is trained, what is published, what a checkpoint holds."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rollmill.errors import CheckpointError, ConfigError
from rollmill.trainer.step import Trainer
from rollmill.weights.adapters import merged
from unit.trainer.test_loop import World
from unit.trainer.trainer_builders import config, random_groups, tiny_model

LORA = {"lora_rank": 2, "lora_alpha": 8.0, "learning_rate": 1e-2}
PROMPT = np.arange(1, 12, dtype=np.int32)


def trainer(kind: str = "llama", *, seed: int = 0, **changes) -> Trainer:
    return Trainer(tiny_model(kind, seed=seed), config=config(trainer={**LORA, **changes}))


def step(one: Trainer, *, seed: int = 1) -> None:
    one.train_step(random_groups(seed=seed), optimizer_step_of=lambda _: 0)


def copied(tensors) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_at_first_the_policy_is_that_of_the_whole_model(kind):
    whole = Trainer(tiny_model(kind), config=config())
    np.testing.assert_array_equal(trainer(kind).canary(PROMPT).logprobs, whole.canary(PROMPT).logprobs)


def test_only_adapters_are_trained_and_published():
    one = trainer()
    base, adapters = copied(one.base_tensors()), copied(one.named_tensors())
    step(one)
    assert {name.rsplit(".", 2)[1] for name in adapters} == {"lora_A", "lora_B"}
    # 7 layers named so in each of 2 blocks, two matrices each.
    assert len(adapters) == 2 * 7 * 2
    assert all(torch.equal(base[name], tensor) for name, tensor in one.base_tensors().items())
    assert any(not torch.equal(adapters[name], tensor) for name, tensor in one.named_tensors().items())


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_the_base_has_the_names_of_the_whole_model(kind):
    assert trainer(kind).base_tensors().keys() == Trainer(tiny_model(kind), config=config()).named_tensors().keys()


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_base_and_adapter_merged_are_the_policy_that_is_trained(kind):
    one = trainer(kind)
    step(one)
    served = tiny_model(kind)
    whole = merged(one.base_tensors(), one.named_tensors(), settings=one.adapter_on("d"))
    served.load_state_dict(whole, strict=kind != "llama")  # the tied head has no name of its own
    expected = Trainer(served, config=config()).canary(PROMPT).logprobs
    np.testing.assert_allclose(one.canary(PROMPT).logprobs, expected, atol=1e-5)
    assert np.abs(expected - trainer(kind).canary(PROMPT).logprobs).max() > 1e-3


def test_the_canary_is_that_of_the_published_adapters_whatever_is_trained_meanwhile():
    one = trainer()
    step(one)
    scorer, published, now = one.canary_scorer(PROMPT), copied(one.named_tensors()), one.canary(PROMPT)
    step(one, seed=2)
    np.testing.assert_array_equal(scorer.score(published).logprobs, now.logprobs)
    assert np.abs(one.canary(PROMPT).logprobs - now.logprobs).max() > 0


def test_a_checkpoint_holds_whole_weights_and_goes_on_bit_for_bit():
    one = trainer()
    step(one)
    state = one.state()
    assert state.model.keys() == Trainer(tiny_model(), config=config()).named_tensors().keys()
    model, optimizer = copied(state.model), copied(state.optimizer)
    two = trainer()
    two.load_state(model=model, optimizer=optimizer, state=state.state)
    step(one, seed=2)
    step(two, seed=2)
    assert all(torch.equal(one.named_tensors()[name], tensor) for name, tensor in two.named_tensors().items())


def test_adapters_that_were_trained_on_another_model_are_refused():
    one = trainer()
    step(one)
    state = one.state()
    other = trainer(seed=7)
    before = copied(other.named_tensors())
    with pytest.raises(CheckpointError, match=r"trained on another model\.source"):
        other.load_state(model=state.model, optimizer=state.optimizer, state=state.state)
    assert all(torch.equal(before[name], tensor) for name, tensor in other.named_tensors().items())


def test_a_checkpoint_of_whole_weights_is_refused():
    whole = Trainer(tiny_model(), config=config())
    step(whole)
    state = whole.state()
    with pytest.raises(CheckpointError, match="adapter tensors do not fit"):
        trainer().load_state(model=state.model, optimizer=state.optimizer, state=state.state)


def test_layers_that_the_model_does_not_have_are_named():
    with pytest.raises(ConfigError, match=r"names qkv_proj, and LlamaForCausalLM has no .* It has .*q_proj"):
        trainer(lora_targets=("q_proj", "qkv_proj"))


def test_the_output_head_is_no_layer_for_an_adapter():
    with pytest.raises(ConfigError, match="names lm_head, the output head"):
        trainer(lora_targets=("q_proj", "lm_head"))


def test_the_initial_matrices_depend_on_the_seed_alone():
    first, again, other = trainer(), trainer(), Trainer(tiny_model(), config=config(trainer=LORA, run={"seed": 1}))
    assert all(torch.equal(t, again.named_tensors()[name]) for name, t in first.named_tensors().items())
    assert any(not torch.equal(t, other.named_tensors()[name]) for name, t in first.named_tensors().items())


def test_a_frozen_weight_counts_for_two_products_of_three():
    whole, adapted = Trainer(tiny_model(), config=config()), trainer()
    ratio = adapted._body_flops / whole._body_flops
    assert 4 / 6 < ratio < 1


def test_a_run_publishes_adapters_on_a_base_that_is_stored_before():
    world = World(changed={"trainer": LORA})
    world.assign()
    world.store.set_note("phase", "finishing")
    world.run()
    assert world.log[:2] == ["base", "publish 0"]
    assert [manifest.adapter.base_digest for manifest in world.repository.published] == ["base-digest"] * 2
    assert all(manifest.adapter.rank == 2 for manifest in world.repository.published)
