"""Builders for tests of the HTTP face: a replica behind its ASGI application, or behind a real socket."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any

import httpx2

from replica_builders import fake_engine, repository_of, started, two_models
from rollmill.clock import VirtualClock
from rollmill.config.schema import LimitSettings
from rollmill.generator.engines.fake import FakeEngine
from rollmill.generator.http import serve_http
from rollmill.generator.http.app import HttpApp
from rollmill.generator.service import InferenceService, TextCodec
from rollmill.testing.tokenizer import ToyTokenizer
from rollmill.types import GenerateRequest

TOY = ToyTokenizer()


@contextlib.asynccontextmanager
async def served(
    engine: FakeEngine | None = None,
    *,
    codec: TextCodec | None = TOY,  # pyright: ignore[reportArgumentType]
    limits: LimitSettings | None = None,
    models: Sequence[str] = ("policy",),
    **changes: Any,
) -> AsyncIterator[InferenceService]:
    """The service of one fake engine, or of the engine that is given."""
    repository = repository_of(*two_models())
    engine = fake_engine(repository, **changes) if engine is None else engine
    async with asyncio.TaskGroup() as tasks:
        replica = await started(engine, repository)
        try:
            yield InferenceService(replica, tasks=tasks, codec=codec, limits=limits, models=models)
        finally:
            await engine.close()


def app_client(service: InferenceService, **settings: Any) -> httpx2.AsyncClient:
    """A client of the application itself, without a socket."""
    app = HttpApp(service, clock=VirtualClock(), **settings)
    return httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://replica")


@contextlib.asynccontextmanager
async def bound(service: InferenceService, **settings: Any) -> AsyncIterator[int]:
    """Serve on a real socket; gives its port."""
    stop = asyncio.Event()
    port: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(serve_http(service, stop=stop, on_bound=port.set_result, **settings))
        try:
            yield await port
        finally:
            stop.set()


def says(text: str, *, times: int = 1) -> Callable[[GenerateRequest], list[int]]:
    """A script that has the fake engine say a text, character by character, and end the turn."""
    return lambda request: [*(TOY.encode(text) * times), TOY.end_of_turn_id]


def events_of(body: str) -> list[Any]:
    """The events of a stream; the end mark as it is."""
    datas = [line.removeprefix("data: ") for line in body.split("\n") if line.startswith("data: ")]
    return [data if data == "[DONE]" else json.loads(data) for data in datas]


def texts_of(events: Sequence[Any]) -> dict[int, str]:
    """What the events of a chat or a completion add up to, for each sample."""
    texts: dict[int, str] = {}
    for choice in choices_of(events):
        piece = choice["delta"].get("content", "") if "delta" in choice else choice["text"]
        texts[choice["index"]] = texts.get(choice["index"], "") + piece
    return texts


def choices_of(events: Sequence[Any]) -> Iterator[Any]:
    """The choices of all events."""
    for event in events:
        if event != "[DONE]":
            yield from event["choices"]


def chat(text: str = "2+2?", **fields: Any) -> dict[str, Any]:
    """Body of a chat."""
    return {"model": "policy", "messages": [{"role": "user", "content": text}], "max_tokens": 8, **fields}
