"""Real runs on a tiny random Llama with a scorer that tosses a coin: the configuration, the command, its files."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

DEADLINE_S = 300.0
STARTED: list[subprocess.Popen[str]] = []
"""Commands of the test in hand; `tests/integration/conftest.py` ends what a failed test leaves."""

SECTIONS: dict[str, dict[str, Any]] = {
    "run": {"name": "tiny"},
    "model": {"source": "tiny-llama"},
    "environment": {"pool_size": 400, "heldout_size": 16, "scorer": "rollmill.testing.scorers:coin"},
    "sampling": {"max_new_tokens": 12},
    "generator": {"max_num_seqs": 16, "max_model_len": 256, "dtype": "float32"},
    "trainer": {"learning_rate": 1e-3, "checkpoint_every_steps": 4, "dtype": "float32"},
    "evaluation": {},
    "schedule": {"batch_groups": 2, "group_size": 4, "max_staleness": 2, "window_groups": 4},
}
TASKS = """
[[environment.tasks]]
name = "basic_arithmetic"
options = { min_terms = 2, max_terms = 2, min_digits = 1, max_digits = 2 }
"""


def tiny_toml(folder: Path, **changed: dict[str, Any]) -> str:
    """Return the configuration of a run below `folder` with keys of its sections changed or added."""
    assert changed.keys() <= SECTIONS.keys()
    changed["run"] = {"directory": str(folder / "runs"), **changed.get("run", {})}
    tables = [
        # The scalars of JSON are written the same way in TOML.
        "\n".join([f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in fields.items()), ""])
        for name, section in SECTIONS.items()
        for fields in [{**section, **changed.get(name, {})}]
    ]
    return "\n".join(tables) + TASKS


def write_config(folder: Path, *, steps: int, max_staleness: int = 2) -> Path:
    """Write the configuration of the run `folder`/runs/tiny and return where it is."""
    path = folder / "train.toml"
    run = {"steps": steps, "stall_report_s": 20.0, "stall_limit_s": 60.0}
    path.write_text(tiny_toml(folder, run=run, schedule={"max_staleness": max_staleness}))
    return path


# the command


def rollmill(*arguments: str) -> subprocess.Popen[str]:
    """Start `rollmill` with these arguments."""
    process = subprocess.Popen(
        [sys.executable, "-m", "rollmill.cli", *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    STARTED.append(process)
    return process


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Wait for the command's end; return its status and what it wrote."""
    out, err = process.communicate(timeout=DEADLINE_S)
    return process.returncode, out, err


def end_what_was_started() -> None:
    """Kill the commands that still run; the kernel ends the processes of their runs."""
    while STARTED:
        process = STARTED.pop()
        if process.poll() is None:
            process.kill()
        if process.stdout is not None and not process.stdout.closed:
            process.communicate(timeout=DEADLINE_S)


def wait_until(predicate: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    """Wait for something that a living run does.

    Raises:
        AssertionError: if it did not come.
    """
    until_s = time.monotonic() + DEADLINE_S
    while not predicate():
        # The process's end wakes this wait; otherwise it looks again twenty times a second.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=0.05)
            pytest.fail(f"the run ended early: {process.communicate()}")
        assert time.monotonic() < until_s, "what the test waits for did not come"


def wait_for_steps(run: Path, count: int, process: subprocess.Popen[str]) -> None:
    """Wait until `count` optimizer steps are reported."""
    metrics = run / "metrics.jsonl"
    wait_until(lambda: metrics.exists() and metrics.read_bytes().count(b"\n") >= count, process)


def processes_of(run: Path) -> list[psutil.Process]:
    """Return the processes that name the run directory, the command that resumes it among them."""
    return [
        process
        for process in psutil.process_iter(["cmdline"])
        if str(run) in " ".join(process.info["cmdline"] or []) and process.pid != os.getpid()
    ]


def kill_supervisor(process: subprocess.Popen[str], run: Path) -> None:
    """Kill the supervisor and see the kernel end the others with it."""
    others = [other for other in processes_of(run) if other.pid != process.pid]
    assert len(others) >= 3
    process.kill()
    process.communicate(timeout=DEADLINE_S)
    _, alive = psutil.wait_procs(others, timeout=10)
    assert alive == []


# its files


def lines(path: Path) -> list[dict[str, Any]]:
    """Return the records of a JSON lines file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def tensor_digests(run: Path) -> dict[str, str]:
    """Return digests of the model's and the optimizer's tensors of every checkpoint."""
    return {
        f"{path.parent.name}/{path.name}": hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(run.glob("checkpoints/*/*.safetensors"))
    }


def steps_of(run: Path) -> set[tuple[int, float, float]]:
    """Return what was measured of each step; a step of an abandoned history stands there twice, with equal numbers."""
    return {(row["step"], row["loss"], row["grad_norm"]) for row in lines(run / "metrics.jsonl")}


def check_books(summary: dict[str, Any]) -> None:
    """Check that rollouts and seconds sum to what was admitted and to wall time."""
    rollouts = summary["rollouts"]
    parts = sum(rollouts[state] for state in ("in_flight", "suspended", "buffered", "trained"))
    assert rollouts["admitted"] == parts + sum(rollouts["dropped"].values())
    for process, book in summary["seconds"].items():
        causes = sum(seconds for cause, seconds in book.items() if cause not in ("sum_s", "wall_s"))
        assert causes == pytest.approx(book["wall_s"], abs=0.05), process
        assert book["sum_s"] == pytest.approx(causes, abs=0.05), process
        assert min(book.values()) > -0.05, process
