"""From settings to an environment.

Decides only which adapter is meant; the adapters check their own settings.
"""

from __future__ import annotations

from typing import Any, cast

from rollmill.config.schema import EnvironmentSettings
from rollmill.environments.imports import import_object, is_import_path
from rollmill.environments.protocol import Environment
from rollmill.environments.reasoning_gym import load_reasoning_gym
from rollmill.errors import ConfigError

_REQUIRED = ("training_size", "task_at", "heldout", "reset", "step", "start", "score", "alarm", "close", "identity")


def load_environment(settings: EnvironmentSettings, *, run_seed: int, system_prompt: str | None = None) -> Environment:
    """Return the environment that `environment.kind` names.

    An import path names a factory that is called as this function is, and returns an `Environment`.

    Args:
        settings: the table `[environment]`.
        run_seed: `run.seed`; orders the training tasks.
        system_prompt: `model.system_prompt`.

    Raises:
        ConfigError: if the kind, a task family, an option or the scorer does not exist.
        DataError: if the data cannot be used.
        MissingExtraError: if an optional package is not installed.
    """
    if settings.kind == "reasoning_gym":
        return load_reasoning_gym(settings, run_seed=run_seed, system_prompt=system_prompt)
    if not is_import_path(settings.kind):
        raise ConfigError(
            f"environment.kind = {settings.kind!r} is not known. Use 'reasoning_gym', or the import path of your own "
            "factory, 'package.module:Factory'."
        )
    factory = import_object(settings.kind, setting="environment.kind")
    if not callable(factory):
        raise ConfigError(f"environment.kind = {settings.kind!r} is a {type(factory).__name__}, not a factory.")
    environment: Any = factory(settings, run_seed=run_seed, system_prompt=system_prompt)
    lacking = [name for name in _REQUIRED if not callable(getattr(environment, name, None))]
    if lacking:
        raise ConfigError(
            f"environment.kind = {settings.kind!r} made a {type(environment).__name__} without {', '.join(lacking)}. "
            "See rollmill.environments.protocol.Environment for what an environment answers."
        )
    return cast("Environment", environment)
