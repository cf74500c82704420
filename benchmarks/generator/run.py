"""The generator as a service: against its peers, and what its faces, weight swaps, starts and long lives cost.

    python benchmarks/generator/run.py                              # all parts; about two hours on two quiet cores
    python benchmarks/generator/run.py --parts faces swap --repeats 3
    python benchmarks/generator/run.py --parts peers --peers rollmill vllm --in-flight 16 64
    python benchmarks/generator/run.py --smoke --model DIRECTORY --out /tmp/smoke.json     # seconds, with a tiny model

| Part | What is measured |
|---|---|
| `peers` | embedded, vLLM CPU, transformers `generate` and continuous batching: tokens/s, time to first token, memory; 64 prompt and 64 to 128 new tokens, groups of 8 and unrelated prompts, 1, 16 and 64 in flight |
| `faces` | CPU-seconds of the replica per token at 64 in flight: bare engine, gRPC and HTTP, whole and streamed |
| `swap` | pause of a weight load over one memory copy; tokens/s with a load every second over tokens/s without, and over those where prompts alone are forgotten |
| `startup` | `rollmill serve` to the first token |
| `memory` | of a replica over 10,000 requests |

Who is compared takes turns, in an order that rotates, so that what disturbs the machine disturbs all; ratios are medians
over the repeats of paired figures. Writes `result.json` beside this file after every part and merges with what is there;
`goals` says which goals it reaches (`goals.py`). `--summarise` writes that anew for a result that is there, and measures nothing.
"""  # noqa: E501 - a table

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from goals import goals_of, lines_of
from shared import load

engine = load("run")

HERE = Path(__file__).parent
PARTS = ("peers", "faces", "swap", "startup", "memory")
STATIC = "transformers"
PEERS = ("rollmill", "vllm", STATIC, "transformers_cb")
FACES = ("bare", "grpc", "grpc_stream", "http", "http_stream")
GROUP, PROMPT_TOKENS, NEW_TOKENS = 8, 64, (64, 128)
REPLICA_DEADLINE_S = 900.0


# -- peers


def requests_for(in_flight: int, *, smoke: bool) -> int:
    """Return how many requests keep so many in flight for long enough, in whole groups."""
    return max(GROUP, in_flight * (1 if smoke else 2))


def measure_peers(args: argparse.Namespace, *, folder: Path) -> dict[str, Any]:
    """Return runs, facts of the peers and the ideal of this machine."""
    failures: dict[str, str] = {}
    runs: list[dict[str, Any]] = []
    config = json.loads((args.model / "config.json").read_text())
    with contextlib.ExitStack() as closing:
        peers, facts = engine.start(
            args.peers,
            model=args.model,
            dtype=args.dtype,
            threads=args.threads,
            folder=folder,
            failures=failures,
            closing=closing,
            worker=HERE / "worker.py",
        )
        ideal = engine.gemm_flops(args.dtype, threads=args.threads)
        for repeat in range(args.repeats):
            for in_flight in args.in_flight:
                for group in (GROUP, 1):
                    for peer in peers[repeat % len(peers) :] + peers[: repeat % len(peers)]:
                        if (peer.name, group) == (STATIC, 1):
                            continue  # a padded static batch does the same work whatever the prompts share
                        case = {
                            "in_flight": in_flight,
                            "requests": requests_for(in_flight, smoke=args.smoke),
                            "group": group,
                            "prompt_tokens": PROMPT_TOKENS,
                            "new_tokens": args.new_tokens,
                            "vocabulary": config["vocab_size"],
                            "seed": 1000 * repeat + in_flight + group,
                        }
                        try:
                            runs.append({"peer": peer.name, "repeat": repeat, **run_of(peer, case)})
                        except RuntimeError as error:
                            failures[peer.name] = str(error)
                            peers = [one for one in peers if one is not peer]
                            print(f"{peer.name} is left out from here on: {str(error)[-500:]}", flush=True)
                            continue
                        print(_line(runs[-1]), flush=True)
    return {
        "runs": runs,
        "started": facts,
        "left_out": failures,
        "ideal_flops": ideal,
        "ratios": peer_ratios(args, runs, ideal),
    }


def run_of(peer: Any, case: dict[str, Any]) -> dict[str, Any]:
    """Return one case of one peer."""
    from rollmill.telemetry.memory import memory_of, tree_of

    load_average = os.getloadavg()[0]
    seconds = peer.ask(case)
    first = seconds.pop("first_s")
    return {
        "in_flight": case["in_flight"],
        "group": case["group"],
        "per_s": seconds["tokens"] / seconds["wall_s"],
        "per_cpu_s": seconds["tokens"] / seconds["cpu_s"],
        "first_token_p50_s": statistics.median(first),
        "first_token_p95_s": first[max(0, -(-len(first) * 95 // 100) - 1)],
        "memory_bytes": memory_of(tree_of(peer.pid)).total_bytes,
        **seconds,
        "load_average": load_average,
    }


def _line(run: dict[str, Any]) -> str:
    return (
        f"{run['peer']:>16} {run['in_flight']:>3} in flight in {run['group']}s: {run['per_s']:.0f} tokens/s, "
        f"{run['per_cpu_s']:.0f} per CPU-s, first token {run['first_token_p50_s']:.2f} s, "
        f"{run['memory_bytes'] / 1e9:.1f} GB, load {run['load_average']:.1f}"
    )


def peer_ratios(args: argparse.Namespace, runs: list[dict[str, Any]], ideal: dict[str, float]) -> dict[str, float]:
    """Return ours over each peer's, paired, larger is better; and our share of this machine's ideal."""
    ratios: dict[str, float] = {}
    for in_flight in args.in_flight:
        for group, kind in ((GROUP, "groups"), (1, "unrelated")):
            # Static `generate` does the same for both kinds of prompts and is measured once.
            wanted = {name: (name, in_flight, GROUP if name == STATIC else group) for name in PEERS}
            of = {name: [r for r in runs if (r["peer"], r["in_flight"], r["group"]) == wanted[name]] for name in PEERS}
            for clock, flops in (("per_s", ideal["wall"]), ("per_cpu_s", ideal["cpu"])):
                ours = {run["repeat"]: run[clock] for run in of["rollmill"]}
                for name in PEERS[1:]:
                    paired = [ours[run["repeat"]] / run[clock] for run in of[name] if run["repeat"] in ours]
                    if paired:
                        ratios[f"{clock}_over_{name}_{in_flight}_{kind}"] = statistics.median(paired)
                if ours:
                    need = engine.work_flop(args.model, group=group, new_tokens=sum(args.new_tokens) / 2)
                    ratios[f"share_of_ideal_{clock}_{in_flight}_{kind}"] = (
                        statistics.median(ours.values()) * need / flops
                    )
    return ratios


# -- the replica


class Replica:
    """The process of replica.py."""

    def __init__(self, args: argparse.Namespace, *, folder: Path) -> None:
        from rollmill.runtime.threads import process_environment
        from rollmill.weights.repository import LocalModelRepository

        self.log = folder / "replica.log"
        with self.log.open("a") as log:
            self._process = subprocess.Popen(
                [sys.executable, str(HERE / "replica.py"), str(args.model), args.dtype, str(args.threads), str(folder)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=process_environment(threads=args.threads),
            )
        self.addresses = self._answer()
        self._repository = LocalModelRepository(folder / "weights", keep_versions=1_000_000)
        self._others = itertools.cycle((2, 1))

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the replica ended; its last words: {self.log.read_text()[-3000:]}")
        return json.loads(line)

    def do(self, what: str, **more: Any) -> dict[str, Any]:
        """Have one thing done and return what it says."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": what, **more}) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def load_other_weights(self) -> dict[str, Any]:
        """Publish the weights that it does not serve, from this process as a trainer would, and have it load them."""
        other = self._repository.republish(next(self._others), history_id="bench", at_s=time.time())
        return self.do("load", policy_version=other.policy_version)

    def close(self) -> None:
        """Let it end."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@contextlib.contextmanager
def replica(args: argparse.Namespace, *, folder: Path) -> Iterator[Replica]:
    process = Replica(args, folder=folder)
    try:
        yield process
    finally:
        process.close()


def load_of(
    args: argparse.Namespace, *, requests: int, seed: int, new_tokens: tuple[int, int] | None = None
) -> dict[str, Any]:
    return {
        "concurrency": args.face_in_flight,
        "requests": requests,
        "group": GROUP,
        "prompt_tokens": PROMPT_TOKENS,
        "new_tokens": list(args.new_tokens if new_tokens is None else new_tokens),
        "seed": seed,
        "vocabulary": 90,
        "deadline_s": 900.0,
    }


async def put(served: Replica, face: str, work: dict[str, Any], *, name: str) -> Any:
    """Put a load on a face of a replica and return the report."""
    from rollmill.generator.bench import GrpcTarget, HttpTarget, Load, measure

    stream = face.endswith("_stream")
    if face.startswith("grpc"):
        target: Any = GrpcTarget(served.addresses["grpc"], stream=stream)
    else:
        target = HttpTarget(served.addresses["http"], stream=stream)
    try:
        report = await measure(target, Load(**{**work, "new_tokens": tuple(work["new_tokens"])}), name=name)
    finally:
        await target.close()
    if report.errors:
        raise RuntimeError(f"{face}: {report.errors}")
    return report


def measure_faces(args: argparse.Namespace, *, folder: Path) -> dict[str, Any]:
    """Return CPU-seconds of the replica per token on each face, and their ratios to the bare engine."""
    runs: list[dict[str, Any]] = []
    with replica(args, folder=folder) as served:
        for repeat in range(-1, args.repeats):  # the first one warms all up and is not counted
            for face in FACES[repeat % len(FACES) :] + FACES[: repeat % len(FACES)]:
                work = load_of(args, requests=args.face_requests, seed=repeat + 1)
                served.do("flush")
                before, name = served.do("cpu"), f"{face}{repeat}"
                if face == "bare":
                    tokens = served.do("bare", load=work, name=name)["tokens"]
                else:
                    tokens = asyncio.run(put(served, face, work, name=name)).tokens
                cpu_s = served.do("cpu")["cpu_s"] - before["cpu_s"]
                if repeat >= 0:
                    runs.append({"face": face, "repeat": repeat, "tokens": tokens, "cpu_s": cpu_s})
                    print(f"{face:>12}: {tokens} tokens, {1e3 * cpu_s / tokens:.3f} CPU-ms per token", flush=True)
    ratios = {}
    for face in FACES[1:]:
        paired = [_per_token(runs, face, repeat) / _per_token(runs, "bare", repeat) for repeat in range(args.repeats)]
        ratios[f"cpu_{face}_over_bare"] = statistics.median(paired)
    return {"runs": runs, "ratios": ratios}


def _per_token(runs: list[dict[str, Any]], face: str, repeat: int) -> float:
    (run,) = [run for run in runs if (run["face"], run["repeat"]) == (face, repeat)]
    return run["cpu_s"] / run["tokens"]


def measure_swap(args: argparse.Namespace, *, folder: Path) -> dict[str, Any]:
    """Return pauses of loads over memory copies, and tokens/s with a load every second, without, and with what any
    load demands: that prompts which began before are computed anew."""
    loads, storms = [], []
    with replica(args, folder=folder) as served:
        for _ in range(3 if args.smoke else 9):
            copy = served.do("copy")
            loads.append({**served.load_other_weights(), **copy})
        kinds = {"quiet": None, "flushed": lambda: served.do("flush"), "storm": served.load_other_weights}
        for repeat in range(-1, args.repeats):  # the first one warms all up and is not counted
            run = {}
            for kind in list(kinds) if repeat % 2 else reversed(kinds):
                served.do("flush")
                work = load_of(args, requests=args.face_requests, seed=100 + repeat)
                run[kind] = asyncio.run(_with_every_second(kinds[kind], served, work, name=f"{kind}{repeat}"))
            if repeat >= 0:
                storms.append(run)
                print(
                    f"tokens/s: {run['quiet']['per_s']:.0f} quiet, {run['storm']['per_s']:.0f} in a storm of "
                    f"{run['storm']['times']} loads, {run['flushed']['per_s']:.0f} where prompts alone are forgotten",
                    flush=True,
                )
    ratios = {
        "pause_over_copy": statistics.median(one["pause_s"] / one["copy_s"] for one in loads),
        "tokens_per_s_storm_over_quiet": _median_over(storms, "storm", "quiet"),
        "tokens_per_s_flushed_over_quiet": _median_over(storms, "flushed", "quiet"),
        "tokens_per_s_storm_over_flushed": _median_over(storms, "storm", "flushed"),
    }
    print(f"pause {1e3 * statistics.median(one['pause_s'] for one in loads):.0f} ms", flush=True)
    return {"loads": loads, "storms": storms, "ratios": ratios}


def _median_over(storms: list[dict[str, Any]], kind: str, base: str) -> float:
    return statistics.median(one[kind]["per_s"] / one[base]["per_s"] for one in storms)


async def _with_every_second(
    what: Callable[[], Any] | None, served: Replica, work: dict[str, Any], *, name: str
) -> dict[str, Any]:
    over = asyncio.Event()
    times = 0

    async def storm() -> None:
        nonlocal times
        while what is not None and not over.is_set():
            began_s = time.perf_counter()
            await asyncio.to_thread(what)
            times += 1
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, 1.0 - (time.perf_counter() - began_s))):
                    await over.wait()

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(storm())
        report = await put(served, "grpc", work, name=name)
        over.set()
    return {"per_s": report.tokens_per_s, "times": times, "wall_s": report.wall_s}


# -- a life


def measure_startup(args: argparse.Namespace, *, folder: Path) -> dict[str, Any]:
    """Return seconds from the command to its address, and to the first token."""
    runs = []
    for repeat in range(args.repeats):
        began_s = time.perf_counter()
        with (folder / "serve.log").open("w") as log:
            process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "rollmill.cli", "serve", "--json", "--model", str(args.model)),
                    *("--set", f"generator.threads={args.threads}", "--set", f"generator.dtype={args.dtype}"),
                ],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        assert process.stdout is not None
        document = ""
        for line in process.stdout:
            document += line
            if line == "}\n":
                break
        served_s = time.perf_counter() - began_s
        found = json.loads(document or "{}")
        if "grpc" not in found:
            process.wait()
            words = (folder / "serve.log").read_text()[-3000:]
            raise RuntimeError(f"rollmill serve ended; its last words: {found.get('error', words)}")
        first_s = asyncio.run(_first_token(found["grpc"], began_s=began_s))
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
        runs.append({"repeat": repeat, "served_s": served_s, "first_token_s": first_s})
        print(f"served after {served_s:.1f} s, first token after {first_s:.1f} s", flush=True)
    return {"runs": runs, "first_token_s": statistics.median(run["first_token_s"] for run in runs), "ratios": {}}


async def _first_token(address: str, *, began_s: float) -> float:
    from rollmill.generator.bench import GrpcTarget, Load, measure

    target = GrpcTarget(address)
    try:
        before_s = time.perf_counter()
        report = await measure(
            target, Load(concurrency=1, requests=1, group=1, new_tokens=(1, 1), vocabulary=90), name="first"
        )
    finally:
        await target.close()
    if report.errors or report.first_token_s.p50 is None:
        raise RuntimeError(f"no first token: {report.errors}")
    return before_s - began_s + report.first_token_s.p50


def measure_memory(args: argparse.Namespace, *, folder: Path) -> dict[str, Any]:
    """Return the memory of a replica after each thousand of requests, half of them over gRPC and half over HTTP."""
    readings = []
    with replica(args, folder=folder) as served:
        for thousand in range(1 if args.smoke else 10):
            for face in ("grpc", "http_stream"):
                work = load_of(args, requests=500, seed=thousand, new_tokens=(2, 6))
                asyncio.run(put(served, face, work, name=f"{face}{thousand}"))
            readings.append({"requests": 1000 * (thousand + 1), **served.do("cpu")})
            print(f"{readings[-1]['requests']} requests: {readings[-1]['pss_bytes'] / 1e6:.1f} MB", flush=True)
    settled = readings[min(1, len(readings) - 1)]["pss_bytes"]
    return {
        "readings": readings,
        "growth_bytes_per_1000": (readings[-1]["pss_bytes"] - settled) / max(1, len(readings) - 2),
        "ratios": {"memory_end_over_2000_requests": readings[-1]["pss_bytes"] / settled},
    }


MEASURES = {
    "peers": measure_peers,
    "faces": measure_faces,
    "swap": measure_swap,
    "startup": measure_startup,
    "memory": measure_memory,
}


def main() -> None:
    """Measure what is asked for and merge it into the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    parser.add_argument("--peers", nargs="+", default=list(PEERS), choices=PEERS)
    parser.add_argument("--in-flight", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--face-requests", type=int, default=256, help="requests of each load on a face or in a storm")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--model", type=Path, default=None, help="model directory; SmolLM2-135M unless given")
    parser.add_argument(
        "--smoke", action="store_true", help="few and short requests: shows that all runs, measures nothing"
    )
    parser.add_argument("--summarise", action="store_true", help="measure nothing; write the goals of the result anew")
    parser.add_argument("--out", type=Path, default=HERE / "result.json")
    args = parser.parse_args()
    if args.summarise:
        result = json.loads(args.out.read_text())
        write(result, out=args.out)
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # so that what was started is ended on the way out

    from rollmill.weights.prepare import prepare

    args.model = Path(prepare(engine.MODEL).path) if args.model is None else args.model
    args.new_tokens = (4, 8) if args.smoke else NEW_TOKENS
    args.face_in_flight = 8 if args.smoke else 64
    args.face_requests = 16 if args.smoke else args.face_requests
    args.repeats = 1 if args.smoke else args.repeats
    result = json.loads(args.out.read_text()) if args.out.exists() else {"parts": {}, "ratios": {}}
    for part in args.parts:
        print(f"-- {part}", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            found = MEASURES[part](args, folder=Path(folder))
        result["machine"] = engine.machine()
        result["settings"] = {
            name: value.name if isinstance(value, Path) else value
            for name, value in vars(args).items()
            if name not in ("out", "parts", "summarise")
        }
        result["ratios"] |= {f"{part}_{name}": value for name, value in found.pop("ratios").items()}
        result["parts"][part] = found
        write(result, out=args.out)


def write(result: dict[str, Any], *, out: Path) -> None:
    """Write a result with its goals, and print those."""
    result["goals"] = goals_of(result)
    out.write_text(json.dumps(result, indent=2) + "\n")
    print(lines_of(result["goals"]), flush=True)


if __name__ == "__main__":
    main()
