"""Weights of eight bits: rounded when they are published, restored when they are read."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollmill.errors import WeightError, WeightMismatch
from rollmill.types import WeightManifest
from rollmill.weights import LocalModelRepository
from rollmill.weights.rounding import FACTOR, GROUP, restored, rounded


def weights(seed: int = 0, *, inputs: int = 40) -> dict[str, torch.Tensor]:
    numbers = torch.Generator().manual_seed(seed)
    return {
        "model.embed_tokens.weight": torch.randn(6, inputs, generator=numbers),
        "model.layers.0.q_proj.weight": torch.randn(5, inputs, generator=numbers),
        "model.norm.weight": torch.randn(inputs, generator=numbers),
    }


@given(seed=st.integers(0, 99), inputs=st.integers(1, 100), scale=st.sampled_from([1e-20, 1e-3, 1.0, 1e10]))
def test_no_number_moves_by_more_than_half_a_step_and_rounding_again_changes_no_integer(seed, inputs, scale):
    weight = scale * weights(seed, inputs=inputs)["model.layers.0.q_proj.weight"]
    stored = rounded({"w": weight})
    back = restored(stored)["w"]
    half_a_step = 0.501 * stored["w.factor"].repeat_interleave(GROUP, 1)[:, :inputs]
    assert bool(((back - weight).abs() <= half_a_step).all())
    assert torch.equal(rounded({"w": back})["w"], stored["w"])


def test_embeddings_and_vectors_are_published_as_they_are():
    given_ = weights()
    stored = rounded(given_)
    assert {name for name, tensor in stored.items() if tensor.dtype == torch.int8} == {"model.layers.0.q_proj.weight"}
    for name in ("model.embed_tokens.weight", "model.norm.weight"):
        assert torch.equal(stored[name], given_[name])


def test_a_number_that_is_not_finite_is_not_rounded_away():
    for bad in (torch.nan, torch.inf, -torch.inf):
        weight = torch.ones(2, 40)
        weight[1, 3] = bad
        back = restored(rounded({"w": weight}))["w"]
        assert bool(back[1, :GROUP].isnan().all())
        assert bool(back[0].isfinite().all())
        assert bool(back[1, GROUP:].isfinite().all())


def test_a_group_of_zeros_stays_zero():
    assert torch.equal(restored(rounded({"w": torch.zeros(2, 33)}))["w"], torch.zeros(2, 33))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda stored: stored.pop("w" + FACTOR), "needs factors of shape .* there are none"),
        (lambda stored: stored.pop("w"), "without its matrix"),
        (lambda stored: stored.update({"w" + FACTOR: torch.ones(2, 3)}), "there are \\(2, 3\\)"),
    ],
)
def test_integers_without_fitting_factors_are_refused(change, words):
    stored = rounded({"w": torch.ones(2, 40)})
    change(stored)
    with pytest.raises(WeightError, match=words):
        restored(stored)


def publish(repository: LocalModelRepository, *, step: int) -> WeightManifest:
    return repository.publish(
        weights(step),
        optimizer_step=step,
        parent=None,
        history_id="h",
        training_dtype="float32",
        canary=None,
        at_s=0.0,
    )


@pytest.fixture(params=["shm", "file"])
def pair(request, tmp_path) -> tuple[LocalModelRepository, LocalModelRepository]:
    """One repository as a reader of whole weights and as publisher and reader of eight bits."""
    (tmp_path / "shared").mkdir()

    def opened(quantization) -> LocalModelRepository:
        return LocalModelRepository(
            tmp_path / "w",
            transport=request.param,
            keep_versions=1,
            shared_memory=tmp_path / "shared",
            quantization=quantization,
        )

    return opened("none"), opened("int8")


def files(repository: LocalModelRepository) -> list[str]:
    folder = Path(repository.manifests()[-1].location).parent
    return sorted(path.name for path in folder.glob("v*"))


def test_both_are_published_and_each_reader_gets_what_it_serves(pair):
    whole, narrow = pair
    manifest = publish(narrow, step=1)
    assert manifest.rounded is not None
    assert manifest.rounded.tensors["model.layers.0.q_proj.weight"].dtype == "int8"
    assert manifest.rounded.digest != manifest.digest
    assert torch.equal(whole.load(1)["model.layers.0.q_proj.weight"], weights(1)["model.layers.0.q_proj.weight"])
    found, expected = narrow.load(1), restored(rounded(weights(1)))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_where_only_whole_weights_were_published_these_are_read(pair):
    whole, narrow = pair
    assert publish(whole, step=1).rounded is None
    assert torch.equal(narrow.load(1)["model.layers.0.q_proj.weight"], weights(1)["model.layers.0.q_proj.weight"])


def test_a_bit_that_flips_in_the_integers_is_found(pair):
    _, narrow = pair
    manifest = publish(narrow, step=1)
    assert manifest.rounded is not None
    path = Path(manifest.rounded.location)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))
    with pytest.raises(WeightMismatch, match="version 1: tensor"):
        narrow.load(1)


def test_both_files_go_when_a_version_is_retired_and_both_come_back_with_a_roll_back(pair):
    _, narrow = pair
    publish(narrow, step=1)
    again = narrow.republish(1, history_id="h", at_s=0.0)
    assert again.rounded is not None
    assert files(narrow) == [f"v00000{n}{end}" for n in (1, 2) for end in (".int8.safetensors", ".safetensors")]
    assert narrow.retire() == [1]
    assert files(narrow) == ["v000002.int8.safetensors", "v000002.safetensors"]
    assert torch.equal(narrow.load(2)["model.norm.weight"], weights(1)["model.norm.weight"])


def test_integers_of_a_publication_that_was_killed_before_its_manifest_are_removed(pair):
    _, narrow = pair
    manifest = publish(narrow, step=1)
    assert manifest.rounded is not None
    left = Path(manifest.rounded.location).with_name("v000002.int8.safetensors")
    left.write_bytes(b"half")
    assert narrow.adopt().removed == (left.name,)
    assert publish(narrow, step=2).policy_version == 2
    assert narrow.load(2).keys() == weights().keys()


def test_the_kernels_share_a_factor_among_as_many_inputs():
    from rollmill.generator.engines.embedded.native import INT8_GROUP

    assert INT8_GROUP == GROUP
