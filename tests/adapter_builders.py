"""Builders for tests of adapters: runs that train one on a common base, and requests for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from generator_builders import (
    adapter_for,
    canary_for,
    merged_model,
    prompt_of,
    random_model,
    reference_logprobs,
    request,
    tensors_of,
)
from rollmill.types import Adapter, GenerateRequest, SamplingParams, Turn
from rollmill.weights.repository import LocalModelRepository

MODEL = random_model(seed=1)
PAIRS = {seed: adapter_for(MODEL, seed=seed) for seed in (11, 12, 13)}


class Job:
    """A run that trains an adapter."""

    def __init__(self, folder: Path, *, base: Any = MODEL) -> None:
        self.repository = LocalModelRepository(folder, transport="file")
        self.base = base
        self.settings = Adapter(base_digest=self.repository.put_base(tensors_of(base)), rank=2, alpha=3.0)

    def publish(self, seed: int, *, canary_of: int | None = None) -> int:
        return self.repository.publish(
            PAIRS[seed],
            optimizer_step=0,
            parent=None,
            history_id="h",
            training_dtype="float32",
            canary=canary_for(self.whole(seed if canary_of is None else canary_of)),
            at_s=0.0,
            adapter=self.settings,
        ).policy_version

    def whole(self, seed: int) -> Any:
        return merged_model(self.base, PAIRS[seed], settings=self.settings)

    def assert_of(self, turn: Turn, seed: int) -> None:
        expected = reference_logprobs(self.whole(seed), turn, SamplingParams())
        np.testing.assert_allclose(turn.behavior_logprobs, expected, atol=2e-4)


def asks(adapter: str, request_id: str, **sampling: Any) -> GenerateRequest:
    return msgspec.structs.replace(request(request_id, prompt_of(12), **sampling), adapter=adapter)
