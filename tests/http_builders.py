"""Builders for tests of the HTTP face: a fake replica behind its ASGI application, or behind a real socket."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, MutableMapping, Sequence
from typing import Any, TypeVar, cast

import httpx2

from rollmill.clock import Clock, SystemClock, VirtualClock
from rollmill.config.serving import LimitSettings
from rollmill.generator.engines.fake import FakeEngine
from rollmill.generator.http import serve_http
from rollmill.generator.http.app import HttpApp
from rollmill.generator.http.protocol import ABORT_KEY
from rollmill.generator.loading import Replica
from rollmill.generator.service import InferenceService, TextCodec
from rollmill.generator.state import ReplicaState, move
from rollmill.testing import run_virtual
from rollmill.testing.tokenizer import ToyTokenizer
from rollmill.types import GenerateRequest

T = TypeVar("T")
TOY = ToyTokenizer()
CODEC = cast(TextCodec, TOY)
MODEL = "policy"


@contextlib.asynccontextmanager
async def served(
    *,
    clock: Clock | None = None,
    codec: TextCodec | None = CODEC,
    limits: LimitSettings | None = None,
    **engine: Any,
) -> AsyncIterator[InferenceService]:
    """The service of one fake engine that serves policy version 1 and is never asked to load another."""
    clock = SystemClock() if clock is None else clock
    fake = FakeEngine(clock=clock, **{"vocabulary_size": TOY.vocabulary_size, **engine})
    replica = Replica(
        engine=fake,
        repository=cast(Any, None),
        kv_policy="keep",
        load_deadline_s=1.0,
        owner="generator-0",
        clock=clock,
    )
    replica.standing = move(replica.standing, ReplicaState.SERVING, proven=True)
    async with asyncio.TaskGroup() as tasks:
        try:
            yield InferenceService(replica, tasks=tasks, codec=codec, limits=limits, models=[MODEL])
        finally:
            await fake.close()


Scenario = Callable[[httpx2.AsyncClient, InferenceService], Awaitable[T]]


def in_world(scenario: Scenario[T], *, face: dict[str, Any] | None = None, **settings: Any) -> T:
    """Run a scenario with a client of the application itself, without a socket, on a virtual clock.

    Args:
        face: settings of the application.
        settings: of `served`.
    """
    clock = VirtualClock()

    async def main() -> T:
        async with served(clock=clock, **settings) as service:
            app = HttpApp(service, clock=clock, **(face or {}))
            async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://replica") as client:
                return await scenario(client, service)

    return run_virtual(main(), clock=clock)


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


class Peer:
    """The client's end of one exchange, moved by hand.

    Args:
        body: what is sent, in these pieces.
        complete: whether the last piece is the end.

    Attributes:
        left: set it to leave.
        stuck: clear it to stop reading.
        sent: what came back.
        cut: whether the connection was cut.
    """

    def __init__(self, body: Any, *, path: str = "/v1/chat/completions", complete: bool = True) -> None:
        self._pieces = list(body) if isinstance(body, list) else [json.dumps(body).encode()]
        self._complete = complete
        self._path = path
        self.left = asyncio.Event()
        self.reads = asyncio.Event()
        self.reads.set()
        self.sent: list[Any] = []
        self.cut = False

    async def ask(self, service: InferenceService, **face: Any) -> None:
        """Ask, and return once the application is done with it."""
        scope = {
            "type": "http",
            "method": "POST",
            "path": self._path,
            "headers": [],
            "state": {ABORT_KEY: self._cut},
        }
        await HttpApp(service, **face)(scope, self._receive, self._send)

    @property
    def status(self) -> int | None:
        """Of the answer, if it has begun."""
        return self.sent[0]["status"] if self.sent else None

    @property
    def body(self) -> str:
        """What came of the answer."""
        return b"".join(message.get("body", b"") for message in self.sent).decode()

    async def _receive(self) -> MutableMapping[str, Any]:
        if self._pieces:
            piece = self._pieces.pop(0)
            return {"type": "http.request", "body": piece, "more_body": bool(self._pieces) or not self._complete}
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: MutableMapping[str, Any]) -> None:
        await self.reads.wait()
        if not self.cut:
            self.sent.append(message)

    def _cut(self) -> None:
        self.cut = True
        self.left.set()
        self.reads.set()


def says(text: str) -> Callable[[GenerateRequest], list[int]]:
    """A script that has the fake engine say a text, character by character, and end the turn."""
    return lambda request: [*TOY.encode(text), TOY.end_of_turn_id]


def events_of(body: str) -> list[Any]:
    """The events of a stream; the end mark as it is."""
    datas = [line.removeprefix("data: ") for line in body.split("\n") if line.startswith("data: ")]
    return [data if data == "[DONE]" else json.loads(data) for data in datas]


def choices_of(events: Sequence[Any], *, index: int) -> Iterator[Any]:
    """What the events of a stream say of one sample."""
    for event in events:
        if event != "[DONE]":
            yield from (choice for choice in event.get("choices", ()) if choice["index"] == index)


def chat(text: str = "2+2?", **fields: Any) -> dict[str, Any]:
    """Body of a chat."""
    return {"model": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": 8, "seed": 1, **fields}
