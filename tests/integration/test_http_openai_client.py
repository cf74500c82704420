"""The public OpenAI client against a real replica: the embedded engine with SmolLM2's tokenizer, over real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import httpx2
import numpy as np
import openai
import pytest

from http_replica import MODEL, QUESTION, replica, tokenizer_in
from rollmill.config.serving import LimitSettings
from rollmill.generator.proto import policy_inference_pb2 as pb
from rollmill.generator.proto import policy_inference_pb2_grpc as pb_grpc

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tokenizer_in(tmp_path_factory.mktemp("tokenizer"))


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - another end of a socket has to notice something
            await asyncio.sleep(0.005)


async def test_chats_and_grpc_give_the_same_tokens_for_the_same_seed(tokenizer, tmp_path):
    async with replica(tokenizer, tmp_path) as served:
        reply: Any = await served.client.chat.completions.create(
            model=MODEL,
            messages=QUESTION,
            n=4,
            seed=11,
            temperature=0.5,
            max_tokens=12,
            logprobs=True,
            extra_body={"return_token_ids": True},
        )
        async with grpc.aio.insecure_channel(served.grpc_address) as channel:
            asked = pb.GenerateRequest(
                request_id="a",
                messages=pb.Messages(messages=[pb.Message(role="user", content="What is 2 + 2?")]),
                sampling=pb.SamplingParams(temperature=0.5, top_p=1.0, max_new_tokens=12, seed=11),
                siblings=4,
            )
            wired = await pb_grpc.PolicyInferenceStub(channel).Generate(asked, timeout=30)
    assert reply.prompt_token_ids == list(wired.prompt_ids)
    assert len({choice.message.content for choice in reply.choices}) == 4
    for choice, sample in zip(reply.choices, wired.samples, strict=True):
        assert choice.token_ids == list(sample.output_ids)
        assert choice.message.content == sample.text
        assert choice.logprobs is not None
        got = np.array([entry.logprob for entry in choice.logprobs.content or ()], dtype=np.float32)
        # Not to the last bit: the batches were different ones.
        np.testing.assert_allclose(got, np.array(sample.behavior_logprobs), atol=1e-5)
        assert choice.version_spans == [{"start_token": 0, "end_token": len(got), "policy_version": 1}]
    assert reply.usage is not None
    assert reply.usage.prompt_tokens == len(wired.prompt_ids)


async def test_a_stream_adds_up_to_the_reply_that_is_not_streamed(tokenizer, tmp_path):
    settings: Any = {"model": MODEL, "messages": QUESTION, "seed": 5, "max_tokens": 60}
    async with replica(tokenizer, tmp_path) as served:
        whole = await served.client.chat.completions.create(**settings)
        stream = await served.client.chat.completions.create(
            **settings, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert (chunks[-1].choices, chunks[-1].usage.prompt_tokens) == ([], whole.usage.prompt_tokens)
    assert "".join(c.choices[0].delta.content or "" for c in chunks[:-1]) == whole.choices[0].message.content
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason
    assert chunks[0].choices[0].delta.role == "assistant"


async def test_a_stop_string_that_begins_and_ends_within_tokens_cuts_streams_and_replies_alike(tokenizer, tmp_path):
    settings: Any = {"model": MODEL, "messages": QUESTION, "seed": 5, "max_tokens": 60}
    ids: Any = {"extra_body": {"return_token_ids": True}}
    async with replica(tokenizer, tmp_path) as served:
        text = (await served.client.chat.completions.create(**settings)).choices[0].message.content or ""
        stop = text[len(text) // 2 - 3 : len(text) // 2 + 3]
        cut = (await served.client.chat.completions.create(**settings, stop=[stop], **ids)).choices[0]
        stream = await served.client.chat.completions.create(**settings, stop=[stop], stream=True)
        streamed = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        await until(lambda: served.service.status().running == 0)
    assert cut.message.content == streamed == text[: text.index(stop)]
    assert (cut.finish_reason, cut.stop_reason) == ("stop", stop)
    match = cut.stop_match
    assert match["end_token"] == len(cut.token_ids)
    assert text.startswith(served.codec.decode(cut.token_ids[: match["start_token"]]))
    assert stop in served.codec.decode(cut.token_ids)


async def test_completions_take_text_and_ids(tokenizer, tmp_path):
    async with replica(tokenizer, tmp_path) as served:
        create = served.client.completions.create
        text = await create(model=MODEL, prompt="One, two,", seed=3, max_tokens=8, logprobs=0)
        ids: list[int] = served.codec.encode("One, two,").tolist()
        same = await create(model=MODEL, prompt=ids, seed=3, max_tokens=8)
        several = await create(model=MODEL, prompt=[ids, ids[:2]], seed=3, max_tokens=8, n=2)
        listed = await served.client.models.list()
    assert text.choices[0].text == same.choices[0].text == several.choices[0].text
    assert [choice.index for choice in several.choices] == [0, 1, 2, 3]
    assert text.choices[0].logprobs is not None
    assert len(text.choices[0].logprobs.token_logprobs or ()) == text.usage.completion_tokens  # pyright: ignore
    assert [model.id for model in listed.data] == [MODEL]


async def test_errors_come_as_the_clients_own_classes(tokenizer, tmp_path):
    limits = LimitSettings(max_requests=16, max_new_tokens=350)
    token = "correct-horse-battery"
    async with replica(tokenizer, tmp_path, token=token, limits=limits) as served:
        create = served.client.chat.completions.create
        asked: Any = {"model": MODEL, "messages": QUESTION}
        with pytest.raises(openai.NotFoundError, match="model 'gpt' is not served here") as unknown:
            await create(**{**asked, "model": "gpt"})
        with pytest.raises(openai.BadRequestError, match="Unknown parameter: 'beam_width'") as odd:
            await create(**asked, extra_body={"beam_width": 4})
        with pytest.raises(openai.BadRequestError, match="top_logprobs"):
            await create(**asked, logprobs=True, top_logprobs=5)
        with pytest.raises(openai.BadRequestError, match=r"generator\.limits\.max_new_tokens is 350"):
            await create(**asked, max_tokens=351)
        full = asyncio.ensure_future(create(**asked, n=16, max_tokens=300))
        await until(lambda: served.service.status().running == 8)  # all that decode at once; the others wait
        with pytest.raises(openai.RateLimitError) as crowded:
            await create(**asked)
        full.cancel()
        await until(lambda: served.service.status().running == 0)
        with pytest.raises(openai.APIStatusError, match=r"deadline of 0\.05 s") as late:
            await create(**asked, max_tokens=300, extra_body={"deadline_s": 0.05})
        with pytest.raises(openai.AuthenticationError):
            await served.client.with_options(api_key="wrong").chat.completions.create(**asked)
    assert (unknown.value.code, odd.value.param) == ("model_not_found", "beam_width")
    assert int(crowded.value.response.headers["retry-after"]) >= 1
    assert late.value.status_code == 504


async def test_an_error_within_a_stream_is_raised_by_the_client(tokenizer, tmp_path):
    async with replica(tokenizer, tmp_path) as served:
        stream = await served.client.chat.completions.create(
            model=MODEL, messages=QUESTION, stream=True, max_tokens=380, extra_body={"request_id": "long"}
        )
        await stream.__anext__()
        await served.service.abort("long")
        with pytest.raises(openai.APIError, match="request long was aborted"):
            [chunk async for chunk in stream]


async def test_the_client_that_is_not_asynchronous_works_too(tokenizer, tmp_path):
    def ask(url: str) -> str | None:
        with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=30) as client:
            reply = client.chat.completions.create(model=MODEL, messages=QUESTION, seed=5, max_tokens=8)
            return reply.choices[0].message.content

    async with replica(tokenizer, tmp_path) as served:
        plain = await asyncio.to_thread(ask, served.base_url)
        settings: Any = {"model": MODEL, "messages": QUESTION, "seed": 5, "max_tokens": 8}
        reply = await served.client.chat.completions.create(**settings)
    assert plain == reply.choices[0].message.content


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_hangs_up_frees_the_kv_and_others_go_on(tokenizer, tmp_path, stream):
    async with replica(tokenizer, tmp_path) as served:
        settings: Any = {"model": MODEL, "messages": QUESTION, "seed": 5, "max_tokens": 20}
        alone = await served.client.chat.completions.create(**settings)
        async with httpx2.AsyncClient(base_url=served.base_url, timeout=30) as other:
            body = {"messages": QUESTION, "max_tokens": 380, "stream": stream, "n": 2, "ignore_eos": True}
            leaving = asyncio.ensure_future(other.post("/chat/completions", json=body))
            await until(lambda: served.service.status().running == 2)
            beside = asyncio.ensure_future(served.client.chat.completions.create(**settings))
            leaving.cancel()
            await asyncio.wait({leaving})
        assert (await beside).choices[0].message.content == alone.choices[0].message.content
        await until(lambda: served.service.status().running == 0)
        status = served.service.status()
        assert (status.waiting, status.kv_used_tokens) == (0, 0)
