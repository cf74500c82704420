"""Which runs the comparison needs, in which order, and what is missing. Pure: no clock, no files.

Phases

    pilot     how TRL is fastest on this machine: threads, precision, micro-batch, continuous batching
    equal     both sides with equal hyper-parameters, each seed in turn: TRL, then Rollmill for each of `KINDS`
    search    both sides over the grid, on a seed that is not reported
    best      each side with what the search found best, each seed in turn; runs that `equal` has already are reused
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

TARGET = 0.25
"""Held-out accuracy to reach, fixed before any run was made. The base model has 0.023."""
OTHER_TARGETS = (0.20, 0.30)
"""Reported beside it, so that nobody has to trust the choice."""
STOP_AT = 0.30
"""A run is evaluated (and TRL is trained) until this is reached and confirmed."""
EVALUATE_EVERY = 2
"""Optimizer steps between two evaluations."""
SEEDS = (0, 1, 2, 3, 4)
SEARCH_SEEDS = (100,)
PILOT_STEPS = 4
PILOT_LIMIT_S = 240.0
"""A mode whose pilot takes longer is not the fastest: a CPU that emulates bfloat16 needs minutes for a step."""

KINDS = ("shaped", "replace", "shrink")
"""What Rollmill takes for signal, and does with a group that has none.

    shaped    signal is a difference of rewards with the length penalty, as in TRL, which trains on every group
    replace   signal is a difference of verdicts; a group without it is replaced by another
    shrink    the same, and the batch gets smaller instead
"""
BEST_KIND = "shaped"
"""What the search and the runs with the best setting use."""

SEARCH_LIMIT = 1.5
"""A run of the search that has trained for so many times the best time so far cannot win, and is ended."""

VERDICT = ("accuracy", "low", "high", "n", "mean_tokens")
"""What an evaluation says; its own time is not part of it."""

Record = dict[str, Any]


@dataclass(frozen=True)
class Setting:
    """What both sides are given."""

    name: str
    learning_rate: float
    prompts_per_step: int
    group_size: int = 8


EQUAL = Setting("lr3e-5 4x8", 3e-5, 4)
GRID = (
    EQUAL,
    Setting("lr6e-5 4x8", 6e-5, 4),
    Setting("lr1e-4 4x8", 1e-4, 4),
    Setting("lr6e-5 8x8", 6e-5, 8),
)


@dataclass(frozen=True)
class TrlMode:
    """How TRL runs on this CPU; the pilot chooses the fastest."""

    threads: int
    dtype: str = "float32"
    micro_batch: int = 32
    continuous_batching: bool = False


PILOTS = (
    TrlMode(threads=2),
    TrlMode(threads=1),
    TrlMode(threads=2, micro_batch=16),
    TrlMode(threads=2, micro_batch=8),
    TrlMode(threads=2, dtype="bfloat16"),
    TrlMode(threads=2, continuous_batching=True),
)


@dataclass(frozen=True)
class Item:
    """One run."""

    phase: str
    side: str
    setting: Setting
    seed: int
    zero_advantage: str = "replace"
    """One of `KINDS`; TRL has none of them, and its runs say `replace`."""
    mode: TrlMode | None = None
    steps: int = PILOT_STEPS

    @property
    def name(self) -> str:
        """Identity of the run in the runs file."""
        if self.mode is not None and self.phase == "pilot":
            mode = self.mode
            batching = " continuous batching" if mode.continuous_batching else ""
            return f"pilot: {mode.threads} threads, {mode.dtype}, micro-batch {mode.micro_batch}{batching}"
        kind = f" {self.zero_advantage}" if self.side == "rollmill" else ""
        return f"{self.side}{kind}, {self.setting.name}, seed {self.seed}"


def steps_cap(side: str, setting: Setting, *, zero_advantage: str = "replace") -> int:
    """Return the last optimizer step of a run; a run that has not reached the target by then is censored there."""
    slowest = {"trl": 80, "shaped": 12, "replace": 20, "shrink": 30}["trl" if side == "trl" else zero_advantage]
    return slowest if setting.learning_rate <= EQUAL.learning_rate else slowest * 3 // 4


def fastest_mode(runs: Sequence[Record]) -> TrlMode | None:
    """Return TRL's mode with the least wall time per step of the pilot, or `None` before the pilot is complete."""
    done = {run["name"]: run for run in runs if run["phase"] == "pilot"}
    items = pilot_items()
    if any(item.name not in done for item in items):
        return None

    def step_s(item: Item) -> float:
        run = done[item.name]
        return float("inf") if run.get("failed") else run.get("step_wall_s", float("inf"))

    best = min(items, key=step_s)
    return best.mode


def pilot_items() -> list[Item]:
    """Return TRL's pilots."""
    return [Item(phase="pilot", side="trl", setting=EQUAL, seed=SEARCH_SEEDS[0], mode=mode) for mode in PILOTS]


def ours(phase: str, setting: Setting, seed: int, *, zero_advantage: str = BEST_KIND) -> Item:
    """Return a run of Rollmill."""
    cap = steps_cap("rollmill", setting, zero_advantage=zero_advantage)
    return Item(phase=phase, side="rollmill", setting=setting, seed=seed, zero_advantage=zero_advantage, steps=cap)


def theirs(phase: str, setting: Setting, seed: int, *, mode: TrlMode | None) -> Item:
    """Return a run of TRL; its mode is not known before the pilot."""
    return Item(phase=phase, side="trl", setting=setting, seed=seed, mode=mode, steps=steps_cap("trl", setting))


def search_limit_s(item: Item, runs: Sequence[Record]) -> float | None:
    """Return the training time at which a run of the search has lost; `None` for others, and before one has won."""
    if item.phase != "search":
        return None
    rivals = [run for run in runs if run["phase"] == "search" and run["side"] == item.side]
    times = [time_to(run["points"], target=TARGET, key="wall_s") for run in rivals if run["seed"] == item.seed]
    known = [time for time in times if time is not None]
    return SEARCH_LIMIT * min(known) if known else None


def plan(runs: Sequence[Record]) -> list[Item]:
    """Return every run of the comparison as far as it is known, each once, in the order to make them.

    Args:
        runs: finished ones; the pilot decides TRL's mode, the search decides the settings of the last phase.
    """
    mode = fastest_mode(runs)
    items = pilot_items()
    for seed in SEEDS:
        items += [
            theirs("equal", EQUAL, seed, mode=mode),
            *(ours("equal", EQUAL, seed, zero_advantage=kind) for kind in KINDS),
        ]
    for seed in SEARCH_SEEDS:
        for setting in GRID:
            items.append(theirs("search", setting, seed, mode=mode))
            items.append(ours("search", setting, seed))
    best_of = {side: best_setting(runs, side=side) for side in ("trl", "rollmill")}
    for seed in SEEDS:
        if (setting := best_of["trl"]) is not None:
            items.append(theirs("best", setting, seed, mode=mode))
        if (setting := best_of["rollmill"]) is not None:
            items.append(ours("best", setting, seed))
    return list({item.name: item for item in reversed(items)}.values())[::-1]


def missing(runs: Sequence[Record]) -> list[Item]:
    """Return the runs that are not made yet."""
    done = {run["name"] for run in runs}
    return [item for item in plan(runs) if item.name not in done]


def best_setting(runs: Sequence[Record], *, side: str) -> Setting | None:
    """Return the grid's setting with the least median wall time to the target, or `None` before the search is done."""
    medians: dict[Setting, float] = {}
    for setting in GRID:
        found = [
            run
            for run in runs
            if run["phase"] == "search" and run["side"] == side and run["setting"]["name"] == setting.name
        ]
        if {run["seed"] for run in found} != set(SEARCH_SEEDS):
            return None
        times = [time_to(run["points"], target=TARGET, key="wall_s") for run in found]
        medians[setting] = statistics.median(float("inf") if time is None else time for time in times)
    return min(medians, key=lambda setting: medians[setting])


def time_to(points: Sequence[Record], *, target: float, key: str) -> float | None:
    """Return what a run had spent at its first evaluation at or above the target that the next one confirms.

    One evaluation of 256 problems near 0.25 has a standard error of 0.027, and seven or more are made before the
    target: a single one above it may be luck. Two in a row are asked for, and the first of them counts.

    Args:
        points: evaluations in the order of steps, with `accuracy` and `key`.
        key: `wall_s`, `cpu_s` or `step`.

    Returns:
        `None` if the run ended before that (it is censored).

    Example:
        >>> curve = [{"accuracy": a, "wall_s": t} for a, t in ((0.1, 10), (0.26, 20), (0.2, 30), (0.27, 40), (0.3, 50))]
        >>> time_to(curve, target=0.25, key="wall_s")
        40
        >>> time_to(curve, target=0.30, key="wall_s") is None
        True
    """
    for point, after in itertools.pairwise(points):
        if point["accuracy"] >= target and after["accuracy"] >= target:
            return point[key]
    return None


def point(step: int, *, spent: Record, verdict: Record) -> Record:
    """Return one point of a run's curve: what the run had spent by a step, and how good it was.

    Args:
        spent: `wall_s` and `cpu_s` of training.
        verdict: at least the keys of `VERDICT`; others are left out, the evaluation's own time above all.
    """
    return {
        "step": step,
        **{key: spent[key] for key in ("wall_s", "cpu_s")},
        **{key: verdict[key] for key in VERDICT},
    }


def minutes(item: Item, runs: Sequence[Record]) -> float:
    """Return how long a run will take, start-up and evaluation included: the median of like runs, or a guess."""

    def like(run: Record, *, setting: bool) -> bool:
        return (
            run["side"] == item.side
            and (run["phase"] == "pilot") == (item.phase == "pilot")
            and run.get("zero_advantage", "replace") == item.zero_advantage
            and (not setting or run["setting"]["name"] == item.setting.name)
        )

    for setting in (True, False):
        known = [run["took_s"] for run in runs if like(run, setting=setting)]
        if known:
            return statistics.median(known) / 60
    if item.phase == "pilot":
        return 4.0
    rollouts = item.setting.prompts_per_step * item.setting.group_size
    per_rollout_s = {"trl": 0.8, "shaped": 0.2, "replace": 0.25, "shrink": 0.16}[
        "trl" if item.side == "trl" else item.zero_advantage
    ]
    evaluation_s = 20.0 * item.steps / EVALUATE_EVERY
    return (30.0 + item.steps * rollouts * per_rollout_s + evaluation_s) / 60
