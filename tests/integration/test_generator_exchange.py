"""Exchanges over real sockets: services that have none, or stop and come back, and readers that rest."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import grpc
import pytest

from generator_builders import request
from rollmill.config.serving import LimitSettings
from rollmill.errors import EngineDead, RequestAborted, SlowReader
from rollmill.generator.client import GeneratorClient, open_channel
from rollmill.generator.exchange.asking import METHOD
from rollmill.generator.proto import policy_inference_pb2 as pb
from rollmill.generator.router.records import Ended
from rollmill.generator.router.upstream import SERVICE, GrpcUpstream, UpstreamError
from service_builders import Network, quick_engine, service, two_versions, until_running

pytestmark = pytest.mark.integration

ASKED = request("a", [1, 2], max_new_tokens=3)


async def read_to_the_end(call: Any) -> None:
    while await call.read() is not grpc.aio.EOF:  # pyright: ignore[reportAttributeAccessIssue]
        pass


async def older_service(asked: list[str], *, held: asyncio.Event | None = None) -> tuple[grpc.aio.Server, str]:
    """A service of a version without exchanges; with `held` it sets that, and answers nothing."""

    async def hold() -> None:
        if held is not None:
            held.set()
            await asyncio.get_running_loop().create_future()

    async def generate(message: pb.GenerateRequest, context: Any) -> pb.GenerateReply:
        asked.append("Generate")
        await hold()
        sample = pb.Sample(output_ids=[7, 8], behavior_logprobs=[-1.0, -2.0], stop_reason="length")
        sample.version_spans.add(start_token=0, end_token=2, policy_version=1)
        return pb.GenerateReply(request_id=message.request_id, samples=[sample])

    async def stream(message: pb.GenerateRequest, context: Any) -> None:
        asked.append("GenerateStream")
        await hold()
        tokens = pb.TokenChunk(output_ids=[7, 8], behavior_logprobs=[-1.0, -2.0], policy_version=1)
        await context.write(pb.GenerateEvent(request_id=message.request_id, tokens=tokens))
        finished = pb.Finished(output_tokens=2, stop_reason="length")
        await context.write(pb.GenerateEvent(request_id=message.request_id, finished=finished))

    read, write = pb.GenerateRequest.FromString, pb.GenerateReply.SerializeToString
    handlers = {
        "Generate": grpc.unary_unary_rpc_method_handler(generate, read, write),
        "GenerateStream": grpc.unary_stream_rpc_method_handler(stream, read, pb.GenerateEvent.SerializeToString),
    }
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    return server, f"127.0.0.1:{port}"


async def test_a_service_without_exchanges_gets_a_call_for_each_request():
    asked: list[str] = []
    server, address = await older_service(asked)
    client, upstream = GeneratorClient(address), GrpcUpstream(address)
    data = pb.GenerateRequest(request_id="a", prompt_ids=[1]).SerializeToString()
    try:
        whole = await client.generate(ASKED)
        heard: list[int] = []
        streamed = await client.generate(ASKED, on_tokens=lambda chunk: heard.extend(chunk.output_ids.tolist()))
        reply = pb.GenerateReply.FromString(await upstream.generate(data, timeout_s=10))
        events = [pb.GenerateEvent.FromString(event) async for event in upstream.stream(data, timeout_s=10)]
    finally:
        await client.close()
        await upstream.close()
        await server.stop(0)
    assert whole.output_ids.tolist() == streamed.output_ids.tolist() == heard == [7, 8]
    assert list(reply.samples[0].output_ids) == [7, 8]
    assert [event.WhichOneof("event") for event in events] == ["tokens", "finished"]
    assert asked == ["Generate", "GenerateStream"] * 2


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_client_that_closes_ends_requests_with_calls_of_their_own_too(streamed):
    held = asyncio.Event()
    server, address = await older_service([], held=held)
    client = GeneratorClient(address)
    running = asyncio.ensure_future(client.generate(ASKED, on_tokens=print if streamed else None))
    await asyncio.wait_for(held.wait(), 30)
    await client.close()
    with pytest.raises(RequestAborted):
        await running
    await server.stop(0)


async def test_an_exchange_gives_the_turns_that_calls_of_their_own_give():
    repository, _, _ = two_versions()
    async with service(quick_engine(), repository) as client, open_channel(client.address) as channel:
        message = pb.GenerateRequest(
            request_id="b", prompt_ids=[5, 6, 7], sampling=pb.SamplingParams(seed=3), siblings=3
        )
        call = channel.unary_unary(f"/{SERVICE}/Generate")
        alone = pb.GenerateReply.FromString(await call(message.SerializeToString(), timeout=20))
        upstream = GrpcUpstream(client.address)
        whole = pb.GenerateReply.FromString(await upstream.generate(message.SerializeToString(), timeout_s=20))
        tokens: dict[int, list[int]] = {0: [], 1: [], 2: []}
        async for data in upstream.stream(message.SerializeToString(), timeout_s=20):
            event = pb.GenerateEvent.FromString(data)
            tokens[event.index].extend(event.tokens.output_ids)
        await upstream.close()
    assert [list(one.output_ids) for one in whole.samples] == [list(one.output_ids) for one in alone.samples]
    assert list(tokens.values()) == [list(one.output_ids) for one in alone.samples]


async def test_a_client_goes_on_with_a_service_that_came_back():
    repository, _, _ = two_versions()
    async with service(quick_engine(), repository) as first:
        address = first.address
        client = GeneratorClient(address)
        assert len((await client.generate(ASKED)).output_ids) == 3
    with pytest.raises(EngineDead):
        await client.generate(ASKED)
    async with service(quick_engine(), repository, port=int(address.rpartition(":")[2])):
        async with asyncio.timeout(30):
            while True:
                try:
                    turn = await client.generate(ASKED)
                    break
                except EngineDead:  # gRPC waits a moment before it connects again
                    await asyncio.sleep(0.05)
    assert len(turn.output_ids) == 3
    await client.close()


async def test_an_open_exchange_does_not_hold_the_end_of_its_service_back():
    repository, _, _ = two_versions()
    async with contextlib.AsyncExitStack() as stack:
        async with service(quick_engine(), repository) as client:
            channel = await stack.enter_async_context(open_channel(client.address))
            call = channel.stream_stream(METHOD)(timeout=60)
            await call.initial_metadata()
        # What is still open when the grace of a server is over is cut; this call ended by itself.
        assert await call.code() is grpc.StatusCode.OK


async def test_a_client_that_closes_ends_its_requests_and_their_kv_is_free():
    repository, _, _ = two_versions()
    async with service(quick_engine(step_s=0.002), repository) as client:
        other = GeneratorClient(client.address)
        running = asyncio.ensure_future(other.generate(request("long", [1], max_new_tokens=3000)))
        await until_running(client)
        await other.close()
        with pytest.raises(RequestAborted):
            await running
        await until_running(client, 0)


async def test_a_connection_that_is_cut_ends_the_requests_of_its_exchange_and_no_others():
    repository, _, _ = two_versions()
    async with service(quick_engine(step_s=0.002), repository) as client, Network(client.address)() as network:
        far = GeneratorClient(network.address)
        lost = [
            asyncio.ensure_future(far.generate(request(name, [1], max_new_tokens=3000), on_tokens=lambda chunk: None))
            for name in ("b", "c")
        ]
        near = asyncio.ensure_future(client.generate(request("near", [1], max_new_tokens=300)))
        await until_running(client, 3)
        network.cut()
        for one in lost:
            with pytest.raises(EngineDead):
                await one
        assert len((await near).output_ids) == 300
        await until_running(client, 0)
        await far.close()


async def test_who_reads_too_slowly_from_a_replica_is_ended_and_no_other_replica_is_tried():
    repository, _, _ = two_versions()
    async with service(quick_engine(step_s=0.002), repository) as client:
        upstream = GrpcUpstream(client.address, stream_events=16)
        sampling = pb.SamplingParams(max_new_tokens=3000)
        asked = pb.GenerateRequest(request_id="a", prompt_ids=[1], sampling=sampling).SerializeToString()
        events = upstream.stream(asked, timeout_s=60)
        await anext(events)
        await until_running(client, 0)
        assert (await client.status()).output_tokens < 3000
        with pytest.raises(UpstreamError, match="16 events behind") as failed:
            async for _ in events:
                pass
        assert isinstance(failed.value.error, SlowReader)
        assert failed.value.ended is Ended.INVALID
        await upstream.close()


async def test_a_reader_that_reads_nothing_loses_its_exchange_and_its_requests():
    repository, _, _ = two_versions()
    limits = LimitSettings(stream_stall_s=0.5, stream_events=1_000_000)
    async with (
        service(quick_engine(max_model_len=60_000), repository, limits=limits) as client,
        # The probe would widen the window to megabytes.
        grpc.aio.insecure_channel(client.address, options=[("grpc.http2.bdp_probe", 0)]) as channel,
    ):
        call = channel.stream_stream(METHOD)(timeout=60)
        sampling = pb.SamplingParams(max_new_tokens=50_000)
        asked = pb.GenerateRequest(request_id="a", prompt_ids=[1], sampling=sampling).SerializeToString()
        await call.write(pb.AskFrame(asks=[pb.Ask(call=1, stream=asked)]).SerializeToString())
        await until_running(client, 1)
        await until_running(client, 0)
        assert len((await client.generate(ASKED)).output_ids) == 3
        with pytest.raises(grpc.aio.AioRpcError, match=r"took no frame for 0\.5 s") as failed:
            await read_to_the_end(call)
    assert failed.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
