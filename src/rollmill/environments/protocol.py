"""What an environment answers.

An environment poses tasks and judges rollouts; it never decides what is sampled or trained. Scoring runs outside the
event loop and outside the policy's reach.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from rollmill.types import Message, Outcome, Task


class Observation(msgspec.Struct, frozen=True, kw_only=True):
    """What the policy sees next; `done` ends the rollout."""

    messages: tuple[Message, ...]
    done: bool


class Environment(Protocol):
    """Tasks, turns and verdicts of one environment."""

    def training_size(self) -> int:
        """Number of draws in an epoch of the training stream."""
        ...

    def task_at(self, index: int) -> Task:
        """Return draw number `index` of the training stream: a pure function of the run's seed and the index.

        Each epoch is a fresh permutation of the same draws.
        """
        ...

    def heldout(self) -> tuple[Task, ...]:
        """Return the held-out tasks, disjoint from training by content."""
        ...

    def reset(self, task: Task) -> Observation:
        """Return what the policy sees first."""
        ...

    def step(self, task: Task, *, reply: str, turn: int) -> Observation:
        """Take the policy's reply; a single-turn environment is done."""
        ...

    async def score(self, task: Task, *, reply: str) -> Outcome:
        """Return the verdict within the scoring deadline; a hung or broken scorer gives `Unscored`, never a reward.

        Cancellation:
            the scoring slot is recovered.
        """
        ...

    def identity(self) -> str:
        """Return a digest of the data set (options, seed, split), compared on resume."""
        ...

    async def start(self) -> None:
        """Start the scoring processes ahead of the first score. Optional for callers: `score` starts what is missing.

        Raises:
            ConfigError: if the scorer cannot be built.
        """
        ...

    def alarm(self) -> str:
        """Return a sentence to show if the newest scores say nothing (all failed, all equal), else an empty string."""
        ...

    async def close(self) -> None:
        """End the scoring processes; idempotent."""
        ...
