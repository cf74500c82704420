"""What new weights cost: the trainer that publishes them, and the generator that loads them.

    python benchmarks/weight_swap/run.py               # 9 repeats; about two minutes on two quiet cores
    python benchmarks/weight_swap/run.py --repeats 7 --model path/to/model
    python benchmarks/weight_swap/run.py --in-the-pause --output other.json   # generator.stage_weights = false

Each repeat measures, one after the other: one memory copy of all weights; the trainer's copy of a publication (all
that it waits for); the canary, the digests and the commit (in the background of a run); pull and verification; the
weights made ready in spare buffers (the old version serves meanwhile); and the generator's pause, in its parts.
Prints and writes `result.json` beside this file: machine, settings, one entry per repeat, and `ratios`: the goal of 3
memory copies against the measured number of copies (medians; 1 reaches the goal, larger is better). Every ratio is of
CPU-seconds within one repeat, so that other work on the machine does not decide it; wall times stand beside them.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
GOAL_COPIES = 3.0
LOAD_PARTS = ("pull_verify", "stage", "drain", "swap", "prove", "resume")


def machine() -> dict[str, Any]:
    import psutil
    import torch

    from rollmill.config.precision import native_bfloat16

    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(":", 1)[1].strip() for line in lines if "model name" in line), platform.processor())
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": psutil.virtual_memory().total,
        "native_bfloat16": native_bfloat16(),
        "sha_instructions": any("sha_ni" in line for line in lines if line.startswith("flags")),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "load_average_at_start": os.getloadavg()[0],
        "date": time.strftime("%Y-%m-%d"),
    }


def timed(work: Callable[[], Any]) -> tuple[Any, dict[str, float]]:
    """Run work; return what it returns, and its wall and CPU-seconds."""
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    result = work()
    return result, {"wall_s": time.perf_counter() - wall_s, "cpu_s": time.process_time() - cpu_s}


class PhaseClock:
    """The clock of a replica: CPU-seconds of this process, and wall time beside them."""

    def __init__(self) -> None:
        self.readings: list[tuple[float, float]] = []

    def now_s(self) -> float:
        self.readings.append((time.perf_counter(), time.process_time()))
        return self.readings[-1][1]

    def wall_s(self) -> float:
        return time.time()

    def parts(self) -> dict[str, dict[str, float]]:
        """Return the parts of the load that was timed since the call before: a reading stands at each border."""
        readings, self.readings = self.readings, []
        # the reading that ends the staging is taken again as the pause begins
        borders = [*readings[:2], *readings[3:]]
        spans = [
            {"wall_s": later[0] - earlier[0], "cpu_s": later[1] - earlier[1]}
            for earlier, later in itertools.pairwise(borders)
        ]
        return dict(zip(LOAD_PARTS, spans, strict=True))


async def measure(
    model_path: str, *, repeats: int, stage_weights: bool, folder: Path
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    import torch

    from rollmill.clock import SystemClock
    from rollmill.config.schema import RollmillConfig
    from rollmill.generator.engines.embedded.engine import EmbeddedEngine
    from rollmill.generator.engines.embedded.settings import EmbeddedSettings
    from rollmill.generator.loading import Replica
    from rollmill.runtime.trainer_process import canary_token_ids
    from rollmill.trainer.canary import CanaryScorer
    from rollmill.trainer.logprobs import prepare_model
    from rollmill.trainer.model import load_policy
    from rollmill.weights import LocalModelRepository

    torch.set_num_threads(1)
    policy = prepare_model(load_policy(model_path))
    scorer = CanaryScorer(policy, token_ids=canary_token_ids(policy.config.vocab_size), config=RollmillConfig())
    tensors = {name: parameter.detach() for name, parameter in policy.named_parameters()}
    copies = {name: tensor.clone() for name, tensor in tensors.items()}
    repository = LocalModelRepository(folder / "weights", keep_versions=3)

    def copy() -> None:
        for name, tensor in tensors.items():
            copies[name].copy_(tensor)

    def prepare(step: int) -> Any:
        return repository.prepare(
            tensors,
            optimizer_step=step,
            parent=step or None,
            history_id="bench",
            training_dtype="float32",
            at_s=time.time(),
        )

    def keep_house() -> None:
        repository.retire()
        repository.reserve()

    first = prepare(0)
    manifest = first.commit(canary=scorer.score(first.tensors()))
    keep_house()
    engine = EmbeddedEngine(
        model_path,
        settings=EmbeddedSettings(dtype="float32", max_num_seqs=8, max_model_len=256),
        tensors=repository.load(1),
        policy_version=1,
        digest=manifest.digest,
        clock=SystemClock(),
    )
    clock = PhaseClock()
    replica = Replica(
        engine=engine,
        repository=repository,
        kv_policy="keep",
        load_deadline_s=120.0,
        owner="bench",
        clock=clock,
        stage_weights=stage_weights,
    )
    runs: list[dict[str, Any]] = []
    try:
        await replica.start()
        for step in range(1, repeats + 2):
            with torch.no_grad():
                for tensor in tensors.values():
                    tensor.mul_(1.0 + 1e-5)
            load_average = os.getloadavg()[0]
            _, copied = timed(copy)
            publication, prepared = timed(lambda step=step: prepare(step))
            mapped = publication.tensors()
            canary, scored = timed(lambda mapped=mapped: scorer.score(mapped))
            del mapped
            _, committed = timed(lambda publication=publication, canary=canary: publication.commit(canary=canary))
            _, kept = timed(keep_house)
            clock.readings.clear()
            report = await replica.load(step + 1)
            run = {
                "load_average": load_average,
                "memory_copy": copied,
                "publish_copy": prepared,
                "publish_canary": scored,
                "publish_digest_commit": committed,
                "publish_keep_house": kept,
                **clock.parts(),
                "canary_difference": report.canary_difference,
            }
            if step > 1:  # the first one touches memory for the first time
                runs.append(run)
    finally:
        await engine.close()
        repository.clean()
    nbytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    settings = {"model": Path(model_path).name, "dtype": "float32", "weight_bytes": nbytes, "threads": 1}
    settings |= {"transport": manifest.transport, "keep_versions": 3, "kv_on_update": "keep", "repeats": repeats}
    settings |= {"stage_weights": stage_weights, "native_kernels": "native_kernels" in engine.info().capabilities}
    return settings, runs


def total(run: dict[str, Any], names: tuple[str, ...], unit: str) -> float:
    return sum(run[name][unit] for name in names)


FIGURES = {
    "trainer_publish": ("publish_copy",),
    "publish_total": ("publish_copy", "publish_canary", "publish_digest_commit", "publish_keep_house"),
    "pull_verify": ("pull_verify",),
    "stage": ("stage",),
    "generator_pause": ("swap", "prove", "resume"),
    "swap_alone": ("swap",),
    "prove_alone": ("prove",),
}
"""What is reported, and the parts it is the sum of. The drain is no pause: the step in hand still gives its tokens."""


def report_of(settings: dict[str, Any], runs: list[dict[str, Any]], where: dict[str, Any]) -> dict[str, Any]:
    medians: dict[str, Any] = {
        name: {
            "copies": statistics.median(total(run, parts, "cpu_s") / run["memory_copy"]["cpu_s"] for run in runs),
            "cpu_s": statistics.median(total(run, parts, "cpu_s") for run in runs),
            "wall_s": statistics.median(total(run, parts, "wall_s") for run in runs),
        }
        for name, parts in {"memory_copy": ("memory_copy",), **FIGURES}.items()
    }
    ratios = {name: GOAL_COPIES / medians[name]["copies"] for name in ("generator_pause", "trainer_publish")}
    return {
        "machine": where,
        "settings": {**settings, "goal_copies": GOAL_COPIES},
        "runs": runs,
        "medians": medians,
        "ratios": ratios,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--model", default="smollm2-135m-instruct", help="a name of `rollmill model list`, or a folder")
    parser.add_argument("--in-the-pause", action="store_true", help="write the weights in the pause, do not stage them")
    parser.add_argument("--output", type=Path, default=HERE / "result.json")
    options = parser.parse_args()
    from rollmill.weights import prepare

    where = machine()
    model_path = str(prepare(options.model).path)
    with tempfile.TemporaryDirectory(prefix="rollmill-weight-swap-") as folder:
        settings, runs = asyncio.run(
            measure(model_path, repeats=options.repeats, stage_weights=not options.in_the_pause, folder=Path(folder))
        )
    result = report_of(settings, runs, where)
    options.output.write_text(json.dumps(result, indent=2) + "\n")
    print(f"{'':22}copies    CPU s   wall s")
    for name, figures in result["medians"].items():
        print(f"{name:20}{figures['copies']:8.2f} {figures['cpu_s']:8.3f} {figures['wall_s']:8.3f}")
    print("ratios (larger is better, 1 reaches the goal):", json.dumps(result["ratios"]))


if __name__ == "__main__":
    main()
