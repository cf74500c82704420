from __future__ import annotations

import pytest

from rollmill.environments.scoring import ScorerSpec, answer_of, build_scorer, last_integer, verdict
from rollmill.errors import ConfigError
from rollmill.types import Scored, Unscored


@pytest.mark.parametrize(
    ("text", "answer", "score"),
    [
        ("12 + 7 = 19", "19", 1.0),
        ("19, no: 20", "19", 0.0),
        ("It is 019.", "19", 0.0),  # digits are compared as text
        ("minus: -4", "-4", 1.0),
        ("10-4", "-4", 1.0),  # the minus before a digit belongs to it
        ("1,234", "1234", 0.0),  # no thousands separators: the last integer is 234
        ("1,234", "234", 1.0),
        ("no number", "3", 0.0),
        ("", "3", 0.0),
    ],
)
def test_the_last_integer_counts(text: str, answer: str, score: float) -> None:
    assert last_integer(text, {"answer": answer}) == score


def test_the_last_answer_tag_is_the_answer_and_without_one_the_whole_text() -> None:
    assert answer_of("so <answer>1</answer> or <answer> 2 </answer>") == "2"
    assert answer_of("  seven \n") == "seven"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -0.001, 1.001, None])
def test_a_value_outside_0_and_1_is_no_reward(value: float | None) -> None:
    assert verdict(value) == Unscored(reason="bad_value")


def test_a_value_between_0_and_1_is_raw_and_shaped_reward() -> None:
    assert verdict(0.25) == Scored(raw_reward=0.25, shaped_reward=0.25)


def test_an_unknown_scorer_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match="nearest: last_integer"):
        build_scorer(ScorerSpec(name="last_intger"))


def test_an_import_path_names_what_is_missing() -> None:
    with pytest.raises(ConfigError, match="importing 'no_such_module' failed"):
        build_scorer(ScorerSpec(name="no_such_module:score"))
    with pytest.raises(ConfigError, match=r"has no 'sqroot' \(nearest: sqrt"):
        build_scorer(ScorerSpec(name="math:sqroot"))
    with pytest.raises(ConfigError, match="is a float, not a function"):
        build_scorer(ScorerSpec(name="math:pi"))
    assert build_scorer(ScorerSpec(name="rollmill.environments.scoring:last_integer")) is last_integer
