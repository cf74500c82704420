"""Packed log-probs and gradients equal the plain way: one row per rollout, transformers' own attention."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from trainer_builders import VOCABULARY, closed, padded_logprobs, random_groups, rollout, tiny_model, turn
from transformers import PreTrainedModel

from rollmill.errors import ModelError
from rollmill.trainer import attention, head
from rollmill.trainer.attention import plan_layout
from rollmill.trainer.logprobs import PackedInput, packed_logprobs, prepare_model, score_tokens, token_logprobs
from rollmill.trainer.packing import Segment, plan_step
from rollmill.types import Group, Rollout


def members(groups: list[Group]) -> list[Rollout]:
    return [member for group in groups for member in group.rollouts]


def packed(model: PreTrainedModel, groups: list[Group], *, budget: int = 4096) -> dict[str, torch.Tensor]:
    """Rollout id -> log-probs of its output, computed packed."""
    result = {}
    for batch in plan_step(groups, budget_tokens=budget, keep_zero_advantage=True).micro_batches:
        values = packed_logprobs(model, PackedInput(batch))
        for index, rollout_id in enumerate(batch.rollout_ids):
            result[rollout_id] = values[torch.from_numpy(batch.sequence_index == index)]
    return result


def gradient(model: PreTrainedModel) -> torch.Tensor:
    flat = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    model.zero_grad(set_to_none=True)
    return flat


def loss(values: dict[str, torch.Tensor], groups: list[Group]) -> torch.Tensor:
    """An arbitrary loss in which every token has a weight of its own."""
    terms = [
        (values[member.rollout_id] * torch.linspace(-1, 2 + i, member.output_tokens)).sum()
        for i, member in enumerate(members(groups))
    ]
    return torch.stack(terms).sum()


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_and_gradient_equal_the_padded_forward(kind: str, temperature: float) -> None:
    groups = random_groups(groups=3, siblings=4, temperature=temperature)
    model = tiny_model(kind)
    plain = {member.rollout_id: padded_logprobs(model, member) for member in members(groups)}
    loss(plain, groups).backward()
    expected = gradient(model)
    prepare_model(model)
    values = packed(model, groups)
    loss(values, groups).backward()
    for name, one in plain.items():
        torch.testing.assert_close(values[name].detach(), one.detach(), atol=1e-5, rtol=0)
    assert float((gradient(model) - expected).norm() / expected.norm()) <= 1e-5


def test_a_micro_batch_split_changes_no_logprob() -> None:
    model = prepare_model(tiny_model())
    groups = random_groups(groups=3, siblings=4)
    with torch.no_grad():
        whole, split = packed(model, groups), packed(model, groups, budget=12)
    for name, one in whole.items():
        torch.testing.assert_close(split[name], one, atol=1e-5, rtol=0)


def test_siblings_do_not_see_one_another() -> None:
    model = prepare_model(tiny_model())
    alone = closed("g", [rollout("g", 0, turn([1, 2, 3], [4, 5, 6])), rollout("g", 1, turn([1, 2, 3], [7, 7, 7]))])
    other = closed("g", [rollout("g", 0, turn([1, 2, 3], [4, 5, 6])), rollout("g", 1, turn([1, 2, 3], [9, 8, 9]))])
    with torch.no_grad():
        one, two = packed(model, [alone])["g/0.1"], packed(model, [other])["g/0.1"]
    torch.testing.assert_close(one, two, atol=1e-5, rtol=0)


def test_many_small_blocks_give_the_same_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    model = prepare_model(tiny_model())
    groups = random_groups(groups=3, siblings=5)
    with torch.no_grad():
        few = packed(model, groups)
        monkeypatch.setattr(attention, "SMALL_BLOCK", 0)
        monkeypatch.setattr(attention, "PADDING_LIMIT", 1.0)
        many = packed(model, groups)
    for name, one in few.items():
        torch.testing.assert_close(many[name], one, atol=1e-5, rtol=0)


def test_blocks_waste_at_most_the_padding_limit_on_uneven_lengths() -> None:
    segments, at = [], 0
    for length in (900, 500, 40, 30, 20, 700):
        segments.append(Segment(prefix=(), start=at, length=length))
        at += length
    layout = plan_layout(segments)
    computed = sum(block.mask.numel() for block in layout.blocks)
    assert computed <= attention.PADDING_LIMIT * sum(s.length**2 for s in segments)
    assert sorted(layout.restore.tolist()) == sorted(set(layout.restore.tolist()))
    assert len(layout.restore) == at


def test_scoring_a_prompt_equals_the_plain_forward() -> None:
    model = tiny_model("qwen3")
    ids = torch.arange(9) * 5 % VOCABULARY
    with torch.no_grad():
        plain = torch.log_softmax(model(input_ids=ids[None]).logits[0, :-1], -1).gather(1, ids[1:, None]).squeeze(1)
        torch.testing.assert_close(score_tokens(prepare_model(model), ids), plain, atol=1e-5, rtol=0)


def test_logits_are_divided_by_the_temperature_before_the_softmax() -> None:
    # logits [2, 0] at temperature 0.5 are [4, 0]: log-probs -ln(1 + e^-4) = -0.0181 and -4.0181
    model = tiny_model()
    linear = torch.nn.Linear(2, 2, bias=False)
    linear.weight.data = torch.eye(2)
    model.set_output_embeddings(linear)
    values = token_logprobs(
        model, torch.tensor([[2.0, 0.0]] * 2), targets=torch.tensor([0, 1]), temperature=torch.tensor([0.5, 0.5])
    )
    torch.testing.assert_close(values.detach(), torch.tensor([-0.0181, -4.0181]), atol=1e-4, rtol=0)


def test_the_head_in_chunks_gives_the_same_logprobs_and_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    model = prepare_model(tiny_model())
    groups = random_groups()
    results = []
    for chunk in (1 << 20, 3 * VOCABULARY):  # all at once, three tokens at a time
        monkeypatch.setattr(head, "LOGITS_KEPT", chunk)
        values = packed(model, groups)
        loss(values, groups).backward()
        results.append((torch.cat(list(values.values())).detach(), gradient(model)))
    (whole, whole_gradient), (parts, parts_gradient) = results
    torch.testing.assert_close(parts, whole, atol=1e-5, rtol=0)
    assert float((parts_gradient - whole_gradient).norm() / whole_gradient.norm()) <= 1e-6


def test_a_sliding_window_shorter_than_a_sequence_is_refused() -> None:
    layout = plan_layout([Segment(prefix=(), start=0, length=9)])
    tensor = torch.zeros(1, 2, 9, 4)
    module = torch.nn.Module()
    attention.packed_attention(module, tensor, tensor, tensor, None, packed_layout=layout, sliding_window=9)
    with pytest.raises(ModelError, match="sliding window"):
        attention.packed_attention(module, tensor, tensor, tensor, None, packed_layout=layout, sliding_window=8)


def test_an_architecture_that_hides_the_layout_is_refused() -> None:
    tensor = torch.zeros(1, 2, 9, 4)
    with pytest.raises(ModelError, match="packed layout"):
        attention.packed_attention(torch.nn.Module(), tensor, tensor, tensor, None)


def test_a_model_that_post_processes_its_logits_is_refused() -> None:
    model = tiny_model()
    model.config.final_logit_softcapping = 30.0
    with pytest.raises(ModelError, match="final_logit_softcapping"):
        prepare_model(model)


def test_padding_of_the_last_positions_cannot_leak_into_logprobs() -> None:
    # one long and one short completion share a block; the short one's padded keys point at position 0
    model = prepare_model(tiny_model())
    rng = np.random.default_rng(3)
    long, short = rng.integers(0, VOCABULARY, 30), rng.integers(0, VOCABULARY, 4)
    group = closed("g", [rollout("g", 0, turn([5, 1, 4], long)), rollout("g", 1, turn([5, 1, 4], short))])
    only = closed("g", [rollout("g", 0, turn([5, 1, 4], long[:4])), rollout("g", 1, turn([5, 1, 4], short))])
    with torch.no_grad():
        torch.testing.assert_close(packed(model, [group])["g/1.1"], packed(model, [only])["g/1.1"], atol=1e-5, rtol=0)
