"""Two steps of the real main job: the example's own configuration with SmolLM2-135M, smaller where that saves time."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(600)]

EXAMPLE = Path(__file__).parents[2] / "examples" / "arithmetic" / "train.toml"
SMALLER = {
    "run.steps": 2,
    "environment.heldout_size": 8,
    "schedule.batch_groups": 2,
    "schedule.group_size": 6,
    "generator.max_num_seqs": 32,
}


def test_the_real_model_trains_on_what_the_real_engine_sampled(tmp_path: Path) -> None:
    pytest.importorskip("reasoning_gym")
    command = [
        sys.executable,
        "-m",
        "rollmill.cli",
        "train",
        str(EXAMPLE),
        "--json",
        "--set",
        f"run.directory={tmp_path}",
    ]
    for key, value in SMALLER.items():
        command += ["--set", f"{key}={value}"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=540, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    summary = json.loads(result.stdout)
    assert summary["books"] == []
    assert summary["rollouts"]["trained"] == 2 * 2 * 6
    assert summary["eval"]["before"]["n"] == summary["eval"]["after"]["n"] == 8

    steps = [json.loads(line) for line in (tmp_path / "arithmetic" / "metrics.jsonl").read_text().splitlines()]
    # Engine and trainer compute the same log-probs from the same weights; float32 leaves about 1e-5.
    fresh = [step["mismatch_fresh_max"] for step in steps if "mismatch_fresh_max" in step]
    assert fresh
    assert max(fresh) < 1e-3

    rollouts = [json.loads(line) for line in (tmp_path / "arithmetic" / "rollouts.jsonl").read_text().splitlines()]
    rewards = {0.0: 0, 1.0: 0}
    for rollout in rollouts:
        integers = re.findall(r"-?\d+", rollout["answer"])
        reward = float(bool(integers) and integers[-1] == rollout["reference"]["answer"])
        assert rollout["outcome"]["raw_reward"] == reward
        rewards[reward] += 1
    assert min(rewards.values()) > 0
