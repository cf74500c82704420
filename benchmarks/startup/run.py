"""How long from the command to the first sampled token, the first time and the second; and how many CPU-seconds.

    python benchmarks/startup/run.py                       # 3 times each; about two minutes on two quiet cores
    python benchmarks/startup/run.py --before OLD/src      # alternating with the start-up of another source tree

The model is prepared beforehand. `first` has no cache of tasks yet, `second` has. Each start is the main job with
evaluation off; it is stopped as soon as the replica has sampled a token. Writes `result.json` beside this file:
machine, settings, runs, and `ratios` (medians, larger is better): the goal of 5 s against the wall time of a second
start, and CPU-seconds of the other tree and of a first start against those of a second.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from rollmill.errors import RollmillError
from rollmill.generator.client import GeneratorClient
from rollmill.weights.catalog import cache_directory
from rollmill.weights.prepare import prepare

HERE = Path(__file__).parent
CONFIG = HERE.parent.parent / "examples" / "arithmetic" / "train.toml"
MODEL = "smollm2-135m-instruct"
GOAL_S = 5.0
DEADLINE_S = 300.0
LOOK_EVERY_S = 0.05
QUIET = (
    "evaluation.at_start=false",
    "evaluation.at_end=false",
    "run.steps=1000",
    # Not reached before the stop; they let it start where others use the memory too.
    "trainer.micro_batch_tokens=512",
    "weights.keep_versions=2",
)


def machine() -> dict[str, Any]:
    return {
        "cpu": platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "load_average_at_start": os.getloadavg()[0],
        "date": time.strftime("%Y-%m-%d"),
    }


def start(kind: str, *, sources: Path | None, cache: Path, folder: Path) -> dict[str, Any]:
    """Start the main job, wait for its first token, stop it; return what it took until then."""
    run = folder / "run"
    command = [sys.executable, "-m", "rollmill.cli", "train", str(CONFIG)]
    for setting in (f"run.directory={folder}", "run.name=run", *QUIET):
        command += ["--set", setting]
    environment = {**os.environ, "ROLLMILL_CACHE": str(cache), "HF_HUB_OFFLINE": "1"}
    if sources is not None:
        environment["PYTHONPATH"] = str(sources)
    load, began_s = os.getloadavg()[0], time.monotonic()
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        marks = asyncio.run(first_token(process, run=run, began_s=began_s))
        cpu = cpu_seconds(psutil.Process(process.pid))
    finally:
        stop(process)
    return {
        "kind": kind,
        "load_average": load,
        **marks,
        "cpu_s": sum(cpu.values()),
        "cpu_by_process_s": cpu,
    }


async def first_token(process: subprocess.Popen[str], *, run: Path, began_s: float) -> dict[str, float]:
    """Return the seconds until model and data were looked at, until the replica served, until it sampled a token."""
    marks: dict[str, float] = {}
    client: GeneratorClient | None = None
    preflight, address = (run / "processes" / name for name in ("preflight.json", "generator-0.address.json"))
    try:
        while "first_token_s" not in marks:
            now_s = time.monotonic() - began_s
            if process.poll() is not None or now_s > DEADLINE_S:
                raise SystemExit(f"no token within {now_s:.0f} s: {process.stderr.read() if process.stderr else ''}")
            if preflight.exists():
                marks.setdefault("preflight_s", now_s)
            if client is None and address.exists():
                marks["serving_s"] = now_s
                client = GeneratorClient(json.loads(address.read_text())["address"])
            if client is not None and await sampled(client):
                marks["first_token_s"] = time.monotonic() - began_s
            await asyncio.sleep(LOOK_EVERY_S)
    finally:
        if client is not None:
            await client.close()
    return marks


async def sampled(client: GeneratorClient) -> bool:
    try:
        return (await client.status()).output_tokens > 0
    except RollmillError:
        return False  # it is not up yet


def cpu_seconds(root: psutil.Process) -> dict[str, float]:
    """Return CPU-seconds of each living process of the run, with what its ended children used."""
    found: dict[str, float] = {}
    for process in (root, *root.children(recursive=True)):
        try:
            times, command = process.cpu_times(), process.cmdline()
        except psutil.NoSuchProcess:
            continue
        name = role_of(command)
        spent = times.user + times.system + times.children_user + times.children_system
        found[name] = found.get(name, 0.0) + spent
    return found


def role_of(command: list[str]) -> str:
    if "rollmill.runtime.process" in command:
        return command[command.index("rollmill.runtime.process") + 1]
    if "rollmill.cli" in command:
        return "supervisor"  # with what the nursery used, once that has ended
    if "rollmill.runtime.nursery_process" in command:
        return "nursery"
    return "scorer" if any("score" in part for part in command) else "other"


def stop(process: subprocess.Popen[str]) -> None:
    """Stop the run at once: the second signal kills."""
    for _ in range(2):
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(0.5)
            except subprocess.TimeoutExpired:
                continue
    process.kill()
    process.communicate()


def result(runs: list[dict[str, Any]], *, started_on: dict[str, Any]) -> dict[str, Any]:
    def median(kind: str, field: str) -> float | None:
        values = [run[field] for run in runs if run["kind"] == kind]
        return statistics.median(values) if values else None

    wall_s, cpu_s = median("second", "first_token_s"), median("second", "cpu_s")
    first, before = median("first", "cpu_s"), median("before", "cpu_s")
    ratios = {
        "goal_over_wall": wall_s and GOAL_S / wall_s,
        "cpu_of_first_over_second": first and cpu_s and first / cpu_s,
        "cpu_of_before_over_second": before and cpu_s and before / cpu_s,
    }
    return {
        "machine": started_on,
        "settings": {"config": CONFIG.read_text(), "overrides": QUIET, "goal_s": GOAL_S},
        "runs": runs,
        "ratios": {name: value for name, value in ratios.items() if value is not None},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--before", type=Path, default=None, metavar="SRC", help="another source tree to start")
    parser.add_argument("--out", type=Path, default=HERE / "result.json")
    args = parser.parse_args()
    prepare(MODEL)
    started_on, runs = machine(), []
    kinds = ["first", "second", *(["before"] if args.before is not None else [])]
    for repeat in range(args.repeats):
        with tempfile.TemporaryDirectory() as cache:
            (Path(cache) / "models").symlink_to(cache_directory())
            # The second follows the first, because that fills the cache; the other tree alternates its place.
            for kind in kinds if repeat % 2 == 0 else [*kinds[2:], *kinds[:2]]:
                with tempfile.TemporaryDirectory() as folder:
                    sources = args.before if kind == "before" else None
                    runs.append(start(kind, sources=sources, cache=Path(cache), folder=Path(folder)))
                print(
                    f"{kind}: first token after {runs[-1]['first_token_s']:.1f} s, {runs[-1]['cpu_s']:.1f} CPU-s, "
                    f"load {runs[-1]['load_average']:.1f}",
                    flush=True,
                )
                args.out.write_text(json.dumps(result(runs, started_on=started_on), indent=2) + "\n")
    print(json.dumps(result(runs, started_on=started_on)["ratios"]))


if __name__ == "__main__":
    main()
