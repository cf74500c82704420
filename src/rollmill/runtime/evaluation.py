"""Evaluation with the configured, explicit sampling: during a run, and of a checkpoint in one process."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from rollmill.clock import Clock, SystemClock
from rollmill.config.schema import RollmillConfig
from rollmill.controller.evaluation import EvaluationResult, Generate, evaluate
from rollmill.controller.reporting import evaluation_record
from rollmill.environments.load import load_environment
from rollmill.environments.protocol import Environment
from rollmill.environments.rendering import Renderer


def evaluate_checkpoint(source: str, *, config: RollmillConfig) -> dict[str, Any]:
    """Return held-out accuracy with its interval and the sampling that was used.

    Args:
        source: a checkpoint directory, a Hugging Face directory or a name of `rollmill model list`.

    Raises:
        ModelError: if the source cannot be loaded.
        DataError: if the held-out set cannot be made.
    """
    return asyncio.run(_evaluate(source, config=config))


async def _evaluate(source: str, *, config: RollmillConfig) -> dict[str, Any]:
    from rollmill.generator.main import build_engine
    from rollmill.trainer.model import load_policy
    from rollmill.weights.prepare import prepare

    clock = SystemClock()
    path = Path(source) if (Path(source) / "config.json").exists() else Path(prepare(source).path)
    renderer = Renderer(path)
    environment = load_environment(
        config.environment, run_seed=config.run.seed, system_prompt=config.model.system_prompt
    )
    engine = build_engine(
        path,
        settings=config.generator.model_copy(update={"engine": "embedded"}),
        tensors={name: parameter.detach() for name, parameter in load_policy(path).named_parameters()},
        policy_version=0,
        digest="",
        clock=clock,
    )
    try:
        await environment.start()
        result = await run_evaluation(
            config, environment=environment, renderer=renderer, generate=engine.generate, clock=clock, label="eval"
        )
    finally:
        await engine.close()
        await environment.close()
    return {"source": source, **evaluation_record(result)}


async def run_evaluation(
    config: RollmillConfig,
    *,
    environment: Environment,
    renderer: Renderer,
    generate: Generate,
    clock: Clock,
    label: str,
    replicas: int | None = None,
) -> EvaluationResult:
    """Evaluate all held-out tasks with the configured, explicit sampling.

    Args:
        replicas: that answer; `None` takes `generator.replicas`.
    """
    settings = config.evaluation
    return await evaluate(
        environment.heldout(),
        environment=environment,
        renderer=renderer,
        generate=generate,
        clock=clock,
        temperature=settings.temperature,
        max_new_tokens=config.sampling.max_new_tokens if settings.max_new_tokens is None else settings.max_new_tokens,
        deadline_s=settings.deadline_s,
        concurrency=config.generator.max_num_seqs * (replicas or config.generator.replicas),
        label=label,
    )
