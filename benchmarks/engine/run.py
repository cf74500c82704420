"""New tokens per second: Rollmill's embedded engine, transformers `generate`, vLLM's CPU build.

    python benchmarks/engine/run.py                                  # all; 15 to 25 minutes on two quiet cores
    python benchmarks/engine/run.py --dtype float32 --threads 1 --rollouts 16 --repeats 1   # a part of it
    python benchmarks/engine/run.py --peers rollmill transformers

Prompts of 64 tokens, 64 new tokens, temperature 1, the log-prob of every token returned; 16 and 64 rollouts, in groups
of 8 with one prompt and with unrelated prompts. The engines of a setting are started together, then take turns, so that
what disturbs the machine disturbs all. vLLM lives in an environment of its own, that of `rollmill engine install vllm`,
made here if need be; where vLLM cannot be installed or does not start, the reason is recorded in its place.

Writes `result.json` beside this file after every setting and merges with what is there: machine, settings, runs, the
ideal of this machine (measured in the same run), and `ratios`: medians over the repeats of Rollmill's tokens per second
over the peer's, paired; larger is better for us.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import queue
import signal
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from rollmill.errors import RollmillError
from rollmill.generator.engines.vllm import environment as vllm_environment

HERE = Path(__file__).parent
MODEL = "smollm2-135m-instruct"
PROMPT_TOKENS, NEW_TOKENS, GROUP = 64, 64, 8
START_DEADLINE_S, CASE_DEADLINE_S = 600.0, 900.0
SLOW = {("bfloat16", 64)}
"""Left out unless asked for: without native bfloat16 one pass of a peer takes ten minutes."""


def machine() -> dict[str, Any]:
    """Return what the numbers depend on."""
    import psutil

    from rollmill.config.precision import native_bfloat16

    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line]
    return {
        "cpu": names[0].split(":", 1)[1].strip() if names else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": psutil.virtual_memory().total,
        "native_bfloat16": native_bfloat16(),
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
    }


class Peer:
    """One worker process; asked for one case at a time."""

    def __init__(
        self,
        name: str,
        *,
        python: Path,
        model: Path,
        dtype: str,
        threads: int,
        log: Path,
        worker: Path = HERE / "worker.py",
    ) -> None:
        self.name = name
        self._log = log
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
        environment |= {"TOKENIZERS_PARALLELISM": "false", "OMP_WAIT_POLICY": "passive"}
        if name == "vllm":
            cores = sorted(os.sched_getaffinity(0))[:threads]
            environment |= {
                "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
                "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
                "VLLM_CPU_CI_ENV": "1",
                "VLLM_NO_USAGE_STATS": "1",
                "VLLM_LOGGING_LEVEL": "ERROR",
            }
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                [str(python), str(worker), name, str(model), dtype, str(threads)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=environment,
            )
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    @property
    def pid(self) -> int:
        """The worker's process."""
        return self._process.pid

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def answer(self, deadline_s: float) -> dict[str, Any]:
        """Return the next answer.

        Raises:
            RuntimeError: if the worker ended or took too long, with the end of what it printed.
        """
        try:
            line = self._lines.get(timeout=deadline_s)
        except queue.Empty:
            line = ""
        if line:
            return json.loads(line)
        tail = self._log.read_text(errors="replace")[-3000:]
        raise RuntimeError(f"{self.name} gave no answer within {deadline_s:.0f} s or ended; its last words: {tail}")

    def ask(self, case: dict[str, Any]) -> dict[str, Any]:
        """Run one case and return its seconds."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(case) + "\n")
        self._process.stdin.flush()
        return self.answer(CASE_DEADLINE_S)

    def close(self) -> None:
        """End the worker and its children."""
        import psutil

        try:
            children = psutil.Process(self._process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            children = []
        for process in (*children, self._process):
            try:
                process.kill()
            except (psutil.NoSuchProcess, ProcessLookupError):
                continue
        self._process.wait()


_GEMM = """
import json, sys, time, torch
dtype, threads = getattr(torch, sys.argv[1]), int(sys.argv[2])
torch.set_num_threads(threads)
a, b = (torch.randn(2048, 2048).to(dtype) for _ in range(2))
small = dtype != torch.float32 and "avx512_bf16" not in open("/proc/cpuinfo").read()
if small: a = a[:512]
wall, cpu = [], []
with torch.inference_mode():
    torch.mm(a, b)
    for _ in range(5):
        w, c = time.perf_counter(), time.process_time()
        torch.mm(a, b)
        wall.append(time.perf_counter() - w); cpu.append(time.process_time() - c)
flop = 2 * a.shape[0] * 2048 * 2048
print(json.dumps({"wall": flop / sorted(wall)[2], "cpu": flop / sorted(cpu)[2]}))
"""


def gemm_flops(dtype: str, *, threads: int) -> dict[str, float]:
    """Return FLOP/s of one large matrix product: per second of wall time, and per CPU-second."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "passive"}
    done = subprocess.run(
        [sys.executable, "-c", _GEMM, dtype, str(threads)],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        env=environment,
    )
    return json.loads(done.stdout)


def work_flop(model: Path, *, group: int, new_tokens: float = NEW_TOKENS) -> float:
    """Return the FLOP that one new token needs: two per weight and token, the prompt once per group.

    The head is computed for every new token and for no other; attention over at most 128 tokens (2 %) is left out.
    """
    config = json.loads((model / "config.json").read_text())
    hidden, inner, layers = config["hidden_size"], config["intermediate_size"], config["num_hidden_layers"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    dim = config.get("head_dim") or hidden // heads
    body = layers * (hidden * dim * (2 * heads + 2 * kv_heads) + 3 * hidden * inner)
    head = hidden * config["vocab_size"]
    # The first new token comes out of the prompt's pass; the last one is never fed back.
    return 2 * (head + body * (PROMPT_TOKENS / group + new_tokens - 1) / new_tokens)


def measure(
    peers: list[Peer],
    *,
    vocabulary: int,
    rollouts: list[int],
    repeats: int,
    dtype: str,
    threads: int,
    known: dict[str, str],
) -> list[dict[str, Any]]:
    """Return one entry per case and repeat; the peers take turns, in an order that rotates."""
    runs = []
    for repeat in range(repeats):
        for count in rollouts:
            for group in (GROUP, 1):
                turn = peers[repeat % len(peers) :] + peers[: repeat % len(peers)]
                for peer in list(turn):
                    if peer.name == "transformers" and group == 1:
                        continue  # a padded static batch does the same work whatever the prompts share
                    case = {"rollouts": count, "group": group, "seed": 100 * repeat + count + group}
                    case |= {"prompt_tokens": PROMPT_TOKENS, "new_tokens": NEW_TOKENS, "vocabulary": vocabulary}
                    load = os.getloadavg()[0]
                    try:
                        seconds = peer.ask(case)
                    except RuntimeError as error:
                        known[peer.name] = str(error)
                        peers.remove(peer)
                        continue
                    if seconds["tokens"] != count * NEW_TOKENS:
                        raise RuntimeError(
                            f"{peer.name} returned {seconds['tokens']} log-probs instead of {count * NEW_TOKENS}"
                        )
                    rate = {
                        "per_s": seconds["tokens"] / seconds["wall_s"],
                        "per_cpu_s": seconds["tokens"] / seconds["cpu_s"],
                    }
                    run = {"peer": peer.name, "dtype": dtype, "threads": threads, "rollouts": count, "group": group}
                    runs.append({**run, "repeat": repeat, **rate, **seconds, "load_average": load})
                    print(
                        f"{peer.name:>12} {dtype} {threads} thread(s) {count} rollouts in {group}s: "
                        f"{rate['per_s']:.0f} tokens/s, {rate['per_cpu_s']:.0f} per CPU-s, load {load:.1f}",
                        flush=True,
                    )
    return runs


def start(
    names: list[str],
    *,
    model: Path,
    dtype: str,
    threads: int,
    folder: Path,
    failures: dict[str, str],
    closing: contextlib.ExitStack,
    worker: Path = HERE / "worker.py",
) -> tuple[list[Peer], dict[str, Any]]:
    """Start the workers one after the other, to be ended by `closing`; who does not start is recorded and left out."""
    ready, facts = [], {}
    for name in names:
        try:
            python = vllm_environment.install(device="cpu") if name == "vllm" else Path(sys.executable)
            log = folder / f"{name}-{dtype}-{threads}.log"
            peer = Peer(name, python=python, model=model, dtype=dtype, threads=threads, log=log, worker=worker)
            closing.callback(peer.close)
            facts[name] = peer.answer(START_DEADLINE_S)
            ready.append(peer)
        except (RuntimeError, OSError, RollmillError) as error:
            failures[name] = str(error)
            print(f"{name} is left out: {str(error)[-500:]}", flush=True)
    return ready, facts


def _median(runs: list[dict[str, Any]], key: str, **wanted: Any) -> dict[int, float]:
    return {run["repeat"]: run[key] for run in runs if all(run[name] == value for name, value in wanted.items())}


def summarise(result: dict[str, Any]) -> None:
    """Fill in `table` (medians and shares of the ideal) and `ratios` from all runs and ideals."""
    runs, table, ratios = result["runs"], [], {}
    cases = sorted({(run["dtype"], run["threads"], run["rollouts"], run["group"]) for run in runs})
    for dtype, threads, rollouts, group in cases:
        case = {"dtype": dtype, "threads": threads, "rollouts": rollouts, "group": group}
        ideal = result["ideals"][f"{dtype}-{threads}"]
        need = result["flop_per_token"]["group" if group > 1 else "unrelated"]
        for peer in ("rollmill", "transformers", "vllm"):
            # Static generate does the same for both kinds of prompts and is measured once.
            own = {**case, "group": GROUP} if peer == "transformers" else case
            wall, cpu = _median(runs, "per_s", peer=peer, **own), _median(runs, "per_cpu_s", peer=peer, **own)
            if not wall:
                continue
            row = {"peer": peer, **case, "per_s": statistics.median(wall.values())}
            row["per_cpu_s"] = statistics.median(cpu.values())
            row["share_of_ideal"] = row["per_s"] * need / ideal["wall"]
            row["share_of_ideal_cpu"] = row["per_cpu_s"] * need / ideal["cpu"]
            table.append(row)
            if peer == "rollmill":
                continue
            for clock, theirs in (("per_s", wall), ("per_cpu_s", cpu)):
                ours = _median(runs, clock, peer="rollmill", **case)
                paired = [ours[repeat] / theirs[repeat] for repeat in theirs if repeat in ours]
                kind = "groups" if group > 1 else "unrelated"
                name = f"{clock}_over_{peer}_{dtype}_{threads}t_{rollouts}_{kind}"
                if paired:
                    ratios[name] = statistics.median(paired)
    result["table"], result["ratios"] = table, ratios


def main() -> None:
    """Measure what is asked for and merge it into the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, nargs="+", default=[16, 64], choices=[16, 64])
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"], choices=["float32", "bfloat16"])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument(
        "--peers", nargs="+", default=["transformers", "vllm"], choices=["transformers", "vllm", "rollmill"]
    )
    parser.add_argument("--repeats", type=int, default=3, help="of float32; bfloat16 is measured once, if not native")
    parser.add_argument("--slow", action="store_true", help="also 64 rollouts in emulated bfloat16")
    parser.add_argument("--out", type=Path, default=HERE / "result.json")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # so that the workers are ended on the way out
    names = ["rollmill", *[name for name in args.peers if name != "rollmill"]]

    import tempfile

    from rollmill.weights.prepare import prepare

    result = json.loads(args.out.read_text()) if args.out.exists() else {"runs": [], "ideals": {}, "peers": {}}
    result["machine"] = machine()
    model = Path(prepare(MODEL).path)
    result["settings"] = {
        "model": MODEL,
        "prompt_tokens": PROMPT_TOKENS,
        "new_tokens": NEW_TOKENS,
        "group": GROUP,
        "temperature": 1.0,
    }
    result["flop_per_token"] = {"group": work_flop(model, group=GROUP), "unrelated": work_flop(model, group=1)}
    emulated = not result["machine"]["native_bfloat16"]
    with tempfile.TemporaryDirectory() as folder:
        for dtype in args.dtype:
            slow = emulated and dtype == "bfloat16"
            rollouts = [n for n in args.rollouts if not slow or args.slow or (dtype, n) not in SLOW]
            for threads in args.threads:
                failures: dict[str, str] = {}
                with contextlib.ExitStack() as closing:
                    peers, facts = start(
                        names,
                        model=model,
                        dtype=dtype,
                        threads=threads,
                        folder=Path(folder),
                        failures=failures,
                        closing=closing,
                    )
                    ideal = gemm_flops(dtype, threads=threads)
                    runs = measure(
                        peers,
                        vocabulary=json.loads((model / "config.json").read_text())["vocab_size"],
                        rollouts=rollouts,
                        repeats=1 if slow else args.repeats,
                        dtype=dtype,
                        threads=threads,
                        known=failures,
                    )
                fresh = {(run["peer"], run["dtype"], run["threads"], run["rollouts"]) for run in runs}
                kept = [
                    run
                    for run in result["runs"]
                    if (run["peer"], run["dtype"], run["threads"], run["rollouts"]) not in fresh
                ]
                result["runs"] = kept + runs
                result["ideals"][f"{dtype}-{threads}"] = ideal
                result["peers"][f"{dtype}-{threads}"] = {"started": facts, "left_out": failures}
                summarise(result)
                args.out.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result["ratios"], indent=2))


if __name__ == "__main__":
    main()
