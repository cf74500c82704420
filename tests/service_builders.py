"""Builders for tests of the generator over a real socket: a served engine with a client, and a bad network."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

from generator_builders import MemoryRepository, random_model
from rollmill.clock import SystemClock
from rollmill.generator.client import GeneratorClient
from rollmill.generator.engines.fake import FakeEngine, FakeLatency
from rollmill.generator.main import Addresses, serve
from rollmill.generator.security import TlsFiles
from rollmill.generator.wire import ReplicaStatus


@contextlib.asynccontextmanager
async def service(
    engine: Any,
    repository: Any,
    *,
    token: str | None = None,
    tls: TlsFiles | None = None,
    **settings: Any,
) -> AsyncIterator[GeneratorClient]:
    """Serve an engine and hand out a client; stops in order.

    Args:
        token, tls: of the client.
        settings: of `serve`.
    """
    options = {"kv_policy": "keep", "load_deadline_s": 20.0, **settings}
    stop = asyncio.Event()
    bound: asyncio.Future[Addresses] = asyncio.get_running_loop().create_future()
    async with asyncio.TaskGroup() as tasks:
        serving = tasks.create_task(
            serve(engine=engine, repository=repository, stop=stop, on_serving=bound.set_result, **options)  # pyright: ignore[reportArgumentType]
        )
        await asyncio.wait({bound, serving}, return_when=asyncio.FIRST_COMPLETED)
        if not bound.done():
            await serving
        client = GeneratorClient(bound.result().grpc, token=token, tls=tls)
        try:
            yield client
        finally:
            await client.close()
            stop.set()


def two_versions() -> tuple[MemoryRepository, Any, Any]:
    repository, old, new = MemoryRepository(), random_model(seed=1), random_model(seed=2)
    assert (repository.put(old), repository.put(new)) == (1, 2)
    return repository, old, new


def quick_engine(*, step_s: float = 0.0, max_model_len: int = 4000, **changes: Any) -> FakeEngine:
    """A fake engine that gives every request as many tokens as it asks for."""
    return FakeEngine(
        clock=SystemClock(),
        latency=FakeLatency(step_s=step_s),
        max_model_len=max_model_len,
        digest="digest-1",
        **changes,
    )


async def until(client: GeneratorClient, condition: Callable[[ReplicaStatus], bool]) -> None:
    async with asyncio.timeout(40):
        while not condition(await client.status()):
            pass  # each turn of the loop is a round trip to the service


async def until_running(client: GeneratorClient, count: int = 1) -> None:
    await until(client, lambda status: status.running == count)


class Network:
    """A TCP connection that a test can cut, or let go silent, which no end is told of."""

    def __init__(self, target: str) -> None:
        self._host, _, port = target.rpartition(":")
        self._port = int(port)
        self._open = asyncio.Event()
        self._open.set()
        self._writers: list[asyncio.StreamWriter] = []
        self.address = ""

    @contextlib.asynccontextmanager
    async def __call__(self) -> AsyncIterator[Network]:
        server = await asyncio.start_server(self._connect, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            yield self
        finally:
            self._open.set()
            self.cut()
            server.close()
            await server.wait_closed()

    def go_silent(self) -> None:
        self._open.clear()

    def cut(self) -> None:
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(self._host, self._port)
        self._writers += [writer, back]
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._carry(reader, back))
            tasks.create_task(self._carry(there, writer))

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65_536):
                await self._open.wait()
                writer.write(data)
                await writer.drain()
            writer.transport.abort()
