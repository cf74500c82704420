"""Moves between a replica's states, and what each state refuses."""

from __future__ import annotations

import pytest

from rollmill.errors import InvariantViolation
from rollmill.generator.state import ReplicaState, Standing, move, refusal

S = ReplicaState
MOVES = {
    S.STARTING: {S.SERVING, S.DIRTY, S.DRAINING, S.DEAD},
    S.SERVING: {S.SERVING, S.DIRTY, S.DRAINING, S.DEAD},
    S.DIRTY: {S.SERVING, S.DIRTY, S.DRAINING, S.DEAD},
    S.DRAINING: {S.DRAINING, S.DEAD},
    S.DEAD: {S.DEAD},
}


@pytest.mark.parametrize("start", S)
@pytest.mark.parametrize("end", S)
def test_only_the_listed_moves_exist(start, end):
    standing = Standing(state=start, reason="before")
    if end in MOVES[start]:
        assert move(standing, end, reason="why", proven=True).state is end
    else:
        with pytest.raises(InvariantViolation, match=f"from {start} to {end}"):
            move(standing, end, reason="why", proven=True)


@pytest.mark.parametrize("start", [S.STARTING, S.SERVING, S.DIRTY])
def test_nobody_serves_without_proof(start):
    with pytest.raises(InvariantViolation, match="without proof"):
        move(Standing(state=start), S.SERVING)


def test_the_first_reason_stays():
    first = move(Standing(state=S.SERVING), S.DIRTY, reason="canary differs by 0.5")
    assert move(first, S.DIRTY, reason="later").reason == "canary differs by 0.5"
    assert move(first, S.SERVING, proven=True).reason == ""


@pytest.mark.parametrize(
    ("state", "generates", "loads"),
    [
        (S.STARTING, False, True),
        (S.SERVING, True, True),
        (S.DIRTY, False, True),
        (S.DRAINING, False, False),
        (S.DEAD, False, False),
    ],
)
def test_each_state_refuses_what_it_is_not_fit_for_and_says_why(state, generates, loads):
    standing = Standing(state=state, reason="the canary differs")
    for allowed, to_generate in ((generates, True), (loads, False)):
        why = refusal(standing, to_generate=to_generate)
        assert (why is None) == allowed
        if why is not None:
            assert "the canary differs" in why
            assert state.value in why
