"""The policy that is loaded straight from its files is the one that transformers would have loaded."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from trainer_builders import tiny_model
from transformers import AutoModelForCausalLM

from rollmill.errors import ModelError
from rollmill.trainer.model import load_policy


def saved(kind, folder):
    tiny_model(kind).save_pretrained(folder)
    return folder


def by_transformers(path):
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, local_files_only=True)


def assert_same(model, other):
    state, expected = model.state_dict(), other.state_dict()
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[name], expected[name]) for name in expected)
    buffers = dict(other.named_buffers())
    assert {name: buffer.tolist() for name, buffer in model.named_buffers()} == {
        name: buffer.tolist() for name, buffer in buffers.items()
    }
    assert model.config.to_dict() == other.config.to_dict()
    assert model.config._attn_implementation == other.config._attn_implementation
    assert model.generation_config.to_dict() == other.generation_config.to_dict()
    assert model.training == other.training


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_the_policy_equals_what_transformers_loads(kind, tmp_path):
    path = saved(kind, tmp_path)
    model = load_policy(path)
    assert_same(model, by_transformers(path))
    ids = torch.tensor([[1, 5, 9]])
    with torch.no_grad():
        assert torch.equal(model(ids).logits, by_transformers(path)(ids).logits)


def test_a_tied_head_stays_tied(tmp_path):
    model = load_policy(saved("llama", tmp_path))
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_half_precision_files_become_float32_masters(tmp_path):
    path = saved("llama", tmp_path)
    file = path / "model.safetensors"
    halved = {name: tensor.bfloat16() for name, tensor in load_file(file).items()}
    save_file(halved, file, metadata={"format": "pt"})
    model = load_policy(path)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert torch.equal(model.model.embed_tokens.weight, halved["model.embed_tokens.weight"].float())


def test_tensors_under_other_names_go_through_the_loader_of_transformers(tmp_path):
    # a base model without its head: transformers adds the prefix "model."
    path = saved("llama", tmp_path)
    file = path / "model.safetensors"
    expected = by_transformers(path).state_dict()
    bare = {name.removeprefix("model."): tensor.clone() for name, tensor in load_file(file).items()}
    save_file(bare, file, metadata={"format": "pt"})
    state = load_policy(path).state_dict()
    assert all(torch.equal(state[name], expected[name]) for name in expected)


def test_the_policy_owns_its_memory(tmp_path):
    # training changes it in place; a mapping of the prepared model's file must not be what it changes
    path = saved("llama", tmp_path)
    before = (path / "model.safetensors").read_bytes()
    model = load_policy(path)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    assert (path / "model.safetensors").read_bytes() == before


def test_a_directory_without_a_model_is_refused_in_words(tmp_path):
    with pytest.raises(ModelError, match=r"config\.json|safetensors"):
        load_policy(tmp_path)
