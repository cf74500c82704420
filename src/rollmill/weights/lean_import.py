"""Importing transformers' model classes without what they pull in and a run never uses.

Reading the class of a language model also imports torch's compiler and its distributed tensors (with sympy and several
hundred modules between them): half of a process' start. Decides what of it waits until somebody uses it: the compiler
loads at the first use of `torch._dynamo`; torch's Python definitions of its operators (for the compiler and for tensors
without data) load with it, or by `import_operator_definitions`; transformers is told that there is no distributed
torch, which it supports, unless a launcher set up one, and its table of classes is kept. Neither torch nor the model
classes are changed. Where a later version of torch or transformers is made differently, everything is imported as
usual, only slower.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.util
import os
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

from rollmill.weights.late_import import kept_import_structure, late, run_late

COMPILER = "torch._dynamo"
OPERATOR_DEFINITIONS = ("torch._meta_registrations", "torch._decomp", "torch._refs", "torch._prims")
MODEL_MODULES = (
    "transformers.modeling_utils",
    "transformers.generation.utils",
    "transformers.models.auto.modeling_auto",
)
_LAUNCHERS = ("WORLD_SIZE", "LOCAL_RANK")


def import_transformers(*, distributed: bool | None = None) -> None:
    """Import torch and what every causal language model of transformers needs.

    To be called first in a process: what was imported before stays as it is.

    Args:
        distributed: keep distributed tensors; `None` keeps them if a launcher's variables are set.
    """
    if distributed is None:
        distributed = any(name in os.environ for name in _LAUNCHERS)
    with without_collection():
        with late(OPERATOR_DEFINITIONS):
            for name in ("torch", *OPERATOR_DEFINITIONS):
                importlib.import_module(name)
        _let_generators_be_made()
        with on_demand(COMPILER), kept_import_structure():
            if not distributed:
                _tell_not_distributed()
            for name in MODEL_MODULES:
                importlib.import_module(name)


def import_operator_definitions() -> None:
    """Have torch know its operators on tensors without data, as a plain import of it does.

    Call it before anything that uses the meta device. What needs it and did not call gets torch's error that an
    operator is not implemented there, never another result.
    """
    run_late(OPERATOR_DEFINITIONS)


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """Import inside this block: garbage collection pauses, and never looks again at what the block made.

    Modules live as long as the process. Looking through all of them while more come takes a fifth of a large import.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


class _OnDemand(types.ModuleType):
    """A package that runs its own code at the first use of a name; its submodules can be imported before that.

    While `marking`, the decorators that mark a function for the compiler give it back as it is: a run compiles nothing.
    """

    marking = True

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        if self.marking and name in ("allow_in_graph", "assume_constant_result"):
            return _as_it_is
        if self.marking and name == "disable":
            return _disable
        self.__class__ = types.ModuleType  # type: ignore[assignment]
        run_late(OPERATOR_DEFINITIONS)
        spec = self.__spec__
        if spec is None or spec.loader is None:
            raise ImportError(f"{self.__name__} has no loader any more")
        spec.loader.exec_module(self)
        return getattr(self, name)


def _as_it_is(function: Any) -> Any:
    return function


def _disable(function: Callable[..., Any] | None = None, recursive: bool = True, **_: Any) -> Any:
    return _as_it_is if function is None else function


@contextlib.contextmanager
def on_demand(package: str) -> Iterator[None]:
    """Put a package of an imported parent off; once the block has ended, any use of a name of it loads it.

    Nothing happens if it was imported already, or does not exist.
    """
    spec = None if package in sys.modules else importlib.util.find_spec(package)
    if spec is None:
        yield
        return
    module = importlib.util.module_from_spec(spec)
    module.__class__ = _OnDemand
    parent, _, name = package.rpartition(".")
    sys.modules[package] = module
    setattr(sys.modules[parent], name, module)
    try:
        yield
    finally:
        if isinstance(module, _OnDemand):
            module.marking = False


def _let_generators_be_made() -> None:
    """Do for `torch.Generator` what `torch._prims` does at its import, without which torch refuses to make one."""
    import torch

    try:
        torch.Generator()
    except RuntimeError:
        give = getattr(torch._C, "_set_generator_metaclass", None)
        if give is None:
            run_late(OPERATOR_DEFINITIONS)
        else:
            give(importlib.import_module("torch._opaque_base").OpaqueBaseMeta)


def _tell_not_distributed() -> None:
    """Have transformers take its own path for a torch that was built without distributed tensors."""
    for name in ("transformers.utils.import_utils", "transformers.utils"):
        module = importlib.import_module(name)
        if hasattr(module, "is_torch_distributed_available"):
            vars(module)["is_torch_distributed_available"] = _no


def _no() -> bool:
    return False
