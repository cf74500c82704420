"""A whole run with vLLM as its engine: one line of the configuration."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_runs import check_books, finish, lines, processes_of, rollmill, write_config

from rollmill.weights.prepare import prepare
from vllm_server import why_not

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(3600)]

EXAMPLE = Path(__file__).parents[2] / "examples" / "arithmetic" / "train.toml"
LIFT = 0.2
"""Goal of the main job, whatever samples: the 95 % interval ends this much above the accuracy before."""


def model_that_vllm_takes(folder: Path) -> Path:
    """The tiny Llama with heads twice as wide and half as many: the same tensors, and the narrowest that vLLM takes."""
    target = folder / "model"
    shutil.copytree(prepare("tiny-llama").path, target)
    config = json.loads((target / "config.json").read_text())
    config |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
    (target / "config.json").write_text(json.dumps(config))
    return target


def test_a_run_trains_with_vllm_by_one_line(tmp_path: Path) -> None:
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    config, model = write_config(tmp_path, steps=7), model_that_vllm_takes(tmp_path)
    status, out, err = finish(
        rollmill(
            "train",
            str(config),
            "--json",
            *("--set", "generator.engine=vllm"),
            *("--set", f'model.source="{model}"'),
            *("--set", "run.stall_limit_s=240.0"),
        )
    )
    run = tmp_path / "runs" / "tiny"
    assert status == 0, err
    summary = json.loads(out)
    check_books(summary)
    assert (summary["steps"], summary["rollouts"]["trained"], summary["rollouts"]["in_flight"]) == (7, 56, 0)
    assert 0 <= summary["staleness"]["max"] <= 2
    spans = [span for rollout in lines(run / "rollouts.jsonl") for span in rollout["version_spans"]]
    # Weights that were trained came back into the engine, and it said so itself. With a staleness of two at most, a
    # seventh step needs a third version, however far ahead the generator was.
    assert len({span[-1] if isinstance(span, list) else span["policy_version"] for span in spans}) > 2
    # Its processes are counted, and none is left.
    assert summary["peak_memory_bytes"] > 1_500_000_000
    assert processes_of(run) == []
    assert "Starting vLLM server on unix:" in (run / "logs" / "generator-0.vllm.log").read_text()


def test_the_shipped_job_learns_with_vllm_as_with_the_embedded_engine(tmp_path: Path) -> None:
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    train = subprocess.run(
        [
            *(sys.executable, "-m", "rollmill.cli", "train", str(EXAMPLE), "--json"),
            *("--set", "generator.engine=vllm", "--set", f"run.directory={tmp_path}"),
        ],
        capture_output=True,
        text=True,
        timeout=3400,
        check=False,
    )
    assert train.returncode == 0, train.stderr[-3000:]
    summary = json.loads(train.stdout)
    check_books(summary)
    before, after = summary["eval"]["before"], summary["eval"]["after"]
    assert before["n"] == after["n"] == 256
    assert after["low"] >= before["accuracy"] + LIFT, (before, after)
    assert 0 <= summary["staleness"]["max"] <= 2
