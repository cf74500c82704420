"""CPU seconds of the router per request: the law alone, all but gRPC, and the whole path; and where the rest goes.

    python benchmarks/router/run.py                     # about 10 minutes of CPU
    python benchmarks/router/run.py --requests 2000 --runs 1

The whole path: clients, router and replicas are processes of their own on one machine; the CPU is that of the router's
process. A bare proxy of the same gRPC library, which decides nothing, takes turns with it: that is what gRPC alone
costs. Writes `result.json` beside this file: machine, settings, runs, and `ratios` (medians; larger is better), for
example the goal of 0.3 ms over the CPU of a request, and the bare proxy's CPU over the router's. `goals` says which are
reached (`goals.py`); `--summarise` writes that anew for a result that is there.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
from goals import GOAL_S, goals_of

from rollmill.runtime.threads import process_environment

HERE = Path(__file__).parent
SHAPE = {"prompt_tokens": 64, "new_tokens": 64, "chunk_tokens": 16}
SETTINGS: dict[str, dict[str, Any]] = {
    "generate": {},
    "generate_keep_tokens": {"keep_tokens": True},
    "stream": {},
}
"""Ways to answer: in one piece, in one piece with tokens kept (chunks of 16), and as a stream of single tokens."""
WAYS = {f"{callers}{way}": (way, callers) for callers in ("", "exchange_") for way in SETTINGS}
"""And to ask: with a call of gRPC for each request, or in an exchange, as our own client does."""
PROXIED = ("generate", "stream")
STREAMS = 1_000
"""Most streams at once: with 5,000 the clients' one process sees calls cancelled, in front of the bare proxy too."""


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


def start(plan: dict[str, Any]) -> subprocess.Popen[str]:
    command = [sys.executable, str(HERE / "worker.py"), json.dumps(plan)]
    return subprocess.Popen(command, env=process_environment(threads=1), stdout=subprocess.PIPE, text=True)


def line_of(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    text = process.stdout.readline()
    if not text:
        raise RuntimeError(f"a worker ended with status {process.wait()} before it said anything")
    return json.loads(text)


def call(plan: dict[str, Any]) -> dict[str, Any]:
    process = start(plan)
    found = line_of(process)
    if process.wait() != 0:
        raise RuntimeError(f"the worker {plan['role']} ended with status {process.returncode}")
    return found


@contextlib.contextmanager
def serving(plan: dict[str, Any]) -> Iterator[tuple[str, int]]:
    process = start(plan)
    try:
        yield line_of(process)["address"], process.pid
    finally:
        process.kill()
        process.wait()


def without_sockets(args: argparse.Namespace) -> list[dict[str, Any]]:
    runs = []
    for replicas in (4, 16, 64):
        for name, slots in (("free", 100_000), ("queue", 8)):
            plan = {"role": "law", "replicas": replicas, "slots": slots, "sessions": args.sessions, "requests": 30_000}
            runs.append({"part": "law", "replicas": replicas, "case": name, **call(plan)})
            say(runs[-1])
    for way, settings in SETTINGS.items():
        plan = {"role": "forward", "replicas": args.replicas, "sessions": args.sessions, "requests": 10_000}
        plan |= {**SHAPE, "settings": settings, "streams": way == "stream"}
        runs.append({"part": "all_but_grpc", "way": way, **call(plan)})
        say(runs[-1])
    return runs


def over_sockets(args: argparse.Namespace) -> list[dict[str, Any]]:
    runs: list[dict[str, Any]] = []
    replica = {"role": "replica", "delay_s": args.delay_s, **SHAPE}
    with contextlib.ExitStack() as stack:
        addresses = [stack.enter_context(serving(replica))[0] for _ in range(args.replicas)]
        for number in range(args.runs):
            for way in WAYS:
                sides = ["router", "proxy"] if way in PROXIED else ["router"]
                for side in sides if number % 2 == 0 else reversed(sides):
                    runs.append(one_run(args, way, side=side, addresses=addresses))
                    say(runs[-1])
    return runs


def one_run(args: argparse.Namespace, way: str, *, side: str, addresses: list[str]) -> dict[str, Any]:
    answers, callers = WAYS[way]
    server = {"role": side, "replicas": addresses, "settings": {"max_queue": 100_000, **SETTINGS[answers]}}
    with serving(server) as (address, pid):
        streams = answers == "stream"
        sessions = min(args.sessions, STREAMS) if streams else args.sessions
        plan = {"role": "clients", "address": address, "pid": pid, "sessions": sessions, **SHAPE}
        requests = max(args.requests // 10, sessions) if streams else args.requests
        found = call({**plan, "requests": requests, "streams": streams, "exchange": bool(callers)})
    return {"part": "whole", "way": way, "side": side, "load_average": os.getloadavg()[0], **found}


def say(run: dict[str, Any]) -> None:
    name = " ".join(str(run[key]) for key in ("part", "side", "way", "case", "replicas") if key in run)
    more = f", {run['requests_per_s']:.0f} requests/s" if "requests_per_s" in run else ""
    print(f"{name}: {run['cpu_s_per_request'] * 1e6:.0f} us CPU per request{more}", flush=True)


def ratios(runs: list[dict[str, Any]]) -> dict[str, float]:
    def median(**wanted: Any) -> float:
        found = [run for run in runs if all(run.get(key) == value for key, value in wanted.items())]
        return statistics.median(run["cpu_s_per_request"] for run in found)

    found = {f"goal_over_{way}": GOAL_S / median(part="whole", side="router", way=way) for way in WAYS}
    for way in PROXIED:
        sides = {side: median(part="whole", side=side, way=way) for side in ("proxy", "router")}
        found[f"bare_proxy_over_router_{way}"] = sides["proxy"] / sides["router"]
    found["goal_over_all_but_grpc"] = GOAL_S / median(part="all_but_grpc", way="generate")
    found["goal_over_law_16_replicas"] = GOAL_S / median(part="law", replicas=16, case="free")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--sessions", type=int, default=5_000, help="concurrent sessions")
    parser.add_argument("--requests", type=int, default=20_000, help="measured in each run, after as many to warm up")
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--delay-s", type=float, default=1.0, help="until a replica answers")
    parser.add_argument("--summarise", action="store_true", help="measure nothing; write the goals of the result anew")
    parser.add_argument("--out", type=Path, default=HERE / "result.json")
    args = parser.parse_args()
    if args.summarise:
        write(json.loads(args.out.read_text()), out=args.out)
        return
    started_on = machine()
    runs = [*without_sockets(args), *over_sockets(args)]
    result = {
        "machine": started_on,
        "settings": {
            "sessions": args.sessions,
            "requests": args.requests,
            "runs": args.runs,
            "replicas": args.replicas,
            "delay_s": args.delay_s,
            **SHAPE,
        },
        "runs": runs,
        "ratios": ratios(runs),
    }
    write(result, out=args.out)


def write(result: dict[str, Any], *, out: Path) -> None:
    result["goals"] = goals_of(result)
    out.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps({"ratios": result["ratios"], "goals": result["goals"]}))


if __name__ == "__main__":
    main()
