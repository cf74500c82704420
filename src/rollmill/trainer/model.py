"""Loading the policy for training."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from rollmill.errors import ModelError


def load_policy(path: str | Path) -> PreTrainedModel:
    """Return the causal language model of a local Hugging Face directory with float32 master weights.

    Raises:
        ModelError: if it cannot be loaded.
    """
    try:
        return AutoModelForCausalLM.from_pretrained(str(path), dtype=torch.float32, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ModelError(
            f"the model in {path} cannot be loaded for training: {error}. Run `rollmill model prepare` again, or name "
            "a directory with config.json and safetensors of a causal language model."
        ) from error
