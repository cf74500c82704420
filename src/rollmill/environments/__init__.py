"""Environments: tasks, the turn loop, scoring, rendering."""

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
