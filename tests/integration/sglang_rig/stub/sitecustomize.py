"""Stands in for the two packages without which SGLang's wheel does not import on a machine without a GPU.

Put the folder of this file first on PYTHONPATH of the server. `torchvision` (its build does not load beside a CPU build
of torch) and `sgl_kernel` (CUDA or AMX builds only) become modules whose names can be imported, subclassed and passed
around; nothing of them may be called on the way that these tests go, and a call says so.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence
from typing import Any

ABSENT = ("torchvision", "sgl_kernel")


class _AbsentMeta(type):
    """A name of an absent package: has any attribute, can be a base class, cannot be called."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        return _absent(f"{cls.__name__}.{name}")

    def __call__(cls, *_: Any, **__: Any) -> Any:
        raise RuntimeError(
            f"{cls.__name__} was called, and its package is absent here; this test rig has no GPU kernels"
        )


def _absent(name: str) -> type:
    return _AbsentMeta(name, (), {})


class _AbsentModule(types.ModuleType):
    __version__ = "0.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        return _absent(f"{self.__name__}.{name}")


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None) -> Any:
        if fullname.split(".")[0] in ABSENT:
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _AbsentModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing to execute."""


sys.meta_path.insert(0, _Finder())
