"""Deterministic mode with real processes on a tiny random Llama: equal seeds give equal bits, killed or not."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import (
    finish,
    kill_supervisor,
    processes_of,
    rollmill,
    steps_of,
    tensor_digests,
    tiny_toml,
    wait_for_steps,
)

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(400)]


def write_deterministic(folder: Path, name: str, *, steps: int) -> Path:
    path = folder / f"{name}.toml"
    path.write_text(
        tiny_toml(
            folder,
            run={"name": name, "steps": steps, "seed": 3, "deterministic": True},
            # Fewer slots than a wave has rollouts: who waits for whom must not depend on timing either.
            generator={"max_num_seqs": 6, "kernels": "torch"},
            trainer={"checkpoint_every_steps": 2, "keep_checkpoints": 100},
            schedule={"max_staleness": 0},
        )
    )
    return path


def new_run(folder: Path, name: str, *settings: str, steps: int) -> tuple[subprocess.Popen[str], Path]:
    config = write_deterministic(folder, name, steps=steps)
    chosen = [argument for setting in settings for argument in ("--set", setting)]
    return rollmill("train", str(config), "--json", *chosen), folder / "runs" / name


def summary_of(process: subprocess.Popen[str]) -> dict[str, Any]:
    status, out, err = finish(process)
    assert status == 0, err
    return json.loads(out)


def test_main_job_deterministic_twice_and_killed_and_resumed_gives_the_same_bits(tmp_path: Path) -> None:
    straight, first = new_run(tmp_path, "straight", steps=6)
    # Beside it, so that the machine is busy in another way for each.
    killed, second = new_run(tmp_path, "killed", steps=6)
    wait_for_steps(second, 3, killed)
    kill_supervisor(killed, second)
    uninterrupted = tensor_digests(second)
    resumed = rollmill("train", "--resume", str(second), "--json")
    summaries = [summary_of(straight), summary_of(resumed)]

    expected = tensor_digests(first)
    assert sorted(expected) == [
        f"step-{step:06d}/{part}.safetensors" for step in (2, 4, 6) for part in ("model", "optimizer")
    ]
    assert len(set(expected.values())) == 6
    # What was written before the kill: two runs, one seed. What was written after it: killed and resumed.
    assert uninterrupted.items() <= expected.items()
    assert tensor_digests(second) == expected
    assert steps_of(second) == steps_of(first)
    for summary in summaries:
        assert summary["steps"] == 6
        rollouts = summary["rollouts"]
        assert rollouts["trained"] == 6 * 2 * 4
        assert rollouts["admitted"] == rollouts["trained"] + rollouts["buffered"] + sum(rollouts["dropped"].values())


def test_a_run_that_lost_each_process_and_restarted_it_gives_the_same_bits(tmp_path: Path) -> None:
    straight, first = new_run(tmp_path, "straight", steps=8)
    restart = ("run.on_trainer_loss=restart", "run.on_controller_loss=restart")
    lossy, second = new_run(tmp_path, "lossy", *restart, steps=8)
    for step, victim in ((1, "generator-0"), (3, "controller"), (5, "trainer")):
        wait_for_steps(second, step, lossy)
        (process,) = [p for p in processes_of(second) if victim in p.info["cmdline"]]
        process.kill()
    summary_of(straight)
    summary = summary_of(lossy)
    assert {name: losses["losses"] for name, losses in summary["restarts"].items()} == {
        "generator-0": 1,
        "controller": 1,
        "trainer": 1,
    }
    assert len(tensor_digests(first)) == 8
    assert tensor_digests(second) == tensor_digests(first)


def test_another_seed_gives_other_bits(tmp_path: Path) -> None:
    """The control: equal digests mean something."""
    one, first = new_run(tmp_path, "one", steps=2)
    summary_of(one)
    two, second = new_run(tmp_path, "two", "run.seed=4", steps=2)
    summary_of(two)
    digests = tensor_digests(first), tensor_digests(second)
    assert digests[0].keys() == digests[1].keys()
    assert not set(digests[0].values()) & set(digests[1].values())
