"""Adapters as servers read them: folders as PEFT writes them, in shared memory where there is any.

Decides what fits the model that is served: a server would copy a matrix of another shape as far as it goes.

Reference: https://huggingface.co/docs/peft/developer_guides/checkpoint
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollmill.errors import WeightError
from rollmill.generator.engines.remote.folders import own_folder
from rollmill.generator.engines.remote.transfer import Layout
from rollmill.types import Adapter
from rollmill.weights.adapters import WHOLE, pairs
from rollmill.weights.tensorfile import write_tensors
from rollmill.weights.transport import SHARED_MEMORY

if TYPE_CHECKING:
    import torch

_PREFIX = "base_model.model."
"""PEFT puts this before the names of the model."""


def lora_targets(layout: Layout) -> tuple[str, ...]:
    """Return the linear layers that adapters may change, by the last part of their names: matrices of the blocks.

    Example:
        >>> lora_targets({"m.layers.0.q_proj.weight": ("float32", (4, 4)), "m.layers.0.norm.weight": ("float32", (4,)),
        ...               "m.embed_tokens.weight": ("float32", (9, 4))})
        ('q_proj',)
    """
    return tuple(sorted({module.rpartition(".")[2] for module in _matrices(layout)}))


def check_fits(tensors: Mapping[str, torch.Tensor], *, name: str, settings: Adapter, layout: Layout) -> None:
    """Refuse an adapter of another model.

    Args:
        layout: of the weights that are served.

    Raises:
        WeightError: naming what does not fit.
    """
    matrices = _matrices(layout)
    for module, down, up in pairs(tensors, rank=settings.rank):
        shape, wanted = (up.shape[0], down.shape[1]), matrices.get(module)
        if shape != wanted:
            have = "no such linear layer in its blocks" if wanted is None else f"one of {wanted[0]} x {wanted[1]}"
            raise WeightError(
                f"adapter {name!r} changes {module} by a matrix of {shape[0]} x {shape[1]}, and the model that is "
                f"served has {have}: it belongs to another model"
            )


def peft_config(tensors: Mapping[str, torch.Tensor], *, settings: Adapter) -> dict[str, Any]:
    """Return what `adapter_config.json` says of an adapter."""
    modules = (module for module, _, _ in pairs(tensors, rank=settings.rank))
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": settings.rank,
        "lora_alpha": settings.alpha,
        "target_modules": sorted({module.rpartition(".")[2] for module in modules}),
        "bias": "none",
    }


class PeftFolders:
    """Folders of adapters, each until it is removed."""

    def __init__(self, *, shared_memory: Path = SHARED_MEMORY) -> None:
        self._parent = shared_memory if shared_memory.is_dir() and os.access(shared_memory, os.W_OK) else None
        self._root: Path | None = None
        self._count = 0

    def write(self, tensors: Mapping[str, torch.Tensor], *, settings: Adapter) -> Path:
        """Return a new folder with an adapter. Blocks; for a thread of its own.

        Raises:
            WeightError: if there is no room.
        """
        if self._root is None:
            self._root = own_folder("adapters", parent=self._parent)
        self._count += 1
        folder = self._root / f"{self._count:06d}"
        folder.mkdir()
        try:
            named = {_PREFIX + name: tensor for name, tensor in tensors.items()}
            write_tensors(folder / "adapter_model.safetensors", named, durable=False)
            config = json.dumps(peft_config(tensors, settings=settings))
            (folder / "adapter_config.json").write_text(config, encoding="utf-8")
        except BaseException:
            self.remove(folder)
            raise
        return folder

    def remove(self, folder: Path) -> None:
        """Give its memory back."""
        shutil.rmtree(folder, ignore_errors=True)

    def close(self) -> None:
        """Remove everything; idempotent."""
        if self._root is not None:
            shutil.rmtree(self._root, ignore_errors=True)
            self._root = None


def _matrices(layout: Layout) -> dict[str, tuple[int, ...]]:
    """Return module -> shape of the matrices of the blocks: the embedding and the output head are in none."""
    return {
        name.removesuffix(WHOLE): shape
        for name, (_, shape) in layout.items()
        if name.endswith(WHOLE) and len(shape) == 2 and any(part.isdigit() for part in name.split("."))
    }
