"""The engine benchmark's scripts, which this benchmark shares: they are files beside each other, not a package."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

ENGINE = Path(__file__).parents[1] / "engine"


def load(name: str) -> ModuleType:
    """Return `run` or `worker` of benchmarks/engine, under a name that no other script has."""
    own = f"engine_benchmark_{name}"
    if own not in sys.modules:
        spec = importlib.util.spec_from_file_location(own, ENGINE / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[own] = module
        spec.loader.exec_module(module)
    return sys.modules[own]
