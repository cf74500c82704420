"""T26: the token mean is taken per micro-batch.

TRL 6024 and 6439, open-instruct 1161: each micro-batch divided by its own token count (or by the count of another
mask), so short micro-batches weighed more and the gradient depended on how the batch was split. Here one denominator
belongs to the whole optimizer step.
"""

from __future__ import annotations

import pytest
import torch

from rollmill.algorithms.losses import LossSettings, TokenBatch, loss_denominator, policy_loss
from rollmill.trainer.step import Trainer
from rollmill.types import Group
from unit.trainer.trainer_builders import config, random_groups, tiny_model


def micro_batch(losses: list[float], *, masked: int = 0) -> TokenBatch:
    """Tokens with these losses (ratio 1, so the loss is -advantage), then masked ones with a huge loss."""
    n = len(losses) + masked
    return TokenBatch(
        logprobs=torch.zeros(n, requires_grad=True),
        proximal=torch.zeros(n),
        behaviour=torch.zeros(n),
        advantages=-torch.tensor([*losses, *[1e6] * masked]),
        mask=torch.tensor([True] * len(losses) + [False] * masked),
        sequence_index=torch.zeros(n, dtype=torch.int64),
    )


def total(batches: list[TokenBatch]) -> float:
    lengths = [int(batch.mask.sum()) for batch in batches]
    denominator = loss_denominator("token", sequence_tokens=lengths, batch_rollouts=len(lengths), max_new_tokens=8)
    outputs = [policy_loss(batch, settings=LossSettings(), denominator=denominator) for batch in batches]
    return sum(output.loss.item() for output in outputs)


def test_two_micro_batches_of_two_and_six_tokens() -> None:
    # token losses 1 (twice) and 0 (six times): 2 / 8 = 0.25; the mean of means is (1 + 0) / 2 = 0.5
    assert total([micro_batch([1.0] * 2), micro_batch([0.0] * 6)]) == pytest.approx(0.25)


def test_accumulating_over_two_or_four_gives_the_same() -> None:
    losses = [1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    for size in (4, 2):  # micro-batches of 4 and of 2 tokens
        parts = [micro_batch(losses[i : i + size]) for i in range(0, 8, size)]
        assert total(parts) == pytest.approx(0.25)


def test_masked_tokens_are_in_neither_side() -> None:
    assert total([micro_batch([1.0] * 2, masked=5), micro_batch([0.0] * 6, masked=1)]) == pytest.approx(0.25)


def gradient(groups: list[Group], *, budget: int) -> torch.Tensor:
    """The gradient of a step: Adam's first moment after one update is (1 - beta1) times it."""
    trainer = Trainer(tiny_model(), config=config(trainer={"micro_batch_tokens": budget, "max_grad_norm": 1e9}))
    trainer.train_step(groups, optimizer_step_of=lambda _: 0)
    moments = trainer.state().optimizer
    return torch.cat([moments[name].flatten() for name in sorted(moments) if name.startswith("exp_avg.")]) / 0.1


def test_the_gradient_of_a_real_model_does_not_depend_on_the_split() -> None:
    groups = random_groups(groups=3, siblings=4)
    whole = gradient(groups, budget=4096)
    for budget in (40, 20):
        assert float((gradient(groups, budget=budget) - whole).norm() / whole.norm()) <= 1e-5
