"""The head's log-probs and gradients equal the plain log-softmax."""

from __future__ import annotations

import pytest
import torch

from rollmill.trainer import head
from rollmill.trainer.head import head_logprobs


def inputs(*, bias: bool) -> list[torch.Tensor]:
    torch.manual_seed(0)
    tensors = [torch.randn(7, 5), torch.randn(11, 5, dtype=torch.float32)]
    if bias:
        tensors.append(torch.randn(11))
    return [tensor.requires_grad_() for tensor in tensors]


TARGETS = torch.tensor([0, 3, 10, 3, 1, 0, 9])
UPSTREAM = torch.tensor([1.0, -2.0, 0.5, 0.0, 3.0, -1.0, 1.5])


def plain(tensors: list[torch.Tensor], temperature: torch.Tensor) -> torch.Tensor:
    logits = tensors[0] @ tensors[1].t()
    if len(tensors) == 3:
        logits = logits + tensors[2]
    return torch.log_softmax(logits.float() / temperature[:, None], -1).gather(1, TARGETS[:, None]).squeeze(1)


def ours(tensors: list[torch.Tensor], temperature: torch.Tensor) -> torch.Tensor:
    bias = tensors[2] if len(tensors) == 3 else None
    return head_logprobs(tensors[0], tensors[1], bias, targets=TARGETS, temperature=temperature)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("temperature", [torch.ones(7), torch.linspace(0.3, 1.5, 7)])
@pytest.mark.parametrize("kept", [1 << 20, 22, 11])  # all at once; two rows and one row at a time, computed again
def test_values_and_gradients_equal_the_plain_log_softmax(
    bias: bool, temperature: torch.Tensor, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head, "LOGITS_KEPT", kept)
    tensors = inputs(bias=bias)
    expected = plain(tensors, temperature)
    expected_gradients = torch.autograd.grad((expected * UPSTREAM).sum(), tensors)
    values = ours(tensors, temperature)
    torch.testing.assert_close(values, expected, atol=2e-6, rtol=0)
    for one, two in zip(torch.autograd.grad((values * UPSTREAM).sum(), tensors), expected_gradients, strict=True):
        torch.testing.assert_close(one, two, atol=5e-6, rtol=1e-5)


def test_large_logits_do_not_overflow() -> None:
    hidden, weight = torch.full((1, 1), 300.0), torch.tensor([[1.0], [0.0]])
    one = head_logprobs(hidden, weight, None, targets=torch.tensor([0]), temperature=torch.ones(1))
    two = head_logprobs(hidden, weight, None, targets=torch.tensor([1]), temperature=torch.ones(1))
    assert (one.item(), two.item()) == (0.0, -300.0)


def test_autocast_multiplies_in_bfloat16_and_returns_float32_gradients_for_float32_weights() -> None:
    tensors = inputs(bias=False)
    expected = plain(tensors, torch.ones(7)).detach()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        values = ours(tensors, torch.ones(7))
    assert values.dtype == torch.float32
    difference = (values.detach() - expected).abs().max()
    assert 0 < difference < 0.1
    gradients = torch.autograd.grad((values * UPSTREAM).sum(), tensors)
    assert all(gradient.dtype == torch.float32 for gradient in gradients)


def test_a_logit_that_is_not_a_number_reaches_the_result() -> None:
    tensors = inputs(bias=False)
    with torch.no_grad():
        tensors[0][2] = float("nan")
        values = ours(tensors, torch.ones(7))
    assert torch.isnan(values).tolist() == [False, False, True, False, False, False, False]
