"""Loading the policy for training.

A directory whose tensors fit the model name by name is copied straight into it. Anything else (older names, converted
layouts) goes through transformers' own loader, which knows them and takes several times as long.
"""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from rollmill.errors import ModelError, WeightError
from rollmill.weights.inspection import weight_files
from rollmill.weights.lean_import import import_operator_definitions
from rollmill.weights.tensorfile import load_tensors


def load_policy(path: str | Path) -> PreTrainedModel:
    """Return the causal language model of a local Hugging Face directory with float32 master weights.

    Raises:
        ModelError: if it cannot be loaded.
    """
    try:
        return _load_directly(Path(path)) or _load_by_transformers(Path(path))
    except (OSError, ValueError, WeightError) as error:
        raise ModelError(
            f"the model in {path} cannot be loaded for training: {error}. Run `rollmill model prepare` again, or name "
            "a directory with config.json and safetensors of a causal language model."
        ) from error


def _load_by_transformers(path: Path) -> PreTrainedModel:
    import_operator_definitions()  # it builds the model without data first
    return AutoModelForCausalLM.from_pretrained(str(path), dtype=torch.float32, local_files_only=True)


def _load_directly(path: Path) -> PreTrainedModel | None:
    """Return the model, or `None` where the stored tensors are not exactly the model's own."""
    stored = _stored_tensors(path)
    if not stored:
        return None
    config = AutoConfig.from_pretrained(str(path), local_files_only=True)
    if getattr(config, "quantization_config", None) is not None:
        return None
    with no_init_weights():  # every tensor is overwritten below
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.tie_weights()
    pairs = _pairs(model, stored)
    if pairs is None:
        return None
    with torch.no_grad():
        for own, value in pairs:
            own.copy_(value)
    if (path / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(str(path), local_files_only=True)
    return model.eval()


def _stored_tensors(path: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for file in weight_files(path):
        tensors.update(load_tensors(file))
    return tensors


def _pairs(model: PreTrainedModel, stored: dict[str, torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]] | None:
    """Return (own tensor, stored value) for every tensor of the model; a tied one is stored under one of its names."""
    state = model.state_dict(keep_vars=True)
    if not stored.keys() <= state.keys():
        return None
    by_tensor: dict[int, list[str]] = {}
    for name, own in state.items():
        by_tensor.setdefault(id(own), []).append(name)
    pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
    for names in by_tensor.values():
        given = [name for name in names if name in stored]
        own = state[names[0]]
        if len(given) != 1 or stored[given[0]].shape != own.shape:
            return None
        pairs.append((own, stored[given[0]]))
    return pairs
