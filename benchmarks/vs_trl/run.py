"""Rollmill against TRL's GRPOTrainer: time to the same held-out accuracy, on this machine's CPU.

    python benchmarks/vs_trl/run.py --plan          # what is missing, with an estimate in minutes
    python benchmarks/vs_trl/run.py --minutes 60    # make the runs that fit, then report
    python benchmarks/vs_trl/run.py                 # all that is missing
    python benchmarks/vs_trl/run.py --report        # only result.json and the section in ../README.md
    python benchmarks/vs_trl/run.py --tiny          # a few steps of a tiny model, to see that it works

Every finished run is appended to `runs.jsonl` at once, so the script may be stopped and called again at any time. TRL
gets an environment of its own under the cache folder (set TORCH_INDEX for another index of torch wheels).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

# One evaluation uses all cores; waiting threads must sleep. Read by OpenMP when torch is imported.
os.environ.update(OMP_WAIT_POLICY="passive", GOMP_SPINCOUNT="0", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")

import plan
import report
from measure import machine

HERE = Path(__file__).parent
CONFIG = HERE.parent.parent / "examples" / "arithmetic" / "train.toml"
TINY_STEPS = 6
# A random model whose text is scored by the toss of a coin: shows that all parts work, says nothing about either side.
TINY = (
    "model.source=tiny-llama",
    "environment.scorer=rollmill.testing.scorers:coin",
    "environment.heldout_size=32",
    "environment.pool_size=2000",
)


def read_runs(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


class Runner:
    """Makes runs; what all of them share is loaded once, at the first."""

    def __init__(self, runs_file: Path, *, trl_python: Path | None, overrides: tuple[str, ...] = ()) -> None:
        import rollmill_side
        import trl_side
        from evaluator import Evaluator

        from rollmill.config.load import load_config

        self._sides = {"trl": self._trl, "rollmill": self._rollmill}
        self._trl_side, self._rollmill_side = trl_side, rollmill_side
        self._runs_file = runs_file
        self._overrides = overrides
        self._config = load_config(CONFIG, overrides=overrides).config
        self._python = trl_python or trl_side.environment_python()
        self._evaluator = Evaluator(self._config)
        known = [run["before"] for run in read_runs(runs_file) if run["before"]]
        self._before = known[0] if known else self._evaluator.accuracy(None)

    def make(self, item: plan.Item) -> dict[str, Any]:
        """Make one run and append it to the runs file."""
        load, started_s = os.getloadavg()[0], time.monotonic()
        outcome = self._sides[item.side](item)
        record = {
            "name": item.name,
            **dataclasses.asdict(item),
            "machine": machine(),
            "load_average_before": load,
            "before": self._before,
            "took_s": time.monotonic() - started_s,
            **outcome,
        }
        record["step_wall_s"], record["step_cpu_s"] = report.per_step(record["steps_made"])
        with self._runs_file.open("a") as handle:
            handle.write(json.dumps(record) + "\n")
        return record

    def _trl(self, item: plan.Item) -> dict[str, Any]:
        limit_s = plan.search_limit_s(item, read_runs(self._runs_file))
        return self._trl_side.run(
            item, config=self._config, evaluator=self._evaluator, python=self._python, limit_s=limit_s
        )

    def _rollmill(self, item: plan.Item) -> dict[str, Any]:
        return self._rollmill_side.run(
            item, config_path=CONFIG, overrides=self._overrides, config=self._config, evaluator=self._evaluator
        )

    def close(self) -> None:
        self._evaluator.close()


def make_missing(runs_file: Path, *, minutes: float | None, trl_python: Path | None) -> None:
    end_s = None if minutes is None else time.monotonic() + 60 * minutes
    runner: Runner | None = None
    while items := plan.missing(read_runs(runs_file)):
        item = items[0]
        needed = plan.minutes(item, read_runs(runs_file))
        if end_s is not None and time.monotonic() + 60 * needed > end_s:
            print(f"{len(items)} runs are missing; the next one ({item.name}) needs about {needed:.0f} minutes.")
            break
        runner = runner or Runner(runs_file, trl_python=trl_python)
        show(runner.make(item))
    if runner is not None:
        runner.close()


def show(record: dict[str, Any]) -> None:
    if record.get("failed"):
        print(f"{record['name']}: failed after {record['took_s']:.0f} s\n{record['failed']}", flush=True)
        return
    curve = ", ".join(f"{point['step']}: {point['accuracy']:.3f}" for point in record["points"])
    print(
        f"{record['name']}: {len(record['steps_made'])} steps, {record['step_wall_s']:.1f} s wall and "
        f"{record['step_cpu_s']:.1f} s CPU each, {record['took_s']:.0f} s in all. {curve}",
        flush=True,
    )


def show_plan(runs_file: Path) -> None:
    runs = read_runs(runs_file)
    items = plan.missing(runs)
    for item in items:
        print(f"{plan.minutes(item, runs):6.1f} min  {item.phase:<7} {item.name}")
    total = sum(plan.minutes(item, runs) for item in items)
    print(f"{total:6.0f} min  in all for {len(items)} runs; {len(runs)} are made")
    if any(plan.best_setting(runs, side=side) is None for side in ("trl", "rollmill")):
        print("            and, once the search is done, up to 10 runs with each side's best setting")


def tiny(*, trl_python: Path | None) -> None:
    mode = plan.TrlMode(threads=2)
    items = [
        plan.pilot_items()[0],
        plan.theirs("equal", plan.EQUAL, 0, mode=mode),
        plan.ours("equal", plan.EQUAL, 0),
        plan.ours("equal", plan.EQUAL, 0, zero_advantage="shrink"),
    ]
    with tempfile.TemporaryDirectory() as folder:
        runs_file = Path(folder) / "runs.jsonl"
        runner = Runner(runs_file, trl_python=trl_python, overrides=TINY)
        for item in items:
            show(runner.make(dataclasses.replace(item, steps=TINY_STEPS)))
        runner.close()
        print(json.dumps(report.result(read_runs(runs_file)), indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", action="store_true", help="list what is missing")
    parser.add_argument("--report", action="store_true", help="only write the report")
    parser.add_argument("--tiny", action="store_true", help="a few steps of each kind")
    parser.add_argument("--minutes", type=float, help="stop before a run that would not fit")
    parser.add_argument("--runs", type=Path, default=HERE / "runs.jsonl")
    parser.add_argument("--out", type=Path, default=HERE / "result.json")
    parser.add_argument("--trl-python", type=Path, help="Python of an environment that has TRL")
    args = parser.parse_args()
    if args.plan:
        show_plan(args.runs)
    elif args.tiny:
        tiny(trl_python=args.trl_python)
    else:
        if not args.report:
            make_missing(args.runs, minutes=args.minutes, trl_python=args.trl_python)
        result = report.result(read_runs(args.runs))
        args.out.write_text(json.dumps(result, indent=2) + "\n")
        report.write_section(HERE.parent / "README.md", result)
        print(json.dumps(result["ratios"]))


if __name__ == "__main__":
    main()
