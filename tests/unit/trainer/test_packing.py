"""Packing: what is computed, where it stands, and that nothing is lost or doubled."""

from __future__ import annotations

import math

import numpy as np
import pytest
from trainer_builders import closed, random_groups, rollout, scored, turn

from rollmill.errors import DataError, NumericalFault
from rollmill.trainer.packing import MicroBatch, check_rollout, plan_step, samples_of
from rollmill.types import Group, PolicyFailed, Unscored, VersionSpan


def pack(groups: list[Group], *, budget: int = 1000, keep: bool = False) -> tuple[MicroBatch, ...]:
    return plan_step(groups, budget_tokens=budget, keep_zero_advantage=keep).micro_batches


def test_the_prompt_stands_once_and_completions_side_by_side_without_their_last_token() -> None:
    group = closed("g", [rollout("g", 0, turn([1, 2, 3], [10, 11, 12])), rollout("g", 1, turn([1, 2, 3], [20, 21]))])
    (batch,) = pack([group])
    # the last token of a completion predicts nothing: it is a target, never an input
    assert batch.input_ids.tolist() == [1, 2, 3, 10, 11, 20]
    assert batch.position_ids.tolist() == [0, 1, 2, 3, 4, 3]
    assert batch.targets.tolist() == [10, 11, 12, 20, 21]
    assert batch.source.tolist() == [2, 3, 4, 2, 5]
    assert batch.sequence_index.tolist() == [0, 0, 0, 1, 1]
    assert batch.rollout_ids == ("g/0.1", "g/1.1")
    assert [(s.prefix, s.start, s.length) for s in batch.segments] == [
        ((), 0, 3),
        (((0, 3),), 3, 2),
        (((0, 3),), 5, 1),
    ]


def test_what_all_prompts_begin_with_stands_once_in_the_row() -> None:
    groups = [
        closed("a", [rollout("a", i, turn([1, 1, 1, 5], [10 + i, 2])) for i in range(2)]),
        closed("b", [rollout("b", i, turn([1, 1, 1, 6, 7], [20 + i, 2])) for i in range(2)]),
    ]
    (batch,) = pack(groups)
    # the longer prompt's bundle comes first
    assert batch.input_ids.tolist() == [1, 1, 1, 6, 7, 20, 21, 5, 10, 11]
    assert batch.position_ids.tolist() == [0, 1, 2, 3, 4, 5, 5, 3, 4, 4]
    assert [(s.prefix, s.start, s.length) for s in batch.segments] == [
        ((), 0, 3),
        (((0, 3),), 3, 2),
        (((0, 3), (3, 2)), 5, 1),
        (((0, 3), (3, 2)), 6, 1),
        (((0, 3),), 7, 1),
        (((0, 3), (7, 1)), 8, 1),
        (((0, 3), (7, 1)), 9, 1),
    ]
    assert batch.source.tolist() == [4, 5, 4, 6, 7, 8, 7, 9]


def test_a_prompt_that_begins_another_keeps_a_token_of_its_own() -> None:
    groups = [
        closed(name, [rollout(name, i, turn(prompt, [10 + i])) for i in range(2)])
        for name, prompt in (("a", [1, 1]), ("b", [1, 1, 1]))
    ]
    (batch,) = pack(groups)
    assert batch.input_ids.tolist() == [1, 1, 1, 1]
    assert batch.position_ids.tolist() == [0, 1, 2, 1]
    assert batch.source.tolist() == [2, 2, 3, 3]


def test_a_completion_of_one_token_costs_nothing_beside_its_prompt() -> None:
    group = closed("g", [rollout("g", 0, turn([1, 2], [7])), rollout("g", 1, turn([1, 2], [8]))])
    (batch,) = pack([group])
    assert batch.input_ids.tolist() == [1, 2]
    assert batch.source.tolist() == [1, 1]
    assert batch.targets.tolist() == [7, 8]


def test_siblings_without_advantage_are_not_computed_but_count_in_the_denominator() -> None:
    # rewards 1, 0, 0.5 against mean 0.5: the third has advantage 0
    members = [
        rollout("g", 0, turn([1], [5, 6]), outcome=scored(1.0)),
        rollout("g", 1, turn([1], [7]), outcome=scored(0.0)),
        rollout("g", 2, turn([1], [8, 9, 10]), outcome=scored(0.5)),
    ]
    group = closed("g", members)
    plan = plan_step([group], budget_tokens=100, keep_zero_advantage=False)
    assert [batch.rollout_ids for batch in plan.micro_batches] == [("g/0.1", "g/1.1")]
    assert plan.sequence_tokens == (2, 1, 3)
    assert plan.loss_tokens == 6
    (kept,) = pack([group], keep=True)
    assert kept.rollout_ids == ("g/0.1", "g/1.1", "g/2.1")


def test_siblings_outside_the_loss_are_neither_computed_nor_counted() -> None:
    members = [
        rollout("g", 0, turn([1], [5]), outcome=scored(1.0)),
        rollout("g", 1, turn([1], [6, 7]), outcome=PolicyFailed(kind="x", reward=0.0)),
        rollout("g", 2, turn([1], [8, 9]), outcome=Unscored(reason="x")),
    ]
    plan = plan_step([closed("g", members)], budget_tokens=100, keep_zero_advantage=True)
    assert plan.sequence_tokens == (1, 2)
    assert plan.rollout_ids == ("g/0.1", "g/1.1")


@pytest.mark.parametrize("budget", [8, 16, 24, 40, 1000])
def test_every_loss_token_is_computed_once_whatever_the_budget(budget: int) -> None:
    groups = random_groups(groups=3, siblings=6)
    whole = sorted(_tokens(pack(groups)))
    assert sorted(_tokens(pack(groups, budget=budget))) == whole
    assert len(whole) == sum(r.output_tokens for group in groups for r in group.rollouts)


@pytest.mark.parametrize("budget", [16, 24, 40])
def test_micro_batches_stay_within_the_budget(budget: int) -> None:
    # longest prompt 13, longest completion 7 of which 6 are inputs: 19 for a single sequence
    batches = pack(random_groups(groups=3, siblings=6), budget=budget)
    assert all(len(batch.input_ids) <= max(budget, 19) for batch in batches)


def test_a_group_larger_than_the_budget_is_split_by_siblings_and_repeats_its_prompt() -> None:
    group = closed("g", [rollout("g", i, turn([1, 2, 3], [10 + i, 0, 0])) for i in range(4)])
    batches = pack([group], budget=7)  # 3 + 2 + 2
    assert [batch.rollout_ids for batch in batches] == [("g/0.1", "g/1.1"), ("g/2.1", "g/3.1")]
    assert all(batch.input_ids[:3].tolist() == [1, 2, 3] for batch in batches)


def test_a_sequence_larger_than_the_budget_gets_a_micro_batch_of_its_own() -> None:
    group = closed("g", [rollout("g", i, turn([1, 2, 3, 4], list(range(9)))) for i in range(2)])
    assert [len(batch.input_ids) for batch in pack([group], budget=5)] == [12, 12]


def test_groups_with_an_equal_prompt_share_it_and_keep_their_own_advantages() -> None:
    groups = [
        closed(name, [rollout(name, i, turn([1, 2], [3, 4 + i]), outcome=scored(r)) for i, r in enumerate(rewards)])
        for name, rewards in (("a", (1.0, 0.0)), ("b", (0.0, 3.0)))
    ]
    (batch,) = pack(groups)
    assert batch.input_ids.tolist() == [1, 2, 3, 3, 3, 3]
    by_rollout = dict(zip(batch.rollout_ids, batch.advantages[::2], strict=True))
    # with division by the standard deviation (0.5 and 1.5) both groups have +-1, of opposite order
    assert {name: round(float(a)) for name, a in by_rollout.items()} == {
        "a/0.1": 1,
        "a/1.1": -1,
        "b/0.1": -1,
        "b/1.1": 1,
    }


def test_packing_is_the_same_every_time() -> None:
    first, second = (pack(random_groups(groups=4), budget=32) for _ in range(2))
    assert [b.rollout_ids for b in first] == [b.rollout_ids for b in second]
    for one, two in zip(first, second, strict=True):
        np.testing.assert_array_equal(one.input_ids, two.input_ids)


def test_versions_and_behaviour_travel_with_their_tokens() -> None:
    spans = (VersionSpan(0, 2, 7), VersionSpan(2, 3, 8))
    (sample,) = samples_of(
        rollout("g", 0, turn([1], [5, 6, 7], logprobs=[-1.0, -2.0, -3.0], spans=spans)), advantage=1.0
    )
    assert sample.versions.tolist() == [7, 7, 8]
    assert sample.behaviour.tolist() == [-1.0, -2.0, -3.0]


def test_turns_that_extend_one_another_are_one_sequence_with_the_reply_outside_the_loss() -> None:
    (sample,) = samples_of(rollout("g", 0, turn([1, 2], [3]), turn([1, 2, 3, 9, 9], [4, 5])), advantage=1.0)
    assert sample.prompt.tolist() == [1, 2]
    assert sample.tokens.tolist() == [3, 9, 9, 4, 5]
    assert sample.loss_mask.tolist() == [True, False, False, True, True]
    (batch,) = pack(
        [
            closed(
                "g",
                [
                    rollout("g", 0, turn([1, 2], [3]), turn([1, 2, 3, 9, 9], [4, 5])),
                    rollout("g", 1, turn([1, 2], [6])),
                ],
            )
        ]
    )
    # inputs 1 2 | 3 9 9 4; token 3 is predicted from position 1, 4 from position 4 (the second 9), 5 from position 5
    assert batch.targets.tolist() == [3, 4, 5, 6]
    assert batch.source.tolist() == [1, 4, 5, 1]


def test_a_turn_that_rewrites_history_begins_a_new_sequence() -> None:
    samples = samples_of(rollout("g", 0, turn([1, 2], [3]), turn([1, 8], [4, 5])), advantage=1.0)
    assert [(s.prompt.tolist(), s.tokens.tolist()) for s in samples] == [([1, 2], [3]), ([1, 8], [4, 5])]


def test_an_empty_turn_adds_nothing() -> None:
    assert samples_of(rollout("g", 0, turn([1, 2], [])), advantage=1.0) == []


@pytest.mark.parametrize("value", [math.nan, -math.inf, 0.5])
def test_a_behaviour_logprob_that_is_none_is_refused_by_name(value: float) -> None:
    with pytest.raises(NumericalFault) as caught:
        check_rollout(rollout("g", 3, turn([1], [5, 6], logprobs=[-1.0, value])))
    assert caught.value.rollout_ids == ("g/3.1",)


def test_a_greedy_rollout_cannot_be_trained_on() -> None:
    with pytest.raises(DataError, match="temperature"):
        check_rollout(rollout("g", 0, turn([1], [5]), temperature=0.0))


def _tokens(batches: tuple[MicroBatch, ...]) -> list[tuple[str, int, float]]:
    return [
        (batch.rollout_ids[index], int(target), float(advantage))
        for batch in batches
        for index, target, advantage in zip(batch.sequence_index, batch.targets, batch.advantages, strict=True)
    ]
