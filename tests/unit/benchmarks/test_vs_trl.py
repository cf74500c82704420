"""What the comparison with TRL decides: which runs, when the target counts as reached, and what a pair is worth."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).parents[3] / "benchmarks" / "vs_trl"


def load(name: str) -> ModuleType:
    """Load a module of the benchmark's folder under the name by which its siblings import it."""
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module", autouse=True)
def modules():
    names = ("plan", "report", "measure")
    before = {name: sys.modules.pop(name, None) for name in names}
    yield {name: load(name) for name in names}
    for name, module in before.items():
        sys.modules.pop(name, None)
        if module is not None:
            sys.modules[name] = module


@pytest.fixture
def plan(modules):
    return modules["plan"]


@pytest.fixture
def report(modules):
    return modules["report"]


def curve(*points):
    return [{"accuracy": accuracy, "wall_s": wall_s, "cpu_s": 2 * wall_s} for accuracy, wall_s in points]


def run(item, *, points=(), step_wall_s=1.0, step_cpu_s=2.0, peak=1):
    return {
        "name": item.name,
        "phase": item.phase,
        "side": item.side,
        "seed": item.seed,
        "setting": {"name": item.setting.name},
        "zero_advantage": item.zero_advantage,
        "points": list(points),
        "step_wall_s": step_wall_s,
        "step_cpu_s": step_cpu_s,
        "startup_s": 3.0,
        "startup_cpu_s": 4.0,
        "took_s": 600.0,
        "peak_pss_bytes": peak,
        "load_average_before": 0.5,
        "machine": {"cpu": "a cpu"},
    }


def test_a_single_evaluation_above_the_target_does_not_count(plan):
    assert plan.time_to(curve((0.1, 10), (0.3, 20), (0.2, 30)), target=0.25, key="wall_s") is None


def test_the_first_of_two_evaluations_in_a_row_above_the_target_counts(plan):
    points = curve((0.3, 10), (0.2, 20), (0.25, 30), (0.26, 40), (0.5, 50))
    assert plan.time_to(points, target=0.25, key="wall_s") == 30
    assert plan.time_to(points, target=0.25, key="cpu_s") == 60


def test_the_last_evaluation_alone_cannot_reach_the_target(plan):
    assert plan.time_to(curve((0.1, 10), (0.9, 20)), target=0.25, key="wall_s") is None
    assert plan.time_to([], target=0.25, key="wall_s") is None


def test_the_time_of_a_point_is_that_of_training_and_not_of_its_evaluation(plan):
    verdict = {"accuracy": 0.3, "low": 0.2, "high": 0.4, "n": 256, "mean_tokens": 9.0, "wall_s": 12.0}
    point = plan.point(4, spent={"wall_s": 80.0, "cpu_s": 150.0, "reward_mean": 0.5}, verdict=verdict)
    assert point == {
        "step": 4,
        "wall_s": 80.0,
        "cpu_s": 150.0,
        "accuracy": 0.3,
        "low": 0.2,
        "high": 0.4,
        "n": 256,
        "mean_tokens": 9.0,
    }


def test_a_censored_run_of_trl_gives_a_lower_bound_and_one_of_ours_gives_nothing(plan, report):
    reached, never = curve((0.3, 50), (0.3, 60)), curve((0.1, 100), (0.1, 300))
    bound = report.comparison({"points": never}, {"points": reached, "seed": 3}, target=0.25, key="wall_s")
    assert (bound["ratio"], bound["theirs_censored"], bound["seed"]) == (6.0, True, 3)
    lost = report.comparison({"points": reached}, {"points": never, "seed": 3}, target=0.25, key="wall_s")
    assert (lost["ratio"], lost["ours_censored"]) == (0.0, True)


def test_seeds_alternate_between_the_sides(plan):
    equal = [item for item in plan.plan([]) if item.phase == "equal"]
    assert [(item.side, item.zero_advantage, item.seed) for item in equal[:5]] == [
        ("trl", "replace", 0),
        ("rollmill", "shaped", 0),
        ("rollmill", "replace", 0),
        ("rollmill", "shrink", 0),
        ("trl", "replace", 1),
    ]


def test_a_finished_run_is_not_made_again(plan):
    first, second, *_ = plan.plan([])
    assert plan.missing([run(first)])[0] == second


def test_trl_runs_in_the_mode_that_was_fastest_in_the_pilot(plan):
    pilots = plan.pilot_items()
    runs = [run(item, step_wall_s=10.0 + index) for index, item in enumerate(pilots)]
    runs[3]["step_wall_s"] = 1.0
    assert plan.fastest_mode(runs[:-1]) is None
    assert plan.fastest_mode(runs) == pilots[3].mode
    assert {item.mode for item in plan.plan(runs) if item.phase == "equal" and item.side == "trl"} == {pilots[3].mode}


def test_a_mode_that_failed_in_the_pilot_is_not_chosen(plan):
    runs = [run(item, step_wall_s=10.0 + index) for index, item in enumerate(plan.pilot_items())]
    runs[0] |= {"step_wall_s": 1.0, "failed": "ended after 240 s, 1 steps made"}
    assert plan.fastest_mode(runs) == plan.pilot_items()[1].mode


def searched(plan, *, times):
    """Return search runs of both sides; `times` maps a setting to seconds to the target, `None` for never."""
    runs = []
    for setting in plan.GRID:
        spent = times.get(setting.name, 500)
        points = curve((0.1, 900), (0.1, 950)) if spent is None else curve((0.3, spent), (0.3, spent + 1))
        runs += [run(plan.theirs("search", setting, seed, mode=None), points=points) for seed in plan.SEARCH_SEEDS]
        runs += [run(plan.ours("search", setting, seed), points=points) for seed in plan.SEARCH_SEEDS]
    return runs


def test_the_last_phase_takes_the_setting_that_reached_the_target_first(plan):
    fast = plan.GRID[2]
    runs = searched(plan, times={fast.name: 100, plan.GRID[1].name: None})
    best = [item for item in plan.plan(runs) if item.phase == "best"]
    assert {item.setting for item in best} == {fast}
    assert len(best) == 2 * len(plan.SEEDS)


def test_runs_of_the_equal_phase_are_used_again_if_the_search_finds_nothing_better(plan):
    runs = searched(plan, times={plan.EQUAL.name: 100})
    assert [item for item in plan.plan(runs) if item.phase == "best"] == []


def test_the_report_takes_the_median_over_pairs_and_says_how_many_were_censored(plan, report):
    runs = [run(item, step_wall_s=9.0, step_cpu_s=12.0) for item in plan.pilot_items()]
    for seed, wall_s in zip((0, 1, 2), (100, 300, 200), strict=True):
        runs.append(
            run(plan.theirs("equal", plan.EQUAL, seed, mode=None), points=curve((0.3, wall_s), (0.3, 999)), peak=9)
        )
        runs.append(run(plan.ours("equal", plan.EQUAL, seed), points=curve((0.3, 50), (0.3, 60)), peak=3))
    runs[-2]["points"] = curve((0.1, 100), (0.1, 250))  # TRL never got there with seed 2: a bound of 5
    found = report.result(runs)
    assert found["ratios"]["wall"] == 5.0  # of 2, 6 and 5
    assert found["ratios"]["memory"] == 3.0
    assert found["ratios"]["cpu_trl_one_thread"] == 5.0  # 12 s of CPU in either mode
    assert "wall_shrink" not in found["ratios"]
    text = report.section(found)
    assert "200 (1 of 3 censored)" not in text  # the median of 100, 300 and 250
    assert "250 (1 of 3 censored)" in text
    assert "at least 5.00 (2.00 to 6.00)" in text


def test_a_failed_run_enters_no_ratio(plan, report):
    runs = [
        {**run(plan.theirs("equal", plan.EQUAL, 0, mode=None), points=curve((0.3, 9), (0.3, 9))), "failed": "why"},
        run(plan.ours("equal", plan.EQUAL, 0), points=curve((0.3, 5), (0.3, 6))),
    ]
    assert report.result(runs)["ratios"] == {}


def test_the_first_step_does_not_enter_the_cost_of_a_step(report):
    steps = [{"wall_s": wall_s, "cpu_s": 2 * wall_s} for wall_s in (50, 60, 71, 83)]
    assert report.per_step(steps) == (11, 22)  # of 10, 11 and 12


def test_the_section_replaces_only_what_stands_between_its_markers(report, tmp_path):
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n")
    found = report.result([])
    report.write_section(readme, found)
    text = readme.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "old" not in text
    report.write_section(readme, found)
    assert readme.read_text() == text


def test_a_value_between_two_samples_lies_on_the_line_through_them(modules):
    interpolate = modules["measure"].interpolate
    assert interpolate([1.0, 3.0], [10.0, 20.0], at=2.0) == 15.0
    assert interpolate([1.0, 3.0], [10.0, 20.0], at=0.0) == 10.0
    assert interpolate([1.0, 3.0], [10.0, 20.0], at=9.0) == 20.0


def test_a_run_of_the_search_has_lost_at_one_and_a_half_times_the_best_so_far(plan):
    item = plan.theirs("search", plan.GRID[1], 100, mode=plan.TrlMode(threads=2))
    best = plan.theirs("search", plan.GRID[0], 100, mode=plan.TrlMode(threads=2))
    others = [
        run(plan.ours("search", plan.GRID[0], 100), points=curve((0.3, 5.0), (0.3, 9.0))),
        run(plan.theirs("equal", plan.GRID[0], 0, mode=None), points=curve((0.3, 5.0), (0.3, 9.0))),
    ]
    assert plan.search_limit_s(item, others) is None
    made = [*others, run(best, points=curve((0.1, 20.0), (0.26, 40.0), (0.27, 60.0)))]
    assert plan.search_limit_s(item, made) == 60.0
    assert plan.search_limit_s(plan.theirs("best", plan.GRID[1], 0, mode=None), made) is None
