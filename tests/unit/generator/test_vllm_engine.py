"""The vLLM adapter against a server that speaks its dialect and has its traps."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
import torch

from generator_builders import MemoryRepository
from replica_builders import started
from rollmill.clock import SystemClock
from rollmill.config.schema import GeneratorSettings
from rollmill.config.serving import VllmSettings
from rollmill.errors import DataError, DeadlineExceeded, EngineDead, EngineError, WeightError, WeightMismatch
from rollmill.generator.engines.meter import SecondsMeter
from rollmill.generator.engines.remote.model import ServedModel
from rollmill.generator.engines.vllm.start import bring_up
from rollmill.generator.loading import Replica
from rollmill.types import GenerateRequest, SamplingParams, StopReason, TokenChunk, Turn, Wave
from rollmill.weights.tensorfile import TensorsInFile, write_tensors
from vllm_fake import VOCABULARY, FakeVllm, logprob_of

SEATS, MAX_LEN = 4, 200
PROMPT = [5, 6, 7]
MODEL = ServedModel(name="tiny", vocabulary_size=VOCABULARY, max_positions=MAX_LEN, kv=None)


def weights(value: float) -> dict[str, torch.Tensor]:
    return {"a": torch.full((4,), value), "b": torch.full((2, 3), value)}


def asked(request_id: str, prompt: list[int] = PROMPT, *, deadline_s: float = 20.0, **sampling: Any) -> GenerateRequest:
    return GenerateRequest(
        request_id=request_id,
        prompt_ids=np.array(prompt, dtype=np.int32),
        sampling=SamplingParams(**{"max_new_tokens": 8, **sampling}),
        deadline_s=deadline_s,
    )


class World:
    """The adapter, its server, and shorthands."""

    def __init__(self, folder: Any, *, control_deadline_s: float = 10.0) -> None:
        self.server = FakeVllm(folder)
        settings = GeneratorSettings(
            engine="vllm",
            dtype="float32",
            max_num_seqs=SEATS,
            max_model_len=MAX_LEN,
            vllm=VllmSettings(control_deadline_s=control_deadline_s, load_poll_s=60.0),
        )
        clock = SystemClock()
        self.engine = bring_up(
            self.server,
            socket=self.server.socket,
            settings=settings,
            model=MODEL,
            tensors=weights(1.0),
            policy_version=1,
            digest="digest-1",
            clock=clock,
            meter=SecondsMeter(clock, cause="startup"),
            wait=lambda ready: None,
        )
        self.server.seen.clear()

    async def update(self, version: int = 2, *, kv: Any = "keep", tensors: Any = None) -> Any:
        tensors = weights(float(version)) if tensors is None else tensors
        return await self.engine.update(tensors, policy_version=version, digest=f"digest-{version}", kv=kv)

    async def at(self, request: GenerateRequest, tokens: int, **how: Any) -> asyncio.Task[Turn]:
        """Start a request and return when the server has made just this many tokens of it."""
        self.server.allow(0)
        task = asyncio.ensure_future(self.engine.generate(request, **how))
        await self.until(lambda: len(self.server.running) > 0)
        self.server.allow(tokens)
        await self.until(lambda: any(len(r.tokens) >= tokens for r in self.server._requests.values()))
        return task

    async def until(self, ready: Any) -> None:
        async with asyncio.timeout(10):
            while not ready():  # noqa: ASYNC110
                await asyncio.sleep(0.001)

    def spans(self, turn: Turn) -> list[tuple[int, int, int]]:
        return [(span.start_token, span.end_token, span.policy_version) for span in turn.version_spans]


@pytest.fixture
async def world(tmp_path) -> AsyncIterator[World]:
    made = World(tmp_path)
    yield made
    made.server.hang.clear()
    made.server.hold(None)
    made.server.allow(math.inf)
    await made.engine.close()


def expected(turn: Turn, *, stale_after: int | None = None) -> list[float]:
    values = []
    for span in turn.version_spans:
        for index in range(span.start_token, span.end_token):
            stale = stale_after is not None and index >= stale_after
            values.append(logprob_of(span.policy_version, index, stale=stale))
    return values


async def test_a_turn_has_the_servers_tokens_log_probs_and_versions(world):
    turn = await world.engine.generate(
        asked("a", max_new_tokens=5, temperature=0.7, top_p=0.9, top_k=3, seed=2**64 - 1)
    )
    assert turn.output_ids.tolist() == [18, 25, 32, 39, 46]  # (5 + 6 + 7 + 7 i) modulo 96
    np.testing.assert_allclose(turn.behavior_logprobs, expected(turn))
    assert (world.spans(turn), turn.stop_reason, turn.cached_tokens) == ([(0, 5, 1)], StopReason.LENGTH, 0)
    sent = world.server.bodies["/inference/v1/generate"][-1]["sampling_params"]
    assert (sent["temperature"], sent["top_p"], sent["top_k"], sent["seed"]) == (0.7, 0.9, 3, 2**63 - 1)
    assert (sent["ignore_eos"], sent["logprobs"]) == (True, 0)


async def test_the_first_weights_come_by_the_way_of_all_others(tmp_path):
    world = World(tmp_path)
    assert [len(world.server.bodies[path]) for path in ("/init_weight_transfer_engine", "/update_weights")] == [1, 1]
    assert world.server.label == "1"
    await world.engine.close()


async def test_a_stop_token_ends_the_turn_and_belongs_to_it(world):
    turn = await world.engine.generate(asked("a", stop_token_ids=(32,)))
    assert (turn.output_ids.tolist(), turn.stop_reason) == ([18, 25, 32], StopReason.STOP)


async def test_spans_partition_the_output_across_an_update_and_kept_kv_is_kept(world):
    task = await world.at(asked("a", max_new_tokens=20), 6)
    await world.engine.pause("keep")
    assert (world.engine.load().output_tokens, world.engine.load().kv_used_tokens) == (6, 80)  # a quarter of 10 * 32
    report = await world.update(kv="keep")
    world.server.allow(math.inf)
    await world.engine.resume()
    turn = await task
    assert world.spans(turn) == [(0, 6, 1), (6, 20, 2)]
    np.testing.assert_allclose(turn.behavior_logprobs, expected(turn, stale_after=6))
    assert (report.policy_version, report.nbytes, report.changed) == (2, 40, True)  # 4 + 6 floats


async def test_with_recompute_nothing_is_sampled_from_old_kv(world):
    task = await world.at(asked("a", max_new_tokens=20), 6)
    await world.engine.pause("keep")
    await world.update(kv="recompute")
    world.server.allow(math.inf)
    await world.engine.resume()
    np.testing.assert_allclose((turn := await task).behavior_logprobs, expected(turn))
    assert world.spans(turn) == [(0, 6, 1), (6, 20, 2)]


async def test_a_new_request_with_an_old_prompt_never_hits_kv_of_old_weights(world):
    await world.engine.generate(asked("old"))
    assert (await world.engine.generate(asked("again"))).cached_tokens == 2
    await world.engine.pause("keep")
    await world.update(kv="keep")
    await world.engine.resume()
    turn = await world.engine.generate(asked("new"))
    assert turn.cached_tokens == 0
    np.testing.assert_allclose(turn.behavior_logprobs, expected(turn))


async def test_after_a_flush_nothing_made_before_is_hit(world):
    await world.engine.generate(asked("old"))
    await world.engine.flush()
    assert (await world.engine.generate(asked("new"))).cached_tokens == 0


async def test_an_update_without_a_pause_never_reaches_the_server(world):
    with pytest.raises(EngineError, match="pause the engine first"):
        await world.update()
    assert "POST /start_weight_update" not in world.server.seen
    assert world.engine.healthy()


async def test_a_score_in_a_pause_lets_nothing_out_before_the_pause_ends(world):
    heard: list[TokenChunk] = []
    task = await world.at(asked("a", max_new_tokens=10), 4, on_tokens=heard.append)
    await world.until(lambda: sum(len(chunk.output_ids) for chunk in heard) == 4)
    await world.engine.pause("keep")
    await world.update()
    world.server.allow(math.inf)
    scores = await world.engine.score(np.array([1, 2, 3]))
    np.testing.assert_allclose(scores, [-0.2, -0.2])
    assert not task.done()
    assert sum(len(chunk.output_ids) for chunk in heard) == 4
    await world.engine.resume()
    turn = await task
    assert world.spans(turn) == [(0, 4, 1), (4, 10, 2)]
    assert [(c.start_token, len(c.output_ids), c.policy_version) for c in heard][-1] == (4, 6, 2)
    assert np.concatenate([c.output_ids for c in heard]).tolist() == turn.output_ids.tolist()


async def test_what_a_version_sampled_that_was_never_proven_is_cut_off(world):
    task = await world.at(asked("a", max_new_tokens=10), 4)
    await world.engine.pause("keep")
    await world.update()
    world.server.allow(math.inf)
    await world.engine.score(np.array([1, 2, 3]))
    await world.engine.pause("abort")
    turn = await task
    assert (world.spans(turn), turn.stop_reason) == ([(0, 4, 1)], StopReason.ABORT)
    np.testing.assert_allclose(turn.behavior_logprobs, expected(turn))


async def test_a_failed_update_leaves_the_engine_dirty_and_ends_requests_with_what_they_had(world):
    task = await world.at(asked("a", max_new_tokens=10), 4)
    await world.engine.pause("keep")
    world.server.fail["/update_weights"] = 500
    with pytest.raises(EngineError, match=r"version 2 failed: .*told to refuse /update_weights"):
        await world.update()
    assert world.spans(await task) == [(0, 4, 1)]
    assert (world.engine.healthy(), world.engine.info().policy_version) == (False, 1)
    with pytest.raises(EngineError, match="dirty"):
        await world.engine.generate(asked("b"))


async def test_the_old_version_can_be_loaded_again_after_a_failed_update(world):
    await world.engine.pause("keep")
    world.server.fail["/update_weights"] = 500
    with pytest.raises(EngineError):
        await world.update()
    report = await world.update(1)
    world.server.allow(math.inf)
    await world.engine.resume()
    assert (report.changed, world.engine.healthy()) == (True, True)
    assert world.spans(await world.engine.generate(asked("b"))) == [(0, 8, 1)]


async def test_an_error_reply_to_the_last_phase_is_not_taken_for_no_change(world):
    await world.engine.pause("keep")
    world.server.fail["/finish_weight_update"] = 500
    with pytest.raises(EngineError, match="version 2 failed"):
        await world.update()
    assert not world.engine.healthy()


async def test_while_an_update_runs_the_engine_is_sound_and_what_comes_waits(world):
    await world.engine.pause("keep")
    world.server.hold("/update_weights")
    loading = asyncio.ensure_future(world.update())
    await world.until(lambda: "POST /update_weights" in world.server.seen)
    assert world.engine.healthy()
    late = asyncio.ensure_future(world.engine.generate(asked("late")))
    await asyncio.sleep(0)
    assert not late.done()
    world.server.hold(None)
    assert (await loading).changed
    world.server.allow(math.inf)
    await world.engine.resume()
    assert world.spans(await late) == [(0, 8, 2)]


async def test_a_cancelled_update_leaves_the_engine_dirty(world):
    await world.engine.pause("keep")
    world.server.hang.add("/update_weights")
    task = asyncio.ensure_future(world.update())
    await world.until(lambda: "POST /update_weights" in world.server.seen)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not world.engine.healthy()


async def test_weights_of_another_model_are_refused_before_the_server_hears_of_them(world):
    await world.engine.pause("keep")
    for wrong, message in (
        ({"a": torch.zeros(4)}, "missing \\['b'\\]"),
        ({"a": torch.zeros(4), "b": torch.zeros(3, 2)}, "'b' is float32 \\[3, 2\\]"),
        ({"a": torch.zeros(4).double(), "b": torch.zeros(2, 3)}, "'a' is float64"),
    ):
        with pytest.raises(WeightError, match=message):
            await world.update(tensors=wrong)
    assert "POST /start_weight_update" not in world.server.seen
    assert world.engine.healthy()


async def test_a_repeated_version_is_not_loaded_again_and_versions_only_rise(world):
    await world.engine.pause("keep")
    first, second = await world.update(5), await world.update(5)
    assert (first.changed, second.changed, second.nbytes) == (True, False, 0)
    assert world.server.seen.count("POST /update_weights") == 1
    with pytest.raises(WeightMismatch):
        await world.engine.update(weights(5.0), policy_version=5, digest="other", kv="keep")
    with pytest.raises(EngineError, match="only rise"):
        await world.update(4)


async def test_weights_that_lie_in_a_file_are_loaded_from_there(world, tmp_path):
    path = tmp_path / "v2.safetensors"
    write_tensors(path, weights(2.0), durable=False)
    await world.engine.pause("keep")
    await world.update(tensors=TensorsInFile(weights(2.0), path=path))
    assert world.server.loaded[-1] == str(path)
    assert path.exists()


async def test_weights_made_ready_are_written_once_and_their_file_goes_when_they_are_loaded(world):
    tensors = weights(2.0)
    await world.engine.stage(tensors, policy_version=2)
    assert world.engine.info().policy_version == 1
    spool = world.engine._spool
    path = spool.ready(tensors, policy_version=2)
    assert path is not None
    await world.engine.pause("keep")
    await world.update(tensors=tensors)
    assert world.server.loaded[-1] == str(path)
    assert not path.exists()


async def test_abort_reaches_just_its_request_though_its_id_begins_another(world):
    world.server.allow(0)
    a1 = asyncio.ensure_future(world.engine.generate(asked("a1", max_new_tokens=50)))
    a10 = asyncio.ensure_future(world.engine.generate(asked("a10", max_new_tokens=50)))
    await world.until(lambda: len(world.server.running) == 2)
    world.server.allow(3)
    await world.until(lambda: all(len(r.tokens) == 3 for r in world.server._requests.values()))
    assert await world.engine.abort("a1")
    assert not await world.engine.abort("a1")
    assert (len(world.server.running), world.engine.load().running) == (1, 1)
    turn = await a1
    assert (turn.stop_reason, len(turn.output_ids)) == (StopReason.ABORT, 3)
    world.server.allow(math.inf)
    assert (await a10).stop_reason is StopReason.LENGTH
    ids = {body["request_id"] for body in world.server.bodies["/inference/v1/generate"]}
    assert len({len(one) for one in ids if one != "0"}) == 1


async def test_past_its_deadline_a_request_ends_with_what_it_has_sent_or_not(world):
    task = await world.at(asked("a", max_new_tokens=50, deadline_s=0.15), 3)
    turn = await task
    assert (turn.stop_reason, len(turn.output_ids)) == (StopReason.ABORT, 3)
    await world.engine.pause("keep")
    turn = await world.engine.generate(asked("b", deadline_s=0.01))
    assert (turn.stop_reason, len(turn.output_ids), turn.version_spans) == (StopReason.ABORT, 0, ())


async def test_more_requests_than_seats_wait_here_and_are_served_in_order(world):
    world.server.allow(0)
    tasks = [asyncio.ensure_future(world.engine.generate(asked(f"r{n}"))) for n in range(SEATS + 3)]
    await world.until(lambda: len(world.server.running) == SEATS)
    assert (world.engine.load().running, world.engine.load().waiting) == (SEATS, 3)
    world.server.allow(math.inf)
    assert [len((await task).output_ids) for task in tasks] == [8] * (SEATS + 3)


async def test_drain_lets_what_was_sent_finish_and_keeps_the_rest(world):
    task = await world.at(asked("a", max_new_tokens=20), 2)
    draining = asyncio.ensure_future(world.engine.pause("drain"))
    await asyncio.sleep(0)
    late = asyncio.ensure_future(world.engine.generate(asked("late")))
    world.server.allow(math.inf)
    await draining
    assert len((await task).output_ids) == 20
    assert not late.done()
    await world.update()
    await world.engine.resume()
    assert world.spans(await late) == [(0, 8, 2)]


async def test_pause_abort_ends_what_is_sent_and_what_waits(world):
    world.server.allow(0)
    tasks = [asyncio.ensure_future(world.engine.generate(asked(f"r{n}"))) for n in range(SEATS + 2)]
    await world.until(lambda: len(world.server.running) == SEATS)
    await world.engine.pause("abort")
    assert (world.engine.load().running, world.engine.load().waiting, world.engine.load().paused) == (0, 0, True)
    assert {(await task).stop_reason for task in tasks} == {StopReason.ABORT}


async def test_what_comes_while_a_pause_ends_everything_waits_for_its_end(world):
    task = await world.at(asked("a", max_new_tokens=50), 2)
    pausing = asyncio.ensure_future(world.engine.pause("abort"))
    await asyncio.sleep(0)
    late = asyncio.ensure_future(world.engine.generate(asked("late")))
    await pausing
    assert (await task).stop_reason is StopReason.ABORT
    assert (late.done(), world.engine.load().waiting) == (False, 1)
    world.server.allow(math.inf)
    await world.engine.resume()
    assert len((await late).output_ids) == 8


async def test_a_cancelled_caller_frees_its_seat(world):
    task = await world.at(asked("a", max_new_tokens=50), 2)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert world.engine.load().running == 0


@pytest.mark.parametrize("half", [False, True], ids=["process", "its engine alone"])
async def test_a_death_fails_all_requests_with_the_first_error_of_the_log(world, half):
    tasks = [await world.at(asked("a", max_new_tokens=50), 2)]
    tasks.append(asyncio.ensure_future(world.engine.generate(asked("b", max_new_tokens=50))))
    world.server.die("ValueError: no room", half=half)
    world.engine._port.look()
    for task in tasks:
        with pytest.raises(EngineDead, match="ValueError: no room") as died:
            await task
        assert isinstance(died.value.__cause__, EngineDead)
    assert not world.engine.healthy()
    for call in (world.engine.generate(asked("late")), world.engine.pause("keep"), world.engine.score(np.arange(3))):
        with pytest.raises(EngineDead, match="no room"):
            await call


async def test_a_control_call_that_is_not_answered_is_named_with_its_deadline(tmp_path):
    world = World(tmp_path, control_deadline_s=0.1)
    world.server.hang.add("/pause")
    with pytest.raises(DeadlineExceeded, match=r"/pause within 0.1 s"):
        await world.engine.pause("keep")
    world.server.hang.clear()
    await world.engine.close()


async def test_a_reply_without_versions_is_refused(world):
    world.server.lose_labels = True
    with pytest.raises(EngineError, match="does not cover its 8 tokens"):
        await world.engine.generate(asked("a"))
    assert world.engine.load().running == 0


async def test_a_wave_is_refused_with_the_engines_that_run_them(world):
    wave = GenerateRequest(
        request_id="a", prompt_ids=np.array(PROMPT), sampling=SamplingParams(), wave=Wave(wave_id="w", size=1, index=0)
    )
    with pytest.raises(DataError, match="embedded, fake"):
        await world.engine.generate(wave)


async def test_what_the_adapter_asked_for_itself_is_not_counted_as_output(world):
    await world.engine.generate(asked("a", max_new_tokens=5))
    await world.engine.score(np.array([1, 2, 3]))
    await world.engine.pause("keep")
    load = world.engine.load()
    assert (load.output_tokens, load.prefill_tokens) == (5, 3)
    assert (load.kv_used_tokens, load.kv_capacity_tokens) == (0, 320)  # 10 blocks of 32, and nothing runs
    await world.engine.score(np.array([1, 2, 3]))
    assert world.engine.load().output_tokens == 5
    assert {"startup", "decode", "idle", "paused"} <= load.seconds.keys()
    assert sum(load.seconds.values()) == pytest.approx(load.wall_s)


async def test_closing_returns_partial_turns_refuses_later_calls_and_ends_the_server(world):
    task = await world.at(asked("a", max_new_tokens=50), 3)
    await world.engine.close()
    await world.engine.close()
    turn = await task
    assert (turn.stop_reason, len(turn.output_ids)) == (StopReason.ABORT, 3)
    assert (world.engine.healthy(), world.server.stopped) == (False, 1)
    with pytest.raises(EngineDead, match="closed"):
        await world.engine.generate(asked("late"))


async def drained_replica(world, *, bound_s: float) -> Replica:
    """The engine as a replica that drains on an update, with version 2 ready to be loaded."""
    repository = MemoryRepository()
    for value in (1.0, 2.0):
        repository.publish(
            weights(value),
            optimizer_step=0,
            parent=None,
            history_id="h",
            training_dtype="float32",
            canary=None,
            at_s=0.0,
        )
    return await started(world.engine, repository, kv_policy="drain", drain_on_update_s=bound_s)


async def test_an_update_that_drains_lets_what_is_with_the_server_finish_under_the_old_version(world):
    replica = await drained_replica(world, bound_s=10.0)
    task = await world.at(asked("a", max_new_tokens=20), 6)
    loading = asyncio.ensure_future(replica.load(2))
    world.server.allow(math.inf)
    report = await loading
    turn = await task
    assert world.spans(turn) == [(0, 20, 1)]
    np.testing.assert_allclose(turn.behavior_logprobs, expected(turn))
    assert (report.cut, report.policy_version) == (0, 2)


async def test_an_update_that_drains_cuts_what_does_not_finish_and_computes_it_anew(world):
    replica = await drained_replica(world, bound_s=0.05)
    task = await world.at(asked("a", max_new_tokens=20), 6)
    report = await replica.load(2)
    assert (report.cut, report.policy_version) == (1, 2)
    assert report.finish_s >= 0.05
    world.server.allow(math.inf)
    turn = await task
    assert world.spans(turn) == [(0, 6, 1), (6, 20, 2)]
    np.testing.assert_allclose(turn.behavior_logprobs, expected(turn))
