"""What one rollout costs the controller, whether that depends on how many run, and what the store adds to SQLite.

    python benchmarks/controller/run.py            # about 4 minutes of CPU
    python benchmarks/controller/run.py --runs 1   # shorter

Each count of concurrent rollouts runs in a process of its own, alternating. Writes `result.json` beside this file:
machine, settings, runs, and `ratios` (medians; larger is better): the goal of 1 ms over the CPU time of a rollout, the
CPU time at 1,000 over that at 10,000, and the store's samples per second over those of plain inserts.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil

from rollmill.runtime.threads import process_environment

HERE = Path(__file__).parent
GOAL_S = 1e-3


def machine() -> dict[str, Any]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(":", 1)[1].strip() for line in lines if "model name" in line), platform.processor())
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": psutil.virtual_memory().total,
        "python": platform.python_version(),
        "load_average_at_start": os.getloadavg()[0],
        "date": time.strftime("%Y-%m-%d"),
    }


def call(script: str, plan: dict[str, Any]) -> Any:
    load = os.getloadavg()[0]
    done = subprocess.run(
        [sys.executable, str(HERE / script), json.dumps(plan)],
        env=process_environment(threads=1),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    found = json.loads(done.stdout.splitlines()[-1])
    return {"load_average_before": load, **found} if isinstance(found, dict) else found


def ratios(runs: list[dict[str, Any]], store: list[dict[str, Any]]) -> dict[str, float]:
    costs: dict[int, list[float]] = {}
    for run in runs:
        costs.setdefault(run["concurrent"], []).append(run["cpu_s_per_rollout"])
    medians = {concurrent: statistics.median(found) for concurrent, found in sorted(costs.items())}
    few, many = min(medians), max(medians)
    ratios = {f"goal_over_cpu_per_rollout_{concurrent}": GOAL_S / cost for concurrent, cost in medians.items()}
    ratios[f"cpu_per_rollout_{few}_over_{many}"] = medians[few] / medians[many]
    for entry in store:
        name = f"store_over_plain_sqlite_{entry['groups_per_transaction']}_groups_per_transaction"
        for clock in ("wall_s", "cpu_s"):
            found = [pair["plain"][clock] / pair["store"][clock] for pair in entry["pairs"]]
            ratios[f"{name}_{clock}"] = statistics.median(found)
    return ratios


def say(run: dict[str, Any]) -> None:
    parts = ", ".join(f"{name} {spent * 1e6:.0f}" for name, spent in run["parts_s_per_rollout"].items())
    print(
        f"{run['concurrent']} concurrent: {run['cpu_s_per_rollout'] * 1e6:.0f} us CPU per rollout ({parts}); "
        f"{run['rollouts']} rollouts, {run['transactions']} transactions, core "
        f"{run['core_s_per_event'] * 1e6:.0f} us per event",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--concurrent", type=int, nargs=2, default=[1_000, 10_000])
    parser.add_argument("--steps", type=int, nargs=2, default=[40, 15], help="optimizer steps of each")
    parser.add_argument("--folder", type=Path, default=HERE, help="where the stores are for a moment")
    parser.add_argument("--out", type=Path, default=HERE / "result.json")
    args = parser.parse_args()
    started_on, folder = machine(), str(args.folder)
    runs: list[dict[str, Any]] = []
    for _ in range(args.runs):
        for concurrent, steps in zip(args.concurrent, args.steps, strict=True):
            plan = {"concurrent": concurrent, "steps": steps, "folder": folder, "profile": False}
            runs.append(call("world.py", plan))
            say(runs[-1])
    store = call(
        "store.py",
        {"groups_per_transaction": [1, 32], "transactions": 50, "runs": max(args.runs, 3), "folder": folder},
    )
    memory = call("memory.py", {"steps": 600, "batch_groups": 4})
    result = {
        "machine": started_on,
        "settings": {"runs": args.runs, "concurrent": args.concurrent, "steps": args.steps, "group_size": 8},
        "goals": {"cpu_s_per_rollout": GOAL_S},
        "runs": runs,
        "store": store,
        "memory": memory,
        "ratios": ratios(runs, store),
    }
    args.out.write_text(json.dumps(result, indent=2) + "\n")
    print(f"core: {memory['bytes_per_rollout']:.0f} bytes kept per finished rollout")
    print(json.dumps(result["ratios"]))


if __name__ == "__main__":
    main()
