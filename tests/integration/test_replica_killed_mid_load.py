"""A replica is killed in the middle of a weight load and started again: nobody ever sees weights that are half new."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from generator_builders import canary_for, prompt_of, random_model, reference_logprobs, request, save_config, tensors_of
from rollmill.errors import EngineDead
from rollmill.generator.client import GeneratorClient
from rollmill.generator.state import ReplicaState
from rollmill.runtime.threads import process_environment
from rollmill.types import SamplingParams
from rollmill.weights.repository import LocalModelRepository

pytestmark = [pytest.mark.integration, pytest.mark.slow]

SCRIPT = Path(__file__).with_name("half_loading_replica.py")
OLD, NEW = random_model(seed=1), random_model(seed=2)
START_S = 90.0


def publish(repository: LocalModelRepository, model: Any) -> int:
    manifest = repository.publish(
        tensors_of(model),
        optimizer_step=0,
        parent=None,
        history_id="h",
        training_dtype="float32",
        canary=canary_for(model),
        at_s=0.0,
    )
    return manifest.policy_version


async def until_there(file: Path, process: subprocess.Popen[bytes]) -> None:
    async with asyncio.timeout(START_S):
        while not _exists(file):
            assert process.poll() is None, "the replica ended"
            await asyncio.sleep(0.02)


def _exists(file: Path) -> bool:
    return file.exists()


def _spawn(command: list[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command, env=process_environment(threads=1))


@contextlib.asynccontextmanager
async def started(folder: Path, name: str, *options: str) -> AsyncIterator[tuple[GeneratorClient, Any]]:
    """A replica process, and a client of it once it has written its address."""
    file = folder / f"{name}.json"
    paths = ("--model", str(folder / "model"), "--repository", str(folder / "weights"), "--address-file", str(file))
    process = _spawn([sys.executable, str(SCRIPT), *paths, *options])
    try:
        await until_there(file, process)
        client = GeneratorClient(json.loads(file.read_text())["address"])
        try:
            yield client, process
        finally:
            await client.close()
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        process.wait(timeout=30)


@pytest.mark.parametrize("place", ["pull", "swap"])
async def test_a_replica_killed_within_a_load_comes_back_with_the_current_version_whole(tmp_path, place):
    (tmp_path / "model").mkdir()
    save_config(tmp_path / "model", OLD.config)
    repository = LocalModelRepository(tmp_path / "weights", transport="file")
    assert publish(repository, OLD) == 1
    mark = tmp_path / "in-the-middle"
    async with started(tmp_path, "first", "--stop-at", place, "--mark", str(mark)) as (client, process):
        before = await client.generate(request("before", prompt_of(9), seed=3))
        assert {span.policy_version for span in before.version_spans} == {1}
        assert publish(repository, NEW) == 2
        loading = asyncio.ensure_future(client.load_weights(2, deadline_s=60))
        await until_there(mark, process)
        if place == "pull":  # nothing is paused: it goes on under the old version
            during = await client.generate(request("during", prompt_of(9), seed=3))
            assert during.output_ids.tolist() == before.output_ids.tolist()
            assert {span.policy_version for span in during.version_spans} == {1}
            waiting = None
        else:  # half of the weights are new: whoever asks now gets no token of them
            told: list[int] = []
            asked = request("during", prompt_of(9), seed=3)
            waiting = asyncio.ensure_future(client.generate(asked, on_tokens=lambda chunk: told.append(1)))
            for _ in range(3):  # answers on the same connection: the request came before them
                await client.status()
            assert not waiting.done()
            assert told == []
        assert (await client.status()).policy_version == 1
        os.kill(process.pid, signal.SIGKILL)
        with pytest.raises(EngineDead):
            await loading
        if waiting is not None:
            with pytest.raises(EngineDead):
                await waiting
            assert told == []
    async with started(tmp_path, "second") as (client, _):
        status = await client.status()
        newest = repository.latest()
        assert newest is not None
        assert (status.state, status.policy_version, status.digest) == (ReplicaState.SERVING, 2, newest.digest)
        turn = await client.generate(request("after", prompt_of(9), seed=3))
    assert {span.policy_version for span in turn.version_spans} == {2}
    np.testing.assert_allclose(turn.behavior_logprobs, reference_logprobs(NEW, turn, SamplingParams()), atol=1e-4)
