"""One process of the router's benchmark: replicas, router, bare proxy, clients, or the law alone. Speaks JSON lines."""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import psutil

from rollmill.clock import SystemClock
from rollmill.config.router import RouterSettings
from rollmill.config.serving import LimitSettings
from rollmill.generator.exchange.answering import Exchanges, Put
from rollmill.generator.exchange.asking import AskingExchange
from rollmill.generator.proto import policy_inference_pb2 as pb
from rollmill.generator.router.forward import Forwarder
from rollmill.generator.router.law import RouterLaw
from rollmill.generator.router.main import RouterAddresses, serve_router
from rollmill.generator.router.membership import Entry, FixedList
from rollmill.generator.router.records import Ask, Ended, Report, Send
from rollmill.generator.router.service import RouterService
from rollmill.generator.router.upstream import SERVICE, GrpcUpstream, Upstream
from rollmill.runtime.routing import collect_rarely

MEBIBYTE = 1024 * 1024
UNBOUND = (
    ("grpc.max_concurrent_streams", 100_000),
    ("grpc.server.max_pending_requests", 100_000),
    ("grpc.server.max_pending_requests_hard_limit", 100_000),
)


def say(record: Any) -> None:
    sys.stdout.write(json.dumps(record) + "\n")
    sys.stdout.flush()


def request(number: int, *, sessions: int, prompt_tokens: int, new_tokens: int) -> bytes:
    return pb.GenerateRequest(
        request_id=f"request-{number}",
        session_id=f"session-{number % sessions}",
        job=f"job-{number % 4}",
        prompt_ids=[(7 * token + number) % 49_152 for token in range(prompt_tokens)],
        sampling=pb.SamplingParams(temperature=1.0, top_p=1.0, max_new_tokens=new_tokens, seed=number),
        deadline_s=600.0,
    ).SerializeToString()


def reply_of(new_tokens: int) -> bytes:
    return pb.GenerateReply(
        request_id="request",
        samples=[
            pb.Sample(
                output_ids=[(31 * token) % 49_152 for token in range(new_tokens)],
                behavior_logprobs=[-0.01 * token for token in range(new_tokens)],
                version_spans=[pb.VersionSpan(start_token=0, end_token=new_tokens, policy_version=1)],
                stop_reason="length",
                timings=pb.Timings(queued_s=0.1, prefill_s=0.1, decode_s=0.8),
            )
        ],
    ).SerializeToString()


def events_of(new_tokens: int, *, chunk_tokens: int) -> list[bytes]:
    """The first token alone, the others in chunks, and the end."""
    starts = [0, *range(1, new_tokens, chunk_tokens), new_tokens]
    events = [
        pb.GenerateEvent(
            request_id="request",
            tokens=pb.TokenChunk(
                start_token=start,
                output_ids=[(31 * token) % 49_152 for token in range(start, end)],
                behavior_logprobs=[-0.01 * token for token in range(start, end)],
                policy_version=1,
            ),
        )
        for start, end in itertools.pairwise(starts)
    ]
    finished = pb.Finished(output_tokens=new_tokens, stop_reason="length")
    return [one.SerializeToString() for one in (*events, pb.GenerateEvent(request_id="request", finished=finished))]


def status_of() -> bytes:
    return pb.StatusReply(
        state="serving", policy_version=1, digest="d", max_num_seqs=100_000, max_model_len=4096, wall_s=time.monotonic()
    ).SerializeToString()


# -- servers


async def replica(plan: dict[str, Any]) -> None:
    """Answers every request after a while, without an engine."""
    reply = reply_of(plan["new_tokens"])
    streams = {size: events_of(plan["new_tokens"], chunk_tokens=size) for size in (1, plan["chunk_tokens"])}
    delay_s = plan["delay_s"]

    async def generate(_: bytes, context: Any) -> bytes:
        await asyncio.sleep(delay_s)
        return reply

    async def stream(data: bytes, context: Any) -> AsyncGenerator[bytes, None]:
        events = streams[pb.GenerateRequest.FromString(data).chunk_tokens or 1]
        for event in events:
            await asyncio.sleep(delay_s / len(events))
            yield event

    async def status(_: bytes, context: Any) -> bytes:
        return status_of()

    class Answers:
        async def reply(self, data: bytes) -> bytes:
            return await generate(data, None)

        async def events(self, data: bytes, *, put: Put) -> None:
            async for event in stream(data, None):
                put(event)

    exchanges = Exchanges(Answers(), limits=LimitSettings(), calls=100_000)

    async def exchange(frames: AsyncIterator[pb.AskFrame], context: Any) -> None:
        await context.send_initial_metadata(exchanges.metadata)
        await exchanges.serve(frames, write=context.write)

    handlers = {
        "Exchange": grpc.stream_stream_rpc_method_handler(
            exchange, pb.AskFrame.FromString, pb.AnswerFrame.SerializeToString
        ),
        "Generate": grpc.unary_unary_rpc_method_handler(generate),
        "GenerateStream": grpc.unary_stream_rpc_method_handler(stream),
        "Status": grpc.unary_unary_rpc_method_handler(status),
    }
    await serve(handlers)


async def proxy(plan: dict[str, Any]) -> None:
    """Passes bytes on, in turn, and decides nothing: what gRPC alone costs."""
    channels = [grpc.aio.insecure_channel(address) for address in plan["replicas"]]
    calls = [channel.unary_unary(f"/{SERVICE}/Generate") for channel in channels]
    streams = [channel.unary_stream(f"/{SERVICE}/GenerateStream") for channel in channels]
    count = 0

    async def generate(data: bytes, context: Any) -> bytes:
        nonlocal count
        count += 1
        return await calls[count % len(calls)](data, timeout=600)

    async def stream(data: bytes, context: Any) -> None:
        nonlocal count
        count += 1
        async for event in streams[count % len(streams)](data, timeout=600):
            await context.write(event)

    await serve(
        {
            "Generate": grpc.unary_unary_rpc_method_handler(generate),
            "GenerateStream": grpc.unary_stream_rpc_method_handler(stream),
        }
    )


async def serve(handlers: dict[str, Any]) -> None:
    server = grpc.aio.server(options=UNBOUND)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    say({"address": f"127.0.0.1:{port}"})
    await server.wait_for_termination()


async def router(plan: dict[str, Any]) -> None:
    service = RouterService(
        RouterSettings.model_validate(plan["settings"]),
        source=FixedList([Entry(address) for address in plan["replicas"]]),
        connect=GrpcUpstream,
        clock=SystemClock(),
    )

    def announce(addresses: RouterAddresses) -> None:
        say({"address": addresses.grpc})

    collect_rarely()  # as the command does
    await serve_router(service, stop=asyncio.Event(), on_serving=announce)


# -- clients


async def clients(plan: dict[str, Any]) -> None:
    """Keeps so many sessions busy; measures the CPU of the server in front of it, after a warm-up."""
    server = psutil.Process(plan["pid"])
    channels = [grpc.aio.insecure_channel(plan["address"], options=UNBOUND) for _ in range(4)]
    ask = _askers(plan, channels)
    bodies = [
        request(number, sessions=plan["sessions"], prompt_tokens=plan["prompt_tokens"], new_tokens=plan["new_tokens"])
        for number in range(2 * plan["requests"])
    ]
    latencies: list[float] = []

    async def session(numbers: list[int]) -> None:
        for number in numbers:
            started_s = time.monotonic()
            await ask[number % len(ask)](bodies[number])
            latencies.append(time.monotonic() - started_s)

    async def run(first: int) -> None:
        await asyncio.gather(
            *(
                session(list(range(first + one, first + plan["requests"], plan["sessions"])))
                for one in range(plan["sessions"])
            )
        )

    await run(0)
    latencies.clear()
    before, started_s = server.cpu_times(), time.monotonic()
    await run(plan["requests"])
    after, wall_s = server.cpu_times(), time.monotonic() - started_s
    cpu_s = after.user + after.system - before.user - before.system
    latencies.sort()
    say(
        {
            "requests": plan["requests"],
            "cpu_s_per_request": cpu_s / plan["requests"],
            "requests_per_s": plan["requests"] / wall_s,
            "latency_p50_s": latencies[len(latencies) // 2],
            "latency_p95_s": latencies[int(0.95 * len(latencies))],
            "server_rss_mib": server.memory_info().rss / MEBIBYTE,
        }
    )
    for channel in channels:
        await channel.close()


def _askers(plan: dict[str, Any], channels: list[Any]) -> list[Callable[[bytes], Awaitable[None]]]:
    """Return who sends a request over each channel: with a call of its own, or in an exchange as our client does."""

    def of(channel: Any) -> Callable[[bytes], Awaitable[None]]:
        exchange = AskingExchange(channel)
        one, many = (make(f"/{SERVICE}/{name}") for make, name in (
            (channel.unary_unary, "Generate"), (channel.unary_stream, "GenerateStream")
        ))  # fmt: skip

        async def call(body: bytes) -> None:
            await one(body, timeout=600)

        async def call_stream(body: bytes) -> None:
            async for _ in many(body, timeout=600):
                pass

        async def reply(body: bytes) -> None:
            await exchange.reply(body, timeout_s=600.0)
            assert exchange.alone == 0, "a request had a call of its own"

        async def events(body: bytes) -> None:
            await exchange.events(body, hear=lambda _: None, timeout_s=600.0)
            assert exchange.alone == 0, "a request had a call of its own"

        if plan["exchange"]:
            return events if plan["streams"] else reply
        return call_stream if plan["streams"] else call

    return [of(channel) for channel in channels]


# -- without sockets


async def law(plan: dict[str, Any]) -> None:
    """The law alone: requests come and end, so many at a time, with or without a queue."""
    settings = RouterSettings.model_validate({"max_queue": 1_000_000})
    found = RouterLaw(settings)
    for number in range(plan["replicas"]):
        found.table.join(f"replica-{number}")
        report = Report(state="serving", policy_version=1, slots=plan["slots"], kv_use=0.3)
        found.report(f"replica-{number}", report, now_s=0.0)
    asks = [
        Ask(request_id=f"request-{n}", session_id=f"session-{n % plan['sessions']}", job=f"job-{n % 4}", siblings=1)
        for n in range(plan["requests"])
    ]
    running: dict[str, str] = {}
    at_s = 0.0

    def hear(instructions: list[Any]) -> None:
        running.update({one.request_id: one.replica for one in instructions if isinstance(one, Send)})

    started_s = time.process_time()
    for number, one in enumerate(asks):
        at_s += 1e-3
        hear(found.submit(one, now_s=at_s))
        if number >= plan["sessions"]:
            name, replica_name = next(iter(running.items()))
            del running[name]
            hear(found.ended(name, replica_name, Ended.ANSWERED, now_s=at_s))
            hear(found.close(name, now_s=at_s))
    cpu_s = time.process_time() - started_s
    say({"cpu_s_per_request": cpu_s / plan["requests"], "waiting_at_the_end": found.queues.waiting})


class Canned(Upstream):
    """A replica in this process that answers with the same bytes."""

    def __init__(self, plan: dict[str, Any]) -> None:
        self._reply = reply_of(plan["new_tokens"])
        self._streams = {size: events_of(plan["new_tokens"], chunk_tokens=size) for size in (1, plan["chunk_tokens"])}

    async def generate(self, data: bytes, *, timeout_s: float) -> bytes:
        await asyncio.sleep(0)
        return self._reply

    async def stream(self, data: bytes, *, timeout_s: float) -> AsyncGenerator[bytes, None]:
        for event in self._streams[pb.GenerateRequest.FromString(data).chunk_tokens or 1]:
            await asyncio.sleep(0)
            yield event


async def forward(plan: dict[str, Any]) -> None:
    """Law and forwarding in one process: all of the router but gRPC."""
    settings = RouterSettings.model_validate(plan["settings"])
    upstream, found = Canned(plan), RouterLaw(settings)
    names = [f"replica-{number}" for number in range(plan["replicas"])]
    for name in names:
        found.table.join(name)
        found.report(name, Report(state="serving", policy_version=1, slots=100_000), now_s=0.0)
    forwarder = Forwarder(
        found, upstreams=dict.fromkeys(names, upstream), clock=SystemClock(), on_trouble=lambda name: None
    )
    bodies = [
        request(number, sessions=plan["sessions"], prompt_tokens=plan["prompt_tokens"], new_tokens=plan["new_tokens"])
        for number in range(plan["requests"])
    ]

    async def discard(event: pb.GenerateEvent, raw: bytes | None) -> None:
        if raw is None:
            event.SerializeToString()

    async def session(numbers: range) -> None:
        for number in numbers:
            if plan["streams"]:
                await forwarder.stream(bodies[number], emit=discard)
            else:
                await forwarder.generate(bodies[number])

    started_s = time.process_time()
    await asyncio.gather(*(session(range(one, plan["requests"], plan["sessions"])) for one in range(plan["sessions"])))
    cpu_s = time.process_time() - started_s
    say({"cpu_s_per_request": cpu_s / plan["requests"]})


def main() -> None:
    plan = json.loads(sys.argv[1])
    roles = {
        "replica": replica, "proxy": proxy, "router": router, "clients": clients, "law": law, "forward": forward
    }  # fmt: skip
    asyncio.run(roles[plan["role"]](plan))


if __name__ == "__main__":
    main()
