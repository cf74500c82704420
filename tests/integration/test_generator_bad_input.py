"""Bad input over a real socket: a typed status for each, and nobody else is disturbed."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from generator_builders import embedded, prompt_of, request
from rollmill.config.serving import LimitSettings
from rollmill.errors import DataError, EngineDead, EngineError, NotServing, Overloaded, SlowReader
from rollmill.generator.client import GeneratorClient, open_channel
from rollmill.generator.exchange.asking import METHOD, AskingExchange, CallFailed
from rollmill.generator.proto import policy_inference_pb2 as pb
from rollmill.generator.proto import policy_inference_pb2_grpc as pb_grpc
from rollmill.generator.proto import rl_inference_pb2 as rl_pb
from rollmill.generator.proto import rl_inference_pb2_grpc as rl_pb_grpc
from rollmill.generator.state import ReplicaState
from rollmill.types import StopReason
from service_builders import Network, quick_engine, service, two_versions, until, until_running

pytestmark = pytest.mark.integration

LIMITS = LimitSettings(max_requests=6, max_siblings=4, max_body_bytes=65_536, max_request_id_chars=32)
BYSTANDER = request("bystander", prompt_of(7), max_new_tokens=80, seed=3)


@contextlib.asynccontextmanager
async def beside_a_bystander(**settings: Any) -> AsyncIterator[tuple[GeneratorClient, pb_grpc.PolicyInferenceStub]]:
    """A replica on which another request runs, and ends with the very tokens that it gives alone."""
    repository, _, _ = two_versions()
    options = {"limits": LIMITS, "models": ("tiny",), **settings}
    alone = await quick_engine().generate(BYSTANDER)
    async with service(quick_engine(step_s=0.002), repository, **options) as client:
        async with asyncio.TaskGroup() as tasks, open_channel(client.address) as channel:
            running = tasks.create_task(client.generate(BYSTANDER))
            await until_running(client)
            yield client, pb_grpc.PolicyInferenceStub(channel)
            turn = await running
            status = await client.status()
        assert (turn.stop_reason, turn.output_ids.tolist()) == (StopReason.LENGTH, alone.output_ids.tolist())
        assert (status.state, status.running, status.waiting) == (ReplicaState.SERVING, 0, 0)


def message(**fields: Any) -> pb.GenerateRequest:
    sampling = fields.pop("sampling", {})
    given = {"request_id": "a", "prompt_ids": [1, 2], **fields}
    return pb.GenerateRequest(**given, sampling=pb.SamplingParams(**{"max_new_tokens": 4, **sampling}))


async def refused(call: Any) -> tuple[str, str, dict[str, str]]:
    """Status name, details and trailing metadata of a call that must fail."""
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await call
    error = failed.value
    metadata = {str(key): str(value) for key, value in error.trailing_metadata() or ()}
    return error.code().name, error.details() or "", metadata


async def read_to_the_end(stream: Any) -> None:
    while await stream.read() is not grpc.aio.EOF:  # pyright: ignore[reportAttributeAccessIssue]
        pass


BAD = {
    "empty prompt": (message(prompt_ids=[]), "INVALID_ARGUMENT", "data", "an empty prompt"),
    "two prompts": (message(text="hello"), "INVALID_ARGUMENT", "data", "prompt_ids and text"),
    "text without a tokenizer": (message(prompt_ids=[], text="hello"), "INVALID_ARGUMENT", "data", "tokenizer"),
    "id outside the vocabulary": (message(prompt_ids=[1, 128]), "INVALID_ARGUMENT", "data", "vocabulary of 128"),
    "id beyond int32": (message(prompt_ids=[1, 2**32 - 1]), "INVALID_ARGUMENT", "data", "1..4294967295 outside"),
    "prompt as long as the context": (message(prompt_ids=[1] * 4000), "INVALID_ARGUMENT", "data", "4000 tokens"),
    "negative temperature": (message(sampling={"temperature": -0.5}), "INVALID_ARGUMENT", "data", "temperature -0.5"),
    "temperature NaN": (message(sampling={"temperature": np.nan}), "INVALID_ARGUMENT", "data", "temperature nan"),
    "temperature infinite": (message(sampling={"temperature": np.inf}), "INVALID_ARGUMENT", "data", "temperature inf"),
    "top_p 0": (message(sampling={"top_p": 0.0}), "INVALID_ARGUMENT", "data", "top_p 0.0"),
    "top_p above 1": (message(sampling={"top_p": 1.5}), "INVALID_ARGUMENT", "data", "top_p 1.5"),
    "no new token": (message(sampling={"max_new_tokens": 0}), "INVALID_ARGUMENT", "data", "max_new_tokens 0"),
    "too many siblings": (message(siblings=5), "INVALID_ARGUMENT", "data", "5 samples of one call"),
    "deadline in the past": (message(deadline_s=-1.0), "INVALID_ARGUMENT", "data", "deadline_s -1.0"),
    "deadline NaN": (message(deadline_s=np.nan), "INVALID_ARGUMENT", "data", "deadline_s nan"),
    "no id": (message(request_id=""), "INVALID_ARGUMENT", "data", "no request_id"),
    "id too long": (message(request_id="x" * 33), "INVALID_ARGUMENT", "data", "33 characters in request_id"),
    "unknown model": (message(model="gpt-9"), "NOT_FOUND", "model", "'gpt-9' is not served here; served is 'tiny'"),
    "duplicated id": (message(request_id="bystander"), "ALREADY_EXISTS", "request_id_in_use", "bystander is in use"),
    "weights too old": (message(min_policy_version=7), "FAILED_PRECONDITION", "engine", "serves 1"),
}


@pytest.mark.parametrize("method", ["Generate", "GenerateStream"])
async def test_every_bad_request_gets_its_status_and_disturbs_nobody(method):
    async with beside_a_bystander() as (_, stub):
        for name, (asked, status, code, why) in BAD.items():
            call = getattr(stub, method)(asked, timeout=10)
            got, details, metadata = await refused(call if method == "Generate" else call.read())
            assert (name, got, metadata.get("rollmill-code")) == (name, status, code)
            assert why in details


@pytest.mark.parametrize(
    "ask",
    [
        lambda exchange, data: exchange.reply(data, timeout_s=10),
        lambda exchange, data: exchange.events(data, hear=print, timeout_s=10),
    ],
    ids=["reply", "events"],
)
async def test_every_bad_request_of_an_exchange_fails_alone_with_the_same_status(ask):
    async with beside_a_bystander() as (client, _), open_channel(client.address) as channel:
        exchange = AskingExchange(channel)
        for name, (asked, status, code, why) in BAD.items():
            data = asked.SerializeToString()
            with pytest.raises(CallFailed) as failed:
                await ask(exchange, data)
            assert (name, failed.value.status, failed.value.metadata.get("rollmill-code")) == (name, status, code)
            assert why in failed.value.details
        good = await exchange.reply(message(request_id="good").SerializeToString(), timeout_s=10)
        assert len(pb.GenerateReply.FromString(good or b"").samples[0].output_ids) == 4
        await exchange.close()


async def test_frames_that_break_the_rules_end_their_exchange_with_a_status_and_disturb_nobody():
    asked = message(request_id="twice").SerializeToString()
    twice = pb.AskFrame(asks=[pb.Ask(call=1, generate=asked), pb.Ask(call=1, generate=asked)])
    wrong = {b"\xff\xff": "no message of this method", twice.SerializeToString(): "upwards from 1"}
    async with beside_a_bystander() as (client, _), open_channel(client.address) as channel:
        for frame, why in wrong.items():
            call = channel.stream_stream(METHOD)(timeout=10)
            await call.write(frame)
            got, details, _ = await refused(read_to_the_end(call))
            assert (got, why in details) == ("INVALID_ARGUMENT", True)
        large = channel.stream_stream(METHOD)(timeout=10)
        await large.write(b"x" * 70_000)
        assert (await refused(read_to_the_end(large)))[0] == "RESOURCE_EXHAUSTED"


async def test_siblings_never_share_an_id_with_another_request():
    repository, _, _ = two_versions()
    async with (
        service(quick_engine(step_s=0.002), repository) as client,
        open_channel(client.address) as channel,
    ):
        stub = pb_grpc.PolicyInferenceStub(channel)
        alone = asyncio.ensure_future(client.generate(request("alone", [1], max_new_tokens=3000)))
        group = asyncio.ensure_future(client.generate_group(request("g", [1], max_new_tokens=3000), siblings=2))
        await until_running(client, 3)
        reply = await stub.Generate(message(request_id="alone#0"), timeout=10)  # a lone request has no siblings
        got, details, _ = await refused(stub.Generate(message(request_id="g#1"), timeout=10))
        for request_id in ("alone", "g"):
            assert await client.abort(request_id)
        await asyncio.gather(alone, group)
    assert reply.request_id == "alone#0"
    assert (got, "g#1 is in use" in details) == ("ALREADY_EXISTS", True)


async def test_a_request_more_than_there_are_places_is_refused_with_the_time_to_ask_again():
    repository, _, _ = two_versions()
    async with (
        service(quick_engine(step_s=0.002), repository, limits=LIMITS) as client,
        open_channel(client.address) as channel,
    ):
        stub = pb_grpc.PolicyInferenceStub(channel)
        alone = asyncio.ensure_future(client.generate(request("alone", [1], max_new_tokens=3000)))
        group = asyncio.ensure_future(client.generate_group(request("g", [1], max_new_tokens=3000), siblings=4))
        await until_running(client, 5)
        got, _, metadata = await refused(stub.Generate(message(siblings=2), timeout=10))
        with pytest.raises(Overloaded, match=r"generator\.limits\.max_requests is 6") as typed:
            await client.generate_group(request("more", [1]), siblings=2)
        assert len((await client.generate(request("last", [1], max_new_tokens=2))).output_ids) == 2
        assert await client.abort("g")
        assert [turn.stop_reason for turn in await group] == [StopReason.ABORT] * 4
        assert len(await client.generate_group(request("more", [1]), siblings=2)) == 2
        assert await client.abort("alone")
        await alone
    assert (got, metadata["rollmill-code"]) == ("RESOURCE_EXHAUSTED", "overloaded")
    assert 0.1 <= float(metadata["retry-after"]) <= 60
    assert 0.1 <= typed.value.retry_after_s <= 60


async def test_a_message_that_is_too_large_is_refused_before_it_is_read():
    async with beside_a_bystander() as (_, stub):
        got, details, _ = await refused(stub.Generate(message(prompt_ids=[127] * 70_000), timeout=10))
    assert (got, "larger than max" in details) == ("RESOURCE_EXHAUSTED", True)


async def test_a_request_that_is_too_large_for_a_message_is_a_data_error_of_a_client_and_no_matter_to_its_others():
    async with beside_a_bystander() as (client, _):  # whose own request is in the same exchange
        for on_tokens in (None, print):
            with pytest.raises(DataError, match="max_body_bytes"):
                await client.generate(request("large", [127] * 70_000), on_tokens=on_tokens)


@pytest.mark.parametrize(
    ("method", "body", "status"),
    [
        ("/rollmill.generator.v1.PolicyInference/Generate", b"\xff\xff\xff", "INVALID_ARGUMENT"),
        ("/rl_inference.PolicyInference/Generate", b"\x0a\xff", "INVALID_ARGUMENT"),
        ("/rollmill.generator.v1.PolicyInference/Launch", b"", "UNIMPLEMENTED"),
    ],
)
async def test_what_is_no_message_or_no_method_gets_a_status_and_disturbs_nobody(method, body, status):
    async with beside_a_bystander() as (client, _), open_channel(client.address) as channel:
        got, _, _ = await refused(channel.unary_unary(method)(body, timeout=10))
    assert got == status


async def test_the_minimal_interface_refuses_with_the_same_statuses():
    bad = (
        ({"prompt_ids": []}, "INVALID_ARGUMENT", "empty prompt"),
        ({"prompt_ids": [1, -1]}, "INVALID_ARGUMENT", "-1..1 outside the vocabulary"),
        ({"max_new_tokens": -3}, "INVALID_ARGUMENT", "max_new_tokens -3"),
        ({"request_id": "bystander"}, "ALREADY_EXISTS", "in use"),
        ({"request_id": ""}, "INVALID_ARGUMENT", "no request_id"),
    )
    async with beside_a_bystander() as (client, _), open_channel(client.address) as channel:
        for fields, status, why in bad:
            asked = rl_pb.GenerateRequest(**{"request_id": "a", "prompt_ids": [1, 2], "max_new_tokens": 4, **fields})
            got, details, _ = await refused(rl_pb_grpc.PolicyInferenceStub(channel).Generate(asked, timeout=10))
            assert (fields, got, why in details) == (fields, status, True)


async def test_a_bad_score_gets_its_status():
    bad = (
        (pb.ScoreRequest(token_ids=[]), "cannot score 0 token ids"),
        (pb.ScoreRequest(token_ids=[1, 999]), "cannot score"),
        (pb.ScoreRequest(token_ids=[1, 2], what="entropy"), "`logprobs` or `reward`"),
    )
    async with beside_a_bystander() as (_, stub):
        for asked, why in bad:
            got, details, _ = await refused(stub.Score(asked, timeout=10))
            assert (got, why in details) == ("INVALID_ARGUMENT", True)


async def test_rewards_are_refused_with_the_engines_that_give_them(tmp_path):
    repository, old, _ = two_versions()
    async with service(embedded(tmp_path, old), repository) as client:
        with pytest.raises(EngineError, match=r"without a reward head.*ForSequenceClassification\): embedded, fake"):
            await client.reward(np.array([1, 2, 3]))
    async with service(quick_engine(), repository) as client:
        reward, logprobs = await client.reward(np.array([1, 2, 3])), await client.score(np.array([1, 2, 3]))
    assert reward.scores == pytest.approx([logprobs.mean()])
    assert reward.policy_version == 1


async def test_a_draining_replica_says_that_another_one_may_take_the_request():
    repository, _, _ = two_versions()
    async with service(quick_engine(), repository) as client, open_channel(client.address) as channel:
        await client.drain(0.1)
        got, _, metadata = await refused(pb_grpc.PolicyInferenceStub(channel).Generate(message(), timeout=10))
        with pytest.raises(NotServing, match="draining"):
            await client.generate(request("a", [1]))
    assert (got, metadata["rollmill-code"]) == ("UNAVAILABLE", "not_serving")


async def test_a_client_that_cancels_a_stream_frees_its_slot():
    async with beside_a_bystander() as (client, stub):
        stream = stub.GenerateStream(message(sampling={"max_new_tokens": 3000}), timeout=30)
        await stream.read()
        stream.cancel()
        await until(client, lambda status: status.running <= 1)  # the bystander, if it still runs


async def test_a_reader_that_falls_behind_loses_its_request_and_memory_stays_bounded():
    repository, _, _ = two_versions()
    asked = message(sampling={"max_new_tokens": 3900}, siblings=4)
    async with (
        service(quick_engine(), repository, limits=LIMITS.model_copy(update={"stream_events": 16})) as client,
        open_channel(client.address) as channel,
    ):
        stream = pb_grpc.PolicyInferenceStub(channel).GenerateStream(asked, timeout=60)
        await until(client, lambda status: status.output_tokens > 0 and status.running == 0)
        sampled = (await client.status()).output_tokens
        turn = await client.generate(BYSTANDER)
        got, details, metadata = await refused(read_to_the_end(stream))
    assert sampled < 4 * 3900  # it was ended long before its end
    assert (got, metadata["rollmill-code"]) == ("RESOURCE_EXHAUSTED", SlowReader.code)
    assert "16 events behind" in details
    assert turn.stop_reason is StopReason.LENGTH


async def test_a_reader_that_takes_no_event_at_all_loses_its_request_in_time():
    limits = LIMITS.model_copy(update={"stream_events": 10**6, "stream_stall_s": 0.05})
    repository, _, _ = two_versions()
    async with (
        service(quick_engine(max_model_len=10**6), repository, limits=limits) as client,
        # The probe would widen the window to megabytes, which tiny events take up to a minute to fill.
        grpc.aio.insecure_channel(client.address, options=[("grpc.http2.bdp_probe", 0)]) as channel,
    ):
        stub = pb_grpc.PolicyInferenceStub(channel)
        stream = stub.GenerateStream(message(sampling={"max_new_tokens": 10**6 - 10}), timeout=60)
        await until(client, lambda status: status.output_tokens > 0 and status.running == 0)
        assert (await client.status()).output_tokens < 10**6 - 10
        stream.cancel()


async def test_a_connection_that_went_silent_is_noticed_and_its_request_aborted():
    limits = LIMITS.model_copy(update={"keepalive_s": 0.2, "keepalive_timeout_s": 0.2})
    async with (
        beside_a_bystander(limits=limits) as (client, _),
        Network(client.address)() as network,
        open_channel(network.address) as channel,
    ):
        stub = pb_grpc.PolicyInferenceStub(channel)
        stream = stub.GenerateStream(message(sampling={"max_new_tokens": 3900}), timeout=30)
        await stream.read()
        network.go_silent()
        await until_running(client, 0)
        stream.cancel()


async def test_a_stream_that_is_cut_is_a_typed_error_and_frees_its_slot():
    async with beside_a_bystander() as (client, _), Network(client.address)() as network:
        cut_off = GeneratorClient(network.address)
        heard: list[int] = []
        asked = request("cut", [1], max_new_tokens=3900)
        streaming = asyncio.ensure_future(
            cut_off.generate(asked, on_tokens=lambda chunk: heard.append(chunk.start_token))
        )
        await until(client, lambda _: bool(heard))
        network.cut()
        with pytest.raises(EngineDead, match="GenerateStream to the generator"):
            await streaming
        await until(client, lambda status: status.running <= 1)
        await cut_off.close()


async def test_a_client_notices_that_its_replica_went_silent():
    repository, _, _ = two_versions()
    async with service(quick_engine(step_s=0.01), repository) as client, Network(client.address)() as network:
        async with open_channel(network.address, keepalive_s=0.3, keepalive_timeout_s=0.3) as channel:
            stream = pb_grpc.PolicyInferenceStub(channel).GenerateStream(
                message(sampling={"max_new_tokens": 3900}), timeout=60
            )
            await stream.read()
            network.go_silent()
            got, _, _ = await refused(read_to_the_end(stream))
        await client.abort("a")
    assert got == "UNAVAILABLE"


async def test_calls_that_hold_on_for_ever_are_bounded_and_the_replica_answers_again_when_they_go():
    repository, _, _ = two_versions()
    limits = LIMITS.model_copy(update={"max_requests": 1})
    async with service(quick_engine(), repository, limits=limits) as client:
        async with open_channel(client.address) as channel:
            stub: Any = health_pb2_grpc.HealthStub(channel)
            watches = [stub.Watch(health_pb2.HealthCheckRequest(), timeout=60) for _ in range(2 * 1 + 64)]
            for watch in watches:
                await watch.read()
            with pytest.raises(EngineError, match="RESOURCE_EXHAUSTED"):
                await client.status()
            for watch in watches:
                watch.cancel()
        async with asyncio.timeout(20):
            while True:
                with contextlib.suppress(EngineError):
                    await client.status()
                    break
        assert len((await client.generate(request("a", [1], max_new_tokens=2))).output_ids) == 2
