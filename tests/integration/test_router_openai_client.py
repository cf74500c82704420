"""The public OpenAI client against a router over two replicas: text in and out, as from one of them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import openai
import pytest

from http_replica import MODEL, QUESTION, Replica, replica, tokenizer_in
from rollmill.clock import SystemClock
from rollmill.config.router import RouterSettings
from rollmill.generator.http import serve_http
from rollmill.generator.router.main import RouterAddresses, serve_router
from rollmill.generator.router.membership import Entry, FixedList
from rollmill.generator.router.service import RouterService
from rollmill.generator.router.upstream import GrpcUpstream

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tokenizer_in(tmp_path_factory.mktemp("tokenizer"))


async def http(service: RouterService, stop: asyncio.Event, on_bound: Callable[[str], None]) -> None:
    await serve_http(service, stop=stop, on_bound=lambda port: on_bound(f"http://127.0.0.1:{port}/v1"))


@contextlib.asynccontextmanager
async def routed(tokenizer: Path, folder: Path) -> AsyncIterator[tuple[openai.AsyncOpenAI, Replica, Replica]]:
    """A client of a router that has the tokenizer, and the two replicas behind it."""
    folders = [folder / "a", folder / "b"]
    for one in folders:
        one.mkdir()
    async with replica(tokenizer, folders[0]) as first, replica(tokenizer, folders[1]) as second:
        service = RouterService(
            RouterSettings.model_validate({"poll_s": 0.1}),
            source=FixedList([Entry(first.grpc_address), Entry(second.grpc_address)]),
            connect=GrpcUpstream,
            clock=SystemClock(),
            codec=first.codec,
            models=[MODEL],
        )
        stop = asyncio.Event()
        started: asyncio.Future[RouterAddresses] = asyncio.get_running_loop().create_future()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(
                serve_router(service, faces=[http], stop=stop, drain_s=0.0, on_serving=started.set_result)
            )
            url = (await started).faces[0]
            async with asyncio.timeout(20):
                while [one.state for one in service.status_message().replicas] != ["serving"] * 2:
                    service.changed.clear()
                    await service.changed.wait()
            client = openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=30)
            try:
                yield client, first, second
            finally:
                await client.close()
                stop.set()


async def test_chats_are_those_of_one_replica_asked_directly(tokenizer, tmp_path):
    settings: Any = {"model": MODEL, "messages": QUESTION, "n": 2, "seed": 11, "max_tokens": 12, "logprobs": True}
    settings["extra_body"] = {"return_token_ids": True}
    async with routed(tokenizer, tmp_path) as (client, first, _):
        direct = await first.client.chat.completions.create(**settings)
        through = await client.chat.completions.create(**settings)
    assert through.usage.total_tokens == direct.usage.total_tokens
    for one, other in zip(through.choices, direct.choices, strict=True):
        got, expected = one.model_dump(), other.model_dump()
        for choice in (got, expected):
            del choice["timings"], choice["cached_tokens"]
            for entry in choice["logprobs"]["content"]:  # the batches were different ones
                entry["logprob"] = pytest.approx(entry["logprob"], abs=1e-5)
        assert got == expected


async def test_a_stream_adds_up_to_the_reply_that_is_not_streamed(tokenizer, tmp_path):
    settings: Any = {"model": MODEL, "messages": QUESTION, "seed": 5, "max_tokens": 60}
    async with routed(tokenizer, tmp_path) as (client, *_):
        whole = await client.chat.completions.create(**settings)
        stream = await client.chat.completions.create(**settings, stream=True)
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
    assert text == whole.choices[0].message.content != ""


async def test_completions_take_text_and_ids_and_the_model_is_listed(tokenizer, tmp_path):
    async with routed(tokenizer, tmp_path) as (client, first, _):
        text = await client.completions.create(model=MODEL, prompt="One, two,", seed=3, max_tokens=8)
        ids: list[int] = first.codec.encode("One, two,").tolist()
        same = await client.completions.create(model=MODEL, prompt=ids, seed=3, max_tokens=8)
        listed = await client.models.list()
    assert text.choices[0].text == same.choices[0].text
    assert [model.id for model in listed.data] == [MODEL]


async def test_errors_come_as_the_clients_own_classes(tokenizer, tmp_path):
    async with routed(tokenizer, tmp_path) as (client, *_):
        with pytest.raises(openai.NotFoundError, match="model 'gpt' is not served here"):
            await client.chat.completions.create(model="gpt", messages=QUESTION)
        with pytest.raises(openai.BadRequestError, match="Unknown parameter: 'beam_width'"):
            await client.chat.completions.create(model=MODEL, messages=QUESTION, extra_body={"beam_width": 4})
        long: Any = [{"role": "user", "content": "word " * 1000}]
        with pytest.raises(openai.BadRequestError, match="max_model_len"):
            await client.chat.completions.create(model=MODEL, messages=long)


async def test_many_chats_at_once_are_spread_over_both_and_all_answered(tokenizer, tmp_path):
    async with routed(tokenizer, tmp_path) as (client, first, second):

        def ask(number: int) -> Any:
            return client.chat.completions.create(
                model=MODEL,
                messages=[{"role": "user", "content": f"Say {number}."}],
                seed=number,
                max_tokens=24,
                extra_body={"ignore_eos": True},
            )

        replies = await asyncio.gather(*(ask(number) for number in range(24)))
        finished = [one.service.status().finished_turns for one in (first, second)]
    assert all(reply.usage.completion_tokens == 24 for reply in replies)
    assert sum(finished) == 24
    assert min(finished) > 0
