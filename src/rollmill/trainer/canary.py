"""The canary: a fixed prompt scored with published weights, for engines to agree with after loading.

It is scored from the copy that was published, in a module of its own, so that the trainer's next step neither waits for
it nor changes the weights under it. Decides nothing.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping

import numpy as np
import torch
from transformers import PreTrainedModel

from rollmill.config.precision import is_exact, resolve_dtype
from rollmill.config.schema import RollmillConfig
from rollmill.trainer.logprobs import score_tokens
from rollmill.types import Canary


def score_canary(model: PreTrainedModel, token_ids: np.ndarray, *, config: RollmillConfig) -> Canary:
    """Score a fixed prompt with a model's present weights.

    Args:
        token_ids: int [n], n at least 2.
        config: `trainer.dtype`, `generator.dtype`, `generator.quantization` and `weights` are read.
    """
    dtype = resolve_dtype(config.trainer.dtype)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == "bfloat16"):
        logprobs = score_tokens(model, torch.from_numpy(np.asarray(token_ids, dtype=np.int64)))
    return Canary(
        token_ids=np.asarray(token_ids, dtype=np.int32),
        logprobs=logprobs.numpy(),
        tolerance=config.weights.canary_tolerance if is_exact(config) else config.weights.canary_tolerance_mixed,
    )


class CanaryScorer:
    """Scores the canary with given tensors, on any one thread, while the model it was made from is trained.

    Args:
        model: prepared for packed attention; its modules are copied, its parameters are not.
        token_ids: int [n]: the fixed prompt.
    """

    def __init__(self, model: PreTrainedModel, *, token_ids: np.ndarray, config: RollmillConfig) -> None:
        # With the trained parameters in the memo, the copy holds empty ones in their place, tied where they were tied;
        # frozen ones are the same in both.
        memo: dict[int, object] = {
            id(parameter): torch.nn.Parameter(parameter.new_empty(0), requires_grad=False)
            if parameter.requires_grad
            else parameter
            for parameter in model.parameters()
        }
        self._published = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        self._model = copy.deepcopy(model, memo)
        self._token_ids = token_ids
        self._config = config

    def score(self, tensors: Mapping[str, torch.Tensor]) -> Canary:
        """Return the canary of these weights.

        Args:
            tensors: every distinct trained parameter by name, as published.
        """
        named = dict(self._model.named_parameters())
        parameters = {name: named[name] for name in self._published}
        try:
            for name, parameter in parameters.items():
                parameter.data = tensors[name]
            return score_canary(self._model, self._token_ids, config=self._config)
        finally:
            for parameter in parameters.values():
                parameter.data = parameter.new_empty(0)  # let go of the map
