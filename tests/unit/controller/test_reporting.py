from __future__ import annotations

import contextlib

import pytest

from buffer_builders import a_step, put
from rollmill.buffer.memory import MemoryStore
from rollmill.clock import VirtualClock
from rollmill.config.schema import RollmillConfig
from rollmill.controller.evaluation import EvaluationResult
from rollmill.controller.reporting import RunReporter, evaluation_record
from rollmill.controller.translate import scheduler_settings
from rollmill.errors import DataError
from rollmill.scheduling.core import Scheduler
from rollmill.telemetry.files import read_jsonl
from rollmill.telemetry.run_directory import RunDirectory


def result(*, correct: int, n: int, unscored: int = 0) -> EvaluationResult:
    return EvaluationResult(
        correct=correct,
        n=n,
        unscored=unscored,
        unscored_reasons=("generation ended with abort",) if unscored else (),
        mean_reward=0.5,
        mean_tokens=9.0,
        policy_versions=(3, 4),
        temperature=0.0,
        max_new_tokens=24,
        wall_s=1.0,
    )


def test_an_evaluation_carries_interval_sampling_and_the_version_that_was_asked() -> None:
    record = evaluation_record(result(correct=5, n=10, unscored=2))
    # Wilson: 5 of 10 gives 0.2366 to 0.7634
    assert record["accuracy"] == 0.5
    assert record["low"] == pytest.approx(0.2366, abs=1e-4)
    assert record["high"] == pytest.approx(0.7634, abs=1e-4)
    assert (record["n"], record["unscored"], record["policy_version"], record["temperature"]) == (10, 2, 4, 0.0)


def test_an_evaluation_without_any_verdict_is_an_error_and_not_an_accuracy_of_zero() -> None:
    with pytest.raises(DataError, match="none of 7"):
        evaluation_record(result(correct=0, n=0, unscored=7))


def test_the_word_of_an_evaluation_leaves_the_live_view_when_it_has_ended(tmp_path) -> None:
    config = RollmillConfig()
    with contextlib.closing(RunDirectory.create(tmp_path / "run", config=config, started_at_s=0.0)) as directory:
        reporter = RunReporter(
            config=config, directory=directory, store=MemoryStore(), clock=VirtualClock(), decode=lambda _: ""
        )
        core = Scheduler(scheduler_settings(config, training_size=100))
        reporter.say("evaluating (before)")
        assert reporter.live_state(core)["message"] == "evaluating (before)"
        reporter.evaluated("before", result(correct=5, n=10), digest_of=lambda _: "d")
        assert reporter.live_state(core)["message"] == ""
        reporter.close()


def test_a_step_that_is_heard_again_after_a_resume_has_one_line(tmp_path) -> None:
    config, store = RollmillConfig(), MemoryStore()
    with contextlib.closing(RunDirectory.create(tmp_path / "run", config=config, started_at_s=0.0)) as directory:
        for step in (1, 2):
            store.apply(put(f"g{step}", journal=(b"e",)))
        steps = [a_step(step, f"g{step}", step=step) for step in (1, 2)]
        # The first controller stopped before the event of step 1 was in its journal.
        for heard in (steps[:1], steps):
            reporter = RunReporter(
                config=config, directory=directory, store=store, clock=VirtualClock(), decode=lambda _: ""
            )
            for row, record in enumerate(heard):
                reporter.step(row, record)
            reporter.close()
        assert [line["step"] for line in read_jsonl(directory.metrics)] == [1, 2]
