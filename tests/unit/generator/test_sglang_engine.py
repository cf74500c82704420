"""The SGLang adapter against a server that speaks its dialect and has its traps."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from generator_builders import MemoryRepository
from replica_builders import started
from rollmill.clock import SystemClock
from rollmill.config.schema import GeneratorSettings
from rollmill.config.serving import SglangSettings
from rollmill.errors import DataError, DeadlineExceeded, EngineDead, EngineError, WeightError, WeightMismatch
from rollmill.generator.engines.meter import SecondsMeter
from rollmill.generator.engines.remote.model import ServedModel
from rollmill.generator.engines.remote.transfer import Spool
from rollmill.generator.engines.sglang.port import Address
from rollmill.generator.engines.sglang.start import bring_up
from rollmill.generator.loading import Replica
from rollmill.types import GenerateRequest, SamplingParams, StopReason, TokenChunk, Turn, Wave
from rollmill.weights.tensorfile import TensorsInFile, copy_tensors
from sglang_fake import KEY, VOCABULARY, FakeSglang, logprob_of

SEATS, MAX_LEN = 4, 200
PROMPT = [5, 6, 7]
MODEL = ServedModel(name="tiny", vocabulary_size=VOCABULARY, max_positions=MAX_LEN, kv=None)


def weights(value: float) -> dict[str, torch.Tensor]:
    return {"a": torch.full((4,), value), "b": torch.full((2, 3), value)}


def asked(
    request_id: str, prompt: list[int] = PROMPT, *, deadline_s: float = 20.0, group_key: str = "", **sampling: Any
):
    return GenerateRequest(
        request_id=request_id,
        prompt_ids=np.array(prompt, dtype=np.int32),
        sampling=SamplingParams(**{"max_new_tokens": 8, **sampling}),
        deadline_s=deadline_s,
        group_key=group_key,
    )


class World:
    """The adapter, its server, and shorthands."""

    def __init__(self, folder: Path, *, masks: bool = True, **sglang: Any) -> None:
        self.server = FakeSglang()
        self.server.masks = masks
        settings = GeneratorSettings(
            engine="sglang",
            dtype="float32",
            max_num_seqs=SEATS,
            max_model_len=MAX_LEN,
            sglang=SglangSettings(**{"control_deadline_s": 10.0, "load_poll_s": 60.0, **sglang}),
        )
        clock = SystemClock()
        self.engine = bring_up(
            self.server,
            address=Address(port=self.server.port, key=KEY),
            settings=settings,
            model=MODEL,
            tensors=weights(1.0),
            policy_version=1,
            digest="digest-1",
            spool=Spool(),
            folder=folder,
            clock=clock,
            meter=SecondsMeter(clock, cause="startup"),
            wait=lambda ready: None,
        )
        self.server.seen.clear()
        self.server.bodies.clear()

    async def update(self, version: int = 2, *, kv: Any = "keep", tensors: Any = None) -> Any:
        tensors = weights(float(version)) if tensors is None else tensors
        return await self.engine.update(tensors, policy_version=version, digest=f"digest-{version}", kv=kv)

    async def at(self, request: GenerateRequest, tokens: int, **how: Any) -> asyncio.Task[Turn]:
        """Start a request alone and return when just this many tokens of it have come; the server makes no more."""
        self.server.allow(0)
        heard = 0

        def hear(chunk: TokenChunk) -> None:
            nonlocal heard
            heard = chunk.start_token + len(chunk.output_ids)
            if (on_tokens := how.get("on_tokens")) is not None:
                on_tokens(chunk)

        task = asyncio.ensure_future(self.engine.generate(request, on_tokens=hear))
        await until(lambda: len(self.server.running) > 0)
        self.server.allow(tokens)
        await until(lambda: heard >= tokens)
        return task

    def sent(self, path: str) -> list[str]:
        return [call for call in self.server.seen if call.endswith(path)]


async def until(ready: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not ready():  # noqa: ASYNC110 - the server lives on another thread
            await asyncio.sleep(0.001)


@pytest.fixture
async def world(tmp_path) -> AsyncIterator[World]:
    made = World(tmp_path)
    yield made
    await made.engine.close()


def spans(turn: Turn) -> list[tuple[int, int, int]]:
    return [(span.start_token, span.end_token, span.policy_version) for span in turn.version_spans]


def logprobs(*parts: tuple[int, range, bool]) -> np.ndarray:
    """Log-probs of (version, token indices, whether old KV was used)."""
    return np.array([logprob_of(version, at, stale=stale) for version, indices, stale in parts for at in indices])


async def test_a_turn_is_what_the_server_sampled_under_the_version_it_says(world):
    turn = await world.engine.generate(asked("a", max_new_tokens=3))
    assert turn.output_ids.tolist() == [18, 25, 32]  # 5 + 6 + 7, then 7 more each time
    np.testing.assert_allclose(turn.behavior_logprobs, [-1.0, -1.001, -1.002], rtol=1e-6)
    assert (spans(turn), turn.stop_reason, turn.cached_tokens) == ([(0, 3, 1)], StopReason.LENGTH, 0)


async def test_what_the_listener_hears_is_the_turn(world):
    heard: list[TokenChunk] = []
    turn = await world.engine.generate(asked("a", max_new_tokens=5), on_tokens=heard.append)
    assert np.concatenate([chunk.output_ids for chunk in heard]).tolist() == turn.output_ids.tolist()
    assert {chunk.policy_version for chunk in heard} == {1}


async def test_ids_at_the_server_have_one_length_and_are_never_used_twice(world):
    for _ in range(12):
        await world.engine.generate(asked("a", max_new_tokens=1))
    rids = [body["rid"] for body in world.server.bodies["/generate"]]
    assert len(set(rids)) == 12
    assert {len(rid) for rid in rids} == {18}


async def test_an_output_is_capped_by_the_context(world):
    turn = await world.engine.generate(asked("a", [1] * (MAX_LEN - 3), max_new_tokens=50))
    assert (len(turn.output_ids), turn.stop_reason) == (3, StopReason.LENGTH)


async def test_a_filtered_draw_has_the_log_probs_of_the_filtered_distribution(world):
    turn = await world.engine.generate(asked("a", max_new_tokens=2, top_p=0.9))
    np.testing.assert_allclose(turn.behavior_logprobs, [-1.0 + 0.25, -1.001 + 0.25], rtol=1e-6)
    sent = world.server.bodies["/generate"][-1]
    assert (sent["return_sampling_mask"], sent["sampling_params"]["top_k"]) == (True, VOCABULARY)
    await world.engine.generate(asked("b", max_new_tokens=2, top_p=0.9, temperature=0.0))
    assert "return_sampling_mask" not in world.server.bodies["/generate"][-1]


async def test_without_sampling_masks_a_filtered_draw_is_refused_with_the_engines_that_have_it(tmp_path):
    world = World(tmp_path, masks=False)
    assert not {"top_p", "top_k"} & set(world.engine.info().capabilities)
    for wish in ({"top_p": 0.9}, {"top_k": 3}):
        with pytest.raises(DataError, match="Engines that can: embedded, vllm, fake"):
            await world.engine.generate(asked("a", **wish))
    assert len((await world.engine.generate(asked("a"))).output_ids) == 8
    await world.engine.close()


async def test_kept_kv_goes_on_under_the_new_weights_and_new_requests_never_hit_it(world):
    task = await world.at(asked("a", max_new_tokens=6), 2)
    await world.engine.pause("keep")
    report = await world.update(kv="keep")
    assert (report.changed, report.nbytes) == (True, 4 * 4 + 6 * 4)
    await world.engine.resume()
    world.server.allow(math.inf)
    turn = await task
    assert spans(turn) == [(0, 2, 1), (2, 6, 2)]
    np.testing.assert_allclose(
        turn.behavior_logprobs, logprobs((1, range(2), False), (2, range(2, 6), True)), rtol=1e-6
    )
    fresh = await world.engine.generate(asked("b", max_new_tokens=2))
    np.testing.assert_allclose(fresh.behavior_logprobs, logprobs((2, range(2), False)), rtol=1e-6)
    assert fresh.cached_tokens == 0
    assert {body["mode"] for body in world.server.bodies["/pause_generation"]} == {"in_place"}
    assert [body["flush_cache"] for body in world.server.bodies["/update_weights_from_disk"]] == [False]


async def test_recomputed_kv_is_retracted_before_the_flush_so_that_it_is_not_refused(world):
    task = await world.at(asked("a", max_new_tokens=6), 2)
    await world.engine.pause("keep")
    await world.update(kv="recompute")
    await world.engine.resume()
    world.server.allow(math.inf)
    turn = await task
    assert spans(turn) == [(0, 2, 1), (2, 6, 2)]
    np.testing.assert_allclose(
        turn.behavior_logprobs, logprobs((1, range(2), False), (2, range(2, 6), False)), rtol=1e-6
    )
    assert [body["mode"] for body in world.server.bodies["/pause_generation"]] == ["in_place", "retract"]


async def test_a_request_without_a_token_is_sent_anew_when_weights_change_under_kept_kv(world):
    await world.engine.generate(asked("first"))  # its prompt is in the cache, under the salt of version 1
    world.server.allow(0)
    task = asyncio.ensure_future(world.engine.generate(asked("a", max_new_tokens=2)))
    await until(lambda: len(world.server.running) == 1)
    await world.engine.pause("keep")
    await world.update()
    await world.engine.resume()
    world.server.allow(math.inf)
    turn = await task
    assert (spans(turn), turn.cached_tokens) == ([(0, 2, 2)], 0)
    np.testing.assert_allclose(turn.behavior_logprobs, logprobs((2, range(2), False)), rtol=1e-6)


async def test_streamed_tokens_have_their_versions_also_across_an_update(world):
    heard: list[TokenChunk] = []
    task = await world.at(asked("a", max_new_tokens=5), 2, on_tokens=heard.append)
    await world.engine.pause("keep")
    await world.update()
    world.server.allow(math.inf)
    await world.engine.score(np.array([1, 2, 3]))
    await world.engine.resume()
    turn = await task
    told = [chunk.policy_version for chunk in heard for _ in chunk.output_ids]
    assert told == [1, 1, 2, 2, 2]
    assert np.concatenate([chunk.output_ids for chunk in heard]).tolist() == turn.output_ids.tolist()


async def test_a_score_in_a_pause_shows_no_token_that_was_sampled_meanwhile(world):
    heard: list[TokenChunk] = []
    task = await world.at(asked("a", max_new_tokens=100), 2, on_tokens=heard.append)
    await world.engine.pause("keep")
    await world.update()
    world.server.allow(math.inf)
    scores = await world.engine.score(np.array([1, 2, 3, 4]))
    np.testing.assert_allclose(scores, [-0.2, -0.2, -0.2])  # version / 10
    await world.engine.pause("keep")
    assert world.engine.load().output_tokens == 2
    assert sum(len(chunk.output_ids) for chunk in heard) == 2
    await world.engine.resume()
    world.server.allow(math.inf)
    turn = await task
    assert spans(turn) == [(0, 2, 1), (2, 100, 2)]


async def test_what_an_unproven_version_sampled_is_cut_off(world):
    task = await world.at(asked("a", max_new_tokens=100), 2)
    await world.engine.pause("keep")
    await world.update()
    world.server.allow(math.inf)
    await world.engine.score(np.array([1, 2, 3]))
    await world.engine.pause("abort")  # as after a canary that disagrees
    turn = await task
    assert (len(turn.output_ids), spans(turn), turn.stop_reason) == (2, [(0, 2, 1)], StopReason.ABORT)


async def test_a_request_that_ended_within_the_score_waits_for_the_proof(world):
    task = await world.at(asked("a", max_new_tokens=3), 2)
    await world.engine.pause("keep")
    await world.update()
    world.server.allow(math.inf)
    await world.engine.score(np.array([1, 2, 3]))
    for _ in range(20):
        await asyncio.sleep(0)
    assert not task.done()
    await world.engine.resume()
    assert spans(await task) == [(0, 2, 1), (2, 3, 2)]


@pytest.mark.parametrize("trap", ["refused", "label"])
async def test_an_update_that_may_have_changed_weights_leaves_the_engine_dirty_until_one_succeeds(world, trap):
    task = await world.at(asked("a", max_new_tokens=100), 2)
    await world.engine.pause("keep")
    if trap == "refused":
        world.server.refuse_update = "Weights were updated, but the cache was not flushed because requests are running"
        message = "failed: .*400: Weights were updated, but the cache was not flushed"
    else:
        world.server.fail["/server_info"] = 500
        message = "answered /server_info with 500"
    with pytest.raises(EngineError, match=message):
        await world.update()
    assert not world.engine.healthy()
    assert world.engine.info().policy_version == 1
    turn = await task
    assert (len(turn.output_ids), spans(turn), turn.stop_reason) == (2, [(0, 2, 1)], StopReason.ABORT)
    with pytest.raises(EngineError, match="dirty: its load of policy version 2"):
        await world.engine.generate(asked("b"))
    world.server.refuse_update = ""
    await world.update(1, kv="recompute")  # the way back
    await world.engine.resume()
    world.server.allow(math.inf)
    assert world.engine.healthy()
    assert spans(await world.engine.generate(asked("b", max_new_tokens=2))) == [(0, 2, 1)]


async def test_a_server_that_says_that_it_serves_something_else_is_not_believed(world):
    await world.engine.pause("keep")
    world.server._update = lambda body: (200, {"success": True})
    with pytest.raises(EngineError, match=r"say that they serve \['1'\]"):
        await world.update()
    assert not world.engine.healthy()


async def test_an_update_while_running_asks_the_server_nothing(world):
    with pytest.raises(EngineError, match="pause the engine first"):
        await world.update()
    assert [path for path in world.server.seen if path != "GET /v1/loads"] == []  # the watch looks when it likes


async def test_a_repeated_update_changes_nothing_and_another_digest_is_a_mismatch(world):
    await world.engine.pause("keep")
    await world.update()
    again = await world.update()
    assert (again.changed, again.nbytes, len(world.sent("/update_weights_from_disk"))) == (False, 0, 1)
    with pytest.raises(WeightMismatch):
        await world.engine.update(weights(2.0), policy_version=2, digest="other", kv="keep")
    with pytest.raises(EngineError, match="only rise"):
        await world.update(1)


async def test_weights_of_another_model_are_refused_before_the_server_hears_of_them(world):
    await world.engine.pause("keep")
    for tensors, message in (({"a": torch.zeros(4)}, "missing"), ({**weights(2.0), "a": torch.zeros(5)}, "'a'")):
        with pytest.raises(WeightError, match=message):
            await world.update(tensors=tensors)
    assert world.sent("/update_weights_from_disk") == []
    assert world.engine.healthy()


async def test_weights_that_lie_in_a_file_are_read_from_there(world, tmp_path):
    path = tmp_path / "version.weights"
    with path.open("w+b", buffering=0) as handle:
        copy_tensors(handle, weights(2.0), path=path)
    await world.engine.pause("keep")
    await world.update(tensors=TensorsInFile(weights(2.0), path=path))
    assert world.server.loaded == [str(path)]
    assert path.exists()


async def test_a_file_that_cannot_be_read_is_refused_before_the_server_dies_of_it(world, tmp_path):
    short = tmp_path / "short"
    short.write_bytes(b"\x10")
    task = await world.at(asked("a", max_new_tokens=6), 2)
    await world.engine.pause("keep")
    for path, message in ((tmp_path / "gone", "cannot be read"), (short, "not a safetensors file")):
        with pytest.raises(WeightError, match=message):
            await world.update(tensors=TensorsInFile(weights(2.0), path=path))
    assert world.sent("/update_weights_from_disk") == []
    assert world.engine.healthy()
    await world.engine.resume()
    world.server.allow(math.inf)
    assert spans(await task) == [(0, 6, 1)]


async def test_staged_weights_are_written_before_the_pause_and_gone_after_the_update(world):
    tensors = weights(2.0)
    await world.engine.stage(tensors, policy_version=2)
    assert world.sent("/update_weights_from_disk") == []
    await world.engine.pause("keep")
    await world.update(tensors=tensors)
    assert not await asyncio.to_thread(Path(world.server.loaded[0]).exists)


async def test_an_abort_ends_just_that_request_with_what_it_has(world):
    a1 = await world.at(asked("a1", max_new_tokens=100), 3)
    a10 = asyncio.ensure_future(world.engine.generate(asked("a10", max_new_tokens=6)))
    await until(lambda: len(world.server.running) == 2)
    abort = asyncio.ensure_future(world.engine.abort("a1"))
    await until(lambda: len(world.sent("/abort_request")) > 0)
    world.server.allow(math.inf)
    assert await abort
    assert not await world.engine.abort("a1")
    turn = await a1
    assert (turn.stop_reason, spans(turn)[0][1]) == (StopReason.ABORT, len(turn.output_ids))
    assert 3 <= len(turn.output_ids) < 100
    assert (await a10).stop_reason is StopReason.LENGTH


async def test_in_a_pause_a_request_is_ended_by_hanging_up_because_the_server_would_lose_the_abort(world):
    a = await world.at(asked("a", max_new_tokens=100), 3)
    await world.engine.pause("keep")
    assert await world.engine.abort("a")
    turn = await a
    assert (turn.stop_reason, spans(turn)) == (StopReason.ABORT, [(0, len(turn.output_ids), 1)])
    assert world.sent("/abort_request") == []
    await until(lambda: world.server.running == [])
    await world.engine.resume()
    world.server.allow(math.inf)
    assert len((await world.engine.generate(asked("b"))).output_ids) == 8


async def test_the_token_that_the_server_repeats_for_an_abort_in_its_queue_counts_once(world):
    task = await world.at(asked("a", max_new_tokens=100), 3)
    world.server._command(lambda: [setattr(r, "kv_label", None) for r in world.server._requests.values()])
    assert await world.engine.abort("a")
    turn = await task
    assert turn.output_ids.tolist() == [18, 25, 32]
    np.testing.assert_allclose(turn.behavior_logprobs, logprobs((1, range(3), False)), rtol=1e-6)


async def test_pause_abort_ends_what_runs_and_what_waits(world):
    world.server.allow(0)
    tasks = [asyncio.ensure_future(world.engine.generate(asked(f"r{n}", max_new_tokens=100))) for n in range(SEATS + 2)]
    await until(lambda: len(world.server.running) == SEATS)
    pausing = asyncio.ensure_future(world.engine.pause("abort"))
    await until(lambda: len(world.sent("/abort_request")) >= SEATS)
    world.server.allow(math.inf)
    await pausing
    turns = await asyncio.gather(*tasks)
    assert {turn.stop_reason for turn in turns} == {StopReason.ABORT}
    load = world.engine.load()
    assert (load.running, load.waiting, load.paused) == (0, 0, True)


async def test_what_comes_after_a_pause_that_ended_everything_waits_for_its_end(world):
    await world.engine.pause("keep")
    late = asyncio.ensure_future(world.engine.generate(asked("late", max_new_tokens=2)))
    await until(lambda: world.engine.load().waiting == 1)
    ending = asyncio.ensure_future(world.engine.pause("abort"))
    later = asyncio.ensure_future(world.engine.generate(asked("later", max_new_tokens=2)))
    await ending
    assert (await late).stop_reason is StopReason.ABORT
    await world.engine.resume()
    assert (await later).stop_reason is StopReason.LENGTH


async def test_pause_drain_lets_finish_what_was_sent_and_sends_nothing_more(world):
    task = await world.at(asked("a", max_new_tokens=6), 2)
    draining = asyncio.ensure_future(world.engine.pause("drain"))
    late = asyncio.ensure_future(world.engine.generate(asked("late", max_new_tokens=2)))
    await asyncio.sleep(0)
    world.server.allow(math.inf)
    await draining
    assert len((await task).output_ids) == 6
    assert not late.done()
    await world.update()
    await world.engine.resume()
    assert spans(await late) == [(0, 2, 2)]


async def test_members_of_a_group_wait_for_the_first_ones_prefill_and_then_share_it(world):
    world.server.allow(0)
    tasks = [asyncio.ensure_future(world.engine.generate(asked(f"g{n}", group_key="g"))) for n in range(3)]
    other = asyncio.ensure_future(world.engine.generate(asked("other", [9, 9])))
    await until(lambda: len(world.server.running) == 2)
    assert (world.engine.load().running, world.engine.load().waiting) == (2, 2)
    world.server.allow(math.inf)
    turns = await asyncio.gather(*tasks)
    await other
    assert [turn.cached_tokens for turn in turns] == [0, 2, 2]


async def test_past_its_deadline_a_request_ends_with_what_it_has(world):
    task = await world.at(asked("a", max_new_tokens=100, deadline_s=0.1), 3)
    await until(lambda: len(world.sent("/abort_request")) > 0)
    world.server.allow(math.inf)
    turn = await task
    assert turn.stop_reason is StopReason.ABORT
    assert 3 <= len(turn.output_ids) < 100
    await world.engine.pause("keep")
    held = await world.engine.generate(asked("b", deadline_s=0.02))
    assert (held.stop_reason, len(held.output_ids), held.version_spans) == (StopReason.ABORT, 0, ())


async def test_cancelling_a_caller_ends_its_request_at_the_server(world):
    task = await world.at(asked("a", max_new_tokens=100), 2)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: world.server.running == [])
    assert world.engine.load().running == 0


async def test_a_killed_server_fails_all_requests_with_its_first_error(world):
    tasks = [asyncio.ensure_future(world.engine.generate(asked(f"r{n}", max_new_tokens=100))) for n in range(SEATS + 1)]
    await until(lambda: world.engine.load().running == SEATS)
    world.server.die("RuntimeError: pulled the plug")
    for task in tasks:
        with pytest.raises(EngineDead, match="pulled the plug"):
            await task
    assert not world.engine.healthy()
    for call in (world.engine.generate(asked("late")), world.engine.pause("keep"), world.engine.score(np.arange(1, 4))):
        with pytest.raises(EngineDead, match="pulled the plug"):
            await call


async def test_a_control_call_that_is_not_answered_ends_at_its_deadline(tmp_path):
    world = World(tmp_path, control_deadline_s=0.1)
    world.server.hang.add("/pause_generation")
    with pytest.raises(DeadlineExceeded, match=r"/pause_generation within 0\.1 s"):
        await world.engine.pause("keep")
    await world.engine.close()


async def test_a_reply_without_versions_is_refused(world):
    world.server.lose_spans = True
    with pytest.raises(EngineError, match="which policy sampled it"):
        await world.engine.generate(asked("a"))


async def test_a_refused_request_disturbs_no_other(world):
    task = await world.at(asked("a", max_new_tokens=6), 2)
    world.server.fail["/generate"] = 400
    with pytest.raises(DataError, match="told to refuse"):
        await world.engine.generate(asked("b"))
    with pytest.raises(EngineError, match="in use"):
        await world.engine.generate(asked("a"))
    with pytest.raises(DataError, match="wave"):
        await world.engine.generate(
            GenerateRequest(
                request_id="w",
                prompt_ids=np.array([1]),
                sampling=SamplingParams(),
                wave=Wave(wave_id="w", size=1, index=0),
            )
        )
    world.server.allow(math.inf)
    assert len((await task).output_ids) == 6


async def test_with_an_overlapped_schedule_pauses_retract_and_kv_cannot_be_kept(tmp_path):
    world = World(tmp_path, overlap_schedule=True)
    assert "kv_keep" not in world.engine.info().capabilities
    await world.engine.pause("keep")
    assert [body["mode"] for body in world.server.bodies["/pause_generation"]] == ["retract"]
    with pytest.raises(EngineError, match="overlap_schedule"):
        await world.update(kv="keep")
    # Nothing was asked of the server: the old version is as good as before.
    assert (world.engine.healthy(), world.engine.info().policy_version) == (True, 1)
    await world.update(kv="recompute")
    assert world.engine.healthy()
    await world.engine.close()


async def test_a_flush_gives_later_requests_a_salt_of_their_own(world):
    await world.engine.generate(asked("a"))
    assert (await world.engine.generate(asked("b"))).cached_tokens == 2
    await world.engine.flush()
    assert (await world.engine.generate(asked("c"))).cached_tokens == 0


async def test_the_load_tells_memory_from_the_server_and_the_rest_from_here(world):
    await world.engine.generate(asked("a"))
    await world.engine.generate(asked("b"))
    load = world.engine.load()
    assert (load.output_tokens, load.prefill_tokens, load.cached_tokens) == (16, 4, 2)
    assert (load.kv_capacity_tokens, load.kv_used_tokens) == (100, 0)
    assert sum(load.seconds.values()) == pytest.approx(load.wall_s, abs=1e-9)


async def test_closing_returns_partial_turns_and_refuses_later_calls(world):
    task = await world.at(asked("a", max_new_tokens=100), 2)
    closing = asyncio.ensure_future(world.engine.close())
    await until(lambda: len(world.sent("/abort_request")) > 0)
    world.server.allow(math.inf)
    await closing
    await world.engine.close()
    assert (await task).stop_reason is StopReason.ABORT
    assert (world.server.stopped, world.engine.healthy()) == (1, False)
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
    assert spans(turn) == [(0, 20, 1)]
    np.testing.assert_allclose(turn.behavior_logprobs, logprobs((1, range(20), False)))
    assert (report.cut, report.policy_version) == (0, 2)


async def test_an_update_that_drains_cuts_what_does_not_finish_and_computes_it_anew(world):
    replica = await drained_replica(world, bound_s=0.05)
    task = await world.at(asked("a", max_new_tokens=20), 6)
    report = await replica.load(2)
    assert (report.cut, report.policy_version) == (1, 2)
    assert report.finish_s >= 0.05
    world.server.allow(math.inf)
    turn = await task
    assert spans(turn) == [(0, 6, 1), (6, 20, 2)]
    np.testing.assert_allclose(turn.behavior_logprobs, logprobs((1, range(6), False), (2, range(6, 20), False)))
