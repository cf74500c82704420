"""What the sandbox benchmark compares, and which of its classes count."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).parents[3] / "benchmarks" / "sandboxes"


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    spec = importlib.util.spec_from_file_location("sandbox_run", FOLDER / "run.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    names = set(sys.modules)
    spec.loader.exec_module(module)
    for one in set(sys.modules) - names:  # their names are common ones
        if str(getattr(sys.modules[one], "__file__", "")).startswith(str(FOLDER)):
            monkeypatch.delitem(sys.modules, one)
    return module


def times(p50_ms: float) -> dict[str, float]:
    return {"p50_ms": p50_ms}


def test_peers_are_compared_with_ours_where_both_were_measured(figures):
    found = {
        "peer_execs": {
            "rollmill": {"true": times(2.0), "python": times(10.0)},
            "runc": {"true": times(30.0), "python": times(40.0)},
            "left_out": {"bwrap": "it has no calls"},
            "took_s": 3.0,
        },
        "peer_burst": {"rollmill": {"rate_per_s": 80.0}, "runc": {"rate_per_s": 20.0}, "count": 100, "left_out": {}},
        "peer_density": {"rollmill": {"bytes_each": 1e6}, "runc": {"bytes_each": 3e6}, "count": 100, "left_out": {}},
    }
    assert figures.ratios(found) == {
        "runc_over_ours, exec of true": 15.0,
        "runc_over_ours, exec of python": 4.0,
        "our_rate_over_runc, burst": 4.0,
        "runc_over_ours, memory each": 3.0,
    }


def test_memory_that_the_machine_does_not_show_is_compared_with_nothing(figures):
    found = {"peer_density": {"rollmill": {"bytes_each": 0.0}, "runc": {"bytes_each": 3e6}, "left_out": {}}}
    assert figures.ratios(found) == {}


def test_the_memory_of_many_is_compared_with_the_goal_only_as_a_sum_of_what_processes_and_groups_hold(figures):
    summed = {"density": {"bytes_each": 1.6e6, "anon_bytes_each": 1.1e6, "available_bytes_each": 1e6}}
    assert figures.ratios(summed) == {"goal_over_bytes_each": 1.25}  # 2 MB over 1.6
    assert figures.ratios({"density": {"bytes_each": 1e6}}) == {}  # an earlier result, by the machine's free memory
    assert figures.ratios({"density": {"available_bytes_each": 1e6, "left_out": "not readable"}}) == {}


def test_the_committed_result_can_still_be_compared(figures):
    import json

    result = json.loads((FOLDER / "result.json").read_text(encoding="utf-8"))
    assert figures.ratios(result["parts"])["runc_over_ours"] == pytest.approx(result["ratios"]["runc_over_ours"])


@pytest.mark.parametrize(
    ("ended", "seconds", "barely"),
    [
        ("exit status 1", 0.05, True),
        ("exit status 2", 1.9, False),
        ("exit status 0", 0.1, False),
        ("output", 0.1, False),
        ("SandboxDead", 0.1, False),
    ],
)
def test_a_class_that_ended_by_itself_and_badly_before_its_time_did_not_run(figures, ended, seconds, barely):
    assert figures.stress.barely_ran(ended, seconds=seconds, asked_s=2) is barely
