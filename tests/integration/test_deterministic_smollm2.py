"""Deterministic mode on the shipped job with its real model: as on the tiny one, but three runs of minutes."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from tiny_runs import finish, kill_supervisor, rollmill, steps_of, tensor_digests, wait_for_steps

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(1800)]

EXAMPLE = Path(__file__).parents[2] / "examples" / "arithmetic" / "train.toml"
STEPS = 3
CHANGED = {
    "run.deterministic": "true",
    "run.steps": STEPS,
    "schedule.max_staleness": 0,
    "generator.kernels": "torch",
    "environment.heldout_size": 8,
    "trainer.checkpoint_every_steps": 1,
    "trainer.keep_checkpoints": STEPS,
}


def new_run(folder: Path, name: str) -> tuple[subprocess.Popen[str], Path]:
    settings = {"run.directory": folder, "run.name": name, **CHANGED}
    chosen = [argument for key, value in settings.items() for argument in ("--set", f"{key}={value}")]
    return rollmill("train", str(EXAMPLE), "--json", *chosen), folder / name


def end_well(process: subprocess.Popen[str]) -> None:
    status, _, err = finish(process)
    assert status == 0, err[-3000:]


def test_the_shipped_job_gives_the_same_bits_twice_and_killed_and_resumed(tmp_path: Path) -> None:
    pytest.importorskip("reasoning_gym")
    process, straight = new_run(tmp_path, "straight")
    end_well(process)
    process, again = new_run(tmp_path, "again")
    end_well(process)
    process, killed = new_run(tmp_path, "killed")
    wait_for_steps(killed, 2, process)
    kill_supervisor(process, killed)
    end_well(rollmill("train", "--resume", str(killed), "--json"))

    expected = tensor_digests(straight)
    assert len(set(expected.values())) == 2 * STEPS
    assert tensor_digests(again) == expected
    assert tensor_digests(killed) == expected
    assert steps_of(killed) == steps_of(again) == steps_of(straight)
