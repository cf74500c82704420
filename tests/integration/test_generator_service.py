"""The generator service over a real socket: every call, every refusal, and the loading of weights."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import grpc
import numpy as np
import pytest
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc

from generator_builders import (
    MAX_LEN,
    VOCABULARY,
    MemoryRepository,
    canary_for,
    embedded,
    prompt_of,
    random_model,
    reference_logits,
    reference_logprobs,
    request,
    save_config,
    tensors_of,
)
from rollmill.clock import SystemClock
from rollmill.config.schema import GeneratorSettings
from rollmill.errors import (
    ConfigError,
    DataError,
    DeadlineExceeded,
    EngineDead,
    EngineError,
    WeightError,
    WeightMismatch,
)
from rollmill.generator.client import GeneratorClient
from rollmill.generator.engines.fake import FakeEngine, FakeFaults, FakeLatency
from rollmill.generator.main import Addresses, build_engine, serve
from rollmill.generator.service import InferenceService
from rollmill.generator.state import ReplicaState
from rollmill.types import Canary, SamplingParams, StopReason, TokenChunk
from rollmill.weights.repository import LocalModelRepository
from service_builders import quick_engine, service, two_versions, until, until_running

pytestmark = pytest.mark.integration


async def test_a_turn_crosses_the_wire_whole(tmp_path):
    repository, old, _ = two_versions()
    sampling = SamplingParams(temperature=0.7, top_p=0.9, seed=2**62 + 3, max_new_tokens=9)
    asked = request("a", prompt_of(7), temperature=0.7, top_p=0.9, seed=2**62 + 3, max_new_tokens=9)
    async with service(embedded(tmp_path, old), repository) as client:
        turn = await client.generate(asked)
    assert turn.stop_reason is StopReason.LENGTH
    assert len(turn.output_ids) == 9
    assert turn.prompt_ids.tolist() == asked.prompt_ids.tolist()
    np.testing.assert_allclose(turn.behavior_logprobs, reference_logprobs(old, turn, sampling), atol=1e-4)
    assert [(s.start_token, s.end_token, s.policy_version) for s in turn.version_spans] == [(0, 9, 1)]


async def test_a_stream_gives_the_turn_that_generate_gives_token_by_token(tmp_path):
    repository, old, _ = two_versions()
    heard: list[int] = []
    asked = request("a", prompt_of(7), seed=5, max_new_tokens=9)
    async with service(embedded(tmp_path, old), repository) as client:
        plain = await client.generate(asked)
        streamed = await client.generate(asked, on_tokens=lambda chunk: heard.extend(chunk.output_ids.tolist()))
    assert len(heard) == 9
    assert heard == streamed.output_ids.tolist() == plain.output_ids.tolist()
    np.testing.assert_array_equal(streamed.behavior_logprobs, plain.behavior_logprobs)
    assert (streamed.version_spans, streamed.stop_reason) == (plain.version_spans, plain.stop_reason)


async def test_siblings_share_the_prefill_and_differ_in_their_draws(tmp_path):
    repository, old, _ = two_versions()
    asked = request("a", prompt_of(40), seed=5, max_new_tokens=9)
    async with service(embedded(tmp_path, old), repository) as client:
        alone = await client.generate(asked)
        turns = await client.generate_group(asked, siblings=4)
    assert [turn.request_id for turn in turns] == ["a#0", "a#1", "a#2", "a#3"]
    assert turns[0].output_ids.tolist() == alone.output_ids.tolist()
    assert len({tuple(turn.output_ids.tolist()) for turn in turns}) == 4
    assert [turn.cached_tokens for turn in turns[1:]] == [40, 40, 40]
    for turn in turns:
        np.testing.assert_allclose(turn.behavior_logprobs, reference_logprobs(old, turn, asked.sampling), atol=1e-4)


async def test_aborting_a_call_ends_all_its_siblings(tmp_path):
    engine = FakeEngine(clock=SystemClock(), digest="digest-1", latency=FakeLatency(step_s=0.01), max_model_len=10_000)
    repository, _, _ = two_versions()
    async with service(engine, repository) as client:
        group = asyncio.ensure_future(
            client.generate_group(request("a", prompt_of(7), max_new_tokens=5_000), siblings=3)
        )
        await until_running(client, 3)
        assert await client.abort("a")
        assert [turn.stop_reason for turn in await group] == [StopReason.ABORT] * 3
        assert not await client.abort("a")


async def test_the_address_file_names_address_process_and_version(tmp_path):
    repository, old, _ = two_versions()
    file = tmp_path / "address.json"
    async with service(embedded(tmp_path, old), repository, address_file=file) as client:
        record = json.loads(file.read_text())
        status = await client.status()
    assert record.keys() == {"address", "pid", "policy_version"}
    assert (record["policy_version"], status.policy_version, status.digest) == (1, 1, "digest-1")
    assert (status.state, status.max_num_seqs, status.max_model_len) == (ReplicaState.SERVING, 8, MAX_LEN)
    assert sum(status.seconds.values()) == pytest.approx(status.wall_s)


async def test_loading_weights_swaps_proves_and_holds_the_new_version(tmp_path):
    repository, old, new = two_versions()
    async with service(embedded(tmp_path, old), repository) as client:
        assert repository.held_versions() == [1]
        report = await client.load_weights(2, deadline_s=20)
        assert repository.held_versions() == [2]
        turn = await client.generate(request("a", prompt_of(6), seed=4))
        again = await client.load_weights(2, deadline_s=20)
        scored = await client.score(np.arange(1, 9))
    assert (report.policy_version, report.changed, report.digest) == (2, True, repository.manifest(2).digest)
    assert report.canary_difference is not None
    assert 0 <= report.canary_difference < 1e-4
    assert not again.changed
    np.testing.assert_allclose(turn.behavior_logprobs, reference_logprobs(new, turn, SamplingParams()), atol=1e-4)
    expected = reference_logits(new, np.arange(1, 9)).log_softmax(-1)[:-1]
    np.testing.assert_allclose(scored, expected[range(7), range(2, 9)].numpy(), atol=1e-4)
    assert repository.held_versions() == []


@pytest.mark.parametrize("transport", ["shm", "file"])
async def test_an_engine_built_from_a_publication_follows_the_repository_of_a_run(tmp_path, transport):
    old, new = random_model(seed=1), random_model(seed=2)
    repository = LocalModelRepository(tmp_path / "weights", transport=transport, keep_versions=1)
    try:
        for model, parent in ((old, None), (new, 1)):
            repository.publish(
                tensors_of(model),
                optimizer_step=1 if parent else 0,
                parent=parent,
                history_id="h",
                training_dtype="float32",
                canary=canary_for(model),
                at_s=0.0,
            )
        engine = build_engine(
            save_config(tmp_path / "model", old.config),
            settings=GeneratorSettings(dtype="float32", max_num_seqs=4, max_model_len=MAX_LEN),
            tensors=repository.load(1),
            policy_version=1,
            digest=repository.manifest(1).digest,
            clock=SystemClock(),
        )
        async with service(engine, repository, kv_policy="recompute") as client:
            assert repository.retire() == []  # version 1 is served, hence held
            report = await client.load_weights(2, deadline_s=20)
            assert repository.retire() == [1]
            status = await client.status()
            turn = await client.generate(request("a", prompt_of(6), seed=4))
            with pytest.raises(WeightError, match="retired"):
                await client.load_weights(1, deadline_s=20)
        assert repository.holders() == {}
    finally:
        repository.clean()
    assert report.nbytes == sum(parameter.nbytes for parameter in new.parameters())
    assert status.digest == report.digest == repository.manifest(2).digest
    np.testing.assert_allclose(turn.behavior_logprobs, reference_logprobs(new, turn, SamplingParams()), atol=1e-4)


async def test_the_fake_engine_is_built_with_the_models_vocabulary_and_claims_no_canary(tmp_path):
    repository, old, _ = two_versions()
    engine = build_engine(
        save_config(tmp_path, old.config),
        settings=GeneratorSettings(engine="fake", max_num_seqs=4, max_model_len=MAX_LEN),
        tensors={},
        policy_version=1,
        digest=repository.manifest(1).digest,
        clock=SystemClock(),
    )
    async with service(engine, repository) as client:
        report = await client.load_weights(2, deadline_s=20)
        with pytest.raises(DataError, match=f"vocabulary of {VOCABULARY}"):
            await client.generate(request("a", [VOCABULARY]))
    assert (report.changed, report.canary_difference) == (True, None)


async def test_a_request_in_flight_crosses_a_load_with_one_span_for_each_version(tmp_path):
    repository, old, _ = two_versions()
    async with service(embedded(tmp_path, old), repository) as client, asyncio.TaskGroup() as tasks:
        turn = tasks.create_task(client.generate(request("a", prompt_of(6), max_new_tokens=150)))
        await until_running(client)
        await client.load_weights(2, deadline_s=20)
    spans = turn.result().version_spans
    assert [span.policy_version for span in spans] == [1, 2]
    assert spans[1].end_token == 150


async def test_a_stream_crosses_a_load_token_by_token_with_the_version_of_each(tmp_path):
    repository, old, _ = two_versions()
    heard: list[TokenChunk] = []
    async with service(embedded(tmp_path, old), repository) as client, asyncio.TaskGroup() as tasks:
        asked = request("a", prompt_of(6), max_new_tokens=150)
        streaming = tasks.create_task(client.generate(asked, on_tokens=heard.append))
        await until(client, lambda _: bool(heard))
        await client.load_weights(2, deadline_s=20)
    turn = streaming.result()
    assert [span.policy_version for span in turn.version_spans] == [1, 2]
    versions = [chunk.policy_version for chunk in heard for _ in chunk.output_ids]
    assert versions == [1] * turn.version_spans[0].end_token + [2] * (150 - turn.version_spans[0].end_token)
    assert [int(token) for chunk in heard for token in chunk.output_ids] == turn.output_ids.tolist()


async def test_a_damaged_publication_is_refused_before_the_pause_and_the_old_version_serves_on(tmp_path):
    repository, old, _ = two_versions()
    repository.damage(2)
    async with service(embedded(tmp_path, old), repository) as client:
        with pytest.raises(WeightMismatch) as refused:
            await client.load_weights(2, deadline_s=20)
        status = await client.status()
        turn = await client.generate(request("a", prompt_of(6)))
        held = repository.held_versions()
    assert refused.value.published == repository.manifest(2).tensors["model.embed_tokens.weight"].sha256
    assert refused.value.served != refused.value.published
    assert (status.state, status.policy_version) == (ReplicaState.SERVING, 1)
    assert turn.version_spans[0].policy_version == 1
    assert held == [1]


async def test_tensors_of_another_shape_leave_the_old_version_serving(tmp_path):
    repository, old, _ = two_versions()
    tensors = {name: torch.zeros(3, 3) for name, _ in old.named_parameters()}
    repository.publish(
        tensors, optimizer_step=0, parent=None, history_id="h", training_dtype="float32", canary=None, at_s=0.0
    )
    async with service(embedded(tmp_path, old), repository) as client:
        with pytest.raises(WeightError, match="instead of"):
            await client.load_weights(3, deadline_s=20)
        turn = await client.generate(request("a", prompt_of(6)))
        held = repository.held_versions()
    assert turn.version_spans[0].policy_version == 1
    assert held == [1]


async def test_a_canary_that_disagrees_makes_the_replica_dirty_until_a_newer_version_proves_itself(tmp_path):
    repository, old, new = two_versions()
    true = canary_for(new)
    lie = Canary(token_ids=true.token_ids, logprobs=true.logprobs + np.float32(0.5), tolerance=1e-3)
    repository.put(new, canary=lie)
    repository.put(random_model(seed=4))
    async with service(embedded(tmp_path, old), repository) as client, asyncio.TaskGroup() as tasks:
        running = tasks.create_task(client.generate(request("running", prompt_of(6), max_new_tokens=150)))
        await until_running(client)
        with pytest.raises(WeightMismatch, match=r"differ from the trainer's by 0\.5 nats"):
            await client.load_weights(3, deadline_s=20)
        partial = await running
        status = await client.status()
        with pytest.raises(EngineError, match=r"dirty.*policy version 3"):
            await client.generate(request("late", prompt_of(6)))
        await client.load_weights(4, deadline_s=20)
        turn = await client.generate(request("healed", prompt_of(6)))
        held = repository.held_versions()
    assert partial.stop_reason is StopReason.ABORT
    assert {span.policy_version for span in partial.version_spans} == {1}
    assert status.state is ReplicaState.DIRTY
    assert turn.version_spans[0].policy_version == 4
    assert held == [4]


async def test_weights_that_turn_out_not_to_be_finite_take_the_replica_out_of_rotation(tmp_path):
    repository, old, new = two_versions()
    repository.publish(
        {name: torch.full_like(value, torch.nan) for name, value in tensors_of(new).items()},
        optimizer_step=1,
        parent=2,
        history_id="h",
        training_dtype="float32",
        canary=None,
        at_s=0.0,
    )
    repository.put(new)
    async with service(embedded(tmp_path, old), repository) as client:
        assert (await client.load_weights(3, deadline_s=20)).canary_difference is None
        with pytest.raises(EngineError, match="not finite"):
            await client.generate(request("a", prompt_of(6)))
        status = await client.status()
        with pytest.raises(EngineError, match=r"the replica is dirty: .*not finite"):
            await client.generate(request("b", prompt_of(6)))
        await client.load_weights(4, deadline_s=20)
        turn = await client.generate(request("c", prompt_of(6)))
    assert status.state is ReplicaState.DIRTY
    np.testing.assert_allclose(turn.behavior_logprobs, reference_logprobs(new, turn, SamplingParams()), atol=1e-4)


async def test_a_first_version_that_fails_its_canary_never_gets_an_address(tmp_path):
    repository, old, new = MemoryRepository(), random_model(seed=1), random_model(seed=2)
    repository.put(old, canary=canary_for(new))
    with pytest.raises(WeightMismatch):
        await serve(
            engine=embedded(tmp_path, old),
            repository=repository,  # pyright: ignore[reportArgumentType]
            kv_policy="keep",
            address_file=tmp_path / "address.json",
            stop=asyncio.Event(),
            load_deadline_s=5.0,
        )
    assert not (tmp_path / "address.json").exists()
    assert repository.held_versions() == []


async def test_an_unknown_version_is_a_weight_error(tmp_path):
    repository, old, _ = two_versions()
    async with service(embedded(tmp_path, old), repository) as client:
        with pytest.raises(WeightError, match="policy version 9 is unknown"):
            await client.load_weights(9, deadline_s=20)
        held = repository.held_versions()
    assert held == [1]


async def test_a_prompt_that_does_not_fit_is_a_data_error(tmp_path):
    repository, old, _ = two_versions()
    async with service(embedded(tmp_path, old), repository) as client:
        with pytest.raises(DataError, match=f"has {MAX_LEN + 5} tokens"):
            await client.generate(request("long", prompt_of(MAX_LEN + 5)))


async def test_abort_ends_exactly_the_named_request(tmp_path):
    repository = two_versions()[0]
    engine = FakeEngine(clock=SystemClock(), latency=FakeLatency(step_s=0.005), max_model_len=4000)
    async with service(engine, repository) as client, asyncio.TaskGroup() as tasks:
        one = tasks.create_task(client.generate(request("a1", [1, 2], max_new_tokens=2000)))
        ten = tasks.create_task(client.generate(request("a10", [1, 2], max_new_tokens=20)))
        await until_running(client, 2)
        assert await client.abort("a1")
        assert not await client.abort("a1")
    assert one.result().stop_reason is StopReason.ABORT
    assert ten.result().stop_reason is StopReason.LENGTH
    assert len(ten.result().output_ids) == 20


async def test_a_client_that_cancels_frees_the_slot(tmp_path):
    repository = two_versions()[0]
    engine = FakeEngine(clock=SystemClock(), latency=FakeLatency(step_s=0.005), max_model_len=4000)
    async with service(engine, repository) as client:
        task = asyncio.ensure_future(client.generate(request("a", [1, 2], max_new_tokens=2000)))
        await until_running(client)
        task.cancel()
        await until_running(client, 0)
        with pytest.raises(asyncio.CancelledError):
            await task


async def test_past_its_deadline_a_request_returns_what_it_has(tmp_path):
    repository = two_versions()[0]
    engine = FakeEngine(clock=SystemClock(), latency=FakeLatency(step_s=0.01), max_model_len=4000)
    async with service(engine, repository) as client:
        turn = await client.generate(request("a", [1, 2], max_new_tokens=2000, deadline_s=0.1))
    assert turn.stop_reason is StopReason.ABORT
    assert 0 < len(turn.output_ids) == len(turn.behavior_logprobs) < 20


async def test_a_call_without_an_answer_ends_as_deadline_exceeded(tmp_path):
    repository = two_versions()[0]
    engine = FakeEngine(clock=SystemClock(), faults=FakeFaults(hang_requests=frozenset({1})))
    async with service(engine, repository) as client:
        impatient = GeneratorClient(client.address, grace_s=-9.9)
        with pytest.raises(DeadlineExceeded, match="GenerateRequest"):
            await impatient.generate(request("a", [1, 2], deadline_s=10.0))
        await impatient.close()


async def test_a_load_that_takes_too_long_names_its_deadline(tmp_path):
    repository = two_versions()[0]
    engine = FakeEngine(clock=SystemClock())
    async with service(engine, repository, load_deadline_s=0.0) as client:
        with pytest.raises(DeadlineExceeded, match="policy version 2 took longer than 0 s"):
            await client.load_weights(2, deadline_s=20)
        turn = await client.generate(request("a", [1, 2]))
    assert turn.version_spans[0].policy_version == 1


async def test_draining_finishes_what_runs_refuses_the_rest_and_counts_what_it_aborts(tmp_path):
    repository = two_versions()[0]
    engine = FakeEngine(clock=SystemClock(), latency=FakeLatency(step_s=0.005), max_model_len=4000)
    async with service(engine, repository) as client, asyncio.TaskGroup() as tasks:
        short = tasks.create_task(client.generate(request("short", [1, 2], max_new_tokens=10)))
        long = tasks.create_task(client.generate(request("long", [1, 2], max_new_tokens=2000)))
        await until_running(client, 2)
        assert await client.drain(0.3) == 1
        with pytest.raises(EngineError, match="draining"):
            await client.generate(request("late", [1, 2]))
        with pytest.raises(EngineError, match="no new weights"):
            await client.load_weights(2, deadline_s=5)
    assert short.result().stop_reason is StopReason.LENGTH
    assert long.result().stop_reason is StopReason.ABORT


async def test_health_follows_the_standing(tmp_path):
    repository = two_versions()[0]
    async with (
        service(FakeEngine(clock=SystemClock()), repository) as client,
        grpc.aio.insecure_channel(client.address) as channel,
    ):
        stub: Any = health_pb2_grpc.HealthStub(channel)
        asked = health_pb2.HealthCheckRequest(service="rollmill.generator.v1.PolicyInference")
        before = await stub.Check(asked, timeout=5)
        await client.drain(0.1)
        after = await stub.Check(asked, timeout=5)
    assert (before.status, after.status) == (before.SERVING, after.NOT_SERVING)


async def test_an_engine_that_dies_fails_its_requests_and_ends_the_service_with_its_first_error(tmp_path):
    repository = two_versions()[0]
    engine = FakeEngine(
        clock=SystemClock(), faults=FakeFaults(hang_requests=frozenset({1}), die_at_request=2), max_model_len=4000
    )
    with pytest.RaisesGroup(pytest.RaisesExc(EngineDead, match="told to die at request 2")):
        async with service(engine, repository) as client:
            hanging = asyncio.ensure_future(client.generate(request("a", [1, 2])))
            await until(client, lambda status: status.waiting == 1)
            with pytest.raises(EngineDead, match="told to die at request 2"):
                await client.generate(request("b", [1, 2]))
            with pytest.raises(EngineDead, match="told to die at request 2"):
                await hanging


async def test_a_client_that_was_closed_is_engine_dead_for_whoever_still_asks_it(tmp_path):
    repository, old, _ = two_versions()
    async with service(embedded(tmp_path, old), repository) as client:
        other = GeneratorClient(client.address)
        await other.close()
        with pytest.raises(EngineDead, match="was closed"):
            await other.status()
        with pytest.raises(EngineDead, match="was closed"):
            await other.generate(request("a", prompt_of(7)), on_tokens=lambda _: None)


async def test_a_replica_that_is_gone_is_engine_dead(tmp_path):
    repository = two_versions()[0]
    async with service(FakeEngine(clock=SystemClock()), repository) as client:
        address = client.address
    late = GeneratorClient(address)
    with pytest.raises(EngineDead, match="not reachable"):
        await late.generate(request("a", [1, 2]))
    await late.close()


class OtherFace:
    """A face that tells one address, or cannot be bound."""

    name = "other"

    def __init__(self, error: Exception | None = None) -> None:
        self.error, self.ended = error, False

    async def serve(self, service: InferenceService, *, stop: asyncio.Event, on_bound: Callable[[str], None]) -> None:
        if self.error is not None:
            raise self.error
        on_bound(f"other://{service.models[0]}")
        await stop.wait()
        self.ended = True


async def test_another_face_is_served_until_requests_are_drained(tmp_path):
    repository, face, addresses = two_versions()[0], OtherFace(), []
    stop = asyncio.Event()

    def announce(found: Addresses) -> None:
        addresses.append(found)
        stop.set()

    await serve(
        engine=FakeEngine(clock=SystemClock()),
        repository=repository,  # pyright: ignore[reportArgumentType]
        kv_policy="keep",
        stop=stop,
        load_deadline_s=5.0,
        models=("tiny",),
        faces=(face,),
        on_serving=announce,
    )
    assert [found.others for found in addresses] == [{"other": "other://tiny"}]
    assert face.ended


async def test_a_face_that_cannot_be_bound_ends_the_start_with_its_error(tmp_path):
    repository, engine = two_versions()[0], FakeEngine(clock=SystemClock())
    with pytest.raises(ConfigError, match="port 80 is taken"):
        await serve(
            engine=engine,
            repository=repository,  # pyright: ignore[reportArgumentType]
            kv_policy="keep",
            address_file=tmp_path / "address.json",
            stop=asyncio.Event(),
            load_deadline_s=5.0,
            faces=(OtherFace(ConfigError("port 80 is taken")),),
        )
    assert not (tmp_path / "address.json").exists()
    assert (engine.healthy(), repository.held_versions()) == (False, [])


@pytest.mark.parametrize(("tokens", "cut"), [(30, 0), (2000, 1)])
async def test_a_load_that_drains_says_over_the_wire_how_long_it_waited_and_how_many_it_cut(tokens, cut):
    repository, _, _ = two_versions()
    engine = quick_engine(step_s=0.01)
    bound_s = 0.2 if cut else 15.0
    async with service(engine, repository, kv_policy="drain", drain_on_update_s=bound_s) as client:
        running = asyncio.ensure_future(client.generate(request("running", [1, 2, 3], max_new_tokens=tokens)))
        await until_running(client)
        report = await client.load_weights(2, deadline_s=20)
        assert report.cut == cut
        assert (report.finish_s >= bound_s) if cut else (0 < report.finish_s < bound_s)
        parts_s = report.drain_s + report.swap_s + report.prove_s + report.resume_s
        assert report.pause_s == pytest.approx(parts_s)  # in which the wait is not
        after = await client.generate(request("after", [1, 2, 3]))
        assert [span.policy_version for span in after.version_spans] == [2]
        await client.abort("running")
        versions = [span.policy_version for span in (await running).version_spans]
        assert versions == ([1, 2] if cut else [1])
