"""Environment variables of child processes: threads and waiting.

OpenMP's default spin-wait makes two busy processes on two cores 4 to 7 times slower, in wall and in CPU time; passive
waiting does not. Torch reads these once, before it starts its pool, so they are set by the parent.
"""

from __future__ import annotations

import os
from collections.abc import Mapping


def process_environment(*, threads: int, base: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment of a child process with this number of compute threads."""
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
    return environment
