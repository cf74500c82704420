"""Which measured steps of the trainer's benchmark become ratios."""

import importlib.util
from pathlib import Path

import pytest

SHARES = Path(__file__).parents[3] / "benchmarks" / "trainer" / "shares.py"


@pytest.fixture(scope="module")
def shares():
    spec = importlib.util.spec_from_file_location("trainer_shares", SHARES)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(dtype, *steps, **more):
    """A run of one thread and shape; steps are shares by wall and by CPU."""
    measured = [{"share_by_wall": wall, "share_by_cpu": cpu} for wall, cpu in steps]
    return {"dtype": dtype, "threads": 1, "shapes": [{"shape": "long", "steps": measured}], **more}


def test_a_ratio_is_the_median_share_over_the_goal(shares):
    found, left_out = shares.ratios([run("float32", (0.3, 0.6), (0.9, 0.5), (0.6, 0.9))])
    # medians 0.6 and 0.6 over a goal of 0.6
    assert found == {
        "share_of_gemm_over_goal_float32_1_threads_long": pytest.approx(1.0),
        "share_of_gemm_over_goal_by_cpu_float32_1_threads_long": pytest.approx(1.0),
    }
    assert left_out == {}


def test_a_step_that_is_faster_than_its_yardstick_gives_no_ratio_whatever_its_precision(shares):
    for dtype in ("bfloat16", "float32"):
        found, left_out = shares.ratios([run(dtype, (2.8, 0.9), (2.6, 0.9), (0.9, 0.9))])
        assert found == {f"share_of_gemm_over_goal_by_cpu_{dtype}_1_threads_long": pytest.approx(1.5)}
        (reason,) = left_out.values()
        assert list(left_out) == [f"share_of_gemm_over_goal_{dtype}_1_threads_long"]
        assert "2.6 times as fast" in reason


def test_one_fast_step_of_three_leaves_the_ratio_in(shares):
    found, left_out = shares.ratios([run("float32", (1.1, 0.9), (0.9, 0.9), (0.9, 0.9))])
    assert len(found) == 2
    assert left_out == {}


def test_what_a_background_checkpoint_saves_is_the_median_of_its_pairs(shares):
    pairs = [{"written": {"wall_s": written}, "begun": {"wall_s": 0.5}} for written in (1.0, 5.0, 2.0)]
    found, _ = shares.ratios([run("float32", (0.6, 0.6), checkpoints=pairs)])
    assert found["checkpoint_wait_saved"] == 4.0
