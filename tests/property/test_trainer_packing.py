"""Packing, for any lengths, turns, advantages and budgets."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rollmill.trainer.packing import MicroBatch, plan_step
from rollmill.types import Group, Rollout
from unit.trainer.trainer_builders import closed, rollout, scored, turn

Token = tuple[str, int, tuple[int, ...]]


@st.composite
def batches(draw: st.DrawFn) -> list[Group]:
    groups = []
    for g in range(draw(st.integers(1, 4))):
        # few distinct prompts, so that groups share some
        prompt = [draw(st.integers(0, 2))] * draw(st.integers(1, 6))
        members = []
        for i in range(draw(st.integers(2, 5))):
            turns, seen = [], list(prompt)
            for _ in range(draw(st.integers(1, 3))):
                output = draw(st.lists(st.integers(10, 19), min_size=1, max_size=5))
                turns.append(turn(seen, output))
                seen = [*seen, *output, *draw(st.lists(st.just(7), max_size=3))]
            members.append(rollout(f"g{g}", i, *turns, outcome=scored(draw(st.sampled_from([0.0, 0.5, 1.0])))))
        groups.append(closed(f"g{g}", members, advantage="dr_grpo"))
    return groups


def expected(groups: list[Group], *, keep: bool) -> list[Token]:
    """(rollout, target, all tokens before it) of every loss token, from the turns themselves."""
    found: list[Token] = []
    for group in groups:
        for member, advantage in zip(group.rollouts, group.advantages, strict=True):
            if keep or advantage != 0:
                found += _of_rollout(member)
    return sorted(found)


def _of_rollout(member: Rollout) -> list[Token]:
    return [
        (member.rollout_id, int(token), (*one.prompt_ids.tolist(), *one.output_ids[:at].tolist()))
        for one in member.turns
        for at, token in enumerate(one.output_ids)
    ]


def packed(batch: MicroBatch) -> list[Token]:
    """The same, from what the packed row lets each position see."""
    found: list[Token] = []
    for source, target, index in zip(batch.source, batch.targets, batch.sequence_index, strict=True):
        segment = next(s for s in batch.segments if s.start <= source < s.start + s.length)
        prefix = [token for at, n in segment.prefix for token in batch.input_ids[at : at + n].tolist()]
        seen = [*prefix, *batch.input_ids[segment.start : source + 1].tolist()]
        assert batch.position_ids[source] == len(seen) - 1
        found.append((batch.rollout_ids[index], int(target), tuple(seen)))
    return found


@given(batches(), st.integers(1, 60), st.booleans())
def test_every_loss_token_is_predicted_once_from_exactly_its_own_past(
    groups: list[Group], budget: int, keep: bool
) -> None:
    plan = plan_step(groups, budget_tokens=budget, keep_zero_advantage=keep)
    assert sorted(token for batch in plan.micro_batches for token in packed(batch)) == expected(groups, keep=keep)


@given(batches(), st.integers(1, 60))
def test_segments_cover_each_row_and_rows_keep_the_budget(groups: list[Group], budget: int) -> None:
    plan = plan_step(groups, budget_tokens=budget, keep_zero_advantage=True)
    for batch in plan.micro_batches:
        covered = np.concatenate([np.arange(s.start, s.start + s.length) for s in batch.segments])
        assert sorted(covered) == list(range(len(batch.input_ids)))
        assert len(batch.input_ids) <= budget or len(batch.rollout_ids) == 1
    assert plan.positions == sum(len(batch.input_ids) for batch in plan.micro_batches)
    assert plan.loss_tokens == sum(r.output_tokens for group in groups for r in group.rollouts)
