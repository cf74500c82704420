"""Scorers, and what their answers mean.

A scorer is a function from (reply text, task reference) to a number in [0, 1]. It runs in a scoring process
(`rollmill.environments.score_worker`), never in the controller. This module builds scorers and turns a number, or what
came instead of one, into an outcome; a failure never becomes a reward.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable
from typing import Any, cast

import msgspec

from rollmill.environments.gym_pool import Mix, make_dataset
from rollmill.environments.imports import import_object, is_import_path, nearest
from rollmill.errors import ConfigError, ScoringFault
from rollmill.types import Outcome, Scored, Unscored

Scorer = Callable[[str, dict[str, Any]], float]

BUILT_IN = ("last_integer", "dataset")
_INTEGER = re.compile(r"-?\d+")
_ANSWER_TAG = re.compile(r"<answer>\s?(.*?)\s?</answer>", re.DOTALL)
_ENTRIES_KEPT = 256  # siblings of a group are scored close together; some families take a second per problem


class ScorerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What a scoring process needs to build its scorer; crosses the wire once, at its start.

    Attributes:
        name: `last_integer`, `dataset`, or an import path `package.module:function`.
        mixes: for `dataset`: the mixture whose families score.
    """

    name: str
    mixes: tuple[Mix, ...] = ()


def check_scorer_name(name: str) -> None:
    """Check the setting `environment.scorer` without building anything.

    Raises:
        ConfigError: if it is neither built in nor an import path.
    """
    if name not in BUILT_IN and not is_import_path(name):
        raise ConfigError(
            f"environment.scorer = {name!r} is neither built in ({nearest(name, list(BUILT_IN))}) nor an import path. "
            "Write your own as 'package.module:function'."
        )


def build_scorer(spec: ScorerSpec) -> Scorer:
    """Return the scorer.

    Raises:
        ConfigError: if the name is unknown, or the import path leads to nothing callable.
    """
    check_scorer_name(spec.name)
    if spec.name == "last_integer":
        return last_integer
    if spec.name == "dataset":
        return dataset_scorer(spec.mixes)
    scorer: Any = import_object(spec.name, setting="environment.scorer")
    if not callable(scorer):
        raise ConfigError(f"environment.scorer = {spec.name!r} is a {type(scorer).__name__}, not a function.")
    return cast("Scorer", scorer)


def last_integer(text: str, reference: dict[str, Any]) -> float:
    """Return 1.0 if the last integer of the text is the reference answer, else 0.0.

    Digits are compared as text, without thousands separators: `1,234` ends in 234. A minus directly before a digit
    belongs to it. This is the rule that other trainers are compared with.

    Example:
        >>> last_integer("3 + 4 is 7.", {"answer": "7"})
        1.0
        >>> last_integer("7, or perhaps 8", {"answer": "7"})
        0.0
    """
    numbers = _INTEGER.findall(text)
    return float(bool(numbers) and numbers[-1] == reference["answer"])


def dataset_scorer(mixes: tuple[Mix, ...]) -> Scorer:
    """Return the families' own `score_answer` over the problem that the reference points to.

    The reference holds the draw's number, not the problem: metadata of some families does not survive a wire. The
    problem is drawn again here and must have the same answer.
    """
    datasets = [make_dataset(mix) for mix in mixes]

    @functools.lru_cache(maxsize=_ENTRIES_KEPT)
    def entry_of(mix: int, draw: int) -> dict[str, Any]:
        return datasets[mix][draw]

    def score(text: str, reference: dict[str, Any]) -> float:
        mix, draw = reference["mix"], reference["draw"]
        entry = entry_of(mix, draw)
        answer = None if entry["answer"] is None else str(entry["answer"])
        if answer != reference["answer"]:
            raise ScoringFault(
                f"problem {draw} of {mixes[mix].name!r} came out with another answer ({answer!r}) than when the pool "
                f"was made ({reference['answer']!r}): the family is not deterministic. Choose "
                "another scorer or family.",
                kind="raised",
            )
        return datasets[mix].score_answer(answer_of(text), entry)

    return score


def answer_of(text: str) -> str:
    """Return what stands in the last `<answer>` tag, or the whole text, without surrounding blanks."""
    tagged = _ANSWER_TAG.findall(text)
    return (tagged[-1] if tagged else text).strip()


def verdict(value: float | None) -> Outcome:
    """Return the outcome of a score: in [0, 1] it is a reward, anything else is none.

    Example:
        >>> verdict(float("nan"))
        Unscored(reason='bad_value')
    """
    if value is None or not math.isfinite(value) or not 0.0 <= value <= 1.0:
        return Unscored(reason="bad_value")
    return Scored(raw_reward=value, shaped_reward=value)
