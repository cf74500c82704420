"""Attention of a layer without the operators around it, where a proof shows that it is the module's own.

The projections stay the module's; the heads are turned by their positions in one call each, in place, instead of in a
dozen operators. Decides for which modules that holds.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from rollmill.generator.engines.embedded.attention import BlockPool, ForwardPlan, block_attention
from rollmill.generator.engines.embedded.native import DIM_STEP, Kernels

_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
_NORMS = ("q_norm", "k_norm")
_CACHE_NAMES = ("cache", "past_key_values")
_PROOF_TOKENS, _PROOF_WIDTH = 3, 24
_Attention = Callable[..., tuple[torch.Tensor, Any]]


def fused_attention(module: nn.Module, kernels: Kernels, *, tolerance: dict[torch.dtype, float]) -> _Attention | None:
    """Return the forward method of an attention module that does the same in fewer calls, `None` if nothing is proven.

    Args:
        module: any; its linear layers may have been replaced already.
        kernels: a variant that rotates.
        tolerance: of the largest result.
    """
    children, dim = dict(module.named_children()), getattr(module, "head_dim", None)
    if not set(_PROJECTIONS) <= set(children) <= {*_PROJECTIONS, *_NORMS} or not isinstance(dim, int) or dim % DIM_STEP:
        return None
    if not isinstance(children["q_proj"], nn.Linear) or not isinstance(getattr(module, "layer_idx", None), int):
        return None
    trial = _small(module, dim=dim)
    try:
        expected, found = (_tried(forward, trial, kernels) for forward in (_plain(trial), _forward(trial, kernels)))
    except (RuntimeError, TypeError, ValueError, AttributeError):  # it is called, or made, in another way
        return None
    error, largest = (found - expected).abs().max(), expected.abs().max()
    proven = found.dtype == expected.dtype and float(error) <= tolerance[found.dtype] * float(largest)
    return _forward(module, kernels) if proven else None


def _plain(module: nn.Module) -> _Attention:
    method = type(module).forward
    return lambda **given: method(module, **given)


def _forward(module: nn.Module, kernels: Kernels) -> _Attention:
    query, key, value, out = (module.get_submodule(name) for name in _PROJECTIONS)
    norms = tuple(getattr(module, name, None) for name in _NORMS)
    dim, layer = _place_of(module)
    scaling = getattr(module, "scaling", None)
    plain = _plain(module)

    def turned(x: torch.Tensor, norm: nn.Module | None, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
        heads = x.view(x.shape[1], -1, dim)
        heads = heads if norm is None else norm(heads)
        kernels.rotate(heads, cosines, sines)
        return heads.transpose(0, 1)[None]

    def forward(
        hidden_states: torch.Tensor,
        *,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        block_plan: ForwardPlan | None = None,
        block_kernels: Kernels | None = None,
        **more: Any,
    ) -> tuple[torch.Tensor, Any]:
        cosines, sines = position_embeddings
        if block_plan is None or cosines.shape[-1] != dim or cosines.dtype != hidden_states.dtype:
            more |= {} if block_plan is None else {"block_plan": block_plan, "block_kernels": block_kernels}
            return plain(hidden_states=hidden_states, position_embeddings=position_embeddings, **more)
        pool: BlockPool = more.get(_CACHE_NAMES[0]) or more[_CACHE_NAMES[1]]
        angles = (cosines[0].contiguous(), sines[0].contiguous())
        queries, keys = turned(query(hidden_states), norms[0], *angles), turned(key(hidden_states), norms[1], *angles)
        values = value(hidden_states).view(1, hidden_states.shape[1], -1, dim).transpose(1, 2)
        kept = pool.update(keys, values, layer)
        attended, _ = block_attention(
            module, queries, *kept, scaling=scaling, block_plan=block_plan, block_kernels=block_kernels
        )
        return out(attended.reshape(1, hidden_states.shape[1], -1)), None

    return forward


def _place_of(module: Any) -> tuple[int, int]:
    """Return the dimension of a head, and in which layer it is."""
    return int(module.head_dim), int(module.layer_idx)


def _dtype_of(module: Any) -> torch.dtype:
    return module.q_proj.weight.dtype


def _small(module: nn.Module, *, dim: int) -> nn.Module:
    """Return a module of this class with two query heads, one key head and random weights."""
    dtype, numbers = _dtype_of(module), torch.Generator().manual_seed(0)
    shapes = {"q_proj": (_PROOF_WIDTH, 2 * dim), "k_proj": (_PROOF_WIDTH, dim), "v_proj": (_PROOF_WIDTH, dim)}
    trial, parts = copy.copy(module), dict[str, nn.Module | None]()
    for name, (inputs, outputs) in {**shapes, "o_proj": (2 * dim, _PROOF_WIDTH)}.items():
        layer = nn.Linear(inputs, outputs, bias=False, dtype=dtype)
        weight = torch.randn(outputs, inputs, generator=numbers) / inputs**0.5
        layer.weight = nn.Parameter(weight.to(dtype), requires_grad=False)
        parts[name] = layer
    for name in set(_NORMS) & set(dict(module.named_children())):
        norm = copy.copy(module.get_submodule(name))  # the weights that are served may not be there yet
        norm._parameters = {
            key: nn.Parameter(torch.rand(old.shape, generator=numbers).to(old.dtype), requires_grad=False)
            for key, old in norm.named_parameters()
        }
        parts[name] = norm
    trial._modules = parts
    return trial


def _tried(forward: _Attention, module: nn.Module, kernels: Kernels) -> torch.Tensor:
    """Return what three tokens of one sequence see of each other."""
    dtype, numbers = _dtype_of(module), torch.Generator().manual_seed(1)
    (dim, layer), tokens = _place_of(module), torch.arange(_PROOF_TOKENS)
    pool = BlockPool(
        layers=layer + 1, blocks=1, kv_heads=1, size=_PROOF_TOKENS, head_dim=dim, dtype=dtype, kernels=kernels
    )
    pool.plan = plan = ForwardPlan(
        write_rows=None,
        write_blocks=torch.zeros_like(tokens),
        write_offsets=tokens,
        decode_tables=torch.zeros(_PROOF_TOKENS, 1, dtype=torch.int64),
        decode_counts=tokens + 1,
    )
    accepted = inspect.signature(type(module).forward).parameters
    cache = next((name for name in _CACHE_NAMES if name in accepted), _CACHE_NAMES[0])
    states = torch.randn(1, _PROOF_TOKENS, _PROOF_WIDTH, generator=numbers).to(dtype)
    angles = torch.rand(2, 1, _PROOF_TOKENS, dim, generator=numbers).to(dtype)
    given = {"attention_mask": None, cache: pool, "block_plan": plan, "block_kernels": kernels}
    return forward(hidden_states=states, position_embeddings=(angles[0], angles[1]), **given)[0]
