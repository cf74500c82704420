"""Records and errors keep their meaning across the wire."""

from __future__ import annotations

import numpy as np
import pytest

from rollmill.errors import DataError, LengthMismatch
from rollmill.generator import wire
from rollmill.generator.engines.protocol import HostKvLoad
from rollmill.generator.proto import policy_inference_pb2 as pb
from rollmill.generator.state import ReplicaState
from rollmill.types import (
    GenerateRequest,
    Message,
    SamplingParams,
    StopReason,
    TokenChunk,
    Turn,
    TurnTimings,
    VersionSpan,
)


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
        session_id="rollout-7",
        job="math",
    )
    message = over_the_wire(wire.request_to_message(request))
    back = wire.request_from_message(message, prompt_ids=wire.prompt_from_message(message))
    assert back.prompt_ids.tolist() == request.prompt_ids.tolist()
    for name in ("request_id", "sampling", "group_key", "deadline_s", "min_policy_version", "session_id", "job"):
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
    reply = over_the_wire(wire.turns_to_message([turn], request_id="a"))
    (back,) = wire.turns_from_message(reply, prompt_ids=turn.prompt_ids)
    assert back.behavior_logprobs.dtype == np.float32
    for name in ("prompt_ids", "output_ids", "behavior_logprobs"):
        np.testing.assert_array_equal(getattr(back, name), getattr(turn, name))
    for name in ("request_id", "version_spans", "stop_reason", "timings", "cached_tokens"):
        assert getattr(back, name) == getattr(turn, name)


@pytest.mark.parametrize("difference", [None, 0.0, 2e-5])
@pytest.mark.parametrize("followed", [None, 0.0, 0.97])
def test_a_load_report_says_whether_a_canary_was_compared(difference, followed):
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
        finish_s=1.5,
        cut=3,
        canary_mean=difference,
        canary_mean_tolerance=difference,
        canary_followed=followed,
    )
    assert wire.report_from_message(over_the_wire(wire.report_to_message(report))) == report


TIER = HostKvLoad(
    used_bytes=1,
    capacity_bytes=2,
    hits=3,
    misses=4,
    evictions=5,
    damaged=6,
    stored_bytes=7,
    restored_bytes=8,
)


@pytest.mark.parametrize("host_kv", [None, TIER])
def test_a_status_comes_back_equal(host_kv):
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
        max_num_seqs=9,
        max_model_len=10,
        dtype="float32",
        finished_turns=11,
        host_kv=host_kv,
        guessed_tokens=12,
        accepted_tokens=13,
    )
    assert wire.status_from_message(over_the_wire(wire.status_to_message(status))) == status


def test_a_stop_reason_that_is_unknown_is_refused():
    with pytest.raises(ValueError, match="melted"):
        wire.turns_from_message(pb.GenerateReply(samples=[pb.Sample(stop_reason="melted")]), prompt_ids=np.array([1]))


@pytest.mark.parametrize(
    ("message", "prompt"),
    [
        (pb.GenerateRequest(text=""), ""),
        (pb.GenerateRequest(text="2 + 2"), "2 + 2"),
        (
            pb.GenerateRequest(messages=pb.Messages(messages=[pb.Message(role="user", content="2 + 2")])),
            (Message("user", "2 + 2"),),
        ),
    ],
    ids=["empty text", "text", "messages"],
)
def test_a_prompt_may_be_text_or_messages(message, prompt):
    assert wire.prompt_from_message(over_the_wire(message)) == prompt


@pytest.mark.parametrize(
    ("message", "have"),
    [
        (pb.GenerateRequest(request_id="a"), "request a has an empty prompt"),
        (pb.GenerateRequest(request_id="a", prompt_ids=[1], text="b"), "request a has prompt_ids and text"),
    ],
)
def test_a_prompt_in_no_form_or_in_two_is_refused(message, have):
    with pytest.raises(DataError, match=have):
        wire.prompt_from_message(message)


def test_stop_ids_of_the_model_count_only_where_the_request_names_none():
    ids = np.array([1])
    named = pb.GenerateRequest(sampling=pb.SamplingParams(stop_token_ids=[5]))
    assert wire.request_from_message(named, prompt_ids=ids, stop_token_ids=[2]).sampling.stop_token_ids == (5,)
    silent = wire.request_from_message(pb.GenerateRequest(), prompt_ids=ids, stop_token_ids=[2])
    assert silent.sampling.stop_token_ids == (2,)


def test_a_reply_that_lacks_a_sibling_is_refused():
    reply = pb.GenerateReply(request_id="a", samples=[pb.Sample(index=1, stop_reason="stop")])
    with pytest.raises(LengthMismatch, match="samples of request a: expected 2 entries, got 1"):
        wire.turns_from_message(reply, prompt_ids=np.array([1]), siblings=2)


def chunk(start, *tokens, version=1):
    ids = np.array(tokens, dtype=np.int32)
    return TokenChunk(
        start_token=start, output_ids=ids, behavior_logprobs=(-ids).astype(np.float32), policy_version=version
    )


def test_the_chunks_of_a_stream_make_up_the_turn():
    turn = Turn(
        request_id="a",
        prompt_ids=np.array([9], dtype=np.int32),
        output_ids=np.array([1, 2, 3], dtype=np.int32),
        behavior_logprobs=np.array([-1, -2, -3], dtype=np.float32),
        version_spans=(VersionSpan(0, 2, 1), VersionSpan(2, 3, 2)),
        stop_reason=StopReason.STOP,
        timings=TurnTimings(queued_s=0.1, prefill_s=0.2, decode_s=0.3),
        cached_tokens=1,
    )
    assembler = wire.TurnAssembler("a", prompt_ids=turn.prompt_ids)
    for part in (chunk(0, 1), chunk(1, 2), chunk(2, 3, version=2)):
        event = over_the_wire(wire.chunk_to_message(part, request_id="a", index=0))
        assembler.add(wire.chunk_from_message(event.tokens))
    back = assembler.finish(over_the_wire(wire.finished_to_message(turn, request_id="a", index=0)).finished)
    for name in ("prompt_ids", "output_ids", "behavior_logprobs"):
        np.testing.assert_array_equal(getattr(back, name), getattr(turn, name))
    for name in ("request_id", "version_spans", "stop_reason", "timings", "cached_tokens"):
        assert getattr(back, name) == getattr(turn, name)


def test_a_stream_that_loses_tokens_is_refused():
    assembler = wire.TurnAssembler("a", prompt_ids=np.array([9]))
    assembler.add(chunk(0, 1))
    with pytest.raises(LengthMismatch, match="start of a chunk of request a: expected 1 entries, got 2"):
        assembler.add(chunk(2, 3))
    with pytest.raises(LengthMismatch, match="streamed tokens of request a: expected 2 entries, got 1"):
        assembler.finish(pb.Finished(output_tokens=2, stop_reason="stop"))
