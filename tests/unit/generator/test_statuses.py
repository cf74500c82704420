"""Errors keep their class, message and numbers across the wire, and every one of them has a status."""

from __future__ import annotations

import pytest

from rollmill import errors
from rollmill.errors import (
    ConfigError,
    DataError,
    DeadlineExceeded,
    EngineDead,
    EngineError,
    ModelError,
    NotServing,
    Overloaded,
    RequestAborted,
    RequestIdInUse,
    RollmillError,
    SlowReader,
    Unauthenticated,
    WeightError,
    WeightMismatch,
)
from rollmill.generator import statuses

# Written down here a second time, because clients and dashboards depend on them.
WANTED: tuple[tuple[RollmillError, str, int], ...] = (
    (Unauthenticated("no token"), "UNAUTHENTICATED", 401),
    (ModelError("not served"), "NOT_FOUND", 404),
    (DataError("too long"), "INVALID_ARGUMENT", 400),
    (RequestIdInUse("a lives"), "ALREADY_EXISTS", 409),
    (Overloaded("full", retry_after_s=1.5), "RESOURCE_EXHAUSTED", 429),
    (SlowReader("behind"), "RESOURCE_EXHAUSTED", 408),
    (NotServing("draining"), "UNAVAILABLE", 503),
    (EngineDead("gone"), "UNAVAILABLE", 503),
    (RequestAborted("aborted"), "CANCELLED", 499),
    (EngineError("too old"), "FAILED_PRECONDITION", 409),
    (DeadlineExceeded("late"), "DEADLINE_EXCEEDED", 504),
    (WeightError("unknown version"), "ABORTED", 409),
    (WeightMismatch("differs", published="aa", served="bb"), "DATA_LOSS", 500),
)


@pytest.mark.parametrize(("error", "status", "http"), WANTED, ids=lambda value: type(value).__name__)
def test_an_error_comes_back_as_its_own_class_with_its_message(error, status, http):
    name, details, metadata = statuses.error_to_status(error)
    back = statuses.error_from_status(name, details, metadata=metadata, where="Generate")
    assert (name, statuses.http_status(error)) == (status, http)
    assert (type(back), str(back)) == (type(error), str(error))


def test_a_weight_mismatch_keeps_both_digests():
    name, details, metadata = statuses.error_to_status(WeightMismatch("differs", published="aa", served="bb"))
    back = statuses.error_from_status(name, details, metadata=metadata, where="LoadWeights")
    assert isinstance(back, WeightMismatch)
    assert (back.published, back.served) == ("aa", "bb")


def test_an_overload_says_when_to_ask_again_in_the_trailing_metadata():
    name, details, metadata = statuses.error_to_status(Overloaded("full", retry_after_s=1.25))
    back = statuses.error_from_status(name, details, metadata=metadata, where="Generate")
    assert metadata["retry-after"] == "1.250"
    assert isinstance(back, Overloaded)
    assert back.retry_after_s == 1.25


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        ("UNAVAILABLE", EngineDead),
        ("DEADLINE_EXCEEDED", DeadlineExceeded),
        ("INVALID_ARGUMENT", DataError),
        ("CANCELLED", RequestAborted),
        ("UNAUTHENTICATED", Unauthenticated),
        ("RESOURCE_EXHAUSTED", EngineError),
    ],
)
def test_errors_of_the_transport_itself_get_a_class_and_an_advice(status, kind):
    back = statuses.error_from_status(status, "socket closed", metadata={}, where="Generate to host:1")
    assert type(back) is kind
    assert str(back).startswith(f"Generate to host:1 ended with {status}: socket closed. ")


def test_a_message_that_the_transport_finds_too_large_is_the_callers_to_mend():
    back = statuses.error_from_status(
        "RESOURCE_EXHAUSTED", "Received message larger than max (70 vs. 64)", metadata={}, where="Generate to host:1"
    )
    assert type(back) is DataError
    assert "generator.limits.max_body_bytes" in str(back)


def test_a_class_that_the_wire_does_not_know_is_an_engine_error_with_the_message():
    name, details, metadata = statuses.error_to_status(ConfigError("unknown key"))
    back = statuses.error_from_status(name, details, metadata=metadata, where="Generate")
    assert (name, type(back)) == ("UNKNOWN", EngineError)
    assert "unknown key" in str(back)


def test_every_error_of_the_tree_has_a_row_and_every_row_can_be_reached():
    kinds = [
        kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.RollmillError)
    ]
    assert {statuses.wire_status(kind) for kind in kinds} == set(statuses.STATUSES)
