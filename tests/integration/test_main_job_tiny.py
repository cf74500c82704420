"""The whole main job with real processes on a tiny random Llama."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from tiny_runs import (
    check_books,
    finish,
    kill_supervisor,
    lines,
    processes_of,
    rollmill,
    wait_for_steps,
    wait_until,
    write_config,
)

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(400)]


def test_a_run_trains_asynchronously_and_its_books_balance(tmp_path: Path) -> None:
    status, out, err = finish(rollmill("train", str(write_config(tmp_path, steps=8)), "--json"))
    assert status == 0, err
    run = tmp_path / "runs" / "tiny"
    summary = json.loads(out)
    assert summary == json.loads((run / "summary.json").read_text())
    check_books(summary)
    assert summary["steps"] == 8
    assert summary["rollouts"]["trained"] == 8 * 2 * 4
    assert summary["rollouts"]["in_flight"] == 0
    assert summary["eval"]["before"]["n"] == 16
    assert summary["eval"]["after"]["n"] == 16
    assert summary["staleness"]["budget"] == 2
    assert 0 < summary["staleness"]["max"] <= 2
    assert summary["peak_memory_bytes"] > 100 << 20
    steps = lines(run / "metrics.jsonl")
    assert [step["step"] for step in steps] == list(range(1, 9))
    assert all({"train_time_s", "wait_data_time_s", "samples"} <= step.keys() for step in steps)
    assert all(step["samples"] == 8 for step in steps)
    assert processes_of(run) == []

    status, out, err = finish(rollmill("eval", str(run / "checkpoints" / "step-000008"), "--json"))
    assert status == 0, err
    # The same problems, the same greedy sampling, the same weights in the same engine.
    assert json.loads(out)["accuracy"] == summary["eval"]["after"]["accuracy"]


def test_budget_zero_is_the_synchronous_loop(tmp_path: Path) -> None:
    status, out, err = finish(rollmill("train", str(write_config(tmp_path, steps=4, max_staleness=0)), "--json"))
    assert status == 0, err
    summary = json.loads(out)
    check_books(summary)
    assert summary["staleness"]["max"] == 0
    rollouts = lines(tmp_path / "runs" / "tiny" / "rollouts.jsonl")
    assert {len(rollout["version_spans"]) for rollout in rollouts} == {1}


def test_both_sides_in_bfloat16_pass_the_canary_and_train(tmp_path: Path) -> None:
    config = str(write_config(tmp_path, steps=2))
    precision = ["--set", "generator.dtype=bfloat16", "--set", "trainer.dtype=bfloat16"]
    status, out, err = finish(rollmill("train", config, "--json", *precision))
    assert status == 0, err
    check_books(json.loads(out))
    assert json.loads(out)["steps"] == 2


def test_ctrl_c_stops_cleanly_and_resume_goes_on(tmp_path: Path) -> None:
    process = rollmill("train", str(write_config(tmp_path, steps=12)))
    run = tmp_path / "runs" / "tiny"
    wait_for_steps(run, 3, process)
    process.send_signal(signal.SIGINT)
    status, out, err = finish(process)
    assert status == 130, err
    assert f"rollmill train --resume {run}" in out
    check_books(json.loads((run / "summary.json").read_text()))
    assert processes_of(run) == []

    status, out, err = finish(rollmill("train", "--resume", str(run), "--json"))
    assert status == 0, err
    summary = json.loads(out)
    check_books(summary)
    assert summary["steps"] == 12
    assert summary["rollouts"]["trained"] == 12 * 2 * 4
    assert [step["step"] for step in lines(run / "metrics.jsonl")] == list(range(1, 13))


def test_ctrl_c_before_the_first_step_loses_nothing_and_resume_begins_the_run(tmp_path: Path) -> None:
    process = rollmill("train", str(write_config(tmp_path, steps=3)))
    run = tmp_path / "runs" / "tiny"
    wait_until(lambda: (run / "processes" / "incarnation.json").exists(), process)
    process.send_signal(signal.SIGINT)
    status, out, err = finish(process)
    assert status == 130, err
    assert f"rollmill train --resume {run}" in out
    assert processes_of(run) == []

    status, out, err = finish(rollmill("train", "--resume", str(run), "--json"))
    assert status == 0, err
    summary = json.loads(out)
    check_books(summary)
    assert summary["steps"] == 3


def test_ctrl_c_while_replicas_start_does_not_wait_for_them(tmp_path: Path) -> None:
    process = rollmill("train", str(write_config(tmp_path, steps=3)))
    run = tmp_path / "runs" / "tiny"
    wait_until(lambda: '"preflight"' in text_of(run / "events.jsonl"), process)
    process.send_signal(signal.SIGINT)
    status, out, err = finish(process)
    assert status == 130, err
    assert f"rollmill train --resume {run}" in out
    assert processes_of(run) == []
    check_books(json.loads((run / "summary.json").read_text()))

    status, out, err = finish(rollmill("train", "--resume", str(run), "--json"))
    assert status == 0, err
    assert json.loads(out)["steps"] == 3


def test_ctrl_c_during_the_evaluation_at_the_end_leaves_it_and_keeps_the_run(tmp_path: Path) -> None:
    many = {"environment.pool_size": 15000, "environment.heldout_size": 1500, "environment.heldout_fraction": 0.3}
    options = [f"--set={key}={value}" for key, value in many.items()]
    config = str(write_config(tmp_path, steps=1))
    process = rollmill("train", config, *options, "--set=evaluation.at_start=false")
    run = tmp_path / "runs" / "tiny"
    wait_until(lambda: '"finished"' in text_of(run / "events.jsonl"), process)
    process.send_signal(signal.SIGINT)
    status, _, err = finish(process)
    assert status == 130, err
    assert "the user asked for the end" in text_of(run / "events.jsonl")
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["steps"], summary["eval"]["after"]) == (1, None)
    assert processes_of(run) == []
    check_books(summary)


def text_of(path: Path) -> str:
    return path.read_text() if path.exists() else ""


@pytest.mark.parametrize("victim", ["generator-0", "trainer", "controller"])
def test_with_stop_the_death_of_any_process_ends_the_run_and_names_it(tmp_path: Path, victim: str) -> None:
    config = str(write_config(tmp_path, steps=1000))
    process = rollmill("train", config, "--set", "run.on_generator_loss=stop")
    run = tmp_path / "runs" / "tiny"
    wait_for_steps(run, 2, process)
    target = next(p for p in processes_of(run) if victim in p.info["cmdline"])
    target.kill()
    status, _, err = finish(process)
    assert status == 1
    failure = json.loads((run / "failure.json").read_text())
    assert failure["process"] == victim
    assert "SIGKILL" in failure["message"]
    assert victim in err
    assert processes_of(run) == []
    check_books(json.loads((run / "summary.json").read_text()))


def test_a_killed_supervisor_leaves_no_process_behind(tmp_path: Path) -> None:
    process = rollmill("train", str(write_config(tmp_path, steps=1000)))
    run = tmp_path / "runs" / "tiny"
    wait_for_steps(run, 1, process)
    kill_supervisor(process, run)


def test_a_run_directory_in_use_is_refused_with_the_next_action(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "tiny"
    run.mkdir(parents=True)
    (run / "config.toml").write_text("")
    status, _, err = finish(rollmill("train", str(write_config(tmp_path, steps=1))))
    assert status == 2
    assert "run_directory" in err
    assert "--resume" in err


@pytest.mark.parametrize(
    ("setting", "word"),
    [
        ("model.source=no-such-model", "no-such-model"),
        ("environment.scorer=rollmill.testing.scorers:missing", "rollmill.testing.scorers:missing"),
    ],
)
def test_a_mistake_is_the_one_thing_reported_though_all_processes_start_at_once(
    tmp_path: Path, setting: str, word: str
) -> None:
    status, _, err = finish(rollmill("train", str(write_config(tmp_path, steps=1)), "--set", setting))
    assert status == 2
    assert word in err
    run = tmp_path / "runs" / "tiny"
    assert json.loads((run / "failure.json").read_text())["process"] == "controller"
    assert not (run / "processes" / "preflight.json").exists()
    assert not list((run / "weights").glob("manifests/*.json"))
    assert processes_of(run) == []
    # Where the mistake was found before they were forked, they have no log yet.
    logs = [run / "logs" / f"{name}.log" for name in ("trainer", "generator-0")]
    assert [log.read_text() for log in logs if log.exists()] in ([], ["", ""])
