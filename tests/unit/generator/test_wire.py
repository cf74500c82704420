"""Records and errors keep their meaning across the wire."""

from __future__ import annotations

import numpy as np
import pytest

from rollmill.errors import (
    ConfigError,
    DataError,
    DeadlineExceeded,
    EngineDead,
    EngineError,
    RequestAborted,
    WeightError,
    WeightMismatch,
)
from rollmill.generator import wire
from rollmill.generator.proto import policy_inference_pb2 as pb
from rollmill.generator.state import ReplicaState
from rollmill.types import GenerateRequest, SamplingParams, StopReason, Turn, TurnTimings, VersionSpan


def over_the_wire(message):
    return type(message).FromString(message.SerializeToString())


def test_a_request_comes_back_equal():
    request = GenerateRequest(
        request_id="g/1.0",
        prompt_ids=np.array([1, 49_151, 7], dtype=np.int32),
        sampling=SamplingParams(
            temperature=0.7, top_p=0.95, top_k=50, max_new_tokens=24, seed=2**63 - 1, stop_token_ids=(2, 0)
        ),
        group_key="g",
        deadline_s=119.9,
        min_policy_version=3,
    )
    back = wire.request_from_message(over_the_wire(wire.request_to_message(request)))
    assert back.prompt_ids.tolist() == request.prompt_ids.tolist()
    for name in ("request_id", "sampling", "group_key", "deadline_s", "min_policy_version"):
        assert getattr(back, name) == getattr(request, name)


def test_a_turn_comes_back_equal_to_the_bit():
    turn = Turn(
        request_id="a",
        prompt_ids=np.array([5], dtype=np.int32),
        output_ids=np.array([1, 2, 3], dtype=np.int32),
        behavior_logprobs=np.array([-0.1, -1e-8, -17.25], dtype=np.float32),
        version_spans=(VersionSpan(0, 1, 7), VersionSpan(1, 3, 8)),
        stop_reason=StopReason.ABORT,
        timings=TurnTimings(queued_s=0.1, prefill_s=0.2, decode_s=0.3),
        cached_tokens=1,
    )
    back = wire.turn_from_message(over_the_wire(wire.turn_to_message(turn)), prompt_ids=turn.prompt_ids)
    assert back.behavior_logprobs.dtype == np.float32
    for name in ("prompt_ids", "output_ids", "behavior_logprobs"):
        np.testing.assert_array_equal(getattr(back, name), getattr(turn, name))
    for name in ("request_id", "version_spans", "stop_reason", "timings", "cached_tokens"):
        assert getattr(back, name) == getattr(turn, name)


@pytest.mark.parametrize("difference", [None, 0.0, 2e-5])
def test_a_load_report_says_whether_a_canary_was_compared(difference):
    report = wire.LoadReport(
        policy_version=3,
        digest="d",
        nbytes=5,
        pull_s=0.5,
        pause_s=0.25,
        changed=True,
        canary_difference=difference,
        drain_s=0.03,
        swap_s=0.15,
        prove_s=0.05,
        resume_s=0.02,
        stage_s=0.75,
    )
    assert wire.report_from_message(over_the_wire(wire.report_to_message(report))) == report


def test_a_status_comes_back_equal():
    status = wire.ReplicaStatus(
        state=ReplicaState.DIRTY,
        reason="canary",
        policy_version=3,
        digest="d",
        running=1,
        waiting=2,
        kv_used_tokens=3,
        kv_capacity_tokens=4,
        output_tokens=5,
        prefill_tokens=6,
        cached_tokens=7,
        wall_s=8.5,
        seconds={"decode": 8.0, "idle": 0.5},
        max_slots=9,
        max_model_len=10,
        dtype="float32",
    )
    assert wire.status_from_message(over_the_wire(wire.status_to_message(status))) == status


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (DataError("too long"), "INVALID_ARGUMENT"),
        (EngineDead("gone"), "UNAVAILABLE"),
        (EngineError("dirty"), "FAILED_PRECONDITION"),
        (RequestAborted("aborted"), "CANCELLED"),
        (DeadlineExceeded("late"), "DEADLINE_EXCEEDED"),
        (WeightError("unknown version"), "ABORTED"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_an_error_comes_back_as_its_own_class_with_its_message(error, status):
    name, details, metadata = wire.error_to_status(error)
    back = wire.error_from_status(name, details, metadata=metadata, where="Generate")
    assert name == status
    assert (type(back), str(back)) == (type(error), str(error))


def test_a_weight_mismatch_keeps_both_digests():
    name, details, metadata = wire.error_to_status(WeightMismatch("differs", published="aa", served="bb"))
    back = wire.error_from_status(name, details, metadata=metadata, where="LoadWeights")
    assert isinstance(back, WeightMismatch)
    assert (name, back.published, back.served, str(back)) == ("DATA_LOSS", "aa", "bb", "differs")


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        ("UNAVAILABLE", EngineDead),
        ("DEADLINE_EXCEEDED", DeadlineExceeded),
        ("INVALID_ARGUMENT", DataError),
        ("CANCELLED", RequestAborted),
        ("RESOURCE_EXHAUSTED", EngineError),
    ],
)
def test_errors_of_the_transport_itself_get_a_class_and_an_advice(status, kind):
    back = wire.error_from_status(status, "socket closed", metadata={}, where="Generate to host:1")
    assert type(back) is kind
    assert str(back).startswith(f"Generate to host:1 ended with {status}: socket closed. ")


def test_a_class_that_the_wire_does_not_know_is_an_engine_error_with_the_message():
    name, details, metadata = wire.error_to_status(ConfigError("unknown key"))
    back = wire.error_from_status(name, details, metadata=metadata, where="Generate")
    assert type(back) is EngineError
    assert "unknown key" in str(back)


def test_a_stop_reason_that_is_unknown_is_refused():
    with pytest.raises(ValueError, match="melted"):
        wire.turn_from_message(pb.GenerateReply(stop_reason="melted"), prompt_ids=np.array([1]))
