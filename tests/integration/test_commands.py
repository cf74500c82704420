"""The commands that start no run: plan, explain, list, check. Each in a process of its own, as a user runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration

EXAMPLE = Path(__file__).parents[2] / "examples" / "arithmetic" / "train.toml"


def rollmill(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "rollmill.cli", *arguments], capture_output=True, text=True, timeout=60, check=False
    )


def test_a_dry_run_prints_the_derived_numbers_and_starts_nothing(tmp_path: Path) -> None:
    result = rollmill("train", str(EXAMPLE), "--dry-run", "--set", f"run.directory={tmp_path}")
    assert result.returncode == 0, result.stderr
    assert "4 prompts x 8 siblings = 32 rollouts" in result.stdout
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_speaks_json() -> None:
    plan = json.loads(rollmill("train", str(EXAMPLE), "--dry-run", "--json").stdout)
    assert plan["derived"]["rollouts_per_step"] == 32
    assert {process["name"] for process in plan["processes"]} == {"controller", "generator", "trainer", "scorer"}


def test_a_dry_run_refuses_what_cannot_work_with_both_numbers() -> None:
    result = rollmill("train", str(EXAMPLE), "--dry-run", "--set", "sampling.max_new_tokens=300")
    assert result.returncode == 2
    assert "300" in result.stderr
    assert "256" in result.stderr


def test_an_unknown_key_names_the_nearest_one() -> None:
    result = rollmill("train", str(EXAMPLE), "--dry-run", "--set", "schedule.group_sise=4")
    assert result.returncode == 2
    assert "schedule.group_size" in result.stderr


def test_an_error_is_a_json_document_with_json() -> None:
    result = rollmill("train", "no-such-file.toml", "--json")
    assert result.returncode == 2
    assert json.loads(result.stdout)["error"]["code"] == "config"


def test_explain_says_value_unit_origin_and_effect() -> None:
    text = rollmill("config", "explain", "schedule.max_staleness", "--set", "schedule.max_staleness=3").stdout
    assert "3" in text
    assert "optimizer steps" in text
    assert "command line" in text
    assert "synchronous" in text


def test_models_are_listed_with_their_readiness() -> None:
    rows = json.loads(rollmill("model", "list", "--json").stdout)
    assert {"smollm2-135m-instruct", "tiny-llama"} <= {row["name"] for row in rows}
    assert all(isinstance(row["prepared"], bool) for row in rows)


def test_the_tiny_model_is_prepared_once_and_says_where() -> None:
    first = json.loads(rollmill("model", "prepare", "tiny-llama", "--json").stdout)
    second = json.loads(rollmill("model", "prepare", "tiny-llama", "--json").stdout)
    assert first == second
    assert (Path(first["path"]) / "config.json").exists()


def test_a_checkpoint_outside_a_run_needs_a_configuration(tmp_path: Path) -> None:
    result = rollmill("eval", str(tmp_path))
    assert result.returncode == 2
    assert "--config" in result.stderr
