"""From measured steps to the benchmark's ratios, and which of them say something."""

from __future__ import annotations

import statistics
from typing import Any

GOAL = 0.60


def median(steps: list[dict[str, float]], name: str) -> float:
    """Return the median of one figure of the steps."""
    return statistics.median(step[name] for step in steps)


def ratios(runs: list[dict[str, Any]]) -> tuple[dict[str, float], dict[str, str]]:
    """Return the ratios, and the names of those that are left out with the reason.

    A share above 1 is none: then the yardstick is slower than the model's own shapes in the same run, as it may be
    where a precision is emulated.
    """
    found: dict[str, float] = {}
    left_out: dict[str, str] = {}
    for run in runs:
        for shape in run["shapes"]:
            case = f"{run['dtype']}_{run['threads']}_threads_{shape['shape']}"
            for prefix, share_name in (("", "share_by_wall"), ("by_cpu_", "share_by_cpu")):
                name, share = f"share_of_gemm_over_goal_{prefix}{case}", median(shape["steps"], share_name)
                if share > 1:
                    left_out[name] = f"the step is {share:.1f} times as fast as the best product that it is compared to"
                else:
                    found[name] = share / GOAL
        if "checkpoints" in run:
            waits = [entry["written"]["wall_s"] / entry["begun"]["wall_s"] for entry in run["checkpoints"]]
            found["checkpoint_wait_saved"] = statistics.median(waits)
    return found, left_out
