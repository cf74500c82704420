"""What the scoring process answers, without the process."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from rollmill import environments
from rollmill.environments.frames import LARGEST_FRAME_BYTES, Job, Reply, body_bytes, frame
from rollmill.environments.score_worker import score

JOB = Job(number=7, text="hello", reference={"answer": "3"})


@pytest.mark.parametrize(
    ("value", "answered"),
    [(1, 1.0), (True, 1.0), (np.float32(0.5), 0.5), ("1.0", None), (None, None), ([1.0], None), ({}, None)],
)
def test_numbers_are_scores_and_everything_else_is_none(value: Any, answered: float | None) -> None:
    assert score(lambda text, reference: value, JOB) == Reply(number=7, kind="score", value=answered)


def test_an_exception_is_reported_with_its_place_and_is_not_a_score() -> None:
    def scorer(text: str, reference: dict[str, Any]) -> float:
        raise KeyError("answer")

    reply = score(scorer, JOB)
    assert (reply.kind, reply.value) == ("raised", None)
    assert reply.text.startswith("KeyError: 'answer' (test_score_worker.py:")


def test_a_frame_is_length_and_body_and_a_wild_length_is_refused() -> None:
    data = frame(JOB)
    assert body_bytes(data[:4]) == len(data) - 4
    with pytest.raises(ValueError, match="over the limit"):
        body_bytes((LARGEST_FRAME_BYTES + 1).to_bytes(4, "little"))
    with pytest.raises(ValueError, match="over the limit"):
        frame(bytes(LARGEST_FRAME_BYTES + 1))


def test_a_scoring_process_imports_neither_the_configuration_nor_the_turn_loop() -> None:
    script = (
        "import sys, rollmill.environments.score_worker\n"
        "print([name for name in ('pydantic', 'torch', 'rollmill.config.schema', 'rollmill.scheduling') "
        "if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_every_public_name_of_environments_is_found_where_it_lives() -> None:
    assert all(getattr(environments, name).__name__ == name for name in environments.__all__)
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = environments.no_such_name
