"""A real SGLang: what it uses of old weights after an update, what becomes of it when it fails, and its traps."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from typing import Any

import httpx2 as httpx
import numpy as np
import psutil
import pytest
import torch

from generator_builders import (
    MemoryRepository,
    all_ids,
    canary_for,
    prompt_of,
    reference_logits,
    reference_logprobs,
    request,
    tensors_of,
)
from rollmill.clock import SystemClock
from rollmill.errors import EngineDead, EngineError, WeightError, WeightMismatch
from rollmill.generator.engines.remote.engine import RemoteEngine
from rollmill.generator.engines.remote.transfer import Spool
from rollmill.generator.engines.sglang.dialect import (
    ABORT,
    CONTINUE,
    GENERATE,
    PAUSE,
    SERVER_INFO,
    UPDATE,
    read_labels,
    update_body,
)
from rollmill.generator.engines.sglang.port import linked_folder
from rollmill.generator.loading import Replica
from rollmill.generator.state import ReplicaState
from rollmill.types import Canary, SamplingParams, StopReason, TokenChunk, Turn
from rollmill.weights.tensorfile import TensorsInFile
from sglang_server import SharedServer, why_not

pytestmark = [pytest.mark.slow, pytest.mark.integration, pytest.mark.timeout(600)]

LONG = 140


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[SharedServer]:
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    shared = SharedServer(tmp_path_factory.mktemp("sglang"))
    yield shared
    shared.stop()


async def running(engine: RemoteEngine, prompt: list[int], *, name: str = "r", tokens: int = 4) -> asyncio.Task[Turn]:
    """Start a long request and return when it has some tokens."""
    enough = asyncio.Event()

    def hear(chunk: TokenChunk) -> None:
        if chunk.start_token + len(chunk.output_ids) >= tokens:
            enough.set()

    task = asyncio.ensure_future(engine.generate(request(name, prompt, max_new_tokens=LONG), on_tokens=hear))
    async with asyncio.timeout(20):
        await enough.wait()
    return task


async def load_new(engine: RemoteEngine, server: SharedServer, *, kv: Any) -> None:
    await engine.pause("keep")
    await engine.update(tensors_of(server.new), policy_version=2, digest="digest-2", kv=kv)


@torch.inference_mode()
def with_old_kv(server: SharedServer, turn: Turn, *, cut: int) -> np.ndarray:
    """Log-probs of the tokens from `cut` on, under the new weights over keys and values of the old ones."""
    ids = torch.from_numpy(all_ids(turn))
    # When the weights changed, the newest token had not been fed yet.
    fed = len(turn.prompt_ids) + cut - 1
    old = server.old(input_ids=ids[None, :fed], use_cache=True)
    rows = server.new(input_ids=ids[None, fed:], cache=old.past_key_values).logits[0].log_softmax(-1)
    return rows[:-1].gather(1, ids[fed + 1 :, None])[:, 0].numpy()


async def test_with_keep_what_runs_goes_on_over_old_kv_and_a_new_request_with_its_prompt_does_not(server):
    engine = server.engine()
    task = await running(engine, prompt_of(9))
    await load_new(engine, server, kv="keep")
    await engine.resume()
    fresh = await engine.generate(request("fresh", prompt_of(9)))
    turn = await task
    old, new = turn.version_spans
    expected = with_old_kv(server, turn, cut=new.start_token)
    np.testing.assert_allclose(turn.behavior_logprobs[new.start_token :], expected, atol=1e-4)
    before = reference_logprobs(server.old, turn, SamplingParams())[: old.end_token]
    np.testing.assert_allclose(turn.behavior_logprobs[: old.end_token], before, atol=1e-4)
    assert fresh.cached_tokens == 0
    np.testing.assert_allclose(
        fresh.behavior_logprobs, reference_logprobs(server.new, fresh, SamplingParams()), atol=1e-4
    )
    await engine.close()


async def test_with_recompute_what_runs_goes_on_as_the_new_policy_would(server):
    engine = server.engine()
    task = await running(engine, prompt_of(9))
    await load_new(engine, server, kv="recompute")
    await engine.resume()
    turn = await task
    start = turn.version_spans[1].start_token
    expected = reference_logprobs(server.new, turn, SamplingParams())[start:]
    np.testing.assert_allclose(turn.behavior_logprobs[start:], expected, atol=1e-4)
    # The two ways differ by more than rounding, or this test would show nothing.
    assert np.abs(expected - with_old_kv(server, turn, cut=start)).max() > 1e-2
    await engine.close()


async def test_after_an_update_the_tied_head_is_the_new_one(server):
    engine = server.engine()
    await load_new(engine, server, kv="keep")
    canary = canary_for(server.new)
    np.testing.assert_allclose(await engine.score(canary.token_ids), canary.logprobs, atol=1e-4)
    old = reference_logits(server.old, canary.token_ids.astype(np.int64)).log_softmax(-1)[:-1]
    stale = old.gather(1, torch.from_numpy(canary.token_ids[1:].astype(np.int64))[:, None])[:, 0].numpy()
    assert np.abs(stale - canary.logprobs).max() > 1e-2
    await engine.close()


async def test_a_replica_proves_a_version_in_the_pause_and_cuts_off_what_an_unproven_one_sampled(server):
    engine, repository = server.engine(), MemoryRepository()
    repository.put(server.old)
    repository.put(server.new)
    replica = Replica(
        engine=engine,
        repository=repository,
        kv_policy="keep",
        load_deadline_s=60.0,
        owner="test",
        clock=SystemClock(),
    )
    await replica.start()
    task = await running(engine, prompt_of(9))
    report = await replica.load(2)
    assert report.canary_difference is not None
    assert report.canary_difference < 1e-4
    assert [span.policy_version for span in (await task).version_spans] == [1, 2]
    wrong = canary_for(server.new)
    repository.put(server.old, canary=Canary(token_ids=wrong.token_ids, logprobs=wrong.logprobs, tolerance=1e-3))
    task = await running(engine, prompt_of(9), name="s")
    with pytest.raises(WeightMismatch):
        await replica.load(3)
    turn = await task
    assert (turn.stop_reason, {span.policy_version for span in turn.version_spans}) == (StopReason.ABORT, {2})
    np.testing.assert_allclose(
        turn.behavior_logprobs, reference_logprobs(server.new, turn, SamplingParams()), atol=1e-4
    )
    assert replica.standing.state is ReplicaState.DIRTY
    await engine.close()


async def test_a_file_that_cannot_be_read_changes_nothing(server, tmp_path):
    engine = server.engine()
    gone = TensorsInFile(tensors_of(server.new), path=tmp_path / "gone.safetensors")
    task = await running(engine, prompt_of(9))
    await engine.pause("keep")
    with pytest.raises(WeightError, match="cannot be read"):
        await engine.update(gone, policy_version=2, digest="digest-2", kv="keep")
    await engine.resume()
    turn = await task
    assert (engine.healthy(), [span.policy_version for span in turn.version_spans]) == (True, [1])
    np.testing.assert_allclose(
        turn.behavior_logprobs, reference_logprobs(server.old, turn, SamplingParams()), atol=1e-4
    )
    await engine.close()


async def test_siblings_share_the_prefill_of_their_prompt(server):
    engine = server.engine()
    prompt = prompt_of(40, seed=77)
    turns = await asyncio.gather(*(engine.generate(request(f"s{n}", prompt, group_key="g")) for n in range(8)))
    assert turns[0].cached_tokens < 39
    assert [turn.cached_tokens for turn in turns[1:]] == [39] * 7
    await engine.close()


async def test_what_is_ended_in_a_pause_has_left_the_server_when_it_goes_on(server):
    engine = server.engine()
    task = await running(engine, prompt_of(9))
    await engine.pause("keep")
    assert await engine.abort("r")
    assert (await task).stop_reason is StopReason.ABORT
    await engine.resume()
    await engine.generate(request("next", prompt_of(5), max_new_tokens=2))
    async with asyncio.timeout(20):  # the scheduler drops what has ended when it plans its next step
        while (await asyncio.to_thread(server.loads))["num_running_reqs"] > 0:
            pass
    assert server.loads()["num_total_tokens"] < LONG
    await engine.close()


# -- why the adapter does what it does: should one of these fail, a trap is gone


def body(rid: str, *, tokens: int = 100) -> dict[str, Any]:
    return {"rid": rid, "input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": tokens}, "stream": True}


async def lines_of(client: httpx.AsyncClient, sent: dict[str, Any], seen: list[str]) -> None:
    async with client.stream("POST", GENERATE, json=sent) as reply:
        async for line in reply.aiter_lines():
            if line.startswith("data: {"):
                seen.append(line)  # noqa: PERF401 - others look at it meanwhile


async def until_seen(seen: list[str], *, count: int) -> None:
    async with asyncio.timeout(20):
        while len(seen) < count:  # noqa: ASYNC110 - a server in another process
            await asyncio.sleep(0.005)


async def test_trap_a_refused_flush_has_changed_the_weights(server):
    engine = server.engine()
    seen: list[str] = []
    async with server.async_client() as client, asyncio.TaskGroup() as tasks:
        tasks.create_task(lines_of(client, body("trap-flush-1"), seen))
        await until_seen(seen, count=3)
        await client.post(PAUSE, json={"mode": "in_place"})
        spool = Spool()
        file = spool.write(tensors_of(server.new), policy_version=9)
        with linked_folder(file, parent=server.folder) as folder:
            refused = await client.post(UPDATE, json=update_body(str(folder), policy_version=9, flush=True))
        assert (refused.status_code, refused.json()["success"]) == (400, False)
        assert read_labels((await client.get(SERVER_INFO)).content) == {"9"}
        await client.post(CONTINUE, json={"torch_empty_cache": False})
        spool.close()
    await engine.close()


async def test_trap_an_abort_of_what_the_front_end_holds_back_in_a_pause_is_lost(server):
    engine = server.engine()
    seen: list[str] = []
    async with server.async_client() as client, asyncio.TaskGroup() as tasks:
        await client.post(PAUSE, json={"mode": "in_place"})
        tasks.create_task(lines_of(client, body("trap-gate-1", tokens=5), seen))
        await asyncio.sleep(0.3)  # it is there
        await client.post(ABORT, json={"rid": "trap-gate-1"})
        await client.post(CONTINUE, json={"torch_empty_cache": False})
        await client.post(ABORT, json={"rid": "trap-gate-1"})
    assert '"type":"length"' in seen[-1]
    await engine.close()


# -- the overlapped schedule: a server of its own


@pytest.fixture(scope="module")
def overlapped(tmp_path_factory) -> Iterator[SharedServer]:
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    shared = SharedServer(tmp_path_factory.mktemp("sglang-overlapped"), overlap_schedule=True, kv_on_update="recompute")
    yield shared
    shared.stop()


async def test_overlapped_each_token_of_a_request_in_flight_has_the_version_that_sampled_it(overlapped):
    engine = overlapped.engine()
    task = await running(engine, prompt_of(9))
    await load_new(engine, overlapped, kv="recompute")
    await engine.resume()
    turn = await task
    old, new = turn.version_spans
    assert [(old.start_token, old.policy_version), (new.end_token, new.policy_version)] == [(0, 1), (LONG, 2)]
    assert old.end_token == new.start_token >= 4
    for span, model in ((old, overlapped.old), (new, overlapped.new)):
        tokens = slice(span.start_token, span.end_token)
        expected = reference_logprobs(model, turn, SamplingParams())[tokens]
        np.testing.assert_allclose(turn.behavior_logprobs[tokens], expected, atol=1e-4)
    await engine.close()


async def test_overlapped_kv_cannot_be_kept_and_the_refusal_names_both_settings(overlapped):
    engine = overlapped.engine()
    task = await running(engine, prompt_of(9))
    await engine.pause("keep")
    with pytest.raises(EngineError, match=r"generator\.kv_on_update.*generator\.sglang\.overlap_schedule"):
        await engine.update(tensors_of(overlapped.new), policy_version=2, digest="digest-2", kv="keep")
    await engine.resume()
    turn = await task
    assert (engine.healthy(), [span.policy_version for span in turn.version_spans]) == (True, [1])
    np.testing.assert_allclose(
        turn.behavior_logprobs, reference_logprobs(overlapped.old, turn, SamplingParams()), atol=1e-4
    )
    await engine.close()


# -- deaths; last, because each costs a start


async def test_the_death_of_its_scheduler_alone_fails_what_runs_in_time(server):
    engine = server.engine()
    task = await running(engine, prompt_of(9))
    parent = psutil.Process(server.process.pid)
    family = [parent, *parent.children(recursive=True)]
    schedulers = [child for child in family if "scheduler" in " ".join(child.cmdline())]
    assert len(schedulers) == 1
    schedulers[0].send_signal(signal.SIGKILL)
    async with asyncio.timeout(60):
        with pytest.raises(EngineDead):
            await task
    assert not engine.healthy()
    await engine.close()
    server.stop()
    assert psutil.wait_procs(family, timeout=20)[1] == []


async def test_nothing_of_a_server_is_left_when_its_first_process_is_killed(server):
    engine = server.engine()
    parent = psutil.Process(server.process.pid)
    family = [parent, *parent.children(recursive=True)]
    assert len(family) >= 3
    os.kill(parent.pid, signal.SIGKILL)  # its children are told by the kernel
    assert psutil.wait_procs(family, timeout=20)[1] == []
    await engine.close()
