"""The one judge of both sides: greedy answers to Rollmill's held-out problems, through Rollmill's engine."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import plan
from safetensors.torch import load_file

from rollmill.clock import SystemClock
from rollmill.config.schema import GeneratorSettings, RollmillConfig
from rollmill.controller.evaluation import evaluate
from rollmill.controller.reporting import evaluation_record
from rollmill.environments.load import load_environment
from rollmill.environments.rendering import Renderer
from rollmill.generator.main import build_engine
from rollmill.weights.prepare import prepare

SLOTS = 64
DEADLINE_S = 3600.0


class Evaluator:
    """An engine that stays loaded; idle between evaluations, it costs memory and no CPU time.

    Args:
        config: names the model, the environment and the cap on tokens.
    """

    def __init__(self, config: RollmillConfig) -> None:
        self._config = config
        self.model_path = Path(prepare(config.model.source).path)
        self.renderer = Renderer(self.model_path)
        self.environment = load_environment(config.environment, run_seed=0, system_prompt=config.model.system_prompt)
        self._clock = SystemClock()
        self._version = 0
        self._loop = asyncio.Runner()
        self._engine = self._loop.run(self._build())

    async def _build(self) -> Any:
        return build_engine(
            self.model_path,
            settings=GeneratorSettings(
                dtype="float32",
                threads=len(os.sched_getaffinity(0)),
                max_num_seqs=SLOTS,
                max_model_len=self._config.generator.max_model_len,
            ),
            tensors=load_file(self.model_path / "model.safetensors"),
            policy_version=0,
            digest="",
            clock=self._clock,
        )

    def accuracy(self, weights: Path | None) -> dict[str, Any]:
        """Return accuracy with its 95 % interval for a file of weights, or for the model before training."""
        return self._loop.run(self._accuracy(weights))

    async def _accuracy(self, weights: Path | None) -> dict[str, Any]:
        if weights is not None:
            self._version += 1
            await self._engine.pause("drain")
            await self._engine.update(load_file(weights), policy_version=self._version, digest="", kv="recompute")
            await self._engine.resume()
        result = await evaluate(
            self.environment.heldout(),
            environment=self.environment,
            renderer=self.renderer,
            generate=self._engine.generate,
            clock=self._clock,
            temperature=0.0,
            max_new_tokens=self._config.sampling.max_new_tokens,
            deadline_s=DEADLINE_S,
            concurrency=SLOTS,
            label=f"version {self._version}",
        )
        record = evaluation_record(result)
        return {key: record[key] for key in plan.VERDICT}

    def close(self) -> None:
        self._loop.run(self._engine.close())
        self._loop.run(self.environment.close())
        self._loop.close()
