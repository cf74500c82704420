"""Where a replica outside a run takes its first weights from."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from generator_builders import llama, prompt_of, random_model, reference_logprobs, request
from rollmill.clock import SystemClock
from rollmill.config.load import load_config
from rollmill.errors import RunDirectoryError, WeightError
from rollmill.runtime.serving import ServeOptions, engine_and_repository
from rollmill.types import SamplingParams
from rollmill.weights.repository import LocalModelRepository

pytestmark = pytest.mark.integration

MODEL = random_model(llama(), seed=1)


def saved(folder: Path, *, dtype: torch.dtype = torch.float32, prefix: str = "model.") -> Path:
    """A directory of the model, in another dtype or under names that only a loader understands."""
    MODEL.save_pretrained(folder)
    file = folder / "model.safetensors"
    tensors = {name.removeprefix("model."): value.to(dtype) for name, value in load_file(file).items()}
    save_file({f"{prefix}{name}": value for name, value in tensors.items()}, file)
    return folder


def options(repository: Path | None = None) -> ServeOptions:
    config = load_config(None, overrides=("generator.max_model_len=64", "generator.dtype=float32")).config
    return ServeOptions(config=config, repository=repository)


@pytest.mark.parametrize("prefix", ["model.", ""], ids=["names of the model", "names of its loader"])
async def test_the_models_own_weights_are_served_whatever_their_names(tmp_path, prefix):
    folder = saved(tmp_path / "model", prefix=prefix)
    repository, engine = engine_and_repository(options(), path=folder, clock=SystemClock())
    try:
        turn = await engine.generate(request("a", prompt_of(6), seed=3))
        info = engine.info()
    finally:
        await engine.close()
    np.testing.assert_allclose(turn.behavior_logprobs, reference_logprobs(MODEL, turn, SamplingParams()), atol=1e-4)
    assert (info.policy_version, info.digest) == (1, repository.manifest(1).digest)
    assert "model.embed_tokens.weight" in repository.manifest(1).tensors


async def test_weights_stored_in_bfloat16_are_served_in_the_precision_that_is_asked_for(tmp_path):
    folder = saved(tmp_path / "model", dtype=torch.bfloat16)
    repository, engine = engine_and_repository(options(), path=folder, clock=SystemClock())
    try:
        scored = await engine.score(np.arange(1, 9))
        info = engine.info()
    finally:
        await engine.close()
    rounded = random_model(llama(), seed=1)
    rounded.load_state_dict({name: value.bfloat16().float() for name, value in MODEL.state_dict().items()})
    logprobs = rounded(torch.arange(1, 9)[None]).logits[0].log_softmax(-1)[range(7), range(2, 9)]
    np.testing.assert_allclose(scored, logprobs.detach().numpy(), atol=1e-4)
    assert (info.dtype, repository.manifest(1).training_dtype) == ("float32", "bfloat16")


def test_a_repository_in_which_nothing_was_published_says_what_to_do(tmp_path):
    LocalModelRepository(tmp_path / "run" / "weights", transport="file")
    folder = saved(tmp_path / "model")
    with pytest.raises(WeightError, match="no published weights yet"):
        engine_and_repository(options(tmp_path / "run"), path=folder, clock=SystemClock())
    with pytest.raises(RunDirectoryError, match="no model repository"):
        engine_and_repository(options(tmp_path / "elsewhere"), path=folder, clock=SystemClock())
