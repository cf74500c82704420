"""The compiled kernels: exact for every shape, independent of the batch, and optional."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from generator_builders import SteppedEngine, prompt_of, random_model, reference_logprobs, request
from rollmill.generator.engines.embedded import native
from rollmill.generator.engines.embedded.linears import PackedLinear, choose_kernels, destinations
from rollmill.generator.engines.embedded.native import Kernels, KernelsUnavailable, load_kernels
from rollmill.types import SamplingParams


@pytest.fixture(scope="module")
def kernels() -> Kernels:
    try:
        return load_kernels()
    except KernelsUnavailable as error:
        pytest.skip(str(error))


def product(kernels: Kernels, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    packed = kernels.new_packed(outputs=weight.shape[0], inputs=weight.shape[1])
    packed.fill_(torch.nan)  # whatever the packing leaves out would show
    kernels.pack(weight, packed)
    return kernels.linear(rows, packed, outputs=weight.shape[0])


@settings(max_examples=40, deadline=None)
@given(m=st.integers(1, 50), outputs=st.integers(1, 70), inputs=st.integers(1, 900), seed=st.integers(0, 9))
def test_the_product_is_exact_for_every_shape(kernels, m, outputs, inputs, seed):
    numbers = torch.Generator().manual_seed(seed)
    rows, weight = torch.randn(m, inputs, generator=numbers), torch.randn(outputs, inputs, generator=numbers)
    expected = (rows.double() @ weight.double().T).numpy()
    np.testing.assert_allclose(product(kernels, rows, weight).numpy(), expected, atol=1e-5 * inputs**0.5)


def test_products_of_small_integers_are_equal_to_the_last_bit(kernels):
    # Sums stay below 2**24, so float32 has no rounding to hide a wrong index behind.
    numbers = torch.Generator().manual_seed(1)
    for m, outputs, inputs in ((300, 40, 800), (1, 1, 1), (6, 16, 384), (5, 17, 385)):
        rows = torch.randint(-9, 10, (m, inputs), generator=numbers).float()
        weight = torch.randint(-9, 10, (outputs, inputs), generator=numbers).float()
        assert torch.equal(product(kernels, rows, weight), rows @ weight.T)


def test_a_row_does_not_depend_on_the_rows_it_shares_the_product_with(kernels):
    numbers = torch.Generator().manual_seed(2)
    rows, weight = torch.randn(250, 577, generator=numbers), torch.randn(33, 577, generator=numbers)
    whole = product(kernels, rows, weight)
    for count in (1, 2, 7, 48, 249):
        assert torch.equal(product(kernels, rows[:count].contiguous(), weight), whole[:count])


def test_two_threads_compute_the_same_bits_as_one(kernels):
    numbers = torch.Generator().manual_seed(3)
    rows, weight = torch.randn(9, 400, generator=numbers), torch.randn(200, 400, generator=numbers)
    one = product(kernels, rows, weight)
    torch.set_num_threads(2)
    try:
        assert torch.equal(product(kernels, rows, weight), one)
    finally:
        torch.set_num_threads(1)


def test_a_layer_with_a_bias_and_a_batch_dimension_equals_torch(kernels):
    with torch.random.fork_rng():
        torch.manual_seed(4)
        layer, x = nn.Linear(24, 40), torch.randn(2, 3, 24)
    expected, weight = layer(x).detach(), layer.weight.detach().clone()
    with torch.inference_mode():
        PackedLinear(layer, kernels=kernels, keeps_weight=False).write(weight)
        np.testing.assert_allclose(layer(x).numpy(), expected.numpy(), atol=1e-5)


def test_only_a_weight_that_another_module_reads_is_kept_plain(kernels):
    model = random_model()  # head tied to the embedding
    kept = {names[0]: destination.parameter is not None for names, destination in destinations(model, kernels=kernels)}
    assert kept["model.embed_tokens.weight"]
    assert kept["model.norm.weight"]
    assert not any(plain for name, plain in kept.items() if name.endswith("proj.weight"))
    assert bool(model.model.layers[0].mlp.up_proj.weight.isnan().all())


@pytest.mark.parametrize("choice", ["auto", "torch"])
def test_log_probs_are_exact_with_and_without_the_kernels(tmp_path, choice):
    model = random_model(seed=1)
    engine = SteppedEngine(tmp_path, model, kernels=choice)
    engine.submit(request("a", prompt_of(9)))
    engine.finish()
    expected = reference_logprobs(model, engine.turn("a"), SamplingParams())
    np.testing.assert_allclose(engine.turn("a").behavior_logprobs, expected, atol=1e-4)


def test_without_a_compiler_auto_serves_with_torch_and_native_is_refused(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("ROLLMILL_CACHE", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    native.load_kernels.cache_clear()
    try:
        assert choose_kernels("auto", dtype=torch.float32) is None
        assert "no C compiler is installed" in caplog.text
        with pytest.raises(KernelsUnavailable, match="no C compiler"):
            choose_kernels("native", dtype=torch.float32)
    finally:
        native.load_kernels.cache_clear()


def test_a_compiler_that_fails_is_quoted(tmp_path, monkeypatch):
    compiler = tmp_path / "broken-cc"
    compiler.write_text("#!/bin/sh\necho 'no such flag' >&2\nexit 3\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("ROLLMILL_CACHE", str(tmp_path))
    monkeypatch.setenv("CC", str(compiler))
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    native.load_kernels.cache_clear()
    try:
        with pytest.raises(KernelsUnavailable, match="ended with 3: no such flag"):
            load_kernels()
        assert not list((tmp_path / "kernels").iterdir())
    finally:
        native.load_kernels.cache_clear()


def test_the_kernels_are_not_used_where_they_were_not_measured(monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    native.load_kernels.cache_clear()
    try:
        with pytest.raises(KernelsUnavailable, match="torch reports AVX512"):
            load_kernels()
    finally:
        native.load_kernels.cache_clear()


def test_native_kernels_are_refused_for_another_precision():
    with pytest.raises(KernelsUnavailable, match="bfloat16"):
        choose_kernels("native", dtype=torch.bfloat16)
    assert choose_kernels("auto", dtype=torch.bfloat16) is None
    assert choose_kernels("torch", dtype=torch.float32) is None
