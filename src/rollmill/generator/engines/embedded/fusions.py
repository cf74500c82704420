"""Norms, gated units and attention of a layer in few compiled calls, where a proof shows that they are the module's.

In bfloat16 with few rows a quarter of a decode step is spent between the products, most of it in the calls of a dozen
operators per module. The modules stay those of transformers; of root-mean-square norms, of gated units with SiLU and
of attention with rotary positions the forward method is replaced, if the compiled functions give on random numbers what
the module itself does. Decides which modules that holds for.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import nn

from rollmill.generator.engines.embedded.fused_attention import fused_attention
from rollmill.generator.engines.embedded.native import Kernels

_Forward = Callable[[torch.Tensor], torch.Tensor]

_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2.0**-6}
"""Of the largest result. In bfloat16 each of two roundings may fall the other way, by 2**-7 of a number."""
_UNIT = ("gate_proj", "up_proj", "down_proj", "act_fn")
_PROOF_ROWS, _PROOF_WIDTH = 3, 24


@torch.inference_mode()
def fuse(model: nn.Module, kernels: Kernels) -> int:
    """Replace the forward methods of all modules for which it is proven; return of how many.

    Args:
        model: its linear layers may have been replaced already.
        kernels: a variant that has such functions, or nothing is replaced.
    """
    if not kernels.fuses:
        return 0
    count = 0
    for module in model.modules():
        fused = (
            _fused_norm(module, kernels)
            or _fused_unit(module, kernels)
            or fused_attention(module, kernels, tolerance=_TOLERANCE)
        )
        if fused is not None:
            module.forward = fused
            count += 1
    return count


def _fused_norm(module: nn.Module, kernels: Kernels) -> _Forward | None:
    weight, epsilon = getattr(module, "weight", None), getattr(module, "variance_epsilon", None)
    alone = [name for name, _ in module.named_parameters()] == ["weight"] and not list(module.children())
    if not alone or not isinstance(epsilon, float) or not isinstance(weight, nn.Parameter) or weight.ndim != 1:
        return None
    numbers = torch.Generator().manual_seed(0)
    trial = copy.copy(module)  # the weights that are served may not be there yet
    trial._parameters = {
        "weight": nn.Parameter(_random(len(weight), like=weight, numbers=numbers), requires_grad=False)
    }
    rows = _random(_PROOF_ROWS, len(weight), like=weight, numbers=numbers)
    fused = _norm(trial, kernels, epsilon=epsilon)
    return _norm(module, kernels, epsilon=epsilon) if _agree(fused(rows), type(module).forward(trial, rows)) else None


def _norm(module: nn.Module, kernels: Kernels, *, epsilon: float) -> _Forward:
    plain = type(module).forward

    def forward(x: torch.Tensor) -> torch.Tensor:
        weight = module._parameters["weight"]
        if weight is None or x.dtype != weight.dtype:
            return plain(module, x)
        return kernels.norm(x, weight, epsilon=epsilon)

    return forward


def _fused_unit(module: nn.Module, kernels: Kernels) -> _Forward | None:
    gate = getattr(module, "gate_proj", None)
    if set(dict(module.named_children())) != set(_UNIT) or not isinstance(gate, nn.Linear):
        return None
    numbers = torch.Generator().manual_seed(0)
    trial, like = copy.copy(module), gate.weight
    layers: dict[str, nn.Module | None] = {name: _small_linear(like, numbers=numbers) for name in _UNIT[:3]}
    trial._modules = {**layers, "act_fn": module._modules["act_fn"]}
    rows = _random(_PROOF_ROWS, _PROOF_WIDTH, like=like, numbers=numbers)
    found, expected = _unit(trial, kernels)(rows), type(module).forward(trial, rows)
    return _unit(module, kernels) if _agree(found, expected) else None


def _unit(module: nn.Module, kernels: Kernels) -> _Forward:
    gate, up, down = (module.get_submodule(name) for name in _UNIT[:3])

    def forward(x: torch.Tensor) -> torch.Tensor:
        return down(kernels.gated(gate(x), up(x)))

    return forward


def _small_linear(like: torch.Tensor, *, numbers: torch.Generator) -> nn.Linear:
    layer = nn.Linear(_PROOF_WIDTH, _PROOF_WIDTH, bias=False, dtype=like.dtype)
    layer.weight = nn.Parameter(_random(_PROOF_WIDTH, _PROOF_WIDTH, like=like, numbers=numbers), requires_grad=False)
    return layer


def _random(*shape: int, like: torch.Tensor, numbers: torch.Generator) -> torch.Tensor:
    return torch.randn(*shape, generator=numbers).to(like.dtype)


def _agree(found: torch.Tensor, expected: torch.Tensor) -> bool:
    error, largest = (found - expected).abs().max(), expected.abs().max()
    return found.dtype == expected.dtype and float(error) <= _TOLERANCE[found.dtype] * float(largest)
