"""The compiled kernels: exact for every shape, independent of the batch, and optional."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from generator_builders import SteppedEngine, llama, prompt_of, random_model, reference_logprobs, request
from rollmill.generator.engines.embedded.linears import (
    Bfloat16Packing,
    Float32Packing,
    KernelChoice,
    PackedLinear,
    choose_kernels,
    destinations,
)
from rollmill.generator.engines.embedded.native import Kernels, KernelsUnavailable, load_kernels, load_variant, variants
from rollmill.types import SamplingParams


@pytest.fixture(scope="module", params=["avx2", "avx512", "avx512_bf16"])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    if request.param not in variants():
        pytest.skip(f"this CPU has no {request.param}")
    try:
        return load_variant(request.param)
    except KernelsUnavailable as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def bfloat16(kernels: Kernels) -> Kernels:
    if not kernels.bfloat16:
        pytest.skip(f"{kernels.variant} has no product in bfloat16")
    return kernels


@pytest.fixture
def fresh_kernels() -> Iterator[None]:
    """The kernels are looked for again, before and after."""
    for load in (load_kernels, load_variant):
        load.cache_clear()
    yield
    for load in (load_kernels, load_variant):
        load.cache_clear()


def product(kernels: Kernels, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    packed = kernels.new_packed(outputs=weight.shape[0], inputs=weight.shape[1])
    packed.fill_(torch.nan)  # whatever the packing leaves out would show
    kernels.pack(weight, packed)
    return kernels.linear(rows, packed, outputs=weight.shape[0])


@settings(max_examples=20, deadline=None)
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


def product_bfloat16(kernels: Kernels, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    packed = kernels.new_packed_bfloat16(outputs=weight.shape[0], inputs=weight.shape[1])
    packed.fill_(torch.nan)
    kernels.pack_bfloat16(weight.bfloat16(), packed)
    return kernels.linear_bfloat16(rows.bfloat16(), packed, outputs=weight.shape[0])


@settings(max_examples=20, deadline=None)
@given(m=st.integers(1, 50), outputs=st.integers(1, 70), inputs=st.integers(1, 900), seed=st.integers(0, 9))
def test_the_product_in_bfloat16_is_the_exact_one_rounded_once(bfloat16, m, outputs, inputs, seed):
    # Sums of small integers are exact in float32, whatever their order: what is left is one rounding, to even.
    numbers = torch.Generator().manual_seed(seed)
    rows, weight = (torch.randint(-9, 10, (n, inputs), generator=numbers).float() for n in (m, outputs))
    assert torch.equal(product_bfloat16(bfloat16, rows, weight), (rows @ weight.T).bfloat16())


def test_the_product_in_bfloat16_of_many_inputs_and_rows_is_as_exact(bfloat16):
    # 4097 inputs are three blocks and an odd one, 300 rows two chunks.
    numbers = torch.Generator().manual_seed(1)
    rows, weight = (torch.randint(-9, 10, (n, 4097), generator=numbers).float() for n in (300, 33))
    assert torch.equal(product_bfloat16(bfloat16, rows, weight), (rows @ weight.T).bfloat16())


def test_sums_in_bfloat16_keep_what_float32_keeps(bfloat16):
    # 1 + 1000 times 2**-9: summed in bfloat16 each of the small ones would be lost.
    rows, weight = torch.ones(1, 1001), torch.full((1, 1001), 2.0**-9)
    weight[0, 0] = 1.0
    assert product_bfloat16(bfloat16, rows, weight).item() == torch.tensor(1 + 1000 / 512).bfloat16().item()


def test_a_row_in_bfloat16_does_not_depend_on_the_rows_beside_it_or_the_threads(bfloat16):
    numbers = torch.Generator().manual_seed(2)
    rows, weight = torch.randn(250, 2601, generator=numbers), torch.randn(70, 2601, generator=numbers)
    whole = product_bfloat16(bfloat16, rows, weight)
    for count in (1, 2, 7, 48, 249):
        assert torch.equal(product_bfloat16(bfloat16, rows[:count], weight), whole[:count])
    torch.set_num_threads(2)
    try:
        assert torch.equal(product_bfloat16(bfloat16, rows, weight), whole)
    finally:
        torch.set_num_threads(1)


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
        PackedLinear(layer, packing=Float32Packing(kernels), keeps_weight=False).write(weight)
        np.testing.assert_allclose(layer(x).numpy(), expected.numpy(), atol=1e-5)


def test_only_a_weight_that_another_module_reads_is_kept_plain(kernels):
    model = random_model()  # head tied to the embedding
    kept = {
        names[0]: destination.parameter is not None
        for names, destination in destinations(model, packing=Float32Packing(kernels))
    }
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


def test_without_a_compiler_auto_serves_with_torch_and_native_is_refused(tmp_path, monkeypatch, caplog, fresh_kernels):
    monkeypatch.setenv("ROLLMILL_CACHE", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    assert choose_kernels("auto") is None
    assert "no C compiler is installed" in caplog.text
    with pytest.raises(KernelsUnavailable, match="no C compiler"):
        choose_kernels("native")


def test_a_compiler_that_fails_is_quoted(tmp_path, monkeypatch, fresh_kernels):
    compiler = tmp_path / "broken-cc"
    compiler.write_text("#!/bin/sh\necho 'no such flag' >&2\nexit 3\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("ROLLMILL_CACHE", str(tmp_path))
    monkeypatch.setenv("CC", str(compiler))
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    with pytest.raises(KernelsUnavailable, match="ended with 3: no such flag"):
        load_kernels()
    assert not list((tmp_path / "kernels").iterdir())


@pytest.mark.parametrize(
    ("capability", "flags", "expected"),
    [
        ("DEFAULT", "sse4_2", ()),
        ("AVX2", "avx2 avx512f avx512_bf16", ("avx2",)),  # torch was told to do without
        ("AVX512", "avx2 avx512f", ("avx512", "avx2")),
        ("AVX512", "avx2 avx512f avx512_bf16", ("avx512_bf16", "avx512", "avx2")),
    ],
)
def test_the_best_variant_that_the_cpu_has_comes_first(monkeypatch, capability, flags, expected):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    assert variants(cpuinfo=f"flags : {flags}") == expected


def test_a_compiler_that_does_not_know_a_variant_leaves_the_next_one(tmp_path, monkeypatch, caplog, fresh_kernels):
    if "avx2" not in variants() or (real := shutil.which("cc")) is None:
        pytest.skip("no AVX2, or no compiler")
    compiler = tmp_path / "old-cc"
    compiler.write_text(
        f'#!/bin/sh\ncase "$*" in *avx512*) echo "unrecognized -mavx512f" >&2; exit 1;; esac\nexec {real} "$@"\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("ROLLMILL_CACHE", str(tmp_path))
    monkeypatch.setenv("CC", str(compiler))
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    assert load_kernels().variant == "avx2"
    assert "unrecognized -mavx512f" in caplog.text
    assert "Those for avx2 are used instead" in caplog.text


def test_a_cpu_without_avx2_has_no_kernels(monkeypatch, fresh_kernels):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    with pytest.raises(KernelsUnavailable, match="torch reports DEFAULT"):
        load_kernels()
    assert choose_kernels("auto") is None


def test_in_bfloat16_attention_over_blocks_is_as_close_to_the_exact_numbers_as_torch_is(kernels, tmp_path):
    config = llama(hidden_size=48, head_dim=8, num_attention_heads=6)
    exact = random_model(config, seed=1, dtype=torch.bfloat16).float()  # rounded weights, exact sums
    off = {}
    choices: tuple[KernelChoice, ...] = ("native", "torch")
    for choice in choices:
        engine = SteppedEngine(tmp_path, random_model(config, seed=1), dtype="bfloat16", kernels=choice)
        assert engine.core.model.needs_masks == (choice == "torch")
        for sibling in range(3):
            engine.submit(request(f"a{sibling}", prompt_of(20), group_key="a", seed=sibling, max_new_tokens=20))
        engine.finish()
        turns = [engine.turn(f"a{sibling}") for sibling in range(3)]
        errors = [turn.behavior_logprobs - reference_logprobs(exact, turn, SamplingParams()) for turn in turns]
        off[choice] = float(np.abs(errors).mean())
    assert off["native"] < 1.5 * off["torch"] < 0.2


def test_in_bfloat16_a_layer_rounds_its_weights_and_its_result_as_torch_does(kernels):
    with torch.random.fork_rng():
        torch.manual_seed(5)
        layer, x, published = nn.Linear(24, 40).bfloat16(), torch.randn(3, 24).bfloat16(), torch.randn(40, 24)
    rounded = published.bfloat16().float()
    # The exact sum of rounded numbers, rounded once, then the bias.
    expected = (x.float() @ rounded.T).bfloat16() + layer.bias.detach()
    with torch.inference_mode():
        packing = Bfloat16Packing(kernels) if kernels.bfloat16 else Float32Packing(kernels)
        PackedLinear(layer, packing=packing, keeps_weight=False).write(published)
        found = layer(x)
    assert found.dtype == torch.bfloat16
    np.testing.assert_allclose(found.float().numpy(), expected.float().numpy(), rtol=2**-7)


def test_torch_is_taken_when_asked_for():
    assert choose_kernels("torch") is None


@settings(max_examples=20, deadline=None)
@given(
    batch=st.integers(1, 5),
    kv_heads=st.integers(1, 3),
    share=st.integers(1, 6),
    dim=st.sampled_from([8, 16, 24, 64]),
    size=st.sampled_from([1, 3, 8, 16, 40]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 9),
)
def test_attention_is_exact_for_every_shape(kernels, batch, kv_heads, share, dim, size, dtype, seed):
    numbers = torch.Generator().manual_seed(seed)
    # Queries lie head by head, as transformers hands them over; blocks hold garbage behind what may be read.
    rows = torch.randn(kv_heads * share, batch, dim, generator=numbers).transpose(0, 1)
    width = -(-40 // size)
    keys, values = torch.randn(2, batch * width + 1, kv_heads, size, dim, generator=numbers).to(dtype).unbind()
    tables = (1 + torch.randperm(batch * width, generator=numbers)).view(batch, width)
    counts = torch.randint(1, 40, (batch,), generator=numbers)
    seen = []
    for row, count in enumerate(counts.tolist()):
        flat = [kv[tables[row]].transpose(0, 1).reshape(kv_heads, width * size, dim) for kv in (keys, values)]
        seen.append([kv[:, :count].double() for kv in flat])
        last = tables[row, (count - 1) // size]
        keys[last, :, (count - 1) % size + 1 :] = values[last, :, (count - 1) % size + 1 :] = torch.nan
        for block in tables[row, (count - 1) // size + 1 :].tolist():
            keys[block] = values[block] = torch.nan
    found = kernels.attend(rows, keys, values, tables=tables, counts=counts, scale=dim**-0.5)
    for row, (its_keys, its_values) in enumerate(seen):
        grouped = rows[row].double().view(kv_heads, share, dim)
        weights = (grouped @ its_keys.mT * dim**-0.5).softmax(-1)
        expected = (weights @ its_values).view(kv_heads * share, dim)
        np.testing.assert_allclose(found[row].numpy(), expected.numpy(), atol=5e-6)


def test_attention_of_a_row_has_the_same_bits_alone_and_beside_siblings_and_strangers(kernels):
    numbers = torch.Generator().manual_seed(6)
    rows = torch.randn(6, 6, 16, generator=numbers)
    keys, values = torch.randn(2, 20, 2, 4, 16, generator=numbers).unbind()
    # Two groups share their first two blocks, the last row shares nothing; counts end inside blocks.
    tables = torch.tensor([[1, 2, 3], [1, 2, 4], [1, 2, 5], [7, 8, 9], [7, 8, 10], [11, 12, 13]])
    counts = torch.tensor([9, 12, 10, 11, 5, 12])
    together = kernels.attend(rows, keys, values, tables=tables, counts=counts, scale=0.25)
    for row in range(6):
        one = slice(row, row + 1)
        alone = kernels.attend(rows[one], keys, values, tables=tables[one].clone(), counts=counts[one], scale=0.25)
        assert torch.equal(alone, together[one])


def test_attention_to_scores_of_any_size_stays_finite_and_exact(kernels):
    # Scores of 0, -90 and -300 under the largest: weights e^-90 and less are nothing beside 1.
    keys = torch.zeros(1, 1, 3, 8)
    keys[0, 0, :, 0] = torch.tensor([300.0, 210.0, 0.0])
    values = torch.arange(24.0).view(1, 1, 3, 8)
    rows = torch.zeros(1, 1, 8)
    rows[0, 0, 0] = 1.0
    found = kernels.attend(rows, keys, values, tables=torch.tensor([[0]]), counts=torch.tensor([3]), scale=1.0)
    np.testing.assert_array_equal(found[0, 0].numpy(), np.arange(8.0, dtype=np.float32))


@pytest.mark.parametrize("choice", ["auto", "torch"])
def test_a_group_that_grows_while_others_join_is_exact_with_and_without_the_kernels(tmp_path, choice):
    model = random_model(llama(hidden_size=48, head_dim=8, num_attention_heads=6), seed=1)
    engine = SteppedEngine(tmp_path, model, kernels=choice)
    prompt = prompt_of(11, seed=3)
    for sibling in range(3):
        engine.submit(request(f"a{sibling}", prompt, group_key="a", seed=sibling, max_new_tokens=20))
    engine.steps(4)
    engine.submit(request("b", prompt_of(30, seed=4)))
    engine.finish()
    for name in ("a0", "a1", "a2", "b"):
        turn = engine.turn(name)
        np.testing.assert_allclose(turn.behavior_logprobs, reference_logprobs(model, turn, SamplingParams()), atol=1e-4)
