from __future__ import annotations

import pytest

from rollmill.errors import InvariantViolation
from rollmill.ledger import RolloutLedger, RolloutState


def book_of(*members: str) -> RolloutLedger:
    book = RolloutLedger()
    for member in members:
        book.admit(member)
    return book


def test_every_rollout_is_in_exactly_one_state() -> None:
    book = book_of("a", "b", "c", "d", "e")
    book.suspend("b")
    for member in ("c", "d"):
        book.buffer(member)
    book.train("d")
    book.drop("e", reason="stale")
    assert book.counts() == {"in_flight": 1, "suspended": 1, "buffered": 1, "trained": 1, "dropped": 1}
    assert book.admitted == 5
    book.validate()
    book.recount()


def test_drops_are_counted_by_reason_from_every_live_state() -> None:
    book = book_of("a", "b", "c")
    book.suspend("b")
    book.buffer("c")
    book.drop("a", reason="stale")
    book.drop("b", reason="stopped")
    book.drop("c", reason="stale")
    assert dict(book.dropped_by_reason) == {"stale": 2, "stopped": 1}
    assert (book.reason_of("b"), book.state_of("b")) == ("stopped", RolloutState.DROPPED)
    book.recount()


def test_a_suspended_rollout_comes_back_in_flight() -> None:
    book = book_of("a")
    book.suspend("a")
    book.resume("a")
    assert book.state_of("a") is RolloutState.IN_FLIGHT


def test_restoring_a_trained_rollout_makes_it_buffered() -> None:
    book = book_of("a")
    book.buffer("a")
    book.train("a")
    book.restore("a")
    assert book.counts()["buffered"] == 1
    assert book.counts()["trained"] == 0


def test_a_member_is_admitted_once() -> None:
    book = book_of("a")
    with pytest.raises(InvariantViolation, match="admitted twice"):
        book.admit("a")


@pytest.mark.parametrize(
    ("path", "move"),
    [
        ((), "train"),
        ((), "resume"),
        ((), "restore"),
        (("buffer",), "suspend"),
        (("buffer",), "buffer"),
        (("buffer", "train"), "train"),
        (("buffer", "train"), "drop"),
        (("drop",), "drop"),
        (("drop",), "buffer"),
    ],
)
def test_an_illegal_move_is_refused_and_changes_nothing(path: tuple[str, ...], move: str) -> None:
    book = book_of("a")

    def make(name: str) -> None:
        if name == "drop":
            book.drop("a", reason="stale")
        else:
            getattr(book, name)("a")

    for step in path:
        make(step)
    before = book.counts()
    with pytest.raises(InvariantViolation, match="cannot become"):
        make(move)
    assert book.counts() == before
    book.recount()


def test_an_unknown_member_cannot_move() -> None:
    with pytest.raises(InvariantViolation, match="was never admitted"):
        book_of("a").train("b")


def test_attempts_and_late_results_are_counted_apart_from_the_states() -> None:
    book = book_of("a")
    book.redispatched(reason="infra_failure")
    book.redispatched(reason="infra_failure")
    book.late_result()
    assert dict(book.redispatched_by_reason) == {"infra_failure": 2}
    assert (book.admitted, book.late_results) == (1, 1)
    book.recount()


def test_books_that_do_not_balance_are_found() -> None:
    book = book_of("a", "b")
    book._counts[RolloutState.IN_FLIGHT] -= 1  # pyright: ignore[reportPrivateUsage]
    with pytest.raises(InvariantViolation, match="admitted 2, accounted for 1"):
        book.validate()
    with pytest.raises(InvariantViolation, match="differ from the entries"):
        book.recount()
