"""The language-model head and the log-softmax of one token per row, in one buffer.

The plain way keeps the logits, their softmax and two gradients of the same size; with 49,152 tokens of vocabulary that
is most of a small model's memory and a few percent of its time. Here the logits become the softmax and then their own
gradient in place, and above a bound they are computed again in the backward pass instead of being kept.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

LOGITS_KEPT = 1 << 27
"""Logits kept for the backward pass (512 MiB in float32); more are computed again, one chunk at a time."""


def head_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    targets: torch.Tensor,
    temperature: torch.Tensor,
) -> torch.Tensor:
    """Return float32 [tokens]: log-prob of each target; logits are divided by the temperature before the softmax.

    Args:
        hidden: [tokens, hidden].
        weight: [vocabulary, hidden].
        bias: [vocabulary], where the head has one.
        targets: int64 [tokens].
        temperature: float32 [tokens].
    """
    # autocast does not look into custom functions; it would have cast both sides of this product
    dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else hidden.dtype
    scale = None if bool((temperature == 1.0).all()) else temperature.unsqueeze(1)
    chunk = max(1, LOGITS_KEPT // weight.shape[0])
    keep = len(targets) <= chunk and torch.is_grad_enabled()
    parts = [
        _HeadLogprobs.apply(
            hidden[at : at + chunk].to(dtype),
            weight.to(dtype),
            bias,
            targets[at : at + chunk],
            None if scale is None else scale[at : at + chunk],
            keep,
        )
        for at in range(0, len(targets), chunk)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


class _HeadLogprobs(torch.autograd.Function):
    """log softmax((hidden weight^T + bias) / temperature)[target], with a backward pass in one buffer."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        temperature: torch.Tensor | None,
        keep: bool,
    ) -> torch.Tensor:
        logits = _logits(hidden, weight, bias, temperature)
        largest = logits.amax(dim=1)
        chosen = logits.gather(1, targets.unsqueeze(1)).squeeze(1)
        # from here on the buffer holds exp(logit - largest)
        logits.sub_(largest.unsqueeze(1)).exp_()
        total = logits.sum(dim=1)
        ctx.save_for_backward(hidden, weight, bias, targets, temperature, largest, total)
        ctx.exponentials = logits if keep else None
        return chosen - largest - total.log()

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - the decorator hides the names
        ctx: Any, *grad_outputs: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        (grad,) = grad_outputs
        hidden, weight, bias, targets, temperature, largest, total = ctx.saved_tensors
        buffer = ctx.exponentials
        # taken, not read: it is overwritten below, and its memory is free as soon as this returns
        ctx.exponentials = None
        if buffer is None:
            buffer = _logits(hidden, weight, bias, temperature).sub_(largest.unsqueeze(1)).exp_()
        if temperature is not None:
            grad = grad / temperature.squeeze(1)
        # d log p(target) / d logit = (one at the target) - softmax
        buffer.mul_((-grad / total).unsqueeze(1))
        buffer.scatter_add_(1, targets.unsqueeze(1), grad.unsqueeze(1))
        grad_bias = buffer.sum(dim=0) if bias is not None and ctx.needs_input_grad[2] else None
        buffer = buffer.to(hidden.dtype)
        grad_hidden = buffer @ weight if ctx.needs_input_grad[0] else None
        grad_weight = buffer.t() @ hidden if ctx.needs_input_grad[1] else None
        return grad_hidden, grad_weight, grad_bias, None, None, None


def _logits(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, temperature: torch.Tensor | None
) -> torch.Tensor:
    """Return float32 [tokens, vocabulary] in a buffer of its own."""
    logits = (hidden @ weight.t()).float()
    if bias is not None:
        logits += bias
    if temperature is not None:
        logits /= temperature
    return logits
