"""The routes of the HTTP face, without a socket: what is answered, and with which status everything is refused."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from http_builders import MODEL, TOY, Peer, chat, choices_of, events_of, in_world, says
from rollmill.config.serving import LimitSettings
from rollmill.errors import MissingExtraError
from rollmill.generator.engines.fake import FakeFaults, FakeLatency
from rollmill.generator.http import HttpLimits, openapi, serve_http
from rollmill.generator.http.answers import ChatAnswer
from rollmill.generator.state import ReplicaState, move
from rollmill.types import GenerateRequest, Message, SamplingParams

CHAT, COMPLETION, TOKENS = "/v1/chat/completions", "/v1/completions", "/inference/v1/generate"
SCORE = "/inference/v1/score"
ONE_S = FakeLatency(step_s=1.0)


def tokens(*ids: int, **fields: Any) -> dict[str, Any]:
    sampling = fields.pop("sampling_params", {"max_tokens": 6, "seed": 1, "ignore_eos": True})
    return {"token_ids": list(ids or (10, 11, 12)), "sampling_params": sampling, **fields}


def answered(path: str, body: Any, **settings: Any) -> Any:
    """The JSON of a call that succeeds."""

    async def scenario(client, service):
        answer = await client.post(path, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    return in_world(scenario, **settings)


def refused(path: str, body: Any, **settings: Any) -> tuple[int, Any, Any]:
    """Status, error and headers of a call that fails."""

    async def scenario(client, service):
        answer = await client.post(path, json=body)
        return answer.status_code, answer.json()["error"], answer.headers

    return in_world(scenario, **settings)


async def until(condition: Callable[[], bool]) -> None:
    """Let virtual time pass until something is so."""
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


# -- answers


def test_a_chat_has_the_tokens_that_the_service_gives_for_the_same_seed():
    async def scenario(client, service):
        answer = await client.post(CHAT, json=chat(seed=5, temperature=0.7, return_token_ids=True, logprobs=True))
        prompt = service.encode((Message("user", "2+2?"),))
        sampling = SamplingParams(temperature=0.7, seed=5, max_new_tokens=8, stop_token_ids=TOY.stop_token_ids)
        (turn,) = await service.generate(GenerateRequest(request_id="a", prompt_ids=prompt, sampling=sampling))
        return answer.json(), prompt, turn

    reply, prompt, turn = in_world(scenario)
    (choice,) = reply["choices"]
    assert choice["token_ids"] == turn.output_ids.tolist()
    assert [entry["logprob"] for entry in choice["logprobs"]["content"]] == turn.behavior_logprobs.tolist()
    assert choice["message"] == {"role": "assistant", "content": TOY.decode(turn.output_ids), "refusal": None}
    assert reply["prompt_token_ids"] == list(prompt)
    assert choice["version_spans"] == [{"start_token": 0, "end_token": len(turn.output_ids), "policy_version": 1}]


def test_a_chat_has_the_shape_of_openais():
    reply = answered(CHAT, chat(max_tokens=20, request_id="r"), script=says("4."), latency=ONE_S)
    assert (reply["id"], reply["object"], reply["model"], reply["system_fingerprint"]) == (
        "r",
        "chat.completion",
        MODEL,
        None,
    )
    (choice,) = reply["choices"]
    assert (choice["index"], choice["finish_reason"], choice["logprobs"]) == (0, "stop", None)
    assert choice["stop_reason"] == TOY.end_of_turn_id
    assert choice["timings"] == {"queued_s": 0.0, "prefill_s": 0.0, "decode_s": 2.0}
    assert "token_ids" not in choice
    assert "prompt_token_ids" not in reply
    assert reply["usage"] == {
        "prompt_tokens": 7,
        "completion_tokens": 3,
        "total_tokens": 10,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def test_samples_of_one_prompt_differ_and_the_prompt_counts_once():
    reply = answered(CHAT, chat(n=4, seed=3, return_token_ids=True, ignore_eos=True))
    assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2, 3]
    assert len({tuple(choice["token_ids"]) for choice in reply["choices"]}) == 4
    assert (reply["usage"]["prompt_tokens"], reply["usage"]["completion_tokens"]) == (7, 32)


def test_completions_of_several_prompts_come_in_their_order():
    body = {
        "prompt": ["ab", "abc"],
        "n": 2,
        "return_token_ids": True,
        "logprobs": 0,
        "max_tokens": 3,
        "ignore_eos": True,
    }
    reply = answered(COMPLETION, body)
    assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2, 3]
    assert [len(choice["prompt_token_ids"]) for choice in reply["choices"]] == [2, 2, 3, 3]
    assert reply["usage"]["prompt_tokens"] == 5
    for choice in reply["choices"]:
        assert "".join(choice["logprobs"]["tokens"]) == choice["text"] == TOY.decode(choice["token_ids"])
        assert choice["logprobs"]["text_offset"][0] == 0
        assert len(choice["logprobs"]["token_logprobs"]) == 3


def test_a_prompt_of_ids_and_its_text_give_the_same():
    ids = answered(COMPLETION, {"prompt": TOY.encode("ab"), "seed": 1})
    text = answered(COMPLETION, {"prompt": "ab", "seed": 1})
    assert ids["choices"][0]["text"] == text["choices"][0]["text"] != ""


def test_tokens_go_in_and_out_as_vllm_has_it():
    body = tokens(sampling_params={"max_tokens": 4, "logprobs": 1, "seed": 2, "ignore_eos": True}, request_id="r")
    reply = answered(TOKENS, body)
    assert (reply["request_id"], reply["output_mode"]) == ("r", "tokens")
    (choice,) = reply["choices"]
    assert [entry["token_id"] for entry in choice["logprobs"]["content"]] == choice["token_ids"]
    assert len(choice["token_ids"]) == 4
    assert choice["weight_versions"] == [{"version": "1", "start": 0, "end": 4}]
    assert choice["finish_reason"] == "length"


def test_a_replica_without_tokenizer_takes_ids_and_says_so_to_text():
    reply = answered(TOKENS, tokens(), codec=None)
    assert len(reply["choices"][0]["token_ids"]) == 6
    status, error, _ = refused(CHAT, chat(), codec=None)
    assert status == 400
    assert "takes token ids only" in error["message"]


def test_the_versions_of_a_swap_in_flight_are_in_the_reply():
    async def scenario(client, service):
        engine = service.replica.engine
        asking = asyncio.ensure_future(client.post(TOKENS, json=tokens()))
        await until(lambda: engine.load().output_tokens == 2)
        await engine.pause("keep")
        await engine.update({}, policy_version=2, digest="d2", kv="keep")
        await engine.resume()
        return (await asking).json()["choices"][0]

    choice = in_world(scenario, latency=ONE_S)
    assert choice["version_spans"] == [
        {"start_token": 0, "end_token": 2, "policy_version": 1},
        {"start_token": 2, "end_token": 6, "policy_version": 2},
    ]
    assert choice["weight_versions"] == [
        {"version": "1", "start": 0, "end": 2},
        {"version": "2", "start": 2, "end": 6},
    ]


# -- stop strings


def test_a_stop_string_cuts_the_text_and_the_ids_end_with_it():
    reply = answered(
        CHAT, chat(max_tokens=20, stop=["x", "not"], return_token_ids=True, logprobs=True), script=says("4, not 5.")
    )
    (choice,) = reply["choices"]
    assert choice["message"]["content"] == "4, "
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "not")
    assert choice["stop_match"] == {"text": "not", "start_token": 3, "end_token": 6}
    assert choice["token_ids"] == TOY.encode("4, not")
    assert len(choice["logprobs"]["content"]) == 6
    assert choice["version_spans"] == [{"start_token": 0, "end_token": 6, "policy_version": 1}]
    assert reply["usage"]["completion_tokens"] == 6


def test_a_stop_string_ends_its_own_sample_alone_and_the_engine_stops_sampling_it():
    def script(request: GenerateRequest) -> list[int]:
        return TOY.encode("ab." * 3 if request.request_id.endswith("#0") else "cde" * 3)

    async def scenario(client, service):
        answer = await client.post(CHAT, json=chat(max_tokens=9, n=2, stop=".", ignore_eos=True))
        return answer.json()["choices"], service.status()

    choices, status = in_world(scenario, script=script, latency=ONE_S)
    assert [choice["message"]["content"] for choice in choices] == ["ab", "cdecdecde"]
    assert [choice["finish_reason"] for choice in choices] == ["stop", "length"]
    assert 3 <= status.output_tokens - 9 <= 4  # the first sample's, not all nine
    assert status.running == 0


@pytest.mark.parametrize(("body", "expected"), [({}, "of the header"), ({"session_id": "of the body"}, "of the body")])
def test_a_session_may_be_named_by_a_header(body, expected):
    asked: list[GenerateRequest] = []

    def script(request: GenerateRequest) -> None:
        asked.append(request)

    async def scenario(client, service):
        headers = {"X-Session-ID": "of the header"}
        assert (await client.post(TOKENS, json=tokens(**body), headers=headers)).status_code == 200

    in_world(scenario, script=script)
    assert [request.session_id for request in asked] == [expected]


def test_tokens_can_be_stopped_by_text_too():
    body = tokens(sampling_params={"max_tokens": 20, "stop": "not"})
    (choice,) = answered(TOKENS, body, script=says("4, not 5."))["choices"]
    assert choice["token_ids"] == TOY.encode("4, not")


# -- streams


@pytest.mark.parametrize("stop", [None, "not"])
def test_a_streamed_chat_adds_up_to_the_one_that_is_not(stop):
    body = chat(max_tokens=20, n=2, seed=5, stop=stop, return_token_ids=True, logprobs=True)

    async def scenario(client, service):
        whole = await client.post(CHAT, json=body)
        streamed = await client.post(CHAT, json={**body, "stream": True, "stream_options": {"include_usage": True}})
        assert streamed.headers["content-type"].startswith("text/event-stream")
        return whole.json(), events_of(streamed.text)

    whole, events = in_world(scenario, script=says("4, not 5."))
    assert events[-1] == "[DONE]"
    assert events[-2]["choices"] == []
    assert events[-2]["usage"] == whole["usage"]
    assert {event["object"] for event in events[:-1]} == {"chat.completion.chunk"}
    assert [event["usage"] for event in events[:-2]] == [None] * (len(events) - 2)
    assert events[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    for choice in whole["choices"]:
        pieces = list(choices_of(events, index=choice["index"]))
        assert pieces[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(piece["delta"].get("content", "") for piece in pieces) == choice["message"]["content"]
        assert [token for piece in pieces for token in piece.get("token_ids", ())] == choice["token_ids"]
        logprobs = [entry for piece in pieces if piece["logprobs"] for entry in piece["logprobs"]["content"]]
        assert logprobs == choice["logprobs"]["content"]
        for field in ("finish_reason", "stop_reason", "stop_match", "version_spans", "cached_tokens"):
            assert pieces[-1].get(field) == choice.get(field)
        assert [piece["finish_reason"] for piece in pieces[:-1]] == [None] * (len(pieces) - 1)


def test_scores_are_those_of_the_service_and_say_which_version_gave_them():
    async def scenario(client, service):
        ids = {"token_ids": [3, 4, 5]}
        answers = [await client.post(SCORE, json={**ids, **more}) for more in ({}, {"what": "reward"})]
        logprobs, _ = await service.score(np.array([3, 4, 5]))
        return [answer.json() for answer in answers], logprobs

    (scored, rewarded), logprobs = in_world(scenario)
    assert scored == {"logprobs": logprobs.tolist(), "policy_version": 1}
    assert rewarded == {"rewards": [float(logprobs.mean())], "policy_version": 1}


@pytest.mark.parametrize(
    ("body", "param", "text"),
    [
        ({"token_ids": [1, 2], "what": "entropy"}, "what", "Invalid enum value 'entropy'"),
        ({"token_ids": [1, 2], "what": "reward", "adapter": "maths"}, "adapter", "log-probs alone"),
        ({"token_ids": [1, 2], "temperature": 0.5}, "temperature", "Unknown parameter"),
        ({"token_ids": [1, 2], "deadline_s": 0}, "deadline_s", "> 0.0"),
        ({"token_ids": [-1]}, "token_ids[0]", ">= 0"),
    ],
)
def test_a_score_that_cannot_be_given_names_the_field(body, param, text):
    status, error, _ = refused(SCORE, body)
    assert (status, error["param"], text in error["message"]) == (400, param, True)


def test_a_draining_replica_gives_no_rewards():
    async def scenario(client, service):
        await service.drain(0.1, reason="told to")
        answer = await client.post(SCORE, json={"token_ids": [1, 2], "what": "reward"})
        return answer.status_code, answer.json()["error"]["message"]

    status, text = in_world(scenario)
    assert (status, "a sequence to score refused" in text) == (503, True)


def test_a_streamed_completion_adds_up_to_the_one_that_is_not():
    body = {"prompt": ["ab", "abc"], "max_tokens": 9, "seed": 5, "return_token_ids": True, "logprobs": 0}

    async def scenario(client, service):
        whole = await client.post(COMPLETION, json=body)
        return whole.json(), events_of((await client.post(COMPLETION, json={**body, "stream": True})).text)

    whole, events = in_world(scenario)
    assert events[-1] == "[DONE]"
    assert all("usage" not in event for event in events[:-1])
    for choice in whole["choices"]:
        pieces = list(choices_of(events, index=choice["index"]))
        assert pieces[0]["prompt_token_ids"] == choice["prompt_token_ids"]
        assert "".join(piece["text"] for piece in pieces) == choice["text"]
        for field in ("tokens", "token_logprobs", "text_offset"):
            found = [one for piece in pieces if piece["logprobs"] for one in piece["logprobs"][field]]
            assert found == choice["logprobs"][field]
        assert pieces[-1]["finish_reason"] == choice["finish_reason"]


def test_streamed_tokens_add_up_to_those_that_are_not():
    body = tokens(sampling_params={"max_tokens": 6, "seed": 4, "logprobs": 0, "n": 2}, return_token_ids=True)

    async def scenario(client, service):
        whole = await client.post(TOKENS, json=body)
        return whole.json(), events_of((await client.post(TOKENS, json={**body, "stream": True})).text)

    whole, events = in_world(scenario)
    assert events[0]["prompt_token_ids"] == [10, 11, 12]
    for choice in whole["choices"]:
        pieces = list(choices_of(events, index=choice["index"]))
        assert [token for piece in pieces for token in piece["token_ids"]] == choice["token_ids"]
        assert pieces[-1]["weight_versions"] == choice["weight_versions"]
        assert pieces[-1]["finish_reason"] == choice["finish_reason"]


def test_a_stream_that_is_refused_has_the_status_of_the_refusal():
    status, error, _ = refused(CHAT, chat(stream=True, temperature=-1))
    assert (status, error["type"]) == (400, "invalid_request_error")


def test_a_stream_that_fails_half_way_ends_with_an_error_and_no_end_mark():
    async def scenario(client, service):
        return await client.post(CHAT, json=chat(stream=True, max_tokens=50, deadline_s=3.5, ignore_eos=True))

    answer = in_world(scenario, latency=ONE_S, script=says("a long story"))
    *events, last = events_of(answer.text)
    assert answer.status_code == 200
    assert len(events) == 4  # the role, then a token each second
    assert last["error"]["code"] == "deadline"
    assert "within its deadline of 3.5 s" in last["error"]["message"]


# -- refusals


def drain(service: Any) -> None:
    service.replica.standing = move(service.replica.standing, ReplicaState.DRAINING, reason="scaled in")


@pytest.mark.parametrize(
    ("path", "body", "settings", "status", "code", "again"),
    [
        (CHAT, chat(model="gpt"), {}, 404, "model_not_found", None),
        ("/v1/embeddings", {}, {}, 404, "unknown_url", None),
        (CHAT, chat(temperature=-1), {}, 400, "data", None),
        (CHAT, chat(top_p=0), {}, 400, "data", None),
        (CHAT, chat(deadline_s=-1), {}, 400, "data", None),
        (CHAT, chat(n=300), {}, 400, "data", None),
        (CHAT, chat("x" * 300), {}, 400, "context_length_exceeded", None),
        (CHAT, chat("\u00fc"), {}, 400, "data", None),
        (COMPLETION, {"prompt": ""}, {}, 400, "data", None),
        (TOKENS, tokens(5000), {}, 400, "data", None),
        (CHAT, chat(min_policy_version=2), {}, 409, "engine", "false"),
        (CHAT, chat(), {"max_model_len": 0}, 503, "not_serving", "true"),
        (CHAT, chat(n=5), {"limits": LimitSettings(max_requests=4)}, 400, "data", None),
        (CHAT, chat(max_tokens=50, deadline_s=3.5, ignore_eos=True), {"latency": ONE_S}, 504, "deadline", "false"),
        (CHAT, chat(), {"faults": FakeFaults(die_at_request=1)}, 503, "engine_dead", "true"),
        (CHAT, chat("x" * 3000), {"limits": LimitSettings(max_body_bytes=1024)}, 413, "request_too_large", None),
    ],
)
def test_what_cannot_be_served_has_its_status_its_code_and_whether_to_try_again(
    path, body, settings, status, code, again
):
    got, error, headers = refused(path, body, **settings)
    assert (got, error["code"], headers.get("x-should-retry")) == (status, code, again)
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == ("server_error" if status >= 500 else "invalid_request_error")


def test_a_method_that_a_path_does_not_answer_is_told_which_it_does():
    async def scenario(client, service):
        return await client.get(CHAT), await client.post("/health")

    one, other = in_world(scenario)
    assert (one.status_code, one.headers["allow"], one.json()["error"]["code"]) == (405, "POST", "method_not_allowed")
    assert (other.status_code, other.headers["allow"]) == (405, "GET")


def test_a_path_is_answered_to_the_letter_and_its_head_like_itself():
    async def scenario(client, service):
        return await client.head("/health"), await client.get("/health/"), await client.get(f"/v1/models/{MODEL}/x")

    head, slash, model = in_world(scenario)
    assert (head.status_code, head.content) == (200, b"")
    assert (slash.status_code, slash.json()["error"]["code"]) == (404, "unknown_url")
    assert f"{MODEL}/x" in model.json()["error"]["message"]


def test_an_id_in_use_is_refused_and_the_first_request_goes_on():
    async def scenario(client, service):
        first = asyncio.ensure_future(client.post(CHAT, json=chat(request_id="r")))
        await until(lambda: service.status().running == 1)
        second = await client.post(CHAT, json=chat(request_id="r"))
        return await first, second

    first, second = in_world(scenario, latency=ONE_S)
    assert (second.status_code, second.json()["error"]["code"]) == (409, "request_id_in_use")
    assert second.headers["x-should-retry"] == "false"
    assert first.status_code == 200


def test_too_many_requests_are_told_when_to_ask_again():
    async def scenario(client, service):
        running = asyncio.ensure_future(client.post(CHAT, json=chat(n=4, ignore_eos=True)))
        await until(lambda: service.status().running == 4)
        answer = await client.post(CHAT, json=chat())
        await running
        return answer

    answer = in_world(scenario, latency=ONE_S, limits=LimitSettings(max_requests=4))
    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "rate_limit_exceeded")
    assert (answer.headers["retry-after"], answer.headers["retry-after-ms"]) == ("1", "1000")
    assert answer.headers["x-should-retry"] == "true"


def test_a_draining_replica_sends_its_callers_elsewhere():
    async def scenario(client, service):
        before = await client.get("/health")
        drain(service)
        return before, await client.get("/health"), await client.post(CHAT, json=chat())

    before, health, answer = in_world(scenario)
    assert (before.status_code, before.json()["status"]) == (200, "serving")
    assert (health.status_code, health.json()) == (503, {"status": "draining", "reason": "scaled in"})
    assert (answer.status_code, answer.headers["x-should-retry"]) == (503, "true")
    assert answer.headers["rollmill-code"] == "not_serving"


def test_only_health_is_open_without_the_token():
    token = "correct horse battery"

    async def scenario(client, service):
        paths = ("/v1/models", "/metrics", "/version", "/openapi.json", "/nowhere")
        open_ = await client.get("/health")
        closed = [await client.get(path) for path in paths]
        wrong = await client.post(CHAT, json=chat(), headers={"authorization": "Bearer correct horse"})
        right = await client.post(CHAT, json=chat(), headers={"authorization": f"Bearer {token}"})
        return open_, closed, wrong, right

    open_, closed, wrong, right = in_world(scenario, face={"token": token})
    assert open_.status_code == 200
    assert [answer.status_code for answer in closed] == [401] * 5
    assert wrong.json()["error"]["code"] == "invalid_api_key"
    assert wrong.headers["www-authenticate"] == "Bearer"
    assert right.status_code == 200


def test_callers_without_the_token_hear_their_own_id_alone():
    async def scenario(client, service):
        named = await client.get("/v1/models", headers={"x-request-id": "mine"})
        return named, await client.get("/v1/models")

    named, unnamed = in_world(scenario, face={"token": "correct horse battery"})
    assert (named.status_code, named.headers["x-request-id"]) == (401, "mine")
    assert (unnamed.status_code, "x-request-id" in unnamed.headers) == (401, False)


def test_an_answer_carries_the_callers_id_also_when_it_is_an_error():
    async def scenario(client, service):
        headers = {"x-request-id": "mine"}
        good = await client.post(CHAT, json=chat(), headers=headers)
        bad = await client.post(CHAT, json=chat(model="gpt"), headers=headers)
        odd = await client.post(CHAT, json=chat(request_id="two\nlines"))
        return good, bad, odd

    good, bad, odd = in_world(scenario)
    assert (good.headers["x-request-id"], good.json()["id"], bad.headers["x-request-id"]) == ("mine", "mine", "mine")
    assert odd.json()["id"] == "two\nlines"
    assert "x-request-id" not in odd.headers


# -- aborts, and clients that leave or do not read


def test_an_abort_by_id_is_an_error_to_a_chat_and_a_reason_to_tokens():
    async def scenario(client, service):
        asked = [
            asyncio.ensure_future(client.post(CHAT, json=chat(request_id="c", n=2, ignore_eos=True))),
            asyncio.ensure_future(client.post(TOKENS, json=tokens(request_id="t"))),
            asyncio.ensure_future(
                client.post(COMPLETION, json={"prompt": ["a", "b"], "request_id": "several", "ignore_eos": True})
            ),
            asyncio.ensure_future(client.post(TOKENS, json=tokens(request_id="t1"))),
        ]
        await until(lambda: service.status().output_tokens >= 12)
        ids = ["c", "t", "several", "nobody"]
        aborted = await client.post("/inference/v1/abort_requests", json={"request_ids": ids})
        return aborted, [await answer for answer in asked]

    aborted, (chatted, cut, several, other) = in_world(scenario, latency=ONE_S)
    assert aborted.json() == {"aborted": ["c", "t", "several"]}
    assert (chatted.status_code, chatted.json()["error"]["code"]) == (499, "request_aborted")
    assert several.status_code == 499
    (choice,) = cut.json()["choices"]
    assert (choice["finish_reason"], len(choice["token_ids"])) == ("abort", 2)
    assert other.json()["choices"][0]["finish_reason"] == "length"


def test_tokens_past_their_deadline_come_with_what_there_is():
    (choice,) = answered(TOKENS, tokens(deadline_s=3.5), latency=ONE_S)["choices"]
    assert (choice["finish_reason"], len(choice["token_ids"])) == ("abort", 3)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_place(stream):
    async def scenario(client, service):
        peer = Peer(chat(max_tokens=200, ignore_eos=True, stream=stream, n=2))
        asking = asyncio.ensure_future(peer.ask(service))
        await until(lambda: service.status().output_tokens >= 4)
        assert service.status().running == 2
        peer.left.set()
        await asking
        return service.status().running, service.replica.standing.state, peer

    running, state, peer = in_world(scenario, latency=ONE_S)
    assert running == 0
    assert state is ReplicaState.SERVING
    assert peer.status == (200 if stream else None)
    assert "[DONE]" not in peer.body


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_before_the_first_token_is_not_answered(stream):
    async def scenario(client, service):
        peer = Peer(chat(max_tokens=200, ignore_eos=True, stream=stream))
        asking = asyncio.ensure_future(peer.ask(service))
        await until(lambda: service.status().running == 1)
        peer.left.set()
        await asking
        return service.status().running, service.status().output_tokens, peer.sent

    assert in_world(scenario, latency=ONE_S) == (0, 0, [])


def test_a_defect_within_a_stream_cuts_it_short_without_an_end(monkeypatch):
    def defect(self: Any, samples: Any) -> Any:
        raise RuntimeError("a defect")

    monkeypatch.setattr(ChatAnswer, "closing", defect)
    peer = Peer(chat(stream=True, stream_options={"include_usage": True}))

    async def scenario(client, service):
        await peer.ask(service)

    with pytest.raises(ExceptionGroup) as raised:
        in_world(scenario)
    assert raised.group_contains(RuntimeError, match="a defect")
    assert peer.status == 200
    assert all(message.get("more_body", True) for message in peer.sent)
    assert "[DONE]" not in peer.body


def test_a_reader_that_takes_nothing_for_too_long_is_cut_off_and_frees_its_place():
    async def scenario(client, service):
        peer = Peer(chat(max_tokens=200, ignore_eos=True, stream=True))
        asking = asyncio.ensure_future(peer.ask(service))
        await until(lambda: len(peer.sent) >= 2)
        peer.reads.clear()
        stuck_s = asyncio.get_running_loop().time()
        await asking
        return service.status().running, peer, asyncio.get_running_loop().time() - stuck_s

    running, peer, waited_s = in_world(
        scenario, latency=ONE_S, limits=LimitSettings(stream_stall_s=7.0), script=says("a" * 100)
    )
    assert running == 0
    assert peer.cut
    assert 6.0 <= waited_s <= 8.5  # the first token that could not be handed over came within a second


def test_a_reader_that_falls_behind_is_told_so_and_memory_stays_bounded():
    async def scenario(client, service):
        peer = Peer(chat(max_tokens=200, ignore_eos=True, stream=True))
        asking = asyncio.ensure_future(peer.ask(service))
        await until(lambda: len(peer.sent) >= 2)
        peer.reads.clear()
        await until(lambda: service.status().running == 0)
        had = service.status().output_tokens
        peer.reads.set()
        await asking
        return had, peer

    limits = LimitSettings(stream_stall_s=1000.0, stream_events=16)
    had, peer = in_world(scenario, latency=ONE_S, limits=limits, script=says("a" * 100))
    assert had < 30
    assert events_of(peer.body)[-1]["error"]["code"] == "slow_reader"
    assert not peer.cut


def test_a_body_that_does_not_end_is_given_up():
    async def scenario(client, service):
        peer = Peer([b'{"model":'], complete=False)
        await peer.ask(service, bounds=HttpLimits(body_s=5.0))
        return peer, asyncio.get_running_loop().time()

    peer, at_s = in_world(scenario)
    assert (peer.status, at_s) == (408, 5.0)
    assert "9 bytes of the body came within 5 s" in peer.body


def test_a_body_in_pieces_is_refused_as_soon_as_it_is_too_large_and_its_client_hears_it():
    async def scenario(client, service):
        peer = Peer([b"x" * 800] * 4)
        await peer.ask(service, limits=LimitSettings(max_body_bytes=1024))
        return peer

    peer = in_world(scenario)
    assert peer.status == 413
    assert (b"connection", b"close") in peer.sent[0]["headers"]
    assert "the body has 1600 bytes or more" in peer.body


def test_a_client_that_leaves_within_its_body_is_not_answered():
    async def scenario(client, service):
        peer = Peer([b"{"], complete=False)
        peer.left.set()
        await peer.ask(service)
        return peer.sent

    assert in_world(scenario) == []


# -- what a replica says of itself


def test_models_are_listed_with_the_version_that_is_served():
    async def scenario(client, service):
        return [(await client.get(path)).json() for path in ("/v1/models", f"/v1/models/{MODEL}", "/v1/models/gpt")]

    listed, one, unknown = in_world(scenario)
    assert listed == {"object": "list", "data": [one]}
    assert (one["id"], one["object"], one["policy_version"], one["max_model_len"]) == (MODEL, "model", 1, 256)
    assert unknown["error"]["code"] == "model_not_found"


def test_where_any_name_is_taken_a_reply_has_the_one_that_was_asked_for():
    async def scenario(client, service):
        service.models = ()
        unnamed = chat()
        del unnamed["model"]
        return (await client.post(CHAT, json=unnamed)).json(), (await client.get("/v1/models")).json()

    reply, listed = in_world(scenario)
    assert (reply["model"], listed["data"]) == ("", [])


def test_metrics_are_shown_as_they_are_rendered():
    class Metrics:
        def render(self) -> bytes:
            return b"rollmill_requests_running 0\n"

    async def scenario(client, service):
        return await client.get("/metrics")

    shown, without = in_world(scenario, face={"metrics": Metrics()}), in_world(scenario)
    assert shown.content == b"rollmill_requests_running 0\n"
    assert shown.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert without.status_code == 404


def test_the_openapi_document_is_served_and_describes_every_route_and_record():
    async def scenario(client, service):
        served = (await client.get("/openapi.json")).json()
        methods = {path: set(described) for path, described in served["paths"].items()}
        known = {}
        for path in methods:
            concrete = path.replace("{model}", MODEL)
            answers = {name: await client.request(name.upper(), concrete) for name in ("get", "post")}
            known[path] = {name for name, answer in answers.items() if answer.status_code != 405}
        return served, methods, known

    document, methods, known = in_world(scenario, face={"metrics": None})
    assert document == openapi()
    assert methods == known
    refs = set(find_refs(document))
    assert len(refs) > 20
    assert {ref.removeprefix("#/components/schemas/") for ref in refs} <= set(document["components"]["schemas"])
    described = document["components"]["schemas"]["ChatRequest"]["properties"]
    assert described["temperature"]["description"] == "divides the logits; 0 is greedy."
    assert described["tool_choice"]["description"] == 'only "none" or "auto"'
    assert "description" not in document["components"]["schemas"]["IdLogprob"]["properties"]["top_logprobs"]
    codes = set(document["paths"][CHAT]["post"]["responses"])
    assert {"400", "401", "404", "408", "409", "413", "429", "499", "503", "504"} <= codes


@pytest.mark.parametrize("missing", ["uvicorn", "starlette"])
def test_serving_without_a_package_names_it_and_the_extra(monkeypatch, missing):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == missing else object())

    async def scenario(client, service):
        with pytest.raises(MissingExtraError, match=rf"{missing}.*rollmill\[serve\]"):
            await serve_http(service, stop=asyncio.Event())

    in_world(scenario)


def find_refs(part: Any) -> list[str]:
    if isinstance(part, dict):
        own = [part["$ref"]] if "$ref" in part else []
        return own + [ref for value in part.values() for ref in find_refs(value)]
    return [ref for value in part for ref in find_refs(value)] if isinstance(part, list) else []
