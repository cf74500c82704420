"""Replies that would make a wrong sample are refused; metrics and logs are read as the server writes them."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from rollmill.errors import EngineError
from rollmill.generator.engines.remote.logs import first_error
from rollmill.generator.engines.vllm.dialect import read_delta, read_error, read_metrics, read_reply, read_scores
from rollmill.types import StopReason


def reply(**changes: Any) -> bytes:
    choice = {
        "index": 0,
        "finish_reason": "stop",
        "token_ids": [3, 4],
        "logprobs": {"content": [{"token_id": 3, "logprob": -0.5}, {"token_id": 4, "logprob": -1.0}]},
        "weight_versions": [{"version": "1", "start": 0, "end": 1}, {"version": "2", "start": 1, "end": 2}],
    }
    usage = {"prompt_tokens_details": {"cached_tokens": 32}}
    return json.dumps({"choices": [{**choice, **changes}], "usage": usage}).encode()


def test_a_reply_is_read_whole():
    read = read_reply(reply(), server_id="7")
    assert (read.output_ids.tolist(), read.logprobs.tolist()) == ([3, 4], [-0.5, -1.0])
    assert [(s.start_token, s.end_token, s.policy_version) for s in read.spans] == [(0, 1, 1), (1, 2, 2)]
    assert (read.reason, read.cached_tokens, read.output_ids.dtype) == (StopReason.STOP, 32, np.int32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weight_versions": None}, "does not cover its 2 tokens"),
        ({"weight_versions": [{"version": "1", "start": 0, "end": 1}]}, "does not cover its 2 tokens"),
        ({"weight_versions": [{"version": "default", "start": 0, "end": 2}]}, "not what vLLM"),
        ({"logprobs": None}, "0 log-probs that do not belong to its 2 tokens"),
        (
            {"logprobs": {"content": [{"token_id": 4, "logprob": -1.0}, {"token_id": 3, "logprob": -0.5}]}},
            "do not belong",
        ),
        (
            {"logprobs": {"content": [{"token_id": 3, "logprob": -9999.0}, {"token_id": 4, "logprob": -1.0}]}},
            "log-prob of sampled token 3: it has none",
        ),
        (
            {"logprobs": {"content": [{"token_id": 3, "logprob": 0.5}, {"token_id": 4, "logprob": -1.0}]}},
            "0.5 as the log-prob",
        ),
        ({"finish_reason": "error"}, "'error'"),
    ],
)
def test_a_reply_that_would_make_a_wrong_sample_is_refused(changes, message):
    with pytest.raises(EngineError, match=message):
        read_reply(reply(**changes), server_id="7")


def test_what_is_no_reply_is_shown():
    with pytest.raises(EngineError, match="<html>"):
        read_reply(b"<html>", server_id="7")


def test_an_aborted_reply_may_be_empty():
    empty = reply(finish_reason="abort", token_ids=[], logprobs={"content": []}, weight_versions=None)
    read = read_reply(empty, server_id="7")
    assert (len(read.output_ids), read.spans, read.reason) == (0, (), StopReason.ABORT)


def test_a_stream_is_read_piece_by_piece_and_its_spans_cover_all_pieces():
    first = json.loads(reply(finish_reason=None, weight_versions=None))
    piece = read_delta(f"data: {json.dumps(first)}", server_id="7", n_before=0)
    assert piece is not None
    assert (piece.output_ids.tolist(), piece.reason, piece.record) == ([3, 4], None, None)
    last = json.loads(reply(weight_versions=[{"version": "5", "start": 0, "end": 4}]))
    end = read_delta(f"data: {json.dumps(last)}", server_id="7", n_before=2)
    assert end is not None
    assert end.reason is StopReason.STOP
    assert end.record is not None
    assert end.record[0].end_token == 4
    usage = {"choices": [], "usage": {"prompt_tokens_details": {"cached_tokens": 32}}}
    cached = read_delta(f"data: {json.dumps(usage)}", server_id="7", n_before=4)
    assert cached is not None
    assert (len(cached.output_ids), cached.cached_tokens) == (0, 32)
    assert read_delta("data: [DONE]", server_id="7", n_before=4) is None
    assert read_delta("", server_id="7", n_before=4) is None
    with pytest.raises(EngineError, match="engine died"):
        read_delta('data: {"error": {"message": "engine died"}}', server_id="7", n_before=4)


def test_scores_belong_to_the_given_tokens():
    entries = [None, {"8": {"logprob": -0.25}}, {"9": {"logprob": -0.75}, "1": {"logprob": -0.1}}]
    body = json.dumps({"prompt_logprobs": entries}).encode()
    assert read_scores(body, token_ids=[7, 8, 9], server_id="s").tolist() == [-0.25, -0.75]
    with pytest.raises(EngineError, match="3 entries for 2 tokens"):
        read_scores(body, token_ids=[7, 8], server_id="s")
    with pytest.raises(EngineError, match="KeyError"):
        read_scores(body, token_ids=[7, 8, 2], server_id="s")
    entries[1] = {"8": {"logprob": -9999.0}}
    with pytest.raises(EngineError, match="NaN"):
        read_scores(json.dumps({"prompt_logprobs": entries}).encode(), token_ids=[7, 8, 9], server_id="s")


def test_metrics_are_summed_over_ranks_and_absent_ones_are_nothing():
    text = """# HELP vllm:num_requests_running Number of requests
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 2.0
vllm:kv_cache_usage_perc{engine="0"} 0.5
vllm:kv_cache_usage_perc{engine="1"} 0.25
vllm:generation_tokens_total{engine="0"} 1.25e+03
vllm:cache_config_info{block_size="32",engine="0",num_gpu_blocks="100",x="None"} 1.0
vllm:cache_config_info{block_size="32",engine="1",num_gpu_blocks="None"} 1.0
"""
    read = read_metrics(text)
    assert (read.running, read.waiting, read.kv_used, read.output_tokens) == (5, 0, 0.375, 1250)
    assert read.kv_capacity_tokens == 3200


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"error": {"message": "too long", "code": 400}}', "too long"),
        (b'{"error": "Failed to pause"}', "Failed to pause"),
        (b'{"detail": [{"msg": "field required"}]}', "[{'msg': 'field required'}]"),
        (b"Internal Server Error", "Internal Server Error"),
    ],
)
def test_error_replies_are_read_in_all_their_forms(body, message):
    assert read_error(body) == message


def test_the_first_error_of_a_log_is_the_cause():
    log = """INFO 11-30 09:00:00 [api_server.py:1] vLLM API server version 0.32.0
(EngineCore pid=7) WARNING 11-30 09:00:01 [x.py:2] ValueError: only a warning
(EngineCore pid=7) ERROR 11-30 09:00:02 [core.py:3] EngineCore encountered a fatal error.
(EngineCore pid=7) ERROR 11-30 09:00:02 [core.py:3] Traceback (most recent call last):
(EngineCore pid=7) ERROR 11-30 09:00:02 [core.py:3]   File "core.py", line 9, in run
(EngineCore pid=7) ERROR 11-30 09:00:02 [core.py:3] RuntimeError: Tensor on device meta is not on cpu!
(APIServer pid=5) ERROR 11-30 09:00:03 [async_llm.py:4] vllm.v1.engine.exceptions.EngineDeadError: EngineCore died
"""
    assert first_error(log) == "RuntimeError: Tensor on device meta is not on cpu!"
    assert first_error("INFO all is well\n") is None
