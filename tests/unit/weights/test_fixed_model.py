"""A model directory serves as a repository of one version, and of no other."""

from __future__ import annotations

import pytest
import torch

from rollmill.errors import WeightError, WeightMismatch
from rollmill.weights.fixed import FixedModel
from rollmill.weights.tensorfile import write_tensors

CONFIG = """{"num_attention_heads": 1, "hidden_size": 2, "num_hidden_layers": 1, "max_position_embeddings": 8,
"vocab_size": 3, "architectures": ["LlamaForCausalLM"]}"""


def folder_with(path, **tensors: torch.Tensor):
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(CONFIG)
    (path / "model.safetensors").unlink(missing_ok=True)
    write_tensors(path / "model.safetensors", tensors, durable=False)
    return path


def test_the_models_own_weights_are_version_1_with_their_digest_and_without_a_canary(tmp_path):
    weights = torch.arange(6, dtype=torch.float32).reshape(3, 2)
    model = FixedModel(folder_with(tmp_path / "a", embed=weights), at_s=5.0)
    same = FixedModel(folder_with(tmp_path / "b", embed=weights), at_s=6.0)
    other = FixedModel(folder_with(tmp_path / "c", embed=weights + 1), at_s=5.0)
    manifest = model.manifest(1)
    assert (manifest.policy_version, manifest.optimizer_step, manifest.canary) == (1, 0, None)
    assert (manifest.published_at_s, manifest.training_dtype) == (5.0, "float32")
    assert model.latest() == manifest
    assert model.manifests() == [manifest]
    assert manifest.digest == same.manifest(1).digest != other.manifest(1).digest
    for _ in range(2):  # also when it was read before
        torch.testing.assert_close(model.load(1)["embed"], weights)


def test_another_version_is_refused_with_the_way_to_have_one(tmp_path):
    model = FixedModel(folder_with(tmp_path / "a", embed=torch.ones(3, 2)), at_s=0.0)
    for call in (model.manifest, model.load, lambda version: model.hold(version, owner="me")):
        with pytest.raises(WeightError, match="--repository DIR"):
            call(2)


def test_nothing_can_be_published_beside_it(tmp_path):
    model = FixedModel(folder_with(tmp_path / "a", embed=torch.ones(3, 2)), at_s=0.0)
    with pytest.raises(WeightError, match="nothing can be published"):
        model.republish(1, history_id="h", at_s=0.0)
    assert (model.reserve(), model.retire()) == (False, ())


def test_files_that_changed_after_the_start_are_a_mismatch(tmp_path):
    folder = folder_with(tmp_path / "a", embed=torch.ones(3, 2))
    model = FixedModel(folder, at_s=0.0)
    model.load(1)
    folder_with(folder, embed=torch.zeros(3, 2))
    with pytest.raises(WeightMismatch, match="'embed'"):
        model.load(1)


def test_tensors_that_a_loader_renamed_are_digested_under_their_new_names(tmp_path):
    folder = folder_with(tmp_path / "a", old=torch.ones(3, 2))
    model = FixedModel(folder, at_s=0.0, read=lambda: {"new": torch.ones(3, 2)})
    stored = FixedModel(folder_with(tmp_path / "b", new=torch.ones(3, 2)), at_s=0.0)
    assert list(model.manifest(1).tensors) == ["new"]
    assert model.manifest(1).digest == stored.manifest(1).digest
    assert model.load(1).keys() == {"new"}
