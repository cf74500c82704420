"""The words of SGLang, from replies recorded from version 0.5.23."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from rollmill.errors import DataError, EngineError
from rollmill.generator.engines.remote.port import Figures
from rollmill.generator.engines.sglang.dialect import (
    generate_body,
    read_delta,
    read_error,
    read_figures,
    read_labels,
    read_scores,
    returns_masks,
    score_body,
    update_body,
)
from rollmill.types import GenerateRequest, SamplingParams, StopReason, VersionSpan

LENGTH = {"type": "length", "length": 4}


def body_of(**sampling: Any) -> dict[str, Any]:
    request = GenerateRequest(request_id="a", prompt_ids=np.array([5, 6]), sampling=SamplingParams(**sampling))
    return generate_body(request, server_id="0001", max_tokens=9, salt="3.0", vocabulary_size=96)


def line(ids: list[int], *, total: int, logprobs: list[Any] | None = None, **meta: Any) -> str:
    values = [-0.5] * len(ids) if logprobs is None else logprobs
    entries = [[value, token, None] for value, token in zip(values, ids, strict=True)]
    found = {"finish_reason": None, "completion_tokens": total, "output_token_logprobs": entries, **meta}
    return "data: " + json.dumps({"output_ids": ids, "meta_info": found})


def read(text: str, *, n_before: int = 0, filtered: bool = False) -> Any:
    return read_delta(text, server_id="0001", n_before=n_before, filtered=filtered)


def test_stop_tokens_are_never_sent_with_a_flag_that_switches_them_off():
    body = body_of(stop_token_ids=(7, 8), seed=3)
    assert body["sampling_params"] == {
        "max_new_tokens": 9,
        "temperature": 1.0,
        "top_p": 1.0,
        "sampling_seed": 3,
        "stop_token_ids": [7, 8],
    }
    assert (body["rid"], body["input_ids"], body["extra_key"]) == ("0001", [5, 6], "3.0")
    assert (body["return_logprob"], body["stream"]) == (True, True)


def test_a_seed_of_64_bits_is_cut_to_what_the_server_takes():
    assert body_of(seed=(1 << 64) - 1)["sampling_params"]["sampling_seed"] == (1 << 63) - 1


@pytest.mark.parametrize(
    ("sampling", "top_k"),
    [
        ({}, None),
        ({"top_p": 0.9}, 96),  # a mask needs a finite top_k: all of the vocabulary
        ({"top_k": 5}, 5),
        ({"top_k": 500}, 96),
        ({"top_p": 0.9, "temperature": 0.0}, None),
    ],
)
def test_a_mask_is_asked_for_where_the_distribution_is_filtered(sampling, top_k):
    body = body_of(**sampling)
    assert body.get("return_sampling_mask", False) is (top_k is not None)
    if top_k is not None:
        assert body["sampling_params"]["top_k"] == top_k


def test_a_score_is_a_prefill_of_its_own_before_all_others():
    body = score_body([1, 2, 3], server_id="0009")
    assert (body["logprob_start_len"], body["extra_key"], body["sampling_params"]["max_new_tokens"]) == (
        0,
        "score.0009",
        1,
    )
    assert body["priority"] > body_of()["priority"]


def test_an_update_says_version_and_flush():
    body = update_body("/w", policy_version=7, flush=False)
    assert (body["model_path"], body["weight_version"], body["flush_cache"]) == ("/w", "7", False)


def test_pieces_hold_what_is_new_and_the_last_one_the_record():
    first = read(line([71, 38], total=2, cached_tokens=4))
    assert (first.output_ids.tolist(), first.reason, first.cached_tokens) == ([71, 38], None, 4)
    last = read(
        line(
            [22],
            total=3,
            finish_reason=LENGTH,
            weight_versions=[{"version": "1", "start": 0, "end": 2}, {"version": "2", "start": 2, "end": 3}],
        ),
        n_before=2,
    )
    assert (last.output_ids.tolist(), last.reason) == ([22], StopReason.LENGTH)
    assert last.record == (VersionSpan(0, 2, 1), VersionSpan(2, 3, 2))
    assert read("data: [DONE]") is None
    assert read("") is None


def test_a_token_that_an_abort_in_the_queue_repeats_is_not_taken_twice():
    """Recorded: the last id once more, the log-probs of all eight, and no cached_tokens."""
    entries = [[-0.1 * n, n, None] for n in range(1, 9)]
    meta = {
        "finish_reason": {"type": "abort", "message": "Abort in waiting queue"},
        "completion_tokens": 8,
        "output_token_logprobs": entries,
        "weight_versions": [{"version": "4", "start": 0, "end": 8}],
    }
    text = "data: " + json.dumps({"output_ids": [8], "meta_info": meta})
    delta = read(text, n_before=8)
    assert (len(delta.output_ids), delta.reason, delta.record) == (0, StopReason.ABORT, (VersionSpan(0, 8, 4),))
    assert delta.cached_tokens is None
    assert read(text, n_before=7).output_ids.tolist() == [8]
    with pytest.raises(EngineError, match="1 entries where 2 tokens are new"):
        read(text, n_before=6)


def test_a_filtered_draw_takes_the_log_probs_of_the_mask():
    text = line([28, 34], total=2, output_token_sampling_logprobs=[-2.39, -3.19])
    np.testing.assert_allclose(read(text, filtered=True).logprobs, [-2.39, -3.19], rtol=1e-6)
    np.testing.assert_allclose(read(text).logprobs, [-0.5, -0.5])
    with pytest.raises(EngineError, match="an engine with top_p and top_k: embedded, vllm, fake"):
        read(line([28], total=1), filtered=True)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (line([1], total=1, logprobs=[None]), "not what SGLang 0.5.23 sends"),
        (line([1], total=1, logprobs=[0.2]), "0.2 as the log-prob"),
        (line([1], total=2), "1 entries where 2 tokens are new"),
        (line([1], total=1, finish_reason=LENGTH), "which policy sampled it"),
        (
            line([1], total=1, finish_reason=LENGTH, weight_versions=[{"version": "default", "start": 0, "end": 1}]),
            "not what SGLang",
        ),
        (line([1], total=1, finish_reason={"type": "error", "message": "out of memory"}), "out of memory"),
        ('data: {"error": {"message": "it broke", "code": 500}}', "it broke"),
        ("data: {", "not what SGLang"),
    ],
)
def test_what_would_make_a_wrong_sample_is_refused(text, message):
    with pytest.raises(EngineError, match=message):
        read(text)


def test_a_request_that_the_server_finds_wrong_is_a_data_error():
    reason = {"type": "abort", "message": "too long", "status_code": 400}
    with pytest.raises(DataError, match="too long"):
        read(line([], total=0, finish_reason=reason))


def test_a_request_that_the_server_aborts_by_itself_for_a_fault_is_an_engine_error():
    reason = {"type": "abort", "message": "out of KV", "status_code": 500}
    with pytest.raises(EngineError, match="out of KV"):
        read(line([], total=0, finish_reason=reason))


def test_scores_are_those_of_the_given_tokens():
    entries = [[None, 1, None], [-5.5, 2, None], [-4.5, 3, None]]
    reply = json.dumps({"meta_info": {"input_token_logprobs": entries}}).encode()
    np.testing.assert_allclose(read_scores(reply, token_ids=[1, 2, 3], server_id="s"), [-5.5, -4.5])
    with pytest.raises(EngineError, match="other tokens"):
        read_scores(reply, token_ids=[1, 2, 4], server_id="s")
    with pytest.raises(EngineError, match="not what SGLang"):
        read_scores(b"{}", token_ids=[1, 2], server_id="s")


def test_labels_are_the_schedulers_own():
    assert read_labels(b'{"internal_states": [{"weight_version": "2"}, {"weight_version": "3"}]}') == {"2", "3"}
    with pytest.raises(EngineError, match="not what SGLang"):
        read_labels(b'{"weight_version": "2"}')


def test_masks_are_known_by_a_reply_that_has_them():
    meta = {"completion_tokens": 2, "output_token_sampling_logprobs": [-0.1, -0.2]}
    assert returns_masks(json.dumps({"meta_info": meta}).encode())
    assert not returns_masks(b'{"meta_info": {"completion_tokens": 2}}')
    assert not returns_masks(b"nothing")


def test_memory_is_summed_over_ranks_and_nothing_where_it_is_not_told():
    loads = {"loads": [{"num_used_tokens": 3, "max_total_num_tokens": 10}, {"max_total_num_tokens": 10}]}
    assert read_figures(json.dumps(loads).encode()) == Figures(kv_used_tokens=3, kv_capacity_tokens=20)
    assert read_figures(b"oops") == Figures()


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"error": {"message": "too long"}}', "too long"),
        (b'{"success": false, "message": "not flushed"}', "not flushed"),
        (b'{"error": "Unauthorized"}', "Unauthorized"),
        (b"plain", "plain"),
        (b"[1]", "[1]"),
    ],
)
def test_the_message_of_a_refusal_is_found_in_each_of_its_forms(body, message):
    assert read_error(body) == message
