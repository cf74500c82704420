"""Adapters: published low-rank differences to a base, and the weights that both together are.

A publication with an adapter holds, for each adapted matrix `M.weight` [out, in] of the base, `M.lora_A.weight`
[rank, in] and `M.lora_B.weight` [out, rank]; what is served is `M.weight + alpha / rank * B A`. Small to publish and to
read; every engine can serve it, because what it gets are whole weights. Pure arithmetic; decides nothing.

Reference: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", arXiv 2106.09685, section 4.1.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from rollmill.errors import WeightError
from rollmill.types import Adapter

DOWN, UP, WHOLE = ".lora_A.weight", ".lora_B.weight", ".weight"


@torch.no_grad()
def merged(
    base: Mapping[str, torch.Tensor], adapter: Mapping[str, torch.Tensor], *, settings: Adapter
) -> dict[str, torch.Tensor]:
    """Return the base with its adapted matrices replaced, in the base's dtypes; all others are the base's own.

    Args:
        base: name -> tensor of the whole weights.
        adapter: name -> tensor, as published.

    Raises:
        WeightError: if a matrix of a pair is missing or does not fit, or the base has no such weight.

    Example:
        >>> base = {"q.weight": torch.zeros(2, 3)}
        >>> pair = {"q.lora_A.weight": torch.ones(1, 3), "q.lora_B.weight": torch.tensor([[1.0], [2.0]])}
        >>> merged(base, pair, settings=Adapter(base_digest="d", rank=1, alpha=0.5))["q.weight"]
        tensor([[0.5000, 0.5000, 0.5000],
                [1.0000, 1.0000, 1.0000]])
    """
    scale = settings.alpha / settings.rank
    out = dict(base)
    for module, down, up in pairs(adapter, rank=settings.rank):
        name = module + WHOLE
        weight = base.get(name)
        if weight is None or tuple(weight.shape) != (up.shape[0], down.shape[1]):
            have = "has no such weight" if weight is None else f"has {name} of shape {tuple(weight.shape)}"
            raise WeightError(
                f"the adapter changes {name} by a matrix of {up.shape[0]} x {down.shape[1]}, and its base {have}. The "
                "adapter belongs to another model"
            )
        change = (up.float() @ down.float()).mul_(scale)
        out[name] = change.add_(weight).to(weight.dtype)
    return out


def pairs(adapter: Mapping[str, torch.Tensor], *, rank: int) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Yield (module, A, B) of an adapter.

    Raises:
        WeightError: if a tensor is not one of a pair, or a pair does not have this rank.
    """
    modules = {name.removesuffix(DOWN) for name in adapter if name.endswith(DOWN)}
    strangers = sorted(adapter.keys() - {module + end for module in modules for end in (DOWN, UP)})
    if strangers:
        raise WeightError(f"the adapter holds {strangers[0]}, which is none of a pair of ...{DOWN} and ...{UP}")
    for module in sorted(modules):
        down, up = adapter[module + DOWN], adapter.get(module + UP)
        if up is None:
            raise WeightError(f"the adapter holds {module}{DOWN} without {module}{UP}")
        if down.ndim != 2 or up.ndim != 2 or down.shape[0] != rank or up.shape[1] != rank:
            raise WeightError(
                f"the adapter of {module} has shapes {tuple(down.shape)} and {tuple(up.shape)}; of rank {rank} they "
                f"are ({rank}, in) and (out, {rank})"
            )
        yield module, down, up
