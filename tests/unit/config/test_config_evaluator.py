"""What a replica of its own for evaluations costs, and when there is none."""

from __future__ import annotations

import pytest

from rollmill.config.checks import warnings_of
from rollmill.config.derive import derive, has_evaluator
from rollmill.config.plan import plan, render
from rollmill.config.schema import EvaluationSettings, RollmillConfig, RunSettings

FACTS = {
    "parameters": 1_000_000,
    "vocabulary_size": 1000,
    "layers": 2,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 16,
    "hidden_size": 64,
    "intermediate_size": 128,
    "max_positions": 1024,
}


def config(*, steps: int = 40, **evaluation: object) -> RollmillConfig:
    return RollmillConfig(run=RunSettings(steps=steps), evaluation=EvaluationSettings(**evaluation))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("evaluation", "expected"),
    [
        ({}, False),
        ({"replica": "own"}, True),
        ({"replica": "own", "at_start": False}, False),
        ({"replica": "own", "at_start": False, "every_steps": 10}, True),
        # step 40 is the end of the run, which is always shared
        ({"replica": "own", "at_start": False, "every_steps": 40}, False),
        ({"replica": "shared", "every_steps": 10}, False),
    ],
)
def test_there_is_an_evaluator_if_something_is_evaluated_while_the_run_trains(evaluation, expected) -> None:
    assert has_evaluator(config(**evaluation)) is expected
    names = [process.name for process in plan(config(**evaluation), facts=FACTS, cores=4).processes]
    assert ("evaluator" in names) is expected


def test_an_evaluator_takes_the_memory_of_a_replica_without_spare_weights_and_two_more_sets_of_weights() -> None:
    without, with_one = derive(config(), facts=FACTS), derive(config(replica="own"), facts=FACTS)
    sizes = {memory.process: memory.total_bytes for memory in with_one.memory}
    replica = next(memory.parts for memory in with_one.memory if memory.process == "generator-0")
    assert sizes["evaluator"] == sizes["generator-0"] - replica["spare_weights"]
    assert {memory.process for memory in with_one.memory} - {memory.process for memory in without.memory} == {
        "evaluator"
    }
    assert with_one.shared_bytes is not None
    assert without.shared_bytes is not None
    assert with_one.shared_bytes - without.shared_bytes == 2 * 4 * 1_000_000
    totals = [plan(each, facts=FACTS, cores=4).memory_bytes for each in (config(replica="own"), config())]
    assert totals[0] is not None
    assert totals[1] is not None
    assert totals[0] - totals[1] == sizes["evaluator"] + 2 * 4 * 1_000_000


def test_the_plan_shows_the_evaluator() -> None:
    text = render(plan(config(replica="own"), facts=FACTS, cores=4))
    assert any(line.startswith("evaluator") for line in text.splitlines())


def test_a_replica_of_its_own_without_an_evaluation_is_warned_of() -> None:
    idle = warnings_of(config(replica="own", at_start=False), cores=4)
    assert any('evaluation.replica is "own"' in sentence and "no effect" in sentence for sentence in idle)
    assert not any("evaluation.replica" in sentence for sentence in warnings_of(config(replica="own"), cores=4))
