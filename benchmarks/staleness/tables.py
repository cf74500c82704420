"""From runs to means and ratios. Pure."""

from __future__ import annotations

import statistics
from typing import Any

STALENESS = (0, 1, 2, 4, 8, 16)
SEEDS = (0, 1, 2, 3, 4)
ARMS = {
    "truncated": "importance weight proximal / behaviour, truncated at 2 (the default)",
    "none": "no importance weight; PPO's clip acts on policy / behaviour",
    "ignored": "as if samples were fresh: behaviour log-probs recomputed with the trained weights",
}


def summary(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return mean accuracy over seeds, with its standard error, for every setting that was run."""
    settings = sorted({(run["learning_rate"], run["arm"], run["staleness"]) for run in runs})
    rows: list[dict[str, Any]] = []
    for learning_rate, arm, staleness in settings:
        found = [
            run["accuracy"]
            for run in runs
            if (run["learning_rate"], run["arm"], run["staleness"]) == (learning_rate, arm, staleness)
        ]
        spread = statistics.stdev(found) if len(found) > 1 else 0.0
        rows.append(
            {
                "learning_rate": learning_rate,
                "arm": arm,
                "staleness": staleness,
                "accuracy": statistics.mean(found),
                "standard_error": spread / len(found) ** 0.5,
                "seeds": len(found),
            }
        )
    return rows


def ratios(runs: list[dict[str, Any]], *, learning_rate: float) -> dict[str, float]:
    """Return for each staleness the median over seeds of accuracy with the default correction over accuracy with none.

    Larger than 1 means that the correction helped.
    """
    accuracy = {
        (run["arm"], run["staleness"], run["seed"]): run["accuracy"]
        for run in runs
        if run["learning_rate"] == learning_rate
    }
    found: dict[str, float] = {}
    for staleness in STALENESS:
        for other in ("none", "ignored"):
            pairs = [
                accuracy["truncated", staleness, seed] / accuracy[other, staleness, seed]
                for seed in SEEDS
                if ("truncated", staleness, seed) in accuracy and accuracy.get((other, staleness, seed))
            ]
            if pairs:
                found[f"truncated_over_{other}_staleness_{staleness}"] = statistics.median(pairs)
    return found
