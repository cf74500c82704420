"""How near the trainer comes to the best matrix product of this machine, and what a checkpoint costs.

    python benchmarks/trainer/run.py             # about 5 minutes on two quiet cores with AVX2
    python benchmarks/trainer/run.py --runs 1    # shorter

Floating-point operations of a step: 6 x (weights of the body x positions + weights of the head x loss tokens). Forward
takes 2 per weight and token, backward 4. Attention scores and norms are not counted as work; their time is. Time: from
the first packed token to the clipped gradient. The best product (2048 cubed, or the model's own shape) is measured
before and after every step, in the same process, precision and threads. A share above 1 is none and its ratio is left
out, with the reason (`left_out`). Writes `result.json` beside this file.
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
from shares import GOAL, median, ratios

from rollmill.config.precision import native_bfloat16
from rollmill.runtime.threads import process_environment
from rollmill.weights import prepare

HERE = Path(__file__).parent
MODEL = "smollm2-135m-instruct"


def machine() -> dict[str, Any]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(":", 1)[1].strip() for line in lines if "model name" in line), platform.processor())
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": psutil.virtual_memory().total,
        "native_bfloat16": native_bfloat16(),
        "python": platform.python_version(),
        "load_average_at_start": os.getloadavg()[0],
        "date": time.strftime("%Y-%m-%d"),
    }


def plans(*, runs: int, threads: list[int], dtypes: list[str], shapes: list[str], folder: Path) -> list[dict[str, Any]]:
    """Return one plan per process. Emulated bfloat16 gets the smallest shape, or the run would take an hour."""
    small = not native_bfloat16()
    return [
        {
            "model": str(prepare(MODEL).path),
            "dtype": dtype,
            "threads": count,
            "shapes": ["one_group"] if dtype == "bfloat16" and small else shapes,
            "runs": runs,
            "details": dtype == "float32" and count == min(threads),
            "folder": str(folder),
        }
        for dtype in dtypes
        for count in threads
    ]


def work(plan: dict[str, Any]) -> dict[str, Any]:
    load = os.getloadavg()[0]
    done = subprocess.run(
        [sys.executable, str(HERE / "worker.py"), json.dumps(plan)],
        env=process_environment(threads=plan["threads"]),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return {"load_average_before": load, **json.loads(done.stdout.splitlines()[-1])}


def say(run: dict[str, Any]) -> None:
    for shape in run["shapes"]:
        steps = shape["steps"]
        gemm = statistics.median(entry["flops_per_s"] for entry in shape["gemm"])
        print(
            f"{run['dtype']} {run['threads']} threads {shape['shape']}: {steps[0]['positions']:.0f} positions, "
            f"{steps[0]['loss_tokens']:.0f} in the loss; step {median(steps, 'wall_s'):.2f} s wall "
            f"{median(steps, 'cpu_s'):.2f} s CPU; best product {gemm / 1e9:.1f} GFLOP/s; share "
            f"{median(steps, 'share_by_wall'):.2f} by wall, {median(steps, 'share_by_cpu'):.2f} by CPU",
            flush=True,
        )
    for part, share in run.get("parts", {}).items():
        print(f"  {share:6.1%}  {part}")
    for entry in run.get("checkpoints", []):
        print(f"  checkpoint: written {entry['written']}, begun {entry['begun']}, rest {entry['rest']}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--shapes", nargs="+", default=["main_job", "long"], choices=["main_job", "long", "one_group"])
    parser.add_argument("--folder", type=Path, default=HERE, help="where checkpoints are written for a moment")
    parser.add_argument("--out", type=Path, default=HERE / "result.json")
    args = parser.parse_args()
    started_on = machine()
    runs: list[dict[str, Any]] = []
    for plan in plans(runs=args.runs, threads=args.threads, dtypes=args.dtypes, shapes=args.shapes, folder=args.folder):
        runs.append(work(plan))
        say(runs[-1])
        found, left_out = ratios(runs)
        result = {
            "machine": started_on,
            "settings": {"model": MODEL, "runs": args.runs},
            "goals": {"share_of_gemm": GOAL},
            "runs": runs,
            "ratios": found,
            "left_out": left_out,
        }
        args.out.write_text(json.dumps(result, indent=2) + "\n")
    found, left_out = ratios(runs)
    for name, reason in left_out.items():
        print(f"left out: {name}: {reason}")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
