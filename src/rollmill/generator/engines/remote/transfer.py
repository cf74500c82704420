"""How weights get to the server: the file they lie in already, or one that is written for it.

Decides what fits the model that is served. Files of its own lie in shared memory where there is any.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from rollmill.errors import WeightError
from rollmill.generator.engines.remote.folders import own_folder
from rollmill.weights.tensorfile import TensorsInFile, copy_tensors, dtype_name
from rollmill.weights.transport import SHARED_MEMORY

if TYPE_CHECKING:
    import torch

Layout = Mapping[str, tuple[str, tuple[int, ...]]]


def layout_of(tensors: Mapping[str, torch.Tensor]) -> Layout:
    """Return name -> (dtype, shape)."""
    return {name: (dtype_name(tensor), tuple(tensor.shape)) for name, tensor in tensors.items()}


def check_layout(tensors: Mapping[str, torch.Tensor], *, expected: Layout) -> None:
    """Refuse tensors of another model.

    Raises:
        WeightError: naming what differs; nothing was changed.
    """
    found = layout_of(tensors)
    if found.keys() != expected.keys():
        missing, extra = sorted(expected.keys() - found.keys()), sorted(found.keys() - expected.keys())
        raise WeightError(
            f"{len(found)} tensors were given for a model of {len(expected)}: missing {missing[:3]}, unknown "
            f"{extra[:3]}. They belong to another model. The old weights stay."
        )
    for name, entry in expected.items():
        if found[name] != entry:
            raise WeightError(
                f"tensor {name!r} is {found[name][0]} {list(found[name][1])}, the model that is served has {entry[0]} "
                f"{list(entry[1])}. It belongs to another model or precision. The old weights stay."
            )


def nbytes_of(tensors: Mapping[str, torch.Tensor]) -> int:
    """Return the bytes of all tensors."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


class Spool:
    """Files for weights that lie in none yet; at most one at a time."""

    def __init__(self, *, shared_memory: Path = SHARED_MEMORY) -> None:
        self._parent = shared_memory if shared_memory.is_dir() and os.access(shared_memory, os.W_OK) else None
        self._folder: Path | None = None
        self._ready: tuple[int, Mapping[str, torch.Tensor], Path] | None = None
        self._turn = threading.Lock()

    def ready(self, tensors: Mapping[str, torch.Tensor], *, policy_version: int) -> Path | None:
        """Return the file that holds just these tensors, if there is one."""
        if isinstance(tensors, TensorsInFile):
            return tensors.path
        if self._ready is not None and self._ready[0] == policy_version and self._ready[1] is tensors:
            return self._ready[2]
        return None

    def write(self, tensors: Mapping[str, torch.Tensor], *, policy_version: int) -> Path:
        """Return a file that holds these tensors, written now if need be. Blocks; for a thread of its own.

        A write that nobody waits for any more goes on, and another one waits for its end.

        Raises:
            WeightError: if there is no room.
        """
        with self._turn:
            return self._write(tensors, policy_version=policy_version)

    def _write(self, tensors: Mapping[str, torch.Tensor], *, policy_version: int) -> Path:
        found = self.ready(tensors, policy_version=policy_version)
        if found is not None:
            return found
        self.empty()
        if self._folder is None:
            self._folder = own_folder("weights", parent=self._parent)
        path = self._folder / f"v{policy_version:06d}.safetensors"
        try:
            with path.open("x+b", buffering=0) as handle:
                copy_tensors(handle, tensors, path=path)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        self._ready = (policy_version, tensors, path)
        return path

    def empty(self) -> None:
        """Give the memory of the file back, once the server has read it."""
        if self._ready is not None:
            self._ready[2].unlink(missing_ok=True)
            self._ready = None

    def close(self) -> None:
        """Remove everything; idempotent."""
        self.empty()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None
