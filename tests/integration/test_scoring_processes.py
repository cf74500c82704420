"""Real scoring processes, the pool's child process, and a real chat template."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from rollmill.config.schema import EnvironmentSettings, TaskMix
from rollmill.environments import load_environment
from rollmill.environments.gym_pool import generate_in_child, plan_mixes
from rollmill.environments.score_pool import ScorePool
from rollmill.environments.scoring import ScorerSpec
from rollmill.errors import ConfigError, DataError
from rollmill.types import Scored, Unscored

pytestmark = pytest.mark.integration

SCORERS = """
import os, subprocess, sys, time

def dies(text, reference):
    print("last words", flush=True)
    os._exit(3)

def chatty(text, reference):
    print("x" * 200_000)
    return 1.0

def spawns(text, reference):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    open(text, "w").write(str(child.pid))
    time.sleep(600)

def sleeps(text, reference):
    time.sleep(600)
"""


@pytest.fixture
def scorers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "process_scorers.py").write_text(SCORERS)
    monkeypatch.syspath_prepend(tmp_path)
    return "process_scorers"


def gone(pid: int, *, within_s: float = 5.0) -> bool:
    until = time.monotonic() + within_s
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        if time.monotonic() > until:
            return False
        os.sched_yield()
    return True


async def test_a_scorer_that_ends_its_process_is_unscored_and_its_last_words_are_kept(scorers: str) -> None:
    pool = ScorePool(ScorerSpec(name=f"{scorers}:dies"), size=1, deadline_s=30.0)
    try:
        assert await pool.score("?", reference={}) == Unscored(reason="reward_failed(died)")
        assert "last words" in pool.statistics().last_fault
        assert pool.statistics().live == 1
    finally:
        await pool.close()


async def test_what_a_scorer_prints_does_not_mix_with_its_answers(scorers: str) -> None:
    pool = ScorePool(ScorerSpec(name=f"{scorers}:chatty"), size=1, deadline_s=30.0)
    try:
        for _ in range(3):
            assert await pool.score("?", reference={}) == Scored(raw_reward=1.0, shaped_reward=1.0)
    finally:
        await pool.close()


async def test_what_a_hung_scorer_started_is_killed_with_it(scorers: str, tmp_path: Path) -> None:
    note = tmp_path / "pid"
    pool = ScorePool(ScorerSpec(name=f"{scorers}:spawns"), size=1, deadline_s=1.5)
    try:
        await pool.start()
        assert await pool.score(str(note), reference={}) == Unscored(reason="reward_failed(timeout)")
    finally:
        await pool.close()
    assert gone(int(note.read_text()))


async def test_a_scorer_that_cannot_be_imported_stops_the_start_with_the_reason() -> None:
    pool = ScorePool(ScorerSpec(name="no_such_module:score"), size=1, deadline_s=1.0)
    try:
        with pytest.raises(ConfigError, match="importing 'no_such_module' failed"):
            await pool.start()
    finally:
        await pool.close()


def test_scoring_processes_die_with_a_killed_controller(scorers: str, tmp_path: Path) -> None:
    program = (
        "import asyncio\n"
        "from rollmill.environments.score_pool import ScorePool\n"
        "from rollmill.environments.scoring import ScorerSpec\n"
        "async def main():\n"
        f"    pool = ScorePool(ScorerSpec(name='{scorers}:sleeps'), size=2, deadline_s=600.0)\n"
        "    await pool.start()\n"
        "    print('up', flush=True)\n"
        "    await asyncio.gather(*(pool.score('?', reference={}) for _ in range(2)))\n"
        "asyncio.run(main())\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, env=environment) as controller:
        assert controller.stdout is not None
        assert controller.stdout.readline() == b"up\n"
        workers = psutil.Process(controller.pid).children()
        assert len(workers) == 2
        controller.kill()
    assert all(gone(worker.pid) for worker in workers)


async def test_the_main_jobs_environment_loads_scores_and_closes() -> None:
    pytest.importorskip("reasoning_gym")
    options = {
        "min_terms": 2,
        "max_terms": 2,
        "min_digits": 1,
        "max_digits": 2,
        "operators": ["+"],
        "allow_parentheses": False,
    }
    settings = EnvironmentSettings(tasks=(TaskMix(name="basic_arithmetic", options=options),))
    environment = load_environment(settings, run_seed=0)
    assert len(environment.heldout()) == 256
    assert environment.training_size() > 5000
    heldout = {task.task_id for task in environment.heldout()}
    assert heldout.isdisjoint(environment.task_at(i).task_id for i in range(environment.training_size()))
    try:
        await environment.start()
        task = environment.task_at(3)
        right, wrong = await asyncio.gather(
            environment.score(task, reply=f"That is {task.reference['answer']}."),
            environment.score(task, reply="That is 1000."),
        )
        assert (right, wrong) == (
            Scored(raw_reward=1.0, shaped_reward=1.0),
            Scored(raw_reward=0.0, shaped_reward=0.0),
        )
    finally:
        await environment.close()


@pytest.mark.slow
async def test_families_that_depend_on_the_hash_seed_are_drawn_and_scored_alike_in_every_process() -> None:
    pytest.importorskip("reasoning_gym")
    mixes = plan_mixes((TaskMix(name="isomorphic_strings"),), pool_size=20)  # it iterates over sets of strings
    problems = generate_in_child(mixes)
    assert generate_in_child(mixes) == problems
    pool = ScorePool(ScorerSpec(name="dataset", mixes=mixes), size=1, deadline_s=30.0)
    try:
        for problem in problems[:4]:
            reference = {"answer": problem.answer, "mix": problem.mix, "draw": problem.draw}
            right = await pool.score(f"<answer>{problem.answer}</answer>", reference=reference)
            assert right == Scored(raw_reward=1.0, shaped_reward=1.0), pool.statistics().last_fault
            other = await pool.score("<answer>neither</answer>", reference=reference)
            assert other == Scored(raw_reward=0.0, shaped_reward=0.0)
    finally:
        await pool.close()


def test_errors_of_the_child_that_generates_keep_their_class_and_text() -> None:
    pytest.importorskip("reasoning_gym")
    with pytest.raises(ConfigError, match="nearest: basic_arithmetic"):
        generate_in_child(plan_mixes((TaskMix(name="basic_aritmetic"),), pool_size=3))
    with pytest.raises(DataError, match="was at draw 1 of 3"):
        generate_in_child(plan_mixes((TaskMix(name="basic_arithmetic"),), pool_size=3), limit_s=1e-9)
