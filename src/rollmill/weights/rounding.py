"""Weights rounded to eight bits when they are published, with the factors that restore them.

| tensor | published as |
|---|---|
| a matrix, unless it is an embedding | `NAME`, int8 [outputs, inputs]; `NAME.factor`, float32 [outputs, groups of 32] |
| any other | `NAME`, as it is |

A tied head is an embedding here: it is read by token, and whoever multiplies with it rounds a copy. All replicas then
serve the same numbers, whose digests stand in the manifest, and read 0.28 of the bytes. Rounding what was restored
gives the same integers again: the largest number of a group is 127 steps in both. Pure arithmetic; decides nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from rollmill.errors import WeightError

GROUP = 32
"""Inputs that share a factor."""
STEPS = 127
FACTOR = ".factor"


def is_rounded(name: str, tensor: torch.Tensor) -> bool:
    """Return whether a tensor is published in eight bits."""
    return tensor.ndim == 2 and tensor.is_floating_point() and "embed" not in name


@torch.no_grad()
def rounded(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return what is published: integers and factors for matrices, all others as they are.

    A group with a number that is not finite gets the factor NaN, so that nobody takes it for weights.

    Example:
        >>> found = rounded({"q.weight": torch.tensor([[127.0, -1.4]]), "q.bias": torch.ones(1)})
        >>> found["q.weight"].tolist(), found["q.weight.factor"].tolist(), sorted(found)
        ([[127, -1]], [[1.0]], ['q.bias', 'q.weight', 'q.weight.factor'])
    """
    out: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if is_rounded(name, tensor):
            out[name], out[name + FACTOR] = _round(tensor)
        else:
            out[name] = tensor
    return out


def _round(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    inputs = weight.shape[1]
    groups = torch.nn.functional.pad(weight.float(), (0, -inputs % GROUP)).unflatten(1, (-1, GROUP))
    most = groups.abs().amax(2, keepdim=True)
    last = torch.full_like(most, STEPS)  # torch divides a plain number by way of the reciprocal
    sound = most.isfinite()
    steps = torch.where(sound & (most > 0), groups * (last / most), 0.0).round().to(torch.int8)
    factors = torch.where(sound, most / last, torch.nan)
    return steps.flatten(1)[:, :inputs].contiguous(), factors.squeeze(2)


@torch.no_grad()
def restored(stored: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return weights of published integers and factors, float32; all others as they are.

    Raises:
        WeightError: if a matrix has no factors, factors have no matrix, or their shapes do not fit.
    """
    out: dict[str, torch.Tensor] = {}
    for name, tensor in stored.items():
        if name.endswith(FACTOR):
            if name.removesuffix(FACTOR) not in stored:
                raise WeightError(f"the published weights hold {name} without its matrix")
        elif tensor.dtype == torch.int8:
            out[name] = _restore(name, tensor, factors=stored.get(name + FACTOR))
        else:
            out[name] = tensor
    return out


def _restore(name: str, steps: torch.Tensor, *, factors: torch.Tensor | None) -> torch.Tensor:
    outputs, inputs = steps.shape
    expected = (outputs, -(-inputs // GROUP))
    if factors is None or tuple(factors.shape) != expected:
        found = "none" if factors is None else f"{tuple(factors.shape)}"
        raise WeightError(f"{name} is published in eight bits and needs factors of shape {expected}; there are {found}")
    return steps.float().mul_(factors.repeat_interleave(GROUP, 1)[:, :inputs])
