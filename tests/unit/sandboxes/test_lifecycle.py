"""The law of ends: why a sandbox's first process ended, and whose doing it is."""

import pytest

from rollmill.sandboxes.lifecycle import culprit_of, dead_error, death, explain_end
from rollmill.sandboxes.records import Culprit, DeathReason

R = DeathReason


def test_every_reason_has_a_culprit_and_only_the_rollouts_own_doings_are_its_own():
    by = {culprit: {one for one in R if culprit_of(one) is culprit} for culprit in Culprit}
    assert by[Culprit.NOBODY] == {R.RELEASED}
    assert by[Culprit.INFRASTRUCTURE] == {
        R.LEASE_EXPIRED,
        R.KILLED_BY_OPERATOR,
        R.START_FAILED,
        R.PROVIDER_LOST,
        R.EXITED,
    }
    assert by[Culprit.ROLLOUT] == {one for one in R if one.name.startswith("POLICY_")} | {R.OUT_OF_MEMORY}


@pytest.mark.parametrize(
    ("ordered", "exit_code", "oom_kills", "by_operator", "expected"),
    [
        (R.POLICY_WALL, -9, 3, True, R.POLICY_WALL),
        (None, -9, 3, True, R.KILLED_BY_OPERATOR),
        (None, -9, 1, False, R.OUT_OF_MEMORY),
        (None, -9, 0, False, R.PROVIDER_LOST),
        (None, 0, 0, False, R.EXITED),
        (None, 2, 5, False, R.EXITED),
        (None, -11, 0, False, R.EXITED),
    ],
)
def test_an_order_goes_before_a_note_and_both_before_what_was_seen(
    ordered, exit_code, oom_kills, by_operator, expected
):
    usage = {"oom_kills": oom_kills} if oom_kills else {}
    end = explain_end(ordered=ordered, exit_code=exit_code, usage=usage, by_operator=by_operator, memory_bytes=1000)
    assert end.reason is expected
    assert end.culprit is culprit_of(expected)


def test_the_error_of_a_dead_sandbox_says_why_and_whose_fault():
    error = dead_error("a1", death(R.OUT_OF_MEMORY, detail="the memory cap of 1000 bytes was reached"))
    assert "sandbox a1 has ended (out_of_memory: the memory cap of 1000 bytes was reached)" in str(error)
    assert (error.code, error.reason, error.fault) == ("sandbox_dead", "out_of_memory", "rollout")
