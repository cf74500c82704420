"""From runs to means and ratios. Pure."""

from __future__ import annotations

import statistics
from typing import Any

STALENESS = (0, 1, 2, 4, 8, 16)
SEEDS = (0, 1, 2)
ARMS = {
    "clipped": "truncated, and no gradient where the advantage leads further beyond [1/2, 2] (the default)",
    "truncated": "importance weight proximal / behaviour, truncated at 2",
    "none": "no importance weight; PPO's clip acts on policy / behaviour",
    "ignored": "as if samples were fresh: behaviour log-probs recomputed with the trained weights",
}


def settings_of_a_seed() -> list[tuple[int, str]]:
    """Return (staleness, arm) of every run of a seed and learning rate.

    At staleness 0 there is nothing to correct: the arms differ by rounding, and one of them stands for all.
    """
    return [(staleness, arm) for staleness in STALENESS for arm in ARMS if staleness > 0 or arm == "clipped"]


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


def line_of(rows: list[dict[str, Any]], *, learning_rate: float, arm: str) -> list[dict[str, Any]]:
    """Return the rows of one arm by staleness; that of fresh samples is common to all arms."""
    found = [
        row for row in rows if row["learning_rate"] == learning_rate and (row["arm"] == arm or row["staleness"] == 0)
    ]
    return sorted(found, key=lambda row: row["staleness"])


def ratios(runs: list[dict[str, Any]]) -> dict[str, float]:
    """Return medians over seeds of one accuracy over another with the same seed and learning rate.

    `clipped_over_<arm>`: larger than 1 means that the default correction is better. `kept`: accuracy with the default
    correction over accuracy of fresh samples; 1 means that nothing was lost.
    """
    accuracy = {(run["learning_rate"], run["arm"], run["staleness"], run["seed"]): run["accuracy"] for run in runs}
    found: dict[str, float] = {}
    for rate in sorted({run["learning_rate"] for run in runs}):
        for staleness in STALENESS[1:]:
            for name, arm, age in (
                ("kept", "clipped", 0),
                ("clipped_over_truncated", "truncated", staleness),
                ("clipped_over_none", "none", staleness),
                ("clipped_over_ignored", "ignored", staleness),
            ):
                pairs = [
                    accuracy[rate, "clipped", staleness, seed] / other
                    for seed in SEEDS
                    if (rate, "clipped", staleness, seed) in accuracy
                    and (other := accuracy.get((rate, arm, age, seed)))
                ]
                if pairs:
                    found[f"{name}_staleness_{staleness}_rate_{rate:g}"] = statistics.median(pairs)
    return found
