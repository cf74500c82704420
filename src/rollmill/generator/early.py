"""Loading the first weights of a new run before they are published.

The trainer of a new run publishes the weights of the prepared model unchanged, after it has loaded, copied and digested
them. A replica reads the same files meanwhile. What it read counts only if its digest is that of the first publication;
what `Replica.start` proves is proven all the same. Decides whether a model may be read that way.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from rollmill.config.precision import resolve_dtype
from rollmill.errors import WeightError
from rollmill.types import TensorEntry, WeightManifest
from rollmill.weights.inspection import inspect, weight_files
from rollmill.weights.tensorfile import digest_file, load_tensors, whole_digest

if TYPE_CHECKING:
    from rollmill.generator.engines.embedded.model import ServedModel

PUBLISHED_DTYPE = "float32"
"""What a trainer publishes: its master weights."""


class EarlyModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model ready to be served, and the digest of what it was filled with."""

    model: ServedModel
    digest: str

    def is_what_was_published(self, manifest: WeightManifest) -> bool:
        """Return whether it holds exactly these weights, by every tensor's name and bytes."""
        return self.digest == manifest.digest


def load_early(
    path: str | Path,
    *,
    dtype: str,
    kernels: Literal["auto", "native", "torch"],
    quantization: Literal["none", "int8"] = "none",
    threads: int,
) -> EarlyModel | None:
    """Return the model of a directory, or `None` where a trainer would publish something else than its files hold.

    Args:
        path: prepared Hugging Face directory.
        dtype: of the engine: `auto`, `float32` or `bfloat16`.
        kernels: of the engine.
        quantization: of the engine.
        threads: torch threads of this process.

    Raises:
        ModelError: if the architecture cannot be served.
    """
    import torch

    from rollmill.generator.engines.embedded.model import ServedModel

    torch.set_num_threads(threads)
    path = Path(path)
    if inspect(path).dtype != PUBLISHED_DTYPE:
        return None
    tensors: dict[str, torch.Tensor] = {}
    entries: dict[str, TensorEntry] = {}
    try:
        for file in weight_files(path):
            tensors.update(load_tensors(file))
            entries.update(digest_file(file))
        model = ServedModel(
            path,
            dtype=getattr(torch, resolve_dtype(dtype)),
            tensors=tensors,
            kernels=kernels,
            quantization=quantization,
        )
    except (WeightError, OSError):
        # Older names or another layout: the trainer's loader knows them, and publishes them under their present names.
        return None
    return EarlyModel(model=model, digest=whole_digest(entries))
