"""The pool of problems that reasoning-gym generates.

Decides how many draws each entry of the mixture gets (its weight's share of `pool_size`, before duplicates are
removed) and the seeds of the draws (from the family and its options, never from the run's seed). It does not split.

In production the pool is made in a child process with a fixed hash seed: a few families iterate over sets of strings,
so that their problems would differ from one process to the next; and the package costs seconds and 100 MB to import,
which the controller need not carry.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from rollmill.environments.imports import nearest
from rollmill.environments.split import Problem, make_problem
from rollmill.errors import ConfigError, DataError, EnvironmentFault, MissingExtraError
from rollmill.types import derive_seed

if TYPE_CHECKING:
    from reasoning_gym.dataset import ProceduralDataset

    from rollmill.config.schema import TaskMix

GENERATION_LIMIT_S = 600.0
"""Longest time to generate a pool; some families search for a second per problem."""
_HANG_GRACE_S = 60.0  # time past the limit for the import and for the problem in hand; then the child is killed

# The sentence around the expression is dress in these families: two wordings of one expression are one problem.
_EXPRESSION_FAMILIES = frozenset({"basic_arithmetic", "chain_sum", "decimal_chain_sum", "products"})
_RAISED_BY_FAMILIES = (AssertionError, TypeError, ValueError, KeyError, AttributeError, IndexError)


class Mix(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of the mixture, as it crosses to a child process."""

    name: str
    options: dict[str, Any]
    draws: int


class _Answer(msgspec.Struct, kw_only=True):
    problems: list[Problem] = []
    code: str = ""
    message: str = ""


def plan_mixes(tasks: Sequence[TaskMix], *, pool_size: int) -> tuple[Mix, ...]:
    """Return how often each family is drawn: shares of `pool_size` by weight, largest remainder first.

    Raises:
        ConfigError: if a family gets no draw at all.

    Example:
        >>> from rollmill.config.schema import TaskMix
        >>> mixes = plan_mixes([TaskMix(name="a", weight=2), TaskMix(name="b")], pool_size=10)
        >>> [mix.draws for mix in mixes]
        [7, 3]
    """
    total = sum(task.weight for task in tasks)
    shares = [pool_size * task.weight / total for task in tasks]
    draws = [int(share) for share in shares]
    by_remainder = sorted(range(len(tasks)), key=lambda i: (draws[i] - shares[i], i))
    for i in by_remainder[: pool_size - sum(draws)]:
        draws[i] += 1
    for task, count, share in zip(tasks, draws, shares, strict=True):
        if count == 0:
            raise ConfigError(
                f"environment.tasks: {task.name!r} with weight {task.weight:g} of {total:g} gets {share:.2g} of "
                f"{pool_size} draws, hence none. Raise environment.pool_size to {int(pool_size / share) + 1} or more, "
                "or its weight."
            )
    return tuple(
        Mix(name=task.name, options=task.options, draws=count) for task, count in zip(tasks, draws, strict=True)
    )


def make_dataset(mix: Mix, *, setting: str = "environment.tasks") -> ProceduralDataset:
    """Return the family's generator.

    Raises:
        ConfigError: if the family or an option does not exist, or the family refuses a value.
        MissingExtraError: if reasoning-gym is not installed.
    """
    registry = _registry()
    if mix.name not in registry:
        known = [name for name in registry if name != "composite"]
        raise ConfigError(f"{setting}: reasoning-gym has no task {mix.name!r} ({nearest(mix.name, known)}).")
    _check_options(mix, config_class=registry[mix.name][1], setting=setting)
    options = {"seed": pool_seed(mix), **mix.options, "size": mix.draws}
    try:
        return _create(mix.name, options)
    except _RAISED_BY_FAMILIES as error:
        raise ConfigError(
            f"{setting}: {mix.name!r} refuses its options {mix.options!r}: {type(error).__name__}: {error}. "
            "The options and their limits are in the family's own documentation."
        ) from error


def pool_seed(mix: Mix) -> int:
    """Return the seed of the draws: fixed by family and options, so that the run's seed cannot move the split."""
    return derive_seed("pool", mix.name, json.dumps(mix.options, sort_keys=True, default=str)) % 2**31


def generate_pool(mixes: Sequence[Mix], *, limit_s: float = GENERATION_LIMIT_S) -> list[Problem]:
    """Return all draws of all families, duplicates included, in this process.

    Raises:
        ConfigError: as `make_dataset`.
        DataError: if a family fails to generate, or the pool takes longer than `limit_s`.
    """
    started = time.monotonic()
    problems: list[Problem] = []
    for index, mix in enumerate(mixes):
        dataset = make_dataset(mix, setting=f"environment.tasks[{index}]")
        for draw in range(mix.draws):
            problems.append(_draw(dataset, mix=mix, index=index, draw=draw))
            if time.monotonic() - started > limit_s:
                raise DataError(
                    f"generating the pool took longer than {limit_s:g} s: {mix.name!r} was at draw {draw + 1} of "
                    f"{mix.draws}. Lower environment.pool_size, or ease the family's options."
                )
    return problems


def generate_in_child(mixes: Sequence[Mix], *, limit_s: float = GENERATION_LIMIT_S) -> list[Problem]:
    """Return `generate_pool(mixes)` as made by a child process with a fixed hash seed.

    Raises:
        ConfigError, DataError, MissingExtraError: as raised there.
        EnvironmentFault: if the child died.
    """
    environment = {**os.environ, **child_environment()}
    command = [sys.executable, "-P", "-m", "rollmill.environments.gym_pool"]
    request = msgspec.msgpack.encode([list(mixes), limit_s])
    try:
        done = subprocess.run(
            command, input=request, capture_output=True, env=environment, timeout=limit_s + _HANG_GRACE_S
        )
    except subprocess.TimeoutExpired as error:
        raise DataError(
            f"generating the pool did not end within {limit_s + _HANG_GRACE_S:g} s and was killed: one problem "
            "hangs. "
            "Choose another family or ease its options."
        ) from error
    if done.returncode != 0:
        raise EnvironmentFault(
            f"the process that generates problems ended with code {done.returncode}: "
            f"{done.stderr.decode(errors='replace')[-500:].strip() or 'no output'}"
        )
    answer = msgspec.msgpack.decode(done.stdout, type=_Answer)
    if answer.code == MissingExtraError.code:
        raise _missing()
    if answer.code:
        raise (ConfigError if answer.code == ConfigError.code else DataError)(answer.message)
    return answer.problems


def child_environment() -> dict[str, str]:
    """Return the variables of a child that runs reasoning-gym or a scorer: this import path, fixed hash, one thread."""
    path = os.pathsep.join([entry or os.getcwd() for entry in sys.path])
    return {"PYTHONPATH": path, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


def _draw(dataset: ProceduralDataset, *, mix: Mix, index: int, draw: int) -> Problem:
    try:
        entry = dataset[draw]
    except Exception as error:
        raise DataError(
            f"{mix.name!r} with options {mix.options!r} failed to generate problem {draw} of {mix.draws}: "
            f"{type(error).__name__}: {error}. Ease its options or choose another family."
        ) from error
    essence = entry["metadata"].get("expression") if mix.name in _EXPRESSION_FAMILIES else None
    answer = entry["answer"]
    return make_problem(
        family=mix.name,
        question=entry["question"],
        answer=None if answer is None else str(answer),
        mix=index,
        draw=draw,
        essence=essence if isinstance(essence, str) else None,
    )


def _check_options(mix: Mix, *, config_class: type, setting: str) -> None:
    known = [field.name for field in dataclasses.fields(config_class) if field.name != "size"]
    for option in mix.options:
        if option == "size":
            raise ConfigError(
                f"{setting}: {mix.name!r} takes no option 'size' here; environment.pool_size and the weights decide it."
            )
        if option not in known:
            raise ConfigError(f"{setting}: {mix.name!r} has no option {option!r} ({nearest(option, known)}).")


def _registry() -> dict[str, tuple[type, type]]:
    try:
        from reasoning_gym.factory import DATASETS
    except ModuleNotFoundError as error:
        raise _missing() from error
    return DATASETS


def _create(name: str, options: dict[str, Any]) -> ProceduralDataset:
    from reasoning_gym.factory import create_dataset

    return create_dataset(name, **options)


def _missing() -> MissingExtraError:
    return MissingExtraError(package="reasoning_gym", extra="reasoning-gym", purpose="environment.kind reasoning_gym")


def _main() -> None:
    """Answer one request on the standard streams; the answer is the only thing written to the output."""
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a family prints must not mix with the answer
    warnings.simplefilter("ignore")
    mixes, limit_s = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=tuple[list[Mix], float])
    try:
        answer = _Answer(problems=generate_pool(mixes, limit_s=limit_s))
    except (ConfigError, DataError, MissingExtraError) as error:
        answer = _Answer(code=error.code, message=str(error))
    output.write(msgspec.msgpack.encode(answer))
    output.close()


if __name__ == "__main__":
    _main()
