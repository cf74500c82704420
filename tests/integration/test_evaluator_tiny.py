"""A real evaluator process beside a tiny run: it answers, it can be lost, it leaves nothing behind."""

from __future__ import annotations

import json
from pathlib import Path

import psutil
import pytest
from tiny_runs import check_books, lines, processes_of, rollmill, wait_until, write_config

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(600)]


def events(run: Path, kind: str) -> list[dict]:
    file = run / "events.jsonl"
    return [event for event in lines(file) if event["event"] == kind] if file.exists() else []


def evaluators(run: Path) -> list[psutil.Process]:
    return [process for process in processes_of(run) if "evaluator" in process.info["cmdline"]]


def test_an_evaluator_that_is_killed_is_started_again_and_the_run_does_not_notice(tmp_path: Path) -> None:
    config, run = str(write_config(tmp_path, steps=12)), tmp_path / "runs" / "tiny"
    own = ("--set", "evaluation.replica=own", "--set", "evaluation.every_steps=10")
    process = rollmill("train", config, *own, "--json")
    wait_until(lambda: bool(evaluators(run)), process)
    (first,) = evaluators(run)
    # It lowers its own priority before it imports anything large.
    wait_until(lambda: first.nice() > psutil.Process(process.pid).nice(), process)
    first.kill()
    # At low priority, on a machine that is busy otherwise, it takes its time, and the end of the run waits for it.
    out, err = process.communicate(timeout=500)
    assert process.returncode == 0, err
    summary = json.loads(out)
    check_books(summary)
    assert summary["steps"] == 12
    assert summary["seconds"]["evaluator"]["lost"] > 0  # the killed one closed no book
    (loss,) = events(run, "evaluator_lost")
    assert (loss["label"], loss["attempt"]) == ("before", 1)
    found = {event["label"]: event for event in events(run, "evaluation")}
    told = {event["label"] for event in events(run, "evaluation_skipped")}
    assert set(found) | told == {"before", "step-10", "after"}
    assert found["before"]["policy_versions"] == [1]
    assert found["before"]["n"] == 16
    manifest = json.loads((run / "weights" / "manifests" / "v000001.json").read_text())
    assert found["before"]["digest"] in json.dumps(manifest)
    assert summary["eval"]["before"]["n"] == 16
    assert processes_of(run) == []
    _, alive = psutil.wait_procs([first], timeout=10)
    assert alive == []
