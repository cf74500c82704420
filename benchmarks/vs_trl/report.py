"""From runs to ratios and text. Pure but for `write_section`."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from pathlib import Path

import plan
from plan import Record, time_to

BEGIN, END = "<!-- vs_trl: written by benchmarks/vs_trl/run.py -->", "<!-- vs_trl: end -->"
GOAL, FLOOR = 4.0, 2.0
GIB = 2**30


def per_step(steps: Sequence[Record]) -> tuple[float, float]:
    """Return the median wall and CPU seconds of a step, without the first, which pays for warming up."""
    if len(steps) < 2:
        return (steps[0]["wall_s"], steps[0]["cpu_s"]) if steps else (float("nan"), float("nan"))

    def median(key: str) -> float:
        return statistics.median(after[key] - before[key] for before, after in itertools.pairwise(steps))

    return median("wall_s"), median("cpu_s")


def comparison(theirs: Record, ours: Record, *, target: float, key: str) -> Record:
    """Return one pair: what each side spent to the target, and how many times more TRL spent.

    A side that never got there is censored. If it is TRL, what it had spent by its last evaluation stands for it: the
    ratio is a lower bound. If it is Rollmill, the ratio is 0, the worst there is.

    Example:
        >>> def run(*curve):
        ...     return {"seed": 0, "points": [{"accuracy": a, "wall_s": t} for a, t in curve]}
        >>> pair = comparison(run((0.1, 100), (0.2, 200)), run((0.3, 40), (0.3, 50)), target=0.25, key="wall_s")
        >>> pair["ratio"], pair["theirs_censored"], pair["ours_censored"]
        (5.0, True, False)
    """
    spent = {side: time_to(run["points"], target=target, key=key) for side, run in (("theirs", theirs), ("ours", ours))}
    last = {side: run["points"][-1][key] for side, run in (("theirs", theirs), ("ours", ours))}
    their_s = last["theirs"] if spent["theirs"] is None else spent["theirs"]
    return {
        "seed": ours["seed"],
        "theirs": their_s,
        "ours": last["ours"] if spent["ours"] is None else spent["ours"],
        "theirs_censored": spent["theirs"] is None,
        "ours_censored": spent["ours"] is None,
        "ratio": 0.0 if spent["ours"] is None else their_s / spent["ours"],
    }


def pairs(runs: Sequence[Record], *, theirs: str, ours: str, kind: str, target: float, key: str) -> list[Record]:
    """Return the comparisons of all reported seeds that have both runs.

    Args:
        theirs, ours: names of the settings.
        kind: one of `plan.KINDS`.
    """
    found: list[Record] = []
    for seed in plan.SEEDS:
        their_run = _find(runs, side="trl", setting=theirs, seed=seed)
        our_run = _find(runs, side="rollmill", setting=ours, seed=seed, kind=kind)
        if their_run and our_run:
            found.append(comparison(their_run, our_run, target=target, key=key))
    return found


def _find(runs: Sequence[Record], *, side: str, setting: str, seed: int, kind: str = "") -> Record | None:
    return next(
        (
            run
            for run in runs
            if run["phase"] != "pilot"
            and not run.get("failed")
            and run["points"]
            and (run["side"], run["setting"]["name"], run["seed"]) == (side, setting, seed)
            and (side == "trl" or run["zero_advantage"] == kind)
        ),
        None,
    )


def cases(runs: Sequence[Record]) -> dict[str, tuple[str, str, str]]:
    """Return what is compared: name -> TRL's setting, Rollmill's setting, one of `plan.KINDS`."""
    equal = plan.EQUAL.name
    found = {"": (equal, equal, "shaped"), "_replace": (equal, equal, "replace"), "_shrink": (equal, equal, "shrink")}
    best = {side: plan.best_setting(runs, side=side) for side in ("trl", "rollmill")}
    if best["trl"] is not None and best["rollmill"] is not None:
        found["_best"] = (best["trl"].name, best["rollmill"].name, plan.BEST_KIND)
    return found


def result(runs: Sequence[Record]) -> Record:
    """Return the content of `result.json`."""
    good = [run for run in runs if not run.get("failed")]
    compared: Record = {}
    ratios: dict[str, float] = {}
    for case, (theirs, ours, kind) in cases(good).items():
        for key in ("wall_s", "cpu_s"):
            name = f"{key.removesuffix('_s')}{case}"
            found = pairs(good, theirs=theirs, ours=ours, kind=kind, target=plan.TARGET, key=key)
            if not found:
                continue
            ratios[name] = statistics.median(pair["ratio"] for pair in found)
            others = {
                f"{target:.2f}": statistics.median(
                    pair["ratio"] for pair in pairs(good, theirs=theirs, ours=ours, kind=kind, target=target, key=key)
                )
                for target in plan.OTHER_TARGETS
            }
            compared[name] = {"theirs": theirs, "ours": ours, "kind": kind, "pairs": found, "other_targets": others}
    one_thread = one_thread_share(good)
    if one_thread is not None:
        ratios |= {
            f"{name}_trl_one_thread": ratios[name] * one_thread for name in list(ratios) if name.startswith("cpu")
        }
    memory = memory_ratio(good)
    if memory is not None:
        ratios["memory"] = memory
    return {
        "machine": runs[0]["machine"] if runs else {},
        "settings": _settings(runs),
        "missing": [item.name for item in plan.missing(runs)],
        "pilot": [_pilot(run) for run in runs if run["phase"] == "pilot"],
        "comparisons": compared,
        "steps": _steps(good),
        "runs": [_short(run) for run in runs if run["phase"] != "pilot"],
        "ratios": ratios,
    }


def one_thread_share(runs: Sequence[Record]) -> float | None:
    """Return TRL's CPU seconds per step with one thread over those of its fastest mode, by the pilot.

    The fastest mode in wall time may spend more CPU time; the ratio of CPU seconds is also given as if TRL had run with
    one thread.
    """
    mode = plan.fastest_mode(runs)
    if mode is None:
        return None
    steps = {run["name"]: run["step_cpu_s"] for run in runs if run["phase"] == "pilot"}
    names = {item.mode: item.name for item in plan.pilot_items()}
    one = next(item.name for item in plan.pilot_items() if item.mode is not None and item.mode.threads == 1)
    return steps[one] / steps[names[mode]] if one in steps else None


def memory_ratio(runs: Sequence[Record]) -> float | None:
    """Return TRL's median peak of the sum of PSS over Rollmill's, at the equal setting."""
    peaks = {
        side: [
            run["peak_pss_bytes"]
            for run in runs
            if run["phase"] == "equal" and run["side"] == side and run["zero_advantage"] == kind
        ]
        for side, kind in (("trl", "replace"), ("rollmill", plan.BEST_KIND))
    }
    if not all(peaks.values()):
        return None
    return statistics.median(peaks["trl"]) / statistics.median(peaks["rollmill"])


def _settings(runs: Sequence[Record]) -> Record:
    mode = plan.fastest_mode(runs)
    return {
        "target": plan.TARGET,
        "evaluate_every_steps": plan.EVALUATE_EVERY,
        "seeds": list(plan.SEEDS),
        "search_seeds": list(plan.SEARCH_SEEDS),
        "grid": [setting.name for setting in plan.GRID],
        "goal": GOAL,
        "floor": FLOOR,
        "trl_mode": None if mode is None else vars(mode),
    }


def _steps(runs: Sequence[Record]) -> Record:
    """Return the median cost of a step and of start-up, by side and setting."""
    kinds: dict[str, list[Record]] = {}
    for run in runs:
        if run["phase"] != "pilot":
            name = run["name"].rsplit(", seed", 1)[0]
            kinds.setdefault(name, []).append(run)
    return {
        name: {
            key: statistics.median(run[key] for run in found)
            for key in ("step_wall_s", "step_cpu_s", "startup_s", "startup_cpu_s", "peak_pss_bytes")
        }
        for name, found in kinds.items()
    }


def _pilot(run: Record) -> Record:
    return {key: run.get(key) for key in ("name", "step_wall_s", "step_cpu_s", "peak_pss_bytes", "load_average_before")}


def _short(run: Record) -> Record:
    """Return a run without what only its line in `runs.jsonl` needs."""
    keys = (
        "name",
        "phase",
        "side",
        "seed",
        "points",
        "step_wall_s",
        "step_cpu_s",
        "startup_s",
        "startup_cpu_s",
        "evaluation_s",
        "peak_pss_bytes",
        "load_average_before",
        "rollouts",
        "staleness",
        "seconds",
    )
    return {key: run[key] for key in keys if key in run}


def section(found: Record) -> str:
    """Return the figures as Markdown."""
    titles = {
        "": "equal hyper-parameters, signal by the shaped reward as in TRL",
        "_replace": "equal hyper-parameters, signal by the verdict, groups without it replaced",
        "_shrink": "equal hyper-parameters, signal by the verdict, batch shrunk instead",
        "_best": "each side's best of the grid",
    }
    lines = [
        "| Time to held-out accuracy "
        f"{found['settings']['target']:.2f}"
        " | TRL | Rollmill | Ratio, median (range) | Pairs |"
    ]
    lines.append("|---|---|---|---|---|")
    for case, title in titles.items():
        for key, unit in (("wall", "s wall"), ("cpu", "s CPU")):
            entry = found["comparisons"].get(f"{key}{case}")
            if entry is not None:
                lines.append(_row(f"{title}, {unit}", entry))
    notes = _notes(found)
    return "\n".join([*lines, "", *notes])


def _row(title: str, entry: Record) -> str:
    rows = entry["pairs"]
    ratios = [pair["ratio"] for pair in rows]
    censored = {side: sum(pair[f"{side}_censored"] for pair in rows) for side in ("theirs", "ours")}
    sides = []
    for side in ("theirs", "ours"):
        mark = f" ({censored[side]} of {len(rows)} censored)" if censored[side] else ""
        sides.append(f"{statistics.median(pair[side] for pair in rows):.0f}{mark}")
    bound = "at least " if censored["theirs"] else ""
    return (
        f"| {title} | {sides[0]} | {sides[1]} | {bound}{statistics.median(ratios):.2f} "
        f"({min(ratios):.2f} to {max(ratios):.2f}) | {len(rows)} |"
    )


def _notes(found: Record) -> list[str]:
    lines: list[str] = []
    if missing := found.get("missing"):
        lines.append(f"* **Not complete**: {len(missing)} runs are missing; what stands here may change.")
    mode = found["settings"]["trl_mode"]
    if mode is not None:
        lines.append(
            f"* TRL's fastest mode in the pilot: {mode['threads']} threads, {mode['dtype']}, micro-batch "
            f"{mode['micro_batch']}."
        )
    if "memory" in found["ratios"]:
        lines.append(f"* Peak memory (sum of PSS): TRL takes {found['ratios']['memory']:.2f} times ours.")
    for name, step in found["steps"].items():
        lines.append(
            f"* {name}: {step['step_wall_s']:.1f} s wall and {step['step_cpu_s']:.1f} s CPU per step; start-up "
            f"{step['startup_s']:.0f} s; peak {step['peak_pss_bytes'] / GIB:.1f} GiB."
        )
    loads = [run["load_average_before"] for run in found["runs"]]
    if loads:
        lines.append(f"* Load average before the runs: {min(loads):.1f} to {max(loads):.1f}.")
    return lines


def write_section(readme: Path, found: Record) -> None:
    """Put the figures between the two markers of a README."""
    text = readme.read_text()
    before, rest = text.split(BEGIN, 1)
    after = rest.split(END, 1)[1]
    readme.write_text(f"{before}{BEGIN}\n\n{section(found)}\n\n{END}{after}")
