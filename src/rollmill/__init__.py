"""Rollmill: asynchronous reinforcement learning for language models that keeps the trainer fed."""

__version__ = "0.1.0"
