"""What bounds a run, in a sentence. Pure; the scheduling core says which bound holds."""

from __future__ import annotations

SENTENCES = {
    "trainer": "The trainer is the bound: batches wait for it.",
    "generator": "The generator is the bound: the trainer waits while every slot is busy.",
    "admission": "Admission is the bound: the staleness budget allows no further rollout until the trainer steps.",
    "weights": "Loading weights is the bound: rollouts wait for the new version.",
    "data": "The data is the bound: no further task may be drawn.",
    "start": "Starting: nothing was measured yet.",
}
"""Bound -> one sentence that says who waits for whom."""


def bound_sentence(bound_by: str) -> str:
    """Return the sentence of a bound; an unknown one is named as it is."""
    return SENTENCES.get(bound_by, f"The bound is {bound_by}.")
