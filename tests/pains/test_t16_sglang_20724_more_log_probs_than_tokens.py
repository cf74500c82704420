"""T16: parallel arrays that disagree are refused at the border, and a retry starts a new record.

Reported elsewhere: a retracted request comes back with K + N log-probs for N tokens and no error (SGLang 20724);
retried samples keep old fields, so that four parallel lists lose step (slime 1861).
"""

from __future__ import annotations

import numpy as np
import pytest

from generator_builders import SteppedEngine, prompt_of, random_model, request
from rollmill.errors import LengthMismatch
from rollmill.generator.proto import policy_inference_pb2 as pb
from rollmill.generator.wire import turns_from_message


def reply(*, tokens: int, logprobs: int, covered: int) -> pb.GenerateReply:
    return pb.GenerateReply(
        request_id="a",
        samples=[
            pb.Sample(
                output_ids=range(tokens),
                behavior_logprobs=[-1.0] * logprobs,
                version_spans=[pb.VersionSpan(start_token=0, end_token=covered, policy_version=7)],
                stop_reason="stop",
            )
        ],
    )


def test_5_log_probs_for_3_tokens_are_refused_where_the_reply_enters():
    with pytest.raises(LengthMismatch, match="request a: expected 3 entries, got 5") as refused:
        turns_from_message(reply(tokens=3, logprobs=5, covered=3), prompt_ids=np.array([1]))
    assert (refused.value.expected, refused.value.got) == (3, 5)


def test_version_spans_that_do_not_cover_the_tokens_are_refused():
    with pytest.raises(LengthMismatch) as refused:
        turns_from_message(reply(tokens=3, logprobs=3, covered=2), prompt_ids=np.array([1]))
    assert (refused.value.expected, refused.value.got) == (3, 2)


def test_a_retry_after_4_tokens_is_a_new_record_with_only_its_own_tokens(tmp_path):
    engine = SteppedEngine(tmp_path, random_model(seed=1))
    engine.submit(request("try-0", prompt_of(6), max_new_tokens=12, seed=1))
    engine.steps(4)
    engine.core.abort("try-0")
    first = engine.turn("try-0")
    kept = first.output_ids.copy()
    engine.submit(request("try-1", prompt_of(6), max_new_tokens=3, seed=2))
    engine.finish()
    retry = engine.turn("try-1")
    assert len(first.output_ids) == 4
    assert len(retry.output_ids) == len(retry.behavior_logprobs) == retry.version_spans[-1].end_token == 3
    np.testing.assert_array_equal(first.output_ids, kept)
    with pytest.raises(AttributeError):
        first.output_ids = retry.output_ids  # type: ignore[misc]
