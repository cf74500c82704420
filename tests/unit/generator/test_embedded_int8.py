"""Weights of eight bits: rounded as told, multiplied exactly, swapped and refused like others."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from generator_builders import SteppedEngine, llama, prompt_of, random_model, reference_logprobs, request, tensors_of
from rollmill.errors import EngineError, ModelError
from rollmill.generator.engines.embedded.native import Kernels, KernelsUnavailable, load_variant, variants
from rollmill.types import SamplingParams
from rollmill.weights import rounding as published

SHAPE = llama(hidden_size=48, head_dim=8, num_attention_heads=6)


@pytest.fixture(scope="module", params=["avx2", "avx512", "avx512_bf16"])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    if request.param not in variants():
        pytest.skip(f"this CPU has no {request.param}")
    try:
        return load_variant(request.param)
    except KernelsUnavailable as error:
        pytest.skip(str(error))


def steps_of(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The weight in groups of 32 inputs, and the largest magnitude of each."""
    padded = torch.nn.functional.pad(weight, (0, -weight.shape[1] % 32)).view(len(weight), -1, 32)
    return padded, padded.abs().amax(2, keepdim=True)


def rounded(weight: torch.Tensor) -> torch.Tensor:
    """255 steps for each 32 inputs of an output, the largest magnitude being the last one."""
    padded, most = steps_of(weight)
    last = torch.full_like(most, 127.0)  # torch divides a plain number by way of the reciprocal
    whole = torch.where(most > 0, (padded * (last / most)).round() * (most / last), 0.0)
    return whole.flatten(1)[:, : weight.shape[1]]


def rounded_model(model):
    """The model that an engine with eight bits is: a head of its own, and rounded weights in all linear layers."""
    other = random_model(llama(hidden_size=48, head_dim=8, num_attention_heads=6, tie_word_embeddings=False))
    with torch.no_grad():
        for name, parameter in other.named_parameters():
            source = "model.embed_tokens.weight" if name == "lm_head.weight" else name
            value = tensors_of(model)[source]
            parameter.copy_(rounded(value) if name.endswith(("proj.weight", "lm_head.weight")) else value)
    return other


def product(kernels: Kernels, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    packed, factors = kernels.new_packed_int8(outputs=len(weight), inputs=weight.shape[1])
    kernels.pack_int8(weight, packed, factors)
    return kernels.linear_int8(rows, packed, factors, outputs=len(weight))


@settings(max_examples=20, deadline=None)
@given(m=st.integers(1, 20), outputs=st.integers(1, 40), inputs=st.integers(1, 800), seed=st.integers(0, 9))
def test_a_product_is_that_of_the_rounded_weight_for_every_shape(kernels, m, outputs, inputs, seed):
    numbers = torch.Generator().manual_seed(seed)
    rows, weight = torch.randn(m, inputs, generator=numbers), torch.randn(outputs, inputs, generator=numbers)
    found = product(kernels, rows, weight)
    expected = rows.double() @ rounded(weight).double().T
    np.testing.assert_allclose(found.numpy(), expected.numpy(), atol=2e-5 * inputs**0.5)


def test_no_weight_is_rounded_by_more_than_half_a_step(kernels):
    weight = torch.randn(33, 100, generator=torch.Generator().manual_seed(1))
    as_it_is = product(kernels, torch.eye(100), weight).T
    (padded, most), (found, largest) = steps_of(weight), steps_of(as_it_is)
    assert bool(((found - padded).abs() <= 0.501 * most / 127).all())
    np.testing.assert_allclose(largest.numpy(), most.numpy(), rtol=1e-6)


def test_a_row_has_the_same_bits_alone_and_in_company_and_on_two_threads(kernels):
    numbers = torch.Generator().manual_seed(2)
    rows, weight = torch.randn(250, 577, generator=numbers), torch.randn(200, 577, generator=numbers)
    whole = product(kernels, rows, weight)
    for count in (1, 7, 48):
        assert torch.equal(product(kernels, rows[:count].contiguous(), weight), whole[:count])
    torch.set_num_threads(2)
    try:
        assert torch.equal(product(kernels, rows, weight), whole)
    finally:
        torch.set_num_threads(1)


def test_numbers_that_are_not_finite_are_not_rounded_away(kernels):
    for bad in (torch.nan, torch.inf, -torch.inf):
        for place in (3, 19):
            weight = torch.ones(20, 20)
            weight[2, place] = bad
            found = product(kernels, torch.ones(1, 20), weight)[0]
            assert bool(found[2].isnan())
            assert bool(found[[0, 1, 3, 19]].isfinite().all())


def test_log_probs_are_those_of_the_rounded_model_before_and_after_a_swap(kernels, tmp_path):
    old, new = random_model(SHAPE, seed=1), random_model(SHAPE, seed=2)
    engine = SteppedEngine(tmp_path, old, quantization="int8")
    for sibling in range(3):
        engine.submit(request(f"a{sibling}", prompt_of(20), group_key="a", seed=sibling, max_new_tokens=12))
    engine.finish()
    engine.core.staging.write(weights := tensors_of(new), policy_version=2, gives_up=lambda: False)
    engine.core.pause()
    engine.core.update(weights, policy_version=2, digest="d", kv="keep")
    engine.core.resume()
    engine.submit(request("b", prompt_of(20), max_new_tokens=12))
    engine.finish()
    for name, model in (("a0", old), ("a1", old), ("a2", old), ("b", new)):
        turn = engine.turn(name)
        expected = reference_logprobs(rounded_model(model), turn, SamplingParams())
        np.testing.assert_allclose(turn.behavior_logprobs, expected, atol=1e-4)
        assert np.abs(expected - reference_logprobs(model, turn, SamplingParams())).max() > 1e-3


def test_weights_that_are_not_finite_fail_requests_also_in_eight_bits(kernels, tmp_path):
    engine = SteppedEngine(tmp_path, random_model(SHAPE, seed=1), quantization="int8")
    broken = random_model(SHAPE, seed=2)
    with torch.no_grad():
        broken.model.layers[0].mlp.up_proj.weight[0, 0] = torch.nan
    engine.swap(broken, policy_version=2, kv="keep")
    engine.submit(request("nan", prompt_of(9)))
    engine.steps(1)
    assert isinstance(engine.results["nan"], EngineError)


def test_linear_layers_take_a_quarter_of_the_memory_and_a_little(kernels, tmp_path):
    plain, narrow = (
        SteppedEngine(tmp_path, random_model(SHAPE), quantization=quantization).core.model
        for quantization in ("none", "int8")
    )
    assert narrow.buffer_bytes < 0.5 * plain.buffer_bytes


def test_without_the_compiled_kernels_eight_bits_are_refused(tmp_path):
    with pytest.raises(ModelError, match="eight bits are multiplied by the compiled kernels alone"):
        SteppedEngine(tmp_path, random_model(SHAPE), quantization="int8", kernels="torch")


def test_weights_published_in_eight_bits_give_the_log_probs_that_rounding_them_here_gives(kernels, tmp_path):
    tensors = tensors_of(random_model(SHAPE, seed=2))
    turns = []
    for name, weights in (("whole", tensors), ("published", published.restored(published.rounded(tensors)))):
        (tmp_path / name).mkdir()
        engine = SteppedEngine(tmp_path / name, random_model(SHAPE, seed=1), quantization="int8")
        engine.core.pause()
        engine.core.update(weights, policy_version=2, digest="d", kv="keep")
        engine.core.resume()
        engine.submit(request("a", prompt_of(20), max_new_tokens=12))
        engine.finish()
        turns.append(engine.turn("a"))
    assert turns[0].output_ids.tolist() == turns[1].output_ids.tolist()
    np.testing.assert_allclose(turns[0].behavior_logprobs, turns[1].behavior_logprobs, atol=1e-5)
