"""The weights of a new run, read before they are published."""

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from rollmill.errors import ModelError
from rollmill.generator.early import load_early
from rollmill.trainer.model import load_policy
from rollmill.weights.prepare import prepare
from rollmill.weights.repository import LocalModelRepository


@pytest.fixture
def model(tmp_path):
    return prepare("tiny-llama", cache_dir=tmp_path / "models").path


def early(path):
    return load_early(path, dtype="float32", kernels="torch", threads=1)


def published(path, *, root):
    """Publish what a trainer that has just loaded this model does."""
    tensors = {name: parameter.detach() for name, parameter in load_policy(path).named_parameters()}
    repository = LocalModelRepository(root, transport="file")
    return repository.publish(
        tensors, optimizer_step=0, parent=None, history_id="h1", training_dtype="float32", canary=None, at_s=0.0
    )


def test_it_is_what_the_trainer_of_a_new_run_publishes(model, tmp_path):
    manifest = published(model, root=tmp_path / "weights")
    loaded = early(model)
    assert loaded is not None
    assert loaded.is_what_was_published(manifest)
    assert loaded.model.vocabulary_size == 128


def test_one_changed_bit_makes_it_something_else(model, tmp_path):
    manifest = published(model, root=tmp_path / "weights")
    tensors = load_file(model / "model.safetensors")
    tensors["model.norm.weight"].view(torch.int32)[0] += 1
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    loaded = early(model)
    assert loaded is not None
    assert not loaded.is_what_was_published(manifest)
    assert not loaded.is_what_was_published(msgspec.structs.replace(manifest, digest=""))


def test_files_of_another_precision_are_not_what_is_published(model):
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(model / "model.safetensors").items()}
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    assert early(model) is None


def test_files_with_other_names_are_left_to_the_trainers_loader(model):
    tensors = {name.removeprefix("model."): value for name, value in load_file(model / "model.safetensors").items()}
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    assert early(model) is None


def test_a_directory_without_weights_is_an_error_in_words(model):
    (model / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="safetensors"):
        early(model)
