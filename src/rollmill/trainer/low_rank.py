"""Training low-rank differences instead of whole matrices.

The adapted layers stay what they are; beside each, two small matrices are trained whose product starts at zero. What
is published are those matrices alone (`rollmill.weights.adapters`). Decides nothing.

Reference: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", arXiv 2106.09685, section 4.1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch.nn import functional
from transformers import PreTrainedModel

from rollmill.errors import ConfigError
from rollmill.weights.adapters import DOWN, UP


class LowRankLinear(torch.nn.Linear):
    """A linear layer whose weight is frozen, plus `scale` times a product of two trained matrices.

    Its parameters are `weight`, `lora_A.weight` [rank, in], `lora_B.weight` [out, rank] and, where the layer had one,
    `bias`, frozen too.
    """

    def __init__(self, layer: torch.nn.Linear, *, rank: int, scale: float, generator: torch.Generator) -> None:
        torch.nn.Module.__init__(self)
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.weight, self.bias = layer.weight.requires_grad_(False), layer.bias
        if self.bias is not None:
            self.bias.requires_grad_(False)
        self.scale = scale
        self.lora_A = torch.nn.Linear(layer.in_features, rank, bias=False)
        self.lora_B = torch.nn.Linear(rank, layer.out_features, bias=False)
        with torch.no_grad():
            bound = 1.0 / math.sqrt(layer.in_features)
            self.lora_A.weight.uniform_(-bound, bound, generator=generator)
            self.lora_B.weight.zero_()

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return [..., out] for [..., in]."""
        return functional.linear(input, self.weight, self.bias) + self.lora_B(self.lora_A(input)) * self.scale


def adapt(
    model: PreTrainedModel, *, rank: int, alpha: float, targets: Sequence[str], seed: int
) -> dict[str, torch.nn.Parameter]:
    """Freeze a model and put a low-rank difference beside each layer named so; return its trained parameters.

    Args:
        model: changed in place.
        targets: last part of the names of the linear layers, for example `q_proj`.
        seed: of the initial matrices.

    Raises:
        ConfigError: if the model has no such layers.
    """
    found = {
        name: layer
        for name, layer in model.named_modules()
        if isinstance(layer, torch.nn.Linear) and name.rpartition(".")[2] in targets
    }
    missing = sorted(set(targets) - {name.rpartition(".")[2] for name in found})
    if missing:
        have = sorted(
            {n.rpartition(".")[2] for n, layer in model.named_modules() if isinstance(layer, torch.nn.Linear)}
        )
        raise ConfigError(
            f"trainer.lora_targets names {', '.join(missing)}, and {type(model).__name__} has no such linear layer. It "
            f"has {', '.join(have)}"
        )
    head = model.get_output_embeddings()
    heads = sorted({name.rpartition(".")[2] for name, layer in found.items() if layer is head})
    if heads:
        raise ConfigError(
            f"trainer.lora_targets names {', '.join(heads)}, the output head: adapters are of the layers of the blocks "
            "(decision 0035). Leave it out"
        )
    generator = torch.Generator().manual_seed(seed)
    model.requires_grad_(False)
    for name, layer in found.items():
        parent, _, last = name.rpartition(".")
        adapted = LowRankLinear(layer, rank=rank, scale=alpha / rank, generator=generator)
        setattr(model.get_submodule(parent), last, adapted)
    return {name: p for name, p in model.named_parameters() if is_adapter(name)}


def is_adapter(name: str) -> bool:
    """Return whether a parameter belongs to an adapter."""
    return name.endswith((DOWN, UP))


def base_of(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return the frozen weights of an adapted model by the names that they had before, each distinct tensor once."""
    return {name: p.detach() for name, p in model.named_parameters() if not is_adapter(name)}
