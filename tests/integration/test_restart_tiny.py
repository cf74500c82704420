"""A run that loses a process goes on in the same command, as its settings say: real processes on a tiny model."""

from __future__ import annotations

import contextlib
import json
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from tiny_runs import (
    check_books,
    finish,
    lines,
    processes_of,
    rollmill,
    wait_for_steps,
    wait_until,
    write_config,
)

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(400)]

ALL_RESTART = ["run.on_generator_loss=restart", "run.on_trainer_loss=restart", "run.on_controller_loss=restart"]


def start(tmp_path: Path, *settings: str, steps: int) -> tuple[subprocess.Popen[str], Path]:
    chosen = [argument for setting in settings for argument in ("--set", setting)]
    process = rollmill("train", str(write_config(tmp_path, steps=steps)), "--json", *chosen)
    return process, tmp_path / "runs" / "tiny"


def the(run: Path, name: str) -> psutil.Process | None:
    return next((process for process in processes_of(run) if name in process.info["cmdline"]), None)


def kill(run: Path, name: str) -> int:
    victim = the(run, name)
    assert victim is not None, f"{name} does not run"
    victim.kill()
    return victim.pid


def wait_for_another(run: Path, name: str, *, than: int, process: subprocess.Popen[str]) -> None:
    def has_come() -> bool:
        found = the(run, name)
        return found is not None and found.pid != than

    wait_until(has_come, process)


def losses(run: Path) -> list[dict]:
    path = run / "losses.jsonl"
    return lines(path) if path.exists() else []


def result(process: subprocess.Popen[str]) -> dict:
    status, out, err = finish(process)
    assert status == 0, err
    summary = json.loads(out)
    check_books(summary)
    return summary


def test_the_main_job_loses_each_of_its_processes_and_goes_on(tmp_path: Path) -> None:
    process, run = start(tmp_path, *ALL_RESTART, steps=14)
    for step, name in ((2, "generator-0"), (4, "controller"), (6, "trainer")):
        wait_for_steps(run, step, process)
        wait_for_another(run, name, than=kill(run, name), process=process)
    summary = result(process)
    assert (summary["reason"], summary["steps"], summary["failure"]) == ("steps_done", 14, None)
    assert summary["rollouts"]["trained"] == 14 * 2 * 4
    assert summary["rollouts"]["in_flight"] == 0
    # Only the trainer's loss begins another history.
    assert summary["incarnations"] == 2
    assert {name: (one["losses"], one["restarts"]) for name, one in summary["restarts"].items()} == {
        "generator-0": (1, 1),
        "controller": (1, 1),
        "trainer": (1, 1),
    }
    assert all("SIGKILL" in one["causes"][0] for one in summary["restarts"].values())
    assert {loss["decision"] for loss in losses(run)} == {"restart"}
    # An evaluation is never repeated for a new controller, nor scored with answers that were lost.
    assert summary["eval"]["before"]["n"] == summary["eval"]["after"]["n"] == 16
    evaluations = [event for event in lines(run / "events.jsonl") if event["event"] == "evaluation"]
    assert [event["label"] for event in evaluations] == ["before", "after"]
    assert processes_of(run) == []


def test_a_lost_trainer_is_started_before_the_books_have_gone_back(tmp_path: Path) -> None:
    process, run = start(tmp_path, *ALL_RESTART, steps=8)
    wait_for_steps(run, 3, process)
    controller = the(run, "controller")
    assert controller is not None
    controller.suspend()
    killed = kill(run, "trainer")
    wait_for_another(run, "trainer", than=killed, process=process)
    # Lost once more while it waits: that is a loss of the incarnation that it waited for.
    wait_for_another(run, "trainer", than=kill(run, "trainer"), process=process)
    controller.resume()
    summary = result(process)
    assert summary["steps"] == 8
    assert summary["rollouts"]["trained"] == 8 * 2 * 4
    assert [loss["incarnation"] for loss in losses(run)] == [1, 2]
    assert summary["incarnations"] == 3


def test_three_losses_at_once_are_one_resume_of_everything(tmp_path: Path) -> None:
    process, run = start(tmp_path, *ALL_RESTART, steps=8)
    wait_for_steps(run, 3, process)
    for name in ("trainer", "generator-0", "controller"):
        kill(run, name)
    summary = result(process)
    assert summary["steps"] == 8
    assert summary["rollouts"]["trained"] == 8 * 2 * 4
    assert summary["incarnations"] == 2
    assert sorted(summary["restarts"]) == ["controller", "generator-0", "trainer"]


def test_a_process_that_is_lost_again_and_again_ends_the_run_with_the_first_cause(tmp_path: Path) -> None:
    process, run = start(tmp_path, "run.restart_budget=1", steps=1000)
    wait_for_steps(run, 2, process)
    # Killed before it serves, until the batches that were assigned ahead are used up and no step can come between.
    last = kill(run, "generator-0")
    while not (losses(run) and losses(run)[-1]["decision"] == "fail"):
        found = the(run, "generator-0")
        if found is not None and found.pid != last:
            last = found.pid
            found.kill()
        # The end of the run wakes this; a restart takes far longer.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=0.05)
    status, _, err = finish(process)
    assert status == 1, err
    failure = json.loads((run / "failure.json").read_text())
    assert failure["process"] == "generator-0"
    assert "lost 2 times with no optimizer step between them" in failure["message"]
    assert "run.restart_budget = 1" in failure["message"]
    assert processes_of(run) == []
    check_books(json.loads((run / "summary.json").read_text()))


def test_a_degraded_run_trains_what_is_buffered_and_ends_with_a_checkpoint(tmp_path: Path) -> None:
    process, run = start(tmp_path, "run.on_generator_loss=degrade", steps=1000)
    wait_for_steps(run, 3, process)
    kill(run, "generator-0")
    summary = result(process)
    assert summary["reason"] == "degraded"
    assert summary["resume"] is not None
    assert (run / "checkpoints" / f"step-{summary['steps']:06d}").exists()
    assert summary["rollouts"]["in_flight"] == summary["rollouts"]["buffered"] == 0
    assert 0 <= summary["degraded_steps"] <= 3
    assert [loss["decision"] for loss in losses(run)] == ["degrade"]


def test_a_waiting_run_goes_on_when_somebody_starts_the_replica(tmp_path: Path) -> None:
    process, run = start(tmp_path, "run.on_generator_loss=wait", "run.replica_deadline_s=50", steps=12)
    wait_for_steps(run, 2, process)
    kill(run, "generator-0")
    wait_until(lambda: bool(losses(run)), process)
    loss = losses(run)[0]
    assert loss["decision"] == "wait"
    command = shlex.split(loss["message"].partition("start it again: ")[2])
    assert command[0] == sys.executable
    with (tmp_path / "by_hand.log").open("wb") as log:
        by_hand = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    try:
        summary = result(process)
        assert by_hand.wait(timeout=30) == 0
    finally:
        by_hand.kill()
    assert summary["steps"] == 12


def test_a_waiting_run_ends_when_nobody_does(tmp_path: Path) -> None:
    process, run = start(tmp_path, "run.on_generator_loss=wait", "run.replica_deadline_s=2", steps=1000)
    wait_for_steps(run, 2, process)
    kill(run, "generator-0")
    status, _, err = finish(process)
    assert status == 1, err
    failure = json.loads((run / "failure.json").read_text())
    assert "run.replica_deadline_s = 2 s" in failure["message"]
    assert "SIGKILL" in failure["message"]
    assert processes_of(run) == []


@pytest.mark.parametrize("victim", ["generator-0", "trainer", "controller"])
def test_ctrl_c_while_a_lost_process_starts_again_stops_cleanly(tmp_path: Path, victim: str) -> None:
    process, run = start(tmp_path, *ALL_RESTART, steps=1000)
    wait_for_steps(run, 2, process)
    wait_for_another(run, victim, than=kill(run, victim), process=process)
    process.send_signal(signal.SIGINT)
    status, out, err = finish(process)
    assert status == 130, err
    summary = json.loads(out)
    check_books(summary)
    assert summary["reason"] == "stopped"
    assert processes_of(run) == []


def test_a_trainer_that_somebody_else_tells_to_end_is_a_loss_with_that_cause(tmp_path: Path) -> None:
    process, run = start(tmp_path, steps=200)
    wait_for_steps(run, 3, process)
    trainer = the(run, "trainer")
    assert trainer is not None
    trainer.terminate()
    status, _, _ = finish(process)
    failure = json.loads((run / "failure.json").read_text())
    assert (status, failure["process"], failure["code"]) == (1, "trainer", "process_died")
    assert "told to end (SIGTERM)" in failure["message"]
    assert processes_of(run) == []


def test_a_trainer_that_was_told_to_end_is_started_again_where_the_run_may(tmp_path: Path) -> None:
    process, run = start(tmp_path, *ALL_RESTART, steps=12)
    wait_for_steps(run, 3, process)
    trainer = the(run, "trainer")
    assert trainer is not None
    trainer.terminate()
    summary = result(process)
    assert (summary["steps"], summary["rollouts"]["trained"]) == (12, 12 * 2 * 4)
    (loss,) = losses(run)
    assert (loss["process"], loss["decision"]) == ("trainer", "restart")
    # It wrote a checkpoint of the step it was at, so no step is made twice.
    assert [line["step"] for line in lines(run / "metrics.jsonl")] == list(range(1, 13))
