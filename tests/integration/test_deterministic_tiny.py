"""Deterministic mode with real processes on a tiny random Llama: equal seeds give equal bits, killed or not."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(400)]

CONFIG = """
[run]
name = "{name}"
directory = "{directory}"
steps = {steps}
seed = 3
deterministic = true

[model]
source = "tiny-llama"

[environment]
pool_size = 400
heldout_size = 16
scorer = "rollmill.testing.scorers:coin"

[[environment.tasks]]
name = "basic_arithmetic"
[environment.tasks.options]
min_terms = 2
max_terms = 2
min_digits = 1
max_digits = 2

[sampling]
max_new_tokens = 12

[generator]
# Fewer than a wave has rollouts: who waits for whom must not depend on timing either.
max_slots = 6
max_model_len = 256
dtype = "float32"
kernels = "torch"

[trainer]
learning_rate = 1e-3
checkpoint_every_steps = 2
keep_checkpoints = 100
dtype = "float32"

[schedule]
batch_groups = 2
group_size = 4
max_staleness = 0
window_groups = 4
"""

DEADLINE_S = 300.0


STARTED: list[subprocess.Popen[str]] = []


@pytest.fixture(autouse=True)
def nothing_is_left_running() -> Iterator[None]:
    yield
    for process in STARTED:
        if process.poll() is None:
            process.kill()
        process.communicate(timeout=DEADLINE_S)
    STARTED.clear()


def start(*arguments: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-m", "rollmill.cli", "train", *arguments, "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    STARTED.append(process)
    return process


def new_run(folder: Path, name: str, *, steps: int) -> tuple[subprocess.Popen[str], Path]:
    config = folder / f"{name}.toml"
    config.write_text(CONFIG.format(name=name, directory=folder / "runs", steps=steps))
    return start(str(config)), folder / "runs" / name


def finish(process: subprocess.Popen[str]) -> dict:
    out, err = process.communicate(timeout=DEADLINE_S)
    STARTED.remove(process)
    assert process.returncode == 0, err
    return json.loads(out)


def wait_for_steps(run: Path, count: int, process: subprocess.Popen[str]) -> None:
    metrics, until = run / "metrics.jsonl", time.monotonic() + DEADLINE_S
    while not (metrics.exists() and len(metrics.read_text().splitlines()) >= count):
        # The process's end wakes this wait; otherwise it looks again twenty times a second.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=0.05)
            pytest.fail(f"the run ended early: {process.communicate()[1]}")
        assert time.monotonic() < until, f"step {count} did not come"


def processes_of(run: Path) -> list[psutil.Process]:
    return [
        process
        for process in psutil.process_iter(["cmdline"])
        if str(run) in " ".join(process.info["cmdline"] or []) and process.pid != os.getpid()
    ]


def kill(process: subprocess.Popen[str], run: Path) -> None:
    """Kill the supervisor; the kernel ends the others with it."""
    others = [other for other in processes_of(run) if other.pid != process.pid]
    assert len(others) >= 3
    process.kill()
    process.wait(timeout=DEADLINE_S)
    _, alive = psutil.wait_procs(others, timeout=10)
    assert alive == []


def tensor_digests(run: Path) -> dict[str, str]:
    """Digests of the model's and the optimizer's tensors of every checkpoint."""
    return {
        f"{path.parent.name}/{path.name}": hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(run.glob("checkpoints/*/*.safetensors"))
    }


def steps_of(run: Path) -> set[tuple[int, float, float]]:
    """What was measured of each step; a step of an abandoned history stands there twice, with equal numbers."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {(row["step"], row["loss"], row["grad_norm"]) for row in rows}


def test_main_job_deterministic_twice_and_killed_and_resumed_gives_the_same_bits(tmp_path: Path) -> None:
    straight, first = new_run(tmp_path, "straight", steps=6)
    # Beside it, so that the machine is busy in another way for each.
    killed, second = new_run(tmp_path, "killed", steps=6)
    wait_for_steps(second, 3, killed)
    kill(killed, second)
    uninterrupted = tensor_digests(second)
    resumed = start("--resume", str(second))
    summaries = [finish(straight), finish(resumed)]

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
    config = tmp_path / "lossy.toml"
    config.write_text(CONFIG.format(name="lossy", directory=tmp_path / "runs", steps=8))
    restart = ["--set", "run.on_trainer_loss=restart", "--set", "run.on_controller_loss=restart"]
    lossy, second = start(str(config), *restart), tmp_path / "runs" / "lossy"
    for step, victim in ((1, "generator-0"), (3, "controller"), (5, "trainer")):
        wait_for_steps(second, step, lossy)
        (process,) = [p for p in processes_of(second) if victim in p.info["cmdline"]]
        process.kill()
    finish(straight)
    summary = finish(lossy)
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
    finish(one)
    config = tmp_path / "one.toml"
    finish(start(str(config), "--set", "run.name=two", "--set", "run.seed=4"))
    digests = tensor_digests(first), tensor_digests(tmp_path / "runs" / "two")
    assert digests[0].keys() == digests[1].keys()
    assert not set(digests[0].values()) & set(digests[1].values())
