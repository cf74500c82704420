"""How child processes share the machine: threads and waiting. Priority is in `rollmill.priority`.

OpenMP's default spin-wait makes two busy processes on two cores 4 to 7 times slower, in wall and in CPU time; passive
waiting does not. Torch reads these once, before it starts its pool, so they are set by the parent.
"""

from __future__ import annotations

import os
from collections.abc import Mapping


def process_environment(
    *, threads: int, deterministic: bool = False, base: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Return the environment of a child process with this number of compute threads.

    Args:
        threads: of torch, OpenMP and MKL.
        deterministic: equal inputs give equal bits in every process on this CPU, wherever they lie in memory.
        base: variables to start from; those of this process unless given.
    """
    environment = dict(os.environ if base is None else base)
    environment.update(
        OMP_NUM_THREADS=str(threads),
        MKL_NUM_THREADS=str(threads),
        OPENBLAS_NUM_THREADS="1",
        OMP_WAIT_POLICY="passive",
        GOMP_SPINCOUNT="0",
        TOKENIZERS_PARALLELISM="false",
        HF_HUB_OFFLINE="1",
        PYTHONUNBUFFERED="1",
    )
    if deterministic:
        # AUTO keeps the fastest code of this CPU (on one with AVX2 it costs nothing measurable) and fixes its order of
        # additions; without it MKL may choose another for data that is aligned otherwise.
        environment.setdefault("MKL_CBWR", "AUTO")
        # Libraries may not take fewer threads when the machine is busy; no set of strings may have an order of its own.
        environment.update(MKL_DYNAMIC="FALSE", OMP_DYNAMIC="FALSE", PYTHONHASHSEED="0")
    return environment


def make_torch_deterministic() -> None:
    """Have torch refuse or replace operations whose result is not a function of their inputs alone."""
    import torch

    # Not torch.use_deterministic_algorithms, which also imports the compiler; see rollmill.weights.lean_import.
    torch.set_deterministic_debug_mode("error")
    # That would also fill every new tensor with NaN, against reads of what was never written: none is read here.
    torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]
