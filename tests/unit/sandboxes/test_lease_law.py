"""The rules of leases, by hand."""

from __future__ import annotations

import math

import msgspec
import pytest

from rollmill.errors import SandboxLeaseLost
from rollmill.sandboxes import Capabilities, Lease, SandboxState, SandboxStatus
from rollmill.sandboxes.leases import law
from rollmill.sandboxes.leases.law import Phase, Row

ROW = Row(
    sandbox_id="s1",
    rollout_id="r",
    generation=2,
    provider="p",
    owner="me",
    phase=Phase.RUNNING,
    expires_s=100.0,
    asked_s=10.0,
)


def row(**changes: object) -> Row:
    return msgspec.structs.replace(ROW, **changes)


def seen(*ids: str, snapshots: tuple[str, ...] = ()) -> law.Seen:
    return law.Seen(alive=frozenset(ids), snapshots=frozenset(snapshots))


def done(*rows: Row, alive: law.Seen, now_s: float = 50.0, busy: frozenset[str] = frozenset(), suspends: bool = False):
    steps = law.sweep(rows, alive, now_s=now_s, busy=busy, grace_s=30.0, suspends=suspends)
    return [(step.act.value, step.sandbox_id) for step in steps]


NOTHING = seen()


def test_only_what_lives_and_ones_own_snapshots_count_as_seen():
    lease = Lease(owner="me")
    statuses = [
        SandboxStatus(sandbox_id=state.value, state=state, labels={}, lease=lease, lease_left_s=1.0)
        for state in (SandboxState.READY, SandboxState.PAUSED, SandboxState.DEAD, SandboxState.LOST)
    ]
    found = law.seen_of(statuses, ["r1-1-5eed-s", "r1-1-beef-s", "other"], salt="5eed")
    assert (sorted(found.alive), sorted(found.snapshots)) == (["paused", "ready"], ["r1-1-5eed-s"])


def test_a_row_whose_sandbox_lives_within_its_lease_is_left_alone():
    assert done(row(), alive=seen("s1")) == []
    assert done(row(phase=Phase.SUSPENDED), alive=seen("s1")) == []


def test_a_lease_ends_at_its_second_and_not_before():
    assert done(row(), alive=seen("s1"), now_s=99.9) == []
    assert done(row(), alive=seen("s1"), now_s=100.0) == [("end", "s1")]


def test_a_lease_that_ends_is_suspended_once_where_that_is_wanted():
    late = {"now_s": 100.0, "suspends": True}
    assert done(row(), alive=seen("s1"), **late) == [("expire", "s1")]
    assert done(row(), alive=NOTHING, **late) == [("drop", "s1")]
    assert done(row(snapshots=("a",)), alive=seen(snapshots=("a",)), **late) == [("expire", "s1")]
    assert done(row(phase=Phase.SUSPENDED), alive=seen("s1"), **late) == [("end", "s1")]
    assert done(row(phase=Phase.CREATING), alive=seen("s1"), **late) == [("end", "s1")]
    assert done(row(phase=Phase.CREATING, snapshots=("a",)), alive=seen(snapshots=("a",)), **late) == [("expire", "s1")]


def test_what_the_provider_lost_is_dropped_unless_a_snapshot_holds_it():
    assert done(row(), alive=NOTHING) == [("drop", "s1")]
    assert done(row(snapshots=("a",)), alive=NOTHING) == [("end", "s1")]  # it may be there, and nobody lists it
    assert done(row(phase=Phase.ENDING, snapshots=("a",)), alive=NOTHING) == [("kill", "s1")]
    kept = seen(snapshots=("a",))
    assert done(row(snapshots=("a",)), alive=kept) == [("suspend", "s1")]
    assert done(row(phase=Phase.SUSPENDED, snapshots=("a",)), alive=kept) == []
    assert done(row(phase=Phase.CREATING, snapshots=("a",)), alive=kept) == [("suspend", "s1")]
    assert done(row(phase=Phase.SUSPENDED, snapshots=("a",)), alive=kept, now_s=100.0) == [("end", "s1")]
    assert done(row(phase=Phase.ENDING, snapshots=("a",)), alive=kept) == [("kill", "s1")]


def test_a_snapshot_that_no_row_names_is_an_orphan():
    assert done(row(), alive=seen("s1", snapshots=("a",))) == [("delete_orphan", "a")]
    assert done(row(snapshots=("a",)), alive=seen("s1", snapshots=("a",))) == []


@pytest.mark.parametrize(
    ("now_s", "lives", "what"), [(39.9, True, []), (40.0, True, ["adopt"]), (40.0, False, ["drop"])]
)
def test_a_creation_is_given_up_only_after_its_grace(now_s, lives, what):
    alive = seen("s1") if lives else NOTHING
    assert [act for act, _ in done(row(phase=Phase.CREATING), alive=alive, now_s=now_s)] == what


def test_an_adoption_past_its_lease_is_an_end():
    assert done(row(phase=Phase.CREATING), alive=seen("s1"), now_s=100.0) == [("end", "s1")]


def test_a_failed_kill_is_tried_when_it_is_due():
    ending = row(phase=Phase.ENDING, retry_s=60.0)
    assert done(ending, alive=seen("s1"), now_s=59.0) == []
    assert done(ending, alive=seen("s1"), now_s=60.0) == [("kill", "s1")]
    assert done(ending, alive=NOTHING, now_s=0.0) == [("drop", "s1")]


def test_what_has_no_row_is_an_orphan_and_what_a_call_works_on_is_nobodys_to_sweep():
    assert done(row(), alive=seen("s1", "s2")) == [("kill_orphan", "s2")]
    assert done(row(), alive=seen("s2"), busy=frozenset({"s1", "s2"})) == []


def test_a_claim_holds_for_its_owner_its_generation_and_its_time():
    claim = law.claim_of(ROW)
    assert law.check_claim(claim, ROW, now_s=99.0) == ROW
    for other in (None, row(generation=3), row(owner="you"), row(sandbox_id="s2")):
        with pytest.raises(SandboxLeaseLost):
            law.check_claim(claim, other, now_s=99.0)
    with pytest.raises(SandboxLeaseLost, match=r"ended 0\.5 s ago"):
        law.check_claim(claim, ROW, now_s=100.5)


def test_only_what_is_suspended_unowned_or_ones_own_is_resumed_without_taking_over():
    for fine in (row(phase=Phase.SUSPENDED, owner="you"), row(owner=""), ROW):
        assert law.check_resume("r", fine, owner="me", now_s=50.0, take_over=False) == fine
    with pytest.raises(SandboxLeaseLost, match="take it over"):
        law.check_resume("r", row(owner="you"), owner="me", now_s=50.0, take_over=False)
    assert law.check_resume("r", row(owner="you"), owner="me", now_s=50.0, take_over=True)
    with pytest.raises(SandboxLeaseLost, match="is creating it"):
        law.check_resume("r", row(phase=Phase.CREATING), owner="me", now_s=50.0, take_over=True)


def test_a_providers_own_end_counts_only_where_it_cannot_be_moved_and_files_can_be_kept():
    has = Capabilities(files_snapshot=True, max_lifetime_s=1000.0)
    assert law.keep_after_s(has, before_s=100.0) == 900.0
    assert law.keep_after_s(has, before_s=2000.0) == 0.0
    for changes in ({"extend_ttl": True}, {"files_snapshot": False}, {"max_lifetime_s": None}):
        assert law.keep_after_s(msgspec.structs.replace(has, **changes), before_s=100.0) == math.inf


def test_what_nears_its_providers_end_is_kept_unless_its_lease_ended_or_a_snapshot_holds_it():
    def steps(one: Row, *, now_s: float, snapshots: tuple[str, ...] = ()) -> list[str]:
        found = law.sweep(
            [one], seen("s1", snapshots=snapshots), now_s=now_s, grace_s=30.0, keep_after_s=50.0
        )  # asked for at 10 s
        return [step.act.value for step in found]

    assert steps(row(), now_s=59.9) == []
    assert steps(row(), now_s=60.0) == ["keep"]
    assert steps(row(phase=Phase.SUSPENDED), now_s=60.0) == ["keep"]
    assert steps(row(phase=Phase.CREATING), now_s=60.0) == ["adopt"]
    assert steps(row(phase=Phase.ENDING), now_s=60.0) == ["kill"]
    assert steps(row(), now_s=100.0) == ["end"]
    assert steps(row(phase=Phase.SUSPENDED, snapshots=("s1-s",)), now_s=60.0, snapshots=("s1-s",)) == []
