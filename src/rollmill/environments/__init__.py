"""Environments: tasks, the turn loop, scoring, rendering.

Names are imported at their first use: a scoring process needs only its scorer, and starts in half the time.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollmill.environments.load import load_environment
    from rollmill.environments.protocol import Environment, Observation
    from rollmill.environments.reasoning_gym import ReasoningGymEnvironment
    from rollmill.environments.rendering import MessageRenderer, Renderer, check_lengths
    from rollmill.environments.score_pool import ScorePool, ScoreStatistics
    from rollmill.environments.single_turn import run_rollout

__all__ = [
    "Environment",
    "MessageRenderer",
    "Observation",
    "ReasoningGymEnvironment",
    "Renderer",
    "ScorePool",
    "ScoreStatistics",
    "check_lengths",
    "load_environment",
    "run_rollout",
]

_HOME = {
    "Environment": "protocol",
    "MessageRenderer": "rendering",
    "Observation": "protocol",
    "ReasoningGymEnvironment": "reasoning_gym",
    "Renderer": "rendering",
    "ScorePool": "score_pool",
    "ScoreStatistics": "score_pool",
    "check_lengths": "rendering",
    "load_environment": "load",
    "run_rollout": "single_turn",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
