"""What bounds a run, in a sentence. Pure; the scheduling core says which bound holds."""

from __future__ import annotations

SENTENCES = {
    "trainer": "The trainer is the bound: it always has a batch at hand.",
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
