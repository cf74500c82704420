"""Wiring, supervision and shutdown of the processes of a run."""
