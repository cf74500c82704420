"""What a caller hears of a replica whose connection ends."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from rollmill.errors import EngineDead
from rollmill.generator.router.records import Ended
from rollmill.generator.router.upstream import SERVICE, GrpcUpstream, UpstreamError


@pytest.mark.parametrize("asked", ["generate", "stream", "score", "load_weights"])
def test_a_connection_that_the_router_closes_is_a_lost_replica_and_not_the_end_of_its_callers(asked):
    async def main() -> None:
        arrived = asyncio.Event()
        server, port = await _silent_server(arrived)
        upstream = GrpcUpstream(f"127.0.0.1:{port}")
        try:
            task = asyncio.ensure_future(_ask(upstream, asked))
            await asyncio.wait_for(arrived.wait(), 30)
            await upstream.close()
            with pytest.raises(UpstreamError) as caught:
                await task
            assert caught.value.ended is Ended.LOST
            assert isinstance(caught.value.error, EngineDead)
            assert "left the router's list" in str(caught.value.error)
        finally:
            await server.stop(0)

    asyncio.run(main())


@pytest.mark.parametrize("asked", ["generate", "stream", "score", "load_weights"])
def test_a_connection_that_the_router_has_closed_takes_no_more_calls(asked):
    async def main() -> None:
        upstream = GrpcUpstream("127.0.0.1:1")
        await upstream.close()
        with pytest.raises(UpstreamError, match="left the router's list") as caught:
            await _ask(upstream, asked)
        assert caught.value.ended is Ended.LOST

    asyncio.run(main())


def test_a_caller_that_is_cancelled_stays_cancelled():
    async def main() -> None:
        arrived = asyncio.Event()
        server, port = await _silent_server(arrived)
        upstream = GrpcUpstream(f"127.0.0.1:{port}")
        try:
            task = asyncio.ensure_future(_ask(upstream, "score"))
            await asyncio.wait_for(arrived.wait(), 30)
            task.cancel()
            await upstream.close()
            with pytest.raises(asyncio.CancelledError):
                await task
        finally:
            await server.stop(0)

    asyncio.run(main())


async def _ask(upstream: GrpcUpstream, name: str) -> None:
    if name == "load_weights":
        await upstream.load_weights(2, timeout_s=60)
    elif name == "stream":
        async for _ in upstream.stream(b"", timeout_s=60):
            pass
    else:
        await getattr(upstream, name)(b"", timeout_s=60)


async def _silent_server(arrived: asyncio.Event) -> tuple[grpc.aio.Server, int]:
    """A server that takes every call and answers none."""

    async def silent(request: bytes, context: grpc.aio.ServicerContext) -> bytes:
        arrived.set()
        await asyncio.get_running_loop().create_future()
        return b""

    async def silent_stream(request: bytes, context: grpc.aio.ServicerContext) -> None:
        await silent(request, context)

    handlers = {name: grpc.unary_unary_rpc_method_handler(silent) for name in ("Generate", "Score", "LoadWeights")}
    handlers["GenerateStream"] = grpc.unary_stream_rpc_method_handler(silent_stream)
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    return server, port
