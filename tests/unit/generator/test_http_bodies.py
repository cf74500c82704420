"""What callers send: every setting is obeyed or refused by name, and what changes nothing is taken."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import pytest
from openai.types.chat import completion_create_params as openai_chat
from openai.types.completion_create_params import CompletionCreateParamsBase

from rollmill.generator.http import plan as plans
from rollmill.generator.http.bodies import NEUTRAL, AbortBody, ChatRequest, CompletionRequest, TokenRequest, decode
from rollmill.generator.http.plan import Call, Facts, Plan, plan_of
from rollmill.generator.http.problems import RequestProblem
from rollmill.types import Message

USER = {"role": "user", "content": "hi"}
FACTS = Facts(max_model_len=100, max_new_tokens=None, stop_token_ids=(2, 7), has_tokenizer=True)


def chat(**fields: Any) -> ChatRequest:
    return decode(json.dumps({"messages": [USER], **fields}).encode(), ChatRequest)


def completion(**fields: Any) -> CompletionRequest:
    return decode(json.dumps({"prompt": "hi", **fields}).encode(), CompletionRequest)


def tokens(**sampling: Any) -> TokenRequest:
    return decode(json.dumps({"token_ids": [1, 2], "sampling_params": sampling}).encode(), TokenRequest)


def prompts_of(call: Call) -> Any:
    return plans.prompts_of(call, max_model_len=FACTS.max_model_len)


def plan(call: Call, *, prompt_tokens: int = 10, headers: dict[str, str] | None = None, facts: Facts = FACTS) -> Plan:
    prompts = [np.ones(prompt_tokens, dtype=np.int64)]
    return plan_of(call, prompts=prompts, headers={} if headers is None else headers, facts=facts)


def sampling(call: Call, **settings: Any) -> Any:
    return plan(call, **settings).requests[0].sampling


def problem(body: Any, kind: Any = ChatRequest) -> RequestProblem:
    with pytest.raises(RequestProblem) as refused:
        decode(body if isinstance(body, bytes) else json.dumps(body).encode(), kind)
    return refused.value


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({"messages": [USER], "temprature": 1}, "temprature", "unknown_parameter"),
        ({}, "messages", "missing_required_parameter"),
        ({"messages": [{"content": "hi"}]}, "messages[0].role", "missing_required_parameter"),
        ({"messages": [{**USER, "mood": "good"}]}, "messages[0].mood", "unknown_parameter"),
        ({"messages": [USER], "max_tokens": "8"}, "max_tokens", "invalid_type"),
        ({"messages": [USER], "max_tokens": 0}, "max_tokens", "invalid_value"),
        ({"messages": [USER], "n": 0}, "n", "invalid_value"),
        ({"messages": [USER], "seed": 2**63}, "seed", "invalid_value"),
        ({"messages": [{"role": "wizard", "content": "hi"}]}, "messages[0].role", "invalid_value"),
        ([], None, "invalid_type"),
        (b"{", None, "invalid_json"),
        (b'{"messages": [], "model": "\xff"}', None, "invalid_json"),
        (b'{"messages": [], "temperature": NaN}', None, "invalid_json"),
    ],
)
def test_a_body_that_does_not_fit_is_refused_with_the_field_and_openais_word_for_it(body, param, code):
    refused = problem(body)
    assert (refused.param, refused.problem_code, refused.status) == (param, code, 400)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("frequency_penalty", 0.5),
        ("presence_penalty", -1),
        ("repetition_penalty", 1.1),
        ("min_p", 0.1),
        ("min_tokens", 3),
        ("logit_bias", {"5": 1.0}),
        ("top_logprobs", 1),
        ("priority", 1),
        ("store", True),
        ("tools", [{"type": "function", "function": {"name": "f"}}]),
        ("tool_choice", "required"),
        ("functions", [{"name": "f"}]),
        ("response_format", {"type": "json_object"}),
        ("modalities", ["text", "audio"]),
        ("reasoning_effort", "low"),
        ("skip_special_tokens", False),
        ("include_stop_str_in_output", True),
    ],
)
def test_a_setting_that_would_change_something_is_refused_by_name(field, value):
    refused = problem({"messages": [USER], field: value})
    assert (refused.param, refused.problem_code) == (field, "unsupported_parameter")
    assert f"'{field}' is not supported" in str(refused)


@pytest.mark.parametrize(("field", "value"), [("echo", True), ("suffix", "x"), ("best_of", 3), ("logprobs", 2)])
def test_a_completion_refuses_what_it_cannot_do(field, value):
    with pytest.raises(RequestProblem) as refused:
        plan(completion(**{field: value}))
    assert refused.value.param == field


def test_settings_that_change_nothing_are_taken():
    neutral = {name: values[-1] for name, values in NEUTRAL.items() if name in ChatRequest.__struct_fields__}
    taken = chat(**neutral, user="u", metadata={"a": "b"}, parallel_tool_calls=True, service_tier="auto")
    assert sampling(taken).temperature == 1.0


def test_every_field_that_the_openai_client_can_send_is_known():
    for call, request in (
        (openai_chat.CompletionCreateParamsBase, ChatRequest),
        (CompletionCreateParamsBase, CompletionRequest),
    ):
        assert set(call.__annotations__) - set(request.__struct_fields__) == set()


def test_a_message_that_the_openai_client_gave_can_be_sent_back():
    reply = {
        "role": "assistant",
        "content": "yes",
        "refusal": None,
        "annotations": None,
        "audio": None,
        "function_call": None,
        "tool_calls": None,
    }
    call = decode(json.dumps({"messages": [USER, reply]}).encode(), ChatRequest)
    assert prompts_of(call) == [(Message("user", "hi"), Message("assistant", "yes"))]


def test_parts_of_text_are_joined_and_developer_means_system():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    call = decode(json.dumps({"messages": [{"role": "developer", "content": parts}]}).encode(), ChatRequest)
    assert prompts_of(call) == [(Message("system", "ab"),)]


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "assistant", "tool_calls": [{"id": "1"}]}, "messages[0].tool_calls"),
        ({"role": "tool", "content": "4", "tool_call_id": "1"}, "messages[0].tool_call_id"),
        ({"role": "assistant", "content": None}, "messages[0].content"),
    ],
)
def test_a_message_that_is_no_text_is_refused(message, param):
    with pytest.raises(RequestProblem) as refused:
        prompts_of(decode(json.dumps({"messages": [message]}).encode(), ChatRequest))
    assert refused.value.param == param


def test_an_image_is_refused():
    part = {"type": "image_url", "image_url": {"url": "x"}}
    assert problem({"messages": [{"role": "user", "content": [part]}]}).param == "messages[0].content[0].type"


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("hi", ["hi"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
    ],
)
def test_a_prompt_may_be_text_or_ids_or_several_of_a_kind(prompt, expected):
    got = prompts_of(completion(prompt=prompt))
    assert [one if isinstance(one, str) else np.asarray(one).tolist() for one in got] == expected


@pytest.mark.parametrize("prompt", [[], [[]], ["a", 1], [1, [2]], ["a"] * 1025])
def test_a_prompt_that_is_empty_or_mixed_or_too_many_is_refused(prompt):
    with pytest.raises(RequestProblem) as refused:
        prompts_of(completion(prompt=prompt))
    assert refused.value.param == "prompt"


@pytest.mark.parametrize("token", [-1, 2**31, 1.5, True])
def test_an_id_that_fits_no_int32_is_refused(token):
    refused = problem({"token_ids": [token], "sampling_params": {}}, TokenRequest)
    assert refused.param == "token_ids[0]"


@pytest.mark.parametrize(
    ("call", "new_tokens"),
    [
        (chat(), 90),  # what the context of 100 leaves beside a prompt of 10
        (chat(max_tokens=5), 5),
        (chat(max_completion_tokens=6), 6),
        (chat(max_tokens=5, max_completion_tokens=5), 5),
        (chat(max_tokens=500), 500),  # the engine caps it at the context
        (completion(), 16),
        (tokens(), 90),
        (tokens(max_tokens=4), 4),
    ],
)
def test_a_call_that_names_no_cap_has_the_default_of_its_kind(call, new_tokens):
    assert sampling(call).max_new_tokens == new_tokens


def test_the_default_cap_respects_the_operators():
    facts = Facts(max_model_len=100, max_new_tokens=20, stop_token_ids=(), has_tokenizer=True)
    assert sampling(chat(), facts=facts).max_new_tokens == 20
    assert sampling(chat(max_tokens=21), facts=facts).max_new_tokens == 21  # for the service to refuse


def test_two_caps_that_differ_are_refused():
    with pytest.raises(RequestProblem, match="'max_tokens' is 5 and 'max_completion_tokens' 6"):
        plan(chat(max_tokens=5, max_completion_tokens=6))


def test_a_prompt_that_leaves_no_room_is_refused_with_openais_code():
    with pytest.raises(RequestProblem, match="100 tokens, and max_model_len 100") as refused:
        plan(chat(), prompt_tokens=100)
    assert (refused.value.problem_code, refused.value.param) == ("context_length_exceeded", "messages")


@pytest.mark.parametrize(
    ("call", "param"),
    [
        (chat(messages=[USER, {"role": "user", "content": "x" * 51_200}]), "messages"),
        (completion(prompt="x" * 51_201), "prompt"),
        (completion(prompt=["x", "x" * 51_201]), "prompt"),
        (completion(prompt=[1] * 100), "prompt"),
        (completion(prompt=[[1], [1] * 100]), "prompt"),
        (decode(json.dumps({"token_ids": [1] * 100, "sampling_params": {}}).encode(), TokenRequest), "token_ids"),
    ],
)
def test_what_no_context_of_100_holds_is_refused_before_work_is_done_on_it(call, param):
    with pytest.raises(RequestProblem) as refused:
        prompts_of(call)
    assert (refused.value.problem_code, refused.value.param) == ("context_length_exceeded", param)


def test_a_body_of_a_million_lists_is_refused_before_it_is_read():
    refused = problem(b'{"prompt": [' + b"[" * 1_000_000, CompletionRequest)
    assert refused.problem_code == "request_too_large"


def test_stop_ids_come_on_top_of_the_models_own_unless_those_are_to_be_ignored():
    assert sampling(chat(stop_token_ids=[5, 2])).stop_token_ids == (2, 5, 7)
    assert sampling(chat(stop_token_ids=[5], ignore_eos=True)).stop_token_ids == (5,)


@pytest.mark.parametrize("stop", ["", ["a", ""], ["a"] * 17, "x" * 1025])
def test_stop_strings_that_are_empty_too_many_or_too_long_are_refused(stop):
    with pytest.raises(RequestProblem) as refused:
        plan(chat(stop=stop))
    assert refused.value.param == "stop"


def test_stop_strings_need_a_tokenizer():
    facts = Facts(max_model_len=100, max_new_tokens=None, stop_token_ids=(), has_tokenizer=False)
    with pytest.raises(RequestProblem, match="no tokenizer to match 'stop' with"):
        plan(tokens(stop="a"), facts=facts)


def test_a_seed_below_zero_is_a_seed():
    assert sampling(chat(seed=-1)).seed == 2**64 - 1
    assert sampling(chat(seed=7)).seed == 7


def test_no_seed_is_another_one_for_every_id_and_prompt_and_the_same_when_it_is_sent_again():
    assert sampling(chat()).seed != sampling(chat()).seed
    assert sampling(chat(request_id="r")).seed == sampling(chat(request_id="r")).seed
    prompts = [np.ones(3, dtype=np.int64)] * 2
    requests = plan_of(completion(prompt=["a", "a"]), prompts=prompts, headers={}, facts=FACTS).requests
    assert requests[0].sampling.seed != requests[1].sampling.seed


def test_top_k_of_minus_one_keeps_all():
    assert sampling(chat(top_k=-1)).top_k == 0


def test_id_and_deadline_come_from_the_body_or_else_the_headers_or_else_are_made():
    headers = {"x-request-id": "h", "x-request-timeout": "3.5"}
    named = plan(chat(request_id="b", deadline_s=2), headers=headers)
    assert (named.request_id, named.deadline_s) == ("b", 2.0)
    other = plan(chat(), headers=headers)
    assert (other.request_id, other.deadline_s) == ("h", 3.5)
    made = plan(chat())
    assert re.fullmatch(r"chatcmpl-[0-9a-f]{24}", made.request_id)
    assert made.deadline_s == 120.0


@pytest.mark.parametrize("text", ["soon", "nan", "inf"])
def test_a_deadline_header_that_is_no_number_is_refused(text):
    with pytest.raises(RequestProblem, match="give seconds") as refused:
        plan(chat(), headers={"x-request-timeout": text})
    assert refused.value.param == "x-request-timeout"


def test_each_prompt_has_its_own_id_and_they_share_what_else_was_asked():
    call = completion(
        prompt=["a", "b"], request_id="r", seed=3, session_id="s", group_key="g", min_policy_version=4, job="j"
    )
    prompts = [np.ones(3, dtype=np.int64), np.ones(4, dtype=np.int64)]
    requests = plan_of(call, prompts=prompts, headers={}, facts=FACTS).requests
    assert [request.request_id for request in requests] == ["r-0", "r-1"]
    assert {(r.session_id, r.group_key, r.min_policy_version, r.job, r.sampling.seed) for r in requests} == {
        ("s", "g", 4, "j", 3)
    }


def test_the_token_api_takes_what_vllms_clients_send():
    body = {
        "model": "m",
        "token_ids": [1, 2],
        "sampling_params": {
            "n": 1,
            "temperature": 1.0,
            "top_k": -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "logprobs": 1,
            "skip_special_tokens": False,
            "spaces_between_special_tokens": False,
            "detokenize": False,
        },
        "cache_salt": None,
        "priority": 0,
    }
    call = decode(json.dumps(body).encode(), TokenRequest)
    assert plan(call).logprobs
    assert prompts_of(call)[0].tolist() == [1, 2]


def test_aborts_need_their_ids():
    assert problem({}, AbortBody).param == "request_ids"
