from __future__ import annotations

import pytest

from rollmill.config.schema import EnvironmentSettings, TaskMix
from rollmill.environments import load_environment
from rollmill.errors import ConfigError
from rollmill.testing import ScriptedEnvironment

TASKS = (TaskMix(name="sums"),)


def scripted(settings: EnvironmentSettings, *, run_seed: int, system_prompt: str | None) -> ScriptedEnvironment:
    return ScriptedEnvironment(size=settings.heldout_size, run_seed=run_seed)


def half_done(settings: EnvironmentSettings, *, run_seed: int, system_prompt: str | None) -> object:
    return object()


not_a_factory = 3


def load(kind: str) -> object:
    return load_environment(EnvironmentSettings(kind=kind, tasks=TASKS, heldout_size=3), run_seed=5)


def test_an_import_path_names_a_factory_that_gets_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = load(f"{__name__}:scripted")
    assert isinstance(environment, ScriptedEnvironment)
    assert environment.training_size() == 3


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("reasoning-gym", "is not known. Use 'reasoning_gym', or the import path"),
        ("no_such_module:Factory", "importing 'no_such_module' failed"),
        (f"{__name__}:scriptd", r"has no 'scriptd' \(nearest: scripted"),
        (f"{__name__}:not_a_factory", "is a int, not a factory"),
        (f"{__name__}:half_done", "made a object without training_size"),
    ],
)
def test_what_cannot_be_loaded_says_why_and_what_to_write(kind: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(kind)


def test_an_unknown_scorer_is_refused_before_problems_are_generated() -> None:
    with pytest.raises(ConfigError, match=r"environment.scorer = 'exact'"):
        load_environment(EnvironmentSettings(tasks=TASKS, scorer="exact"), run_seed=0)
