"""What bounds a run, in a sentence. Pure; the scheduling core says which bound holds."""

from __future__ import annotations

from collections.abc import Mapping

from rollmill.telemetry.shares import shares

SENTENCES = {
    "trainer": "The trainer is the bound: it has a batch at hand.",
    "generator": "The generator is the bound: the trainer waits for rollouts that run.",
    "admission": "Admission is the bound: slots are free, and the staleness budget allows no more rollouts.",
    "weights": "Loading weights is the bound: no rollout may start before the newer version is loaded.",
    "data": "The data has ended, or the run is stopping.",
    "start": "Starting: no batch has been taken yet.",
}
"""Bound -> one sentence that says who waits for whom."""


def bound_sentence(bound_by: str) -> str:
    """Return the sentence of a bound; an unknown one is named as it is."""
    return SENTENCES.get(bound_by, f"The bound is {bound_by}.")


def bound_line(bound_by: str, seconds: Mapping[str, float]) -> str:
    """Return the sentence of a run's bound, and the share of time for which it and others held.

    Args:
        seconds: bound -> for how long it held.

    Example:
        >>> bound_line("trainer", {"start": 10.0, "trainer": 88.0, "generator": 2.0})
        'The trainer is the bound: it has a batch at hand. That held for 88% of the time; start 10%, generator 2%.'
    """
    sentence, total = bound_sentence(bound_by), sum(seconds.values())
    if total <= 0:
        return sentence
    others = shares({name: value for name, value in seconds.items() if name != bound_by}, total_s=total)
    held = f"{seconds.get(bound_by, 0.0) / total:.0%} of the time"
    return f"{sentence} That held for {held}{'; ' if others else ''}{others}."
