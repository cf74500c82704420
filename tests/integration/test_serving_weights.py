"""Where a replica outside a run takes its first weights from."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from generator_builders import (
    adapter_for,
    canary_for,
    llama,
    merged_model,
    prompt_of,
    random_model,
    reference_logprobs,
    request,
    tensors_of,
)
from rollmill.clock import SystemClock
from rollmill.config.load import load_config
from rollmill.errors import ConfigError, RunDirectoryError, WeightError
from rollmill.generator.adapters import AdapterLoader
from rollmill.runtime.serving import ServeOptions, engine_and_repository, open_repository
from rollmill.types import Adapter, SamplingParams
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


def trained(run: Path, *, seed: int, base: object = MODEL) -> Path:
    """A run directory with one published adapter."""
    repository = LocalModelRepository(run / "weights", transport="file")
    settings = Adapter(base_digest=repository.put_base(tensors_of(base)), rank=2, alpha=4.0)
    pairs = adapter_for(base, seed=seed)
    repository.publish(
        pairs,
        optimizer_step=0,
        parent=None,
        history_id="h",
        training_dtype="float32",
        canary=canary_for(merged_model(base, pairs, settings=settings)),
        at_s=0.0,
        adapter=settings,
    )
    return run


async def test_adapters_of_two_runs_are_served_beside_the_weights_that_both_were_trained_on(tmp_path):
    folder = saved(tmp_path / "model", dtype=torch.bfloat16)  # not what they were trained on, which is in float32
    runs = {name: trained(tmp_path / name, seed=seed) for name, seed in (("maths", 5), ("tools", 6))}
    sources = {name: open_repository(run) for name, run in runs.items()}
    asked = msgspec.structs.replace(options(), adapters=runs)
    _, engine = engine_and_repository(asked, path=folder, clock=SystemClock(), adapters=sources)
    loader = AdapterLoader(
        engine, sources=sources, kv_policy="keep", load_deadline_s=20.0, owner="generator-0", clock=SystemClock()
    )
    try:
        await loader.start()
        for name, seed in (("maths", 5), ("tools", 6), ("", None)):
            turn = await engine.generate(msgspec.structs.replace(request(f"r-{name}", prompt_of(6)), adapter=name))
            settings = Adapter(base_digest="", rank=2, alpha=4.0)
            whole = MODEL if seed is None else merged_model(MODEL, adapter_for(MODEL, seed=seed), settings=settings)
            expected = reference_logprobs(whole, turn, SamplingParams())
            np.testing.assert_allclose(turn.behavior_logprobs, expected, atol=2e-4)
    finally:
        await loader.close()
        await engine.close()


def test_adapters_that_no_replica_can_serve_together_are_refused_before_anything_is_built(tmp_path):
    folder = saved(tmp_path / "model")
    mine, other = trained(tmp_path / "a", seed=5), trained(tmp_path / "b", seed=5, base=random_model(llama(), seed=2))
    LocalModelRepository(tmp_path / "empty" / "weights", transport="file")

    def build(asked: ServeOptions) -> None:
        sources = {name: open_repository(run) for name, run in asked.adapters.items()}
        engine_and_repository(asked, path=folder, clock=SystemClock(), adapters=sources)

    both = msgspec.structs.replace(options(), adapters={"a": mine, "b": other})
    with pytest.raises(WeightError, match="trained on different weights, and one replica serves one base: a: "):
        build(both)
    with pytest.raises(WeightError, match="nothing was published in the repository of adapter 'c'"):
        build(msgspec.structs.replace(options(), adapters={"c": tmp_path / "empty"}))
    with pytest.raises(ConfigError, match=r"--repository .* and --adapter were both given"):
        build(msgspec.structs.replace(options(mine), adapters={"a": mine}))
    for override, message in (
        ("generator.engine=sglang", 'generator.engine is "sglang", which serves its weights alone'),
        ("generator.max_loras=0", "max_loras is 0: there is no place"),
    ):
        config = load_config(None, overrides=(override,), rules=lambda _: None).config
        with pytest.raises(ConfigError, match=message):
            build(ServeOptions(config=config, adapters={"a": mine}))
