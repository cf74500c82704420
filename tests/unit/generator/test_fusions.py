"""Compiled norms, gated units, attention and KV writes: the module's own numbers, or the module's own method."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import GemmaConfig, GemmaForCausalLM, LlamaConfig, Qwen3Config, Qwen3ForCausalLM
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, LlamaRMSNorm, apply_rotary_pos_emb

from generator_builders import SteppedEngine, llama, prompt_of, random_model, reference_logprobs, request
from rollmill.generator.engines.embedded.attention import ATTENTION_NAME, BlockPool, ForwardPlan
from rollmill.generator.engines.embedded.fusions import fuse
from rollmill.generator.engines.embedded.native import Kernels, KernelsUnavailable, load_variant, variants
from rollmill.types import SamplingParams

DTYPES = st.sampled_from([torch.float32, torch.bfloat16])


@pytest.fixture(scope="module", params=["avx2", "avx512", "avx512_bf16"])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    if request.param not in variants():
        pytest.skip(f"this CPU has no {request.param}")
    try:
        return load_variant(request.param)
    except KernelsUnavailable as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def fusing(kernels: Kernels) -> Kernels:
    if not kernels.fuses:
        pytest.skip(f"{kernels.variant} has no such functions")
    return kernels


def random(*shape: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.dtype == expected.dtype
    # in bfloat16 each of two roundings may fall the other way
    rtol, atol = (1e-5, 1e-6) if found.dtype == torch.float32 else (2.0**-6, 1e-6)
    np.testing.assert_allclose(found.float().numpy(), expected.float().numpy(), rtol=rtol, atol=atol)


@settings(max_examples=20, deadline=None)
@given(m=st.integers(1, 5), n=st.integers(1, 100), dtype=DTYPES, seed=st.integers(0, 9))
def test_a_norm_is_that_of_the_module_for_every_width(fusing, m, n, dtype, seed):
    norm = LlamaRMSNorm(n, eps=1e-5).to(dtype)
    norm.weight.data = random(n, seed=seed, dtype=dtype)
    x = random(2, m, n, seed=seed + 1, dtype=dtype)
    close(fusing.norm(x, norm.weight.detach(), epsilon=1e-5), norm(x).detach())


@settings(max_examples=20, deadline=None)
@given(m=st.integers(1, 5), n=st.integers(1, 100), dtype=DTYPES, seed=st.integers(0, 9))
def test_a_gated_unit_is_silu_times_the_other_for_every_size(fusing, m, n, dtype, seed):
    gate, up = 5 * random(m, n, seed=seed, dtype=dtype), random(m, n, seed=seed + 1, dtype=dtype)
    close(fusing.gated(gate, up), nn.functional.silu(gate) * up)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_not_finite_or_far_from_one_is_treated_as_by_torch(fusing, dtype):
    odd = torch.tensor([float("nan"), float("inf"), -200.0, -95.0, -80.0, -0.0, 90.0, 3e38]).to(dtype)
    one = torch.ones(8, dtype=dtype)
    torch.testing.assert_close(
        fusing.gated(odd, one), nn.functional.silu(odd), rtol=2.0**-7, atol=1e-30, equal_nan=True
    )
    assert bool(fusing.norm(odd[None], one, epsilon=1e-5).isnan().any())


def test_a_row_has_the_same_bits_alone_and_beside_others_and_on_two_threads(fusing):
    x, weight = random(300, 576, seed=1, dtype=torch.float32), random(576, seed=2, dtype=torch.float32)
    whole, units = fusing.norm(x, weight, epsilon=1e-5), fusing.gated(x, x)
    assert torch.equal(fusing.norm(x[:1], weight, epsilon=1e-5), whole[:1])
    assert torch.equal(fusing.gated(x[:1], x[:1]), units[:1])
    turned, cosines, sines = x.clone(), random(300, 64, seed=3, dtype=x.dtype), random(300, 64, seed=4, dtype=x.dtype)
    fusing.rotate(turned.view(300, 9, 64), cosines, sines)
    alone = x[7:8].clone()
    fusing.rotate(alone.view(1, 9, 64), cosines[7:8], sines[7:8])
    assert torch.equal(alone, turned[7:8])
    torch.set_num_threads(2)
    try:
        assert torch.equal(fusing.norm(x, weight, epsilon=1e-5), whole)
        assert torch.equal(fusing.gated(x, x), units)
        again = x.clone()
        fusing.rotate(again.view(300, 9, 64), cosines, sines)
        assert torch.equal(again, turned)
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_modules_with_other_norms_and_units_keep_their_own(fusing, dtype):
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 40, "head_dim": 8}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    qwen, gemma = Qwen3ForCausalLM(Qwen3Config(**shape)).to(dtype), GemmaForCausalLM(GemmaConfig(**shape)).to(dtype)
    # norms multiply by 1 + weight and units are of another kind, but attention is the same
    assert fuse(gemma, fusing) == 2
    # norms of q and k, two of the layer, the unit and attention; the last norm
    assert fuse(qwen, fusing) == 2 * (2 + 2 + 1 + 1) + 1


def test_a_module_that_only_looks_like_one_keeps_its_own(fusing):
    class Shifted(LlamaRMSNorm):
        def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
            return super().forward(hidden_states) + 0.01

    class Swapped(LlamaMLP):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down_proj(self.act_fn(self.up_proj(x)) * self.gate_proj(x))

    assert fuse(nn.ModuleList([Shifted(16), Swapped(llama())]), fusing) == 0
    assert fuse(nn.ModuleList([LlamaRMSNorm(16), LlamaMLP(llama())]), fusing) == 2


def test_attention_is_only_replaced_where_it_is_the_same(fusing):
    class OtherAngles(LlamaAttention):
        def forward(self, hidden_states: torch.Tensor, position_embeddings: Any, **given: Any) -> Any:
            cosines, sines = position_embeddings
            return super().forward(hidden_states, position_embeddings=(cosines, -sines), **given)

    class OtherCall(LlamaAttention):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    class Gated(LlamaAttention):
        def __init__(self, config: LlamaConfig, layer_idx: int) -> None:
            super().__init__(config, layer_idx)
            self.gate_proj = nn.Linear(config.hidden_size, 1)

    config = llama(head_dim=8, attn_implementation=ATTENTION_NAME)
    for kind in (OtherAngles, OtherCall, Gated):
        assert fuse(nn.ModuleList([kind(config, 0)]), fusing) == 0, kind
    # attention needs a dimension that is a multiple of 8
    assert fuse(nn.ModuleList([LlamaAttention(llama(head_dim=12, attn_implementation=ATTENTION_NAME), 0)]), fusing) == 0
    assert fuse(nn.ModuleList([LlamaAttention(config, 0)]), fusing) == 1


@settings(max_examples=20, deadline=None)
@given(tokens=st.integers(1, 5), heads=st.integers(1, 3), half=st.integers(1, 40), dtype=DTYPES, seed=st.integers(0, 9))
def test_heads_are_turned_as_by_transformers(fusing, tokens, heads, half, dtype, seed):
    x = random(tokens, heads, 2 * half, seed=seed, dtype=dtype)
    cosines, sines = (random(tokens, 2 * half, seed=seed + i, dtype=dtype) for i in (1, 2))
    expected, _ = apply_rotary_pos_emb(x[None], x[None], cosines[None], sines[None], unsqueeze_dim=2)
    fusing.rotate(x, cosines, sines)
    close(x, expected[0])


def test_avx2_replaces_nothing(kernels):
    if kernels.variant != "avx2":
        pytest.skip("not that variant")
    assert fuse(random_model(), kernels) == 0


def test_a_fused_norm_reads_the_weight_that_is_served_now(fusing):
    norm = LlamaRMSNorm(16)
    fuse(nn.ModuleList([norm]), fusing)
    norm.weight.data = torch.full((16,), 3.0)  # as a swap exchanges the memory
    with torch.inference_mode():
        np.testing.assert_allclose(norm(torch.ones(1, 16)).numpy(), 3.0, rtol=1e-5)
        assert norm(torch.ones(1, 16).bfloat16()).shape == (1, 16)  # another type than the weight's: its own method


@settings(max_examples=20, deadline=None)
@given(dtype=DTYPES, tokens=st.integers(1, 6), copied=st.booleans(), seed=st.integers(0, 9))
def test_keys_and_values_lie_where_torch_would_write_them(kernels, dtype, tokens, copied, seed):
    shape = {"layers": 2, "blocks": 5, "kv_heads": 3, "size": 4, "head_dim": 6, "dtype": dtype}
    numbers = torch.Generator().manual_seed(seed)
    places = torch.randperm(20, generator=numbers)[: tokens + 2 * copied]
    rows = torch.arange(len(places)) % tokens if copied else None
    plan = ForwardPlan(write_rows=rows, write_blocks=places // 4, write_offsets=places % 4)
    # queries, keys and values are views of [tokens, heads, dim] when transformers hands them over
    keys, values = (random(1, tokens, 3, 6, seed=seed + i, dtype=dtype).transpose(1, 2) for i in (1, 2))
    pools = [BlockPool(**shape), BlockPool(**shape, kernels=kernels)]
    for pool in pools:
        pool.plan = plan
        pool.update(keys, values.contiguous(), 1)
    for block in range(5):
        np.testing.assert_array_equal(*(pool.read(block, tokens=4) for pool in pools))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_log_probs_of_an_engine_stay_those_of_the_model(tmp_path, dtype):
    model = random_model(llama(hidden_size=48, head_dim=8, num_attention_heads=6), seed=1)
    engine = SteppedEngine(tmp_path, model, dtype=dtype)
    for n in range(3):
        engine.submit(request(f"r{n}", prompt_of(9 + n, seed=n), seed=n))
    engine.finish()
    served = random_model(llama(hidden_size=48, head_dim=8, num_attention_heads=6), seed=1)
    served = served.to(torch.bfloat16).float() if dtype == "bfloat16" else served  # rounded weights, exact sums
    for n in range(3):
        expected = reference_logprobs(served, engine.turn(f"r{n}"), SamplingParams())
        error = np.abs(engine.turn(f"r{n}").behavior_logprobs - expected)
        assert error.max() < 1e-4 if dtype == "float32" else error.mean() < 0.2
