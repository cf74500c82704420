"""How the runs of the staleness benchmark become means and ratios."""

import importlib.util
from pathlib import Path

import pytest

TABLES = Path(__file__).parents[3] / "benchmarks" / "staleness" / "tables.py"


@pytest.fixture(scope="module")
def tables():
    spec = importlib.util.spec_from_file_location("staleness_tables", TABLES)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(arm, staleness, seed, accuracy, *, learning_rate=1e-3):
    return {"arm": arm, "staleness": staleness, "seed": seed, "accuracy": accuracy, "learning_rate": learning_rate}


def test_the_spread_is_that_of_the_mean_over_seeds(tables):
    # 0.2, 0.4, 0.6, 0.8: mean 0.5, variance (0.09 + 0.01 + 0.01 + 0.09) / 3 = 0.0667, deviation 0.2582, over sqrt(4)
    (row,) = tables.summary([run("none", 4, seed, 0.2 * (seed + 1)) for seed in range(4)])
    assert row["accuracy"] == pytest.approx(0.5)
    assert row["standard_error"] == pytest.approx(0.1291, abs=1e-4)
    assert (row["arm"], row["staleness"], row["seeds"]) == ("none", 4, 4)


def test_learning_rates_are_never_averaged_together(tables):
    rows = tables.summary([run("none", 4, 0, 0.2), run("none", 4, 0, 0.4, learning_rate=1e-4)])
    assert [row["accuracy"] for row in rows] == [0.4, 0.2]


def test_a_ratio_is_the_median_over_seeds_of_pairs_with_equal_seed(tables):
    runs = [run("clipped", 8, seed, accuracy) for seed, accuracy in enumerate((0.6, 0.2, 0.9))]
    runs += [run("none", 8, seed, accuracy) for seed, accuracy in enumerate((0.3, 0.2, 0.3))]
    found = tables.ratios(runs)
    assert found == {"clipped_over_none_staleness_8_rate_0.001": pytest.approx(2.0)}  # of 2, 1 and 3


def test_what_is_kept_is_measured_against_fresh_samples_of_the_same_learning_rate(tables):
    runs = [run("clipped", 0, 0, 0.8), run("clipped", 16, 0, 0.6), run("clipped", 0, 0, 0.1, learning_rate=1e-4)]
    assert tables.ratios(runs) == {"kept_staleness_16_rate_0.001": pytest.approx(0.75)}


def test_a_seed_that_lacks_one_side_enters_no_ratio(tables):
    runs = [run("clipped", 8, 0, 0.6), run("none", 8, 1, 0.3)]
    assert tables.ratios(runs) == {}


def test_a_line_of_the_plot_goes_from_fresh_samples_to_the_oldest(tables):
    runs = [run("none", 16, 0, 0.3), run("none", 1, 0, 0.6), run("clipped", 0, 0, 0.7), run("clipped", 1, 0, 0.5)]
    runs.append(run("none", 2, 0, 0.1, learning_rate=1e-4))
    line = tables.line_of(tables.summary(runs), learning_rate=1e-3, arm="none")
    assert [(row["staleness"], row["accuracy"]) for row in line] == [(0, 0.7), (1, 0.6), (16, 0.3)]


def test_fresh_samples_are_trained_once_for_all_arms(tables):
    found = tables.settings_of_a_seed()
    assert [one for one in found if one[0] == 0] == [(0, "clipped")]
    assert len(found) == len(set(found)) == 1 + 5 * 4
