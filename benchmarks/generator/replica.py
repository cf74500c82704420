"""One replica with the embedded engine, driven line by line: served over gRPC and HTTP, and asked directly.

    python replica.py MODEL_DIRECTORY DTYPE THREADS REPOSITORY

Prints a JSON line with its addresses when it serves, then one per line of stdin:

    {"do": "cpu"}                               CPU-seconds of this process so far, and its memory
    {"do": "bare", "load": {...}, "name": "x"}  the load on the engine, in this process, without a service
    {"do": "flush"}                             no later request finds a prefix of an earlier one
    {"do": "copy"}                              one memory copy of all weights
    {"do": "load", "policy_version": 3}         a version that another process published is loaded as a run loads it
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from shared import load

from rollmill.clock import SystemClock
from rollmill.generator.bench import Load
from rollmill.generator.bench.cases import Answered, requests_of
from rollmill.generator.engines.protocol import Engine
from rollmill.generator.http import serve_http
from rollmill.generator.main import Addresses, serve
from rollmill.generator.metrics import ReplicaMetrics
from rollmill.generator.service import InferenceService
from rollmill.types import GenerateRequest, SamplingParams, WeightManifest
from rollmill.weights.repository import LocalModelRepository


class HttpFace:
    """HTTP with metrics, as `rollmill serve` has it."""

    name = "http"

    def __init__(self) -> None:
        self.service: InferenceService | None = None

    async def serve(self, service: InferenceService, *, stop: asyncio.Event, on_bound: Callable[[str], None]) -> None:
        self.service = service
        metrics = ReplicaMetrics(service.replica, clock=SystemClock())
        service.observer = metrics
        await serve_http(
            service,
            host="127.0.0.1",
            port=0,
            metrics=metrics,
            stop=stop,
            on_bound=lambda port: on_bound(f"http://127.0.0.1:{port}"),
        )


async def bare(engine: Engine, work: Load, *, name: str) -> list[Answered]:
    """Put a load on the engine itself, from as many callers as a service would have."""
    asked, answers = requests_of(work, name=name), []

    async def caller() -> None:
        for one in asked:
            began_s = time.perf_counter()
            turn = await engine.generate(
                GenerateRequest(
                    request_id=one.request_id,
                    prompt_ids=np.array(one.prompt_ids, dtype=np.int32),
                    sampling=SamplingParams(max_new_tokens=one.new_tokens, seed=one.seed),
                    group_key=one.group_key,
                    deadline_s=one.deadline_s,
                )
            )
            answers.append(Answered(tokens=len(turn.output_ids), latency_s=time.perf_counter() - began_s))

    async with asyncio.TaskGroup() as callers:
        for _ in range(work.concurrency):
            callers.create_task(caller())
    return answers


def copy_s(tensors: dict[str, Any]) -> float:
    """Return the seconds of one copy of all weights into memory that is there."""
    copies = {name: tensor.clone() for name, tensor in tensors.items()}
    began_s = time.perf_counter()
    for name, tensor in tensors.items():
        copies[name].copy_(tensor)
    return time.perf_counter() - began_s


def publish(repository: LocalModelRepository, tensors: dict[str, Any], *, step: int) -> WeightManifest:
    return repository.publish(
        tensors,
        optimizer_step=step,
        parent=None,
        history_id="bench",
        training_dtype="float32",
        canary=None,
        at_s=time.time(),
    )


async def main() -> None:
    path, dtype, threads, folder = sys.argv[1], sys.argv[2], int(sys.argv[3]), Path(sys.argv[4])
    from safetensors.torch import load_file

    tensors = load_file(Path(path) / "model.safetensors")
    # Both sets are always held, so that either is published again in no time: the storm is the replica's, no trainer's.
    repository = LocalModelRepository(folder / "weights", keep_versions=1_000_000)
    first = publish(repository, tensors, step=0)
    publish(repository, {name: tensor * 1.0001 for name, tensor in tensors.items()}, step=1)
    engine = load("worker").new_embedded(path, dtype=dtype, threads=threads, max_model_len=256, digest=first.digest)
    face, stop, process = HttpFace(), asyncio.Event(), psutil.Process()
    lines: asyncio.Queue[str] = asyncio.Queue()
    loop = asyncio.get_running_loop()

    def read() -> None:
        for line in sys.stdin:
            loop.call_soon_threadsafe(lines.put_nowait, line)
        loop.call_soon_threadsafe(lines.put_nowait, "")

    def announce(addresses: Addresses) -> None:
        print(json.dumps({"grpc": addresses.grpc, "http": addresses.others["http"]}), flush=True)
        threading.Thread(target=read, daemon=True).start()

    async def answer(order: dict[str, Any]) -> dict[str, Any]:
        if order["do"] == "flush":
            await engine.flush()
        elif order["do"] == "bare":
            answers = await bare(engine, Load(**order["load"]), name=order["name"])
            return {"tokens": sum(one.tokens for one in answers)}
        elif order["do"] == "load":
            assert face.service is not None
            report = await face.service.load_weights(order["policy_version"])
            return {"pause_s": report.pause_s, "nbytes": report.nbytes, **report.seconds()}
        elif order["do"] == "copy":
            return {"copy_s": copy_s(tensors), "nbytes": sum(tensor.nbytes for tensor in tensors.values())}
        times, memory = process.cpu_times(), process.memory_full_info()
        return {"cpu_s": times.user + times.system, "pss_bytes": memory.pss, "rss_bytes": memory.rss}

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(
            serve(
                engine=engine,
                repository=repository,
                kv_policy="keep",
                stop=stop,
                load_deadline_s=60.0,
                faces=(face,),
                on_serving=announce,
            )
        )
        while line := await lines.get():
            print(json.dumps(await answer(json.loads(line))), flush=True)
        stop.set()


if __name__ == "__main__":
    asyncio.run(main())
