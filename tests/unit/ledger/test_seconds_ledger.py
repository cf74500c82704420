from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmill.errors import InvariantViolation
from rollmill.ledger import (
    REPLICA_CAUSES,
    TRAINER_CAUSES,
    SecondsLedger,
    SecondsReport,
    TrainerCause,
    merge_reports,
)


def test_each_second_goes_to_the_cause_that_ran() -> None:
    book = SecondsLedger("trainer", start_s=100.0)
    book.switch(TrainerCause.WAIT_DATA, at_s=102.0)
    book.switch(TrainerCause.TRAIN, at_s=105.0)
    book.switch(TrainerCause.WAIT_DATA, at_s=109.0)
    book.close(at_s=110.0)
    # startup 100-102, wait 102-105 and 109-110, train 105-109.
    assert book.seconds == {"startup": 2.0, "wait_data": 4.0, "train": 4.0}
    assert book.wall_s == 10.0
    book.validate()


@given(st.lists(st.tuples(st.sampled_from(TRAINER_CAUSES), st.floats(0, 1e5)), max_size=60))
def test_the_causes_sum_to_the_wall_time_for_any_switches(moves: list[tuple[str, float]]) -> None:
    at_s = 1e6
    book = SecondsLedger("trainer", start_s=at_s)
    for cause, after_s in moves:
        at_s += after_s
        book.switch(cause, at_s=at_s)
        book.validate()
    book.report(at_s=at_s + 1.0).validate()
    assert book.wall_s == at_s - 1e6


def test_a_report_counts_the_running_cause_up_to_the_moment() -> None:
    book = SecondsLedger("r0", start_s=0.0)
    book.switch("decode", at_s=1.0)
    report = book.report(at_s=4.0)
    assert (report.seconds, report.wall_s) == ({"startup": 1.0, "decode": 3.0}, 4.0)
    assert book.seconds == {"startup": 1.0}


def test_a_closed_book_takes_no_more_and_closing_twice_is_harmless() -> None:
    book = SecondsLedger("r0", start_s=0.0)
    book.close(at_s=2.0)
    book.close(at_s=9.0)
    assert book.seconds == {"startup": 2.0}
    assert book.report(at_s=50.0).wall_s == 2.0
    with pytest.raises(InvariantViolation, match="closed"):
        book.switch("decode", at_s=3.0)


def test_time_never_goes_back() -> None:
    book = SecondsLedger("r0", start_s=5.0)
    with pytest.raises(InvariantViolation, match="went back"):
        book.switch("decode", at_s=4.0)


def test_incarnations_of_one_owner_merge_by_cause() -> None:
    first = SecondsReport(owner="r0", wall_s=5.0, seconds={"startup": 2.0, "decode": 3.0})
    second = SecondsReport(owner="r0", wall_s=4.0, seconds={"startup": 1.0, "idle": 3.0})
    merged = merge_reports([first, second])
    assert merged == SecondsReport(owner="r0", wall_s=9.0, seconds={"startup": 3.0, "decode": 3.0, "idle": 3.0})
    merged.validate()


def test_a_report_that_does_not_balance_is_refused_with_both_numbers() -> None:
    broken = SecondsReport(owner="r0", wall_s=5.0, seconds={"decode": 3.0})
    with pytest.raises(InvariantViolation, match=r"sum to 3\.0.* but 5\.0"):
        merge_reports([broken])


def test_reports_of_different_owners_do_not_merge() -> None:
    reports = [SecondsReport(owner=owner, wall_s=0.0, seconds={}) for owner in ("r0", "r1")]
    with pytest.raises(InvariantViolation, match="one owner"):
        merge_reports(reports)
    with pytest.raises(InvariantViolation, match="no report"):
        merge_reports([])


def test_the_causes_are_those_the_summary_documents() -> None:
    assert TRAINER_CAUSES == ("startup", "wait_data", "train", "publish", "checkpoint", "idle", "shutdown")
    assert REPLICA_CAUSES == ("startup", "prefill", "decode", "weight_load", "paused", "idle", "shutdown")
