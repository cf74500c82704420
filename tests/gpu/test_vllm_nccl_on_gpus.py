"""Weights over NCCL into a real vLLM on GPUs: the first ones, and a second version in place."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from generator_builders import canary_for, llama, random_model, save_config, tensors_of
from rollmill.clock import SystemClock
from rollmill.config.schema import GeneratorSettings
from rollmill.config.serving import VllmSettings
from rollmill.errors import MissingExtraError
from rollmill.generator.engines.vllm.environment import device_of, find_python
from rollmill.generator.engines.vllm.start import start_vllm
from vllm_server import SHAPE

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.fixture(autouse=True)
def two_gpus() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs a GPU for the sender and one for the server, and there are {torch.cuda.device_count()}")
    try:
        python = find_python(None)
    except MissingExtraError as error:
        pytest.skip(str(error))
    if device_of(python) != "cuda":
        pytest.skip("the environment holds a build of vLLM for CPUs")


async def test_weights_that_were_sent_score_as_the_trainer_scores_them(tmp_path):
    old, new = (random_model(llama(**SHAPE), seed=seed) for seed in (1, 2))
    engine = start_vllm(
        save_config(tmp_path / "model", old.config),
        settings=GeneratorSettings(
            engine="vllm",
            dtype="float32",
            max_num_seqs=4,
            max_model_len=SHAPE["max_position_embeddings"],
            gpu_memory_utilization=0.3,
            # Several messages, the last one not full.
            vllm=VllmSettings(transport="nccl", nccl_buffer_bytes=1 << 16, enforce_eager=True),
        ),
        tensors=tensors_of(old),
        policy_version=1,
        digest="digest-1",
        clock=SystemClock(),
        log=tmp_path / "server.log",
    )
    try:
        for version, model in ((1, old), (2, new)):
            if version > 1:
                await engine.pause("keep")
                await engine.update(tensors_of(model), policy_version=version, digest=f"digest-{version}", kv="keep")
                await engine.resume()
            canary = canary_for(model)
            np.testing.assert_allclose(await engine.score(canary.token_ids), canary.logprobs, atol=1e-3)
    finally:
        await engine.close()
