"""The main job on several seeds, and a control run with shuffled rewards.

    python benchmarks/main_job/run.py                  # 3 seeds and the control; about 40 minutes on two quiet cores
    python benchmarks/main_job/run.py --seeds 0 --no-control
    python benchmarks/main_job/run.py --no-control --set generator.engine=vllm --out benchmarks/main_job/vllm.json

Prints and writes `result.json` beside this file: machine, settings, one entry per run, and `ratios` (medians, larger is
better): the lift that the 95 % interval is sure of against the goal of 0.20, and the ten minutes of the goal against
wall time. Nothing is asserted on time; the machine's load is recorded.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
CONFIG = HERE.parent.parent / "examples" / "arithmetic" / "train.toml"
LIFT_GOAL = 0.20
WALL_GOAL_S = 600.0


def machine() -> dict[str, Any]:
    import psutil

    from rollmill.config.precision import native_bfloat16

    model = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        platform.processor(),
    )
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": psutil.virtual_memory().total,
        "native_bfloat16": native_bfloat16(),
        "python": platform.python_version(),
        "load_average_at_start": os.getloadavg()[0],
        "date": time.strftime("%Y-%m-%d"),
    }


def train(seed: int, *, shuffled: bool, folder: Path, overrides: list[str]) -> dict[str, Any]:
    name = f"seed{seed}{'-shuffled' if shuffled else ''}"
    load = os.getloadavg()[0]
    command = [sys.executable, "-m", "rollmill.cli", "train", str(CONFIG), "--json"]
    for setting in [
        f"run.name={name}",
        f"run.directory={folder}",
        f"run.seed={seed}",
        f"algorithm.reward_shuffle={'true' if shuffled else 'false'}",
        *overrides,
    ]:
        command += ["--set", setting]
    process = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return describe(json.loads(process.stdout), run=folder / name, seed=seed, shuffled=shuffled, load=load)


def describe(summary: dict[str, Any], *, run: Path, seed: int, shuffled: bool, load: float) -> dict[str, Any]:
    before, after = summary["eval"]["before"], summary["eval"]["after"]
    rollouts = [json.loads(line) for line in (run / "rollouts.jsonl").read_text().splitlines()]
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    trainer, generator = summary["seconds"]["trainer"], summary["seconds"]["generator-0"]
    busy_trainer = trainer.get("train", 0.0) + trainer.get("publish", 0.0) + trainer.get("checkpoint", 0.0)
    busy_generator = generator.get("prefill", 0.0) + generator.get("decode", 0.0)
    return {
        "seed": seed,
        "rewards_shuffled": shuffled,
        "load_average_before": load,
        "before": {key: before[key] for key in ("accuracy", "low", "high", "n")},
        "after": {key: after[key] for key in ("accuracy", "low", "high", "n")},
        "sure_lift": after["low"] - before["accuracy"],
        "wall_s": summary["wall_s"],
        "cpu_s": summary["cpu_s"],
        "steps": summary["steps"],
        "rollouts": summary["rollouts"],
        "seconds": summary["seconds"],
        "staleness": summary["staleness"],
        "rollouts_across_a_weight_swap": sum(len(rollout["version_spans"]) > 1 for rollout in rollouts),
        "busy_at_the_same_time_s_at_least": busy_trainer + busy_generator - max(trainer["wall_s"], generator["wall_s"]),
        "useful_tokens_per_s": summary["useful_tokens_per_s"],
        "peak_memory_bytes": summary["peak_memory_bytes"],
        "bound_by": summary["bound_by"],
        "books": summary["books"],
        "reward_by_step": [round(step["reward_mean"], 3) for step in steps],
    }


def result(runs: list[dict[str, Any]], *, started_on: dict[str, Any], overrides: list[str]) -> dict[str, Any]:
    real = [run for run in runs if not run["rewards_shuffled"]]
    return {
        "machine": started_on,
        "settings": CONFIG.read_text(),
        "overrides": overrides,
        "goals": {"sure_lift": LIFT_GOAL, "wall_s": WALL_GOAL_S},
        "runs": runs,
        "ratios": {
            "sure_lift_over_goal": statistics.median(run["sure_lift"] for run in real) / LIFT_GOAL,
            "wall_goal_over_wall": WALL_GOAL_S / statistics.median(run["wall_s"] for run in real),
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--no-control", action="store_true")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--out", type=Path, default=HERE / "result.json")
    args = parser.parse_args()
    started_on = machine()
    plan = [(seed, False) for seed in args.seeds] + ([] if args.no_control else [(0, True)])
    runs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for seed, shuffled in plan:
            run = train(seed, shuffled=shuffled, folder=Path(folder), overrides=args.overrides)
            runs.append(run)
            print(
                f"seed {seed}{' shuffled' if shuffled else ''}: {run['before']['accuracy']:.3f} -> "
                f"{run['after']['accuracy']:.3f} (at least {run['after']['low']:.3f}), {run['wall_s']:.0f} s wall, "
                f"{run['cpu_s']:.0f} s CPU",
                flush=True,
            )
            if any(not entry["rewards_shuffled"] for entry in runs):
                found = result(runs, started_on=started_on, overrides=args.overrides)
                args.out.write_text(json.dumps(found, indent=2) + "\n")
    print(json.dumps(result(runs, started_on=started_on, overrides=args.overrides)["ratios"]))


if __name__ == "__main__":
    main()
