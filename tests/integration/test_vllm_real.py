"""A real vLLM: what it uses of old weights after an update, and what becomes of it when it fails."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from generator_builders import (
    all_ids,
    canary_for,
    prompt_of,
    reference_logits,
    reference_logprobs,
    request,
    tensors_of,
)
from rollmill.errors import EngineDead, EngineError
from rollmill.generator.engines.remote.engine import RemoteEngine
from rollmill.types import SamplingParams, TokenChunk, Turn
from rollmill.weights.tensorfile import TensorsInFile
from vllm_server import SharedServer, why_not

pytestmark = [pytest.mark.slow, pytest.mark.integration, pytest.mark.timeout(600)]

LONG = 140


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[SharedServer]:
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    shared = SharedServer(tmp_path_factory.mktemp("vllm"))
    yield shared
    shared.stop()


async def running(engine: RemoteEngine, prompt: list[int], *, tokens: int = 4) -> asyncio.Task[Turn]:
    """Start a long request and return when it has some tokens."""
    enough = asyncio.Event()

    def hear(chunk: TokenChunk) -> None:
        if chunk.start_token + len(chunk.output_ids) >= tokens:
            enough.set()

    task = asyncio.ensure_future(engine.generate(request("r", prompt, max_new_tokens=LONG), on_tokens=hear))
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
    old = server.old(ids[None, :fed], use_cache=True)
    rows = server.new(ids[None, fed:], cache=old.past_key_values).logits[0].log_softmax(-1)
    return rows[:-1].gather(1, ids[fed + 1 :, None])[:, 0].numpy()


async def test_with_keep_what_runs_goes_on_over_the_old_keys_and_values(server):
    engine = server.engine()
    task = await running(engine, prompt_of(9))
    await load_new(engine, server, kv="keep")
    await engine.resume()
    turn = await task
    old, new = turn.version_spans
    np.testing.assert_allclose(
        turn.behavior_logprobs[new.start_token :], with_old_kv(server, turn, cut=new.start_token), atol=1e-4
    )
    before = reference_logprobs(server.old, turn, SamplingParams())[: old.end_token]
    np.testing.assert_allclose(turn.behavior_logprobs[: old.end_token], before, atol=1e-4)
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
    mixed = reference_logits(_new_body_with_old_head(server), canary.token_ids.astype(np.int64)).log_softmax(-1)
    stale = mixed[:-1].gather(1, torch.from_numpy(canary.token_ids[1:].astype(np.int64))[:, None])[:, 0].numpy()
    assert np.abs(stale - canary.logprobs).max() > 1e-2
    await engine.close()


def _new_body_with_old_head(server: SharedServer) -> Any:
    import copy

    model = copy.deepcopy(server.new)
    model.lm_head.weight = torch.nn.Parameter(server.old.lm_head.weight.detach().clone())
    return model


async def test_a_file_that_cannot_be_read_makes_it_dirty_and_the_old_version_can_be_loaded_again(server, tmp_path):
    engine = server.engine()
    gone = TensorsInFile(tensors_of(server.new), path=tmp_path / "gone.safetensors")
    task = await running(engine, prompt_of(9))
    await engine.pause("keep")
    with pytest.raises(EngineError, match="version 2 failed"):
        await engine.update(gone, policy_version=2, digest="digest-2", kv="keep")
    assert {span.policy_version for span in (await task).version_spans} == {1}
    assert not engine.healthy()
    await engine.update(tensors_of(server.old), policy_version=1, digest="digest-1", kv="keep")
    canary = canary_for(server.old)
    np.testing.assert_allclose(await engine.score(canary.token_ids), canary.logprobs, atol=1e-4)
    await engine.resume()
    turn = await engine.generate(request("after", prompt_of(9)))
    np.testing.assert_allclose(
        turn.behavior_logprobs, reference_logprobs(server.old, turn, SamplingParams()), atol=1e-4
    )
    await engine.close()


async def test_siblings_share_the_prefill_of_their_prompt(server):
    engine = server.engine()
    prompt = prompt_of(70)  # two whole blocks of 32
    first, *others = await asyncio.gather(
        *(engine.generate(request(f"s{n}", prompt, seed=n, group_key="g")) for n in range(4))
    )
    assert {turn.cached_tokens for turn in others} <= {0, 64}
    assert (await engine.generate(request("later", prompt))).cached_tokens == 64
    assert first.cached_tokens == 0
    await engine.close()


async def test_the_death_of_its_engine_process_alone_fails_what_runs_in_time(server):
    engine = server.engine()
    task = await running(engine, prompt_of(9))
    parent = psutil.Process(server.process.pid)
    family = [parent, *parent.children(recursive=True)]
    cores = [child for child in family if "EngineCore" in " ".join(child.cmdline())]
    assert len(cores) == 1
    cores[0].send_signal(signal.SIGKILL)
    async with asyncio.timeout(30):
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
