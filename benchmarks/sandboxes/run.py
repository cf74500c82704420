"""How fast sandboxes start and answer, how many fit, and how soon bombs end, next to other launchers.

    python benchmarks/sandboxes/run.py                      # about half an hour
    python benchmarks/sandboxes/run.py --parts starts execs # some of it; results merge
    python benchmarks/sandboxes/run.py --quick              # small counts, to see that it works; writes nothing

As a plain user it measures that user's sandboxes, and writes `result-user.json`.

bubblewrap, runc, crun and gVisor's runsc take part where they are installed and work (Debian: `bubblewrap runc crun`);
`left_out` says why one does not. `peer_density` adds up the memory of processes and of their group; `footprint.py`
says what counts. Writes `result.json` beside this file: machine, the parts with how long each took, and `ratios`
(larger is better): each peer's median over ours, and each goal over what was measured.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import beside_peers
import containment
import measures
import pooled
import psutil
import state
import stress

HERE = Path(__file__).parent
GOALS = {
    "create_to_first_exec_ms": 20.0,
    "pool_hit_ms": 5.0,
    "first_use_ms": 100.0,
    "snapshot_ms": 20.0,
    "bytes_each": 2e6,
    "contained_ms": 1000.0,
    "canary_ms": 5.0,
}


_ABOUT = ("load_average_before", "took_s")


def machine() -> dict[str, Any]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(":", 1)[1].strip() for line in lines if "model name" in line), platform.processor())
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": psutil.virtual_memory().total,
        "kernel": platform.release(),
        "root": os.geteuid() == 0,
        "date": time.strftime("%Y-%m-%d"),
    }


def parts(*, quick: bool) -> dict[str, Callable[[], Awaitable[dict[str, Any]]]]:
    few = 10 if quick else 200
    cores = len(os.sched_getaffinity(0))
    return {
        "starts": lambda: measures.starts(repeats=few),
        "execs": lambda: measures.execs(repeats=few),
        "burst_100": lambda: measures.burst(count=20 if quick else 100, at_once=cores),
        "burst_1000": lambda: measures.burst(count=40 if quick else 1000, at_once=cores),
        "density": lambda: measures.density(count=20 if quick else 1000),
        "peer_execs": lambda: beside_peers.execs(repeats=3 if quick else 100),
        "peer_burst": lambda: beside_peers.burst(count=6 if quick else 100, at_once=cores),
        "peer_density": lambda: beside_peers.density(count=4 if quick else 50, repeats=1 if quick else 5),
        "bombs": lambda: containment.bombs(repeats=1 if quick else 5),
        "watchdog_ends": lambda: containment.watchdog_ends(repeats=1 if quick else 5),
        "pool_hits": lambda: pooled.hits(repeats=few),
        "square_wave": lambda: pooled.square_wave(low=4 if quick else 96, high=20 if quick else 960, hold_s=2.0),
        "snapshots": lambda: state.snapshots(repeats=1 if quick else 10),
        "first_use": lambda: state.first_use(repeats=1 if quick else 5),
        "stress": lambda: stress.stress(seconds=1 if quick else 2),
    }


def ratios(found: dict[str, Any]) -> dict[str, float]:
    """Return what is compared, larger being better."""
    out: dict[str, float] = {}
    if "starts" in found:
        lives = found["starts"]["whole_life_of_true"]
        ours = lives["rollmill"]["p50_ms"]
        out |= {f"{name}_over_ours": life["p50_ms"] / ours for name, life in lives.items() if name != "rollmill"}
        pythons = found["starts"].get("whole_life_of_python", {})
        out |= _over_ours(pythons, "p50_ms", what="life of Python")
        first = found["starts"]["create_to_first_exec"]["p50_ms"]
        out["goal_over_create_to_first_exec"] = GOALS["create_to_first_exec_ms"] / first
    if "peer_execs" in found:
        for kind in ("true", "python"):
            calls = {who: kinds[kind] for who, kinds in found["peer_execs"].items() if kind in _mapping(kinds)}
            out |= _over_ours(calls, "p50_ms", what=f"exec of {kind}")
    if "peer_burst" in found:
        bursts = {who: one for who, one in found["peer_burst"].items() if "rate_per_s" in _mapping(one)}
        ours = bursts.pop("rollmill")["rate_per_s"]
        out |= {f"our_rate_over_{who}, burst": ours / one["rate_per_s"] for who, one in bursts.items()}
    if "peer_density" in found:
        dense = {who: one for who, one in found["peer_density"].items() if "bytes_each" in _mapping(one)}
        out |= _over_ours(dense, "bytes_each", what="memory each")
    if "pool_hits" in found:
        out["goal_over_pool_hit"] = GOALS["pool_hit_ms"] / found["pool_hits"]["hit"]["p50_ms"]
    if "first_use" in found:
        first = found["first_use"]["first_sandbox"]["p50_ms"]
        out["goal_over_first_use_of_an_image"] = GOALS["first_use_ms"] / first
    for name, times in found.get("snapshots", {}).items():
        if name not in _ABOUT:
            out[f"goal_over_snapshot, {name}"] = GOALS["snapshot_ms"] / times["snapshot"]["p50_ms"]
    if "canary" in found.get("stress", {}):
        out["goal_over_canary_under_stress"] = GOALS["canary_ms"] / found["stress"]["canary"]["p50_ms"]
    if "anon_bytes_each" in found.get("density", {}):  # not what the machine's free memory showed in earlier results
        out["goal_over_bytes_each"] = GOALS["bytes_each"] / found["density"]["bytes_each"]
    for name, bomb in found.get("bombs", {}).items():
        if name not in _ABOUT:
            out[f"goal_over_containment_of_{name}_bomb"] = GOALS["contained_ms"] / bomb["contained"]["p50_ms"]
    return out


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _over_ours(found: dict[str, Any], name: str, *, what: str) -> dict[str, float]:
    ours = found.get("rollmill", {}).get(name, 0.0)
    if ours <= 0:  # not measured, or below what the machine's free memory shows
        return {}
    return {f"{who}_over_ours, {what}": one[name] / ours for who, one in found.items() if who != "rollmill"}


def measure(names: list[str], *, quick: bool) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in names:
        load, at_s = os.getloadavg()[0], time.perf_counter()
        result = asyncio.run(parts(quick=quick)[name]())
        found[name] = {**result, "load_average_before": load, "took_s": round(time.perf_counter() - at_s, 1)}
        print(name, json.dumps(found[name], indent=1), flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--parts", nargs="+", choices=sorted(parts(quick=True)), default=list(parts(quick=True)))
    parser.add_argument("--quick", action="store_true", help="small counts; nothing is written")
    own = "result.json" if os.geteuid() == 0 else "result-user.json"
    parser.add_argument("--out", type=Path, default=HERE / own)
    args = parser.parse_args()
    before = json.loads(args.out.read_text())["parts"] if args.out.exists() and not args.quick else {}
    found = before | measure(args.parts, quick=args.quick)
    result = {"machine": machine(), "goals": GOALS, "parts": found, "ratios": ratios(found)}
    if not args.quick:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result["ratios"], indent=1))


if __name__ == "__main__":
    main()
