"""Whole weights under adapters: stored once per repository, named by their digest, never a version of their own.

A base is not published: no replica serves it alone. It stays as long as a kept version is an adapter on it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from rollmill.errors import WeightError, WeightMismatch
from rollmill.types import Adapter
from rollmill.weights.files import PARTIAL_SUFFIX
from rollmill.weights.reuse import open_to_read
from rollmill.weights.tensorfile import MappedFile, TensorsInFile, entries_of, whole_digest, write_tensors

if TYPE_CHECKING:
    import torch


def base_path(folder: Path, digest: str) -> Path:
    """Return where the base of this digest lies."""
    return folder / f"base-{digest[:16]}.safetensors"


def put_base(folder: Path, tensors: Mapping[str, torch.Tensor], *, durable: bool) -> str:
    """Store whole weights and return their digest; those that are there already are not written again.

    Raises:
        WeightError: if the space is full, tensors share memory, or nothing was given.
    """
    digest = whole_digest(entries_of(tensors))
    path = base_path(folder, digest)
    if path.exists():
        return digest
    partial = path.with_name(path.name + PARTIAL_SUFFIX)
    partial.unlink(missing_ok=True)
    try:
        write_tensors(partial, tensors, durable=durable)
        partial.rename(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    return digest


def load_base(folder: Path, adapter: Adapter) -> Mapping[str, torch.Tensor]:
    """Return the weights under an adapter, memory-mapped and verified.

    Raises:
        WeightMismatch: if they are not those that were stored.
        WeightError: if they are gone.
    """
    path = base_path(folder, adapter.base_digest)
    try:
        with open_to_read(path) as handle:
            mapped = MappedFile(handle, path=path)
    except FileNotFoundError as error:
        raise WeightError(
            f"the weights with digest {adapter.base_digest[:16]}... under an adapter are not in {folder} any more: "
            "they were removed, or their shared memory was lost in a restart. The trainer stores them when it starts"
        ) from error
    found = whole_digest(mapped.entries())
    if found != adapter.base_digest:
        raise WeightMismatch(
            f"the weights under an adapter in {path} have digest {found}, and {adapter.base_digest} was stored: the "
            "file is damaged. Remove it and start the trainer again, which stores it anew",
            published=adapter.base_digest,
            served=found,
        )
    return TensorsInFile(mapped.tensors(), path=path)


def retire_bases(folder: Path, *, kept: Collection[str]) -> None:
    """Remove the bases whose digest is not among these."""
    names = {base_path(folder, digest).name for digest in kept}
    for path in folder.glob("base-*.safetensors"):
        if path.name not in names:
            path.unlink()
