"""One process of the trainer benchmark: one precision, one number of threads. Prints JSON."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from batches import SHAPES, groups_of, part_of
from torch.optim import optimizer as optimizers
from torch.profiler import ProfilerActivity, profile

from rollmill.buffer.protocol import CommitPoint
from rollmill.config.schema import RollmillConfig, TrainerSettings
from rollmill.trainer.checkpointing import Checkpointer, CheckpointFolder
from rollmill.trainer.memory import keep_freed_memory
from rollmill.trainer.model import load_policy
from rollmill.trainer.step import Trainer, TrainerState

GEMM_SIZES = {"float32": ((2048, 2048, 2048), (592, 576, 1536)), "bfloat16": ((1024, 1024, 1024), (592, 576, 1536))}


class Timer:
    """Wall and CPU seconds since it was made."""

    def __init__(self) -> None:
        self._wall_s, self._cpu_s = time.perf_counter(), time.process_time()

    def read(self) -> dict[str, float]:
        return {"wall_s": time.perf_counter() - self._wall_s, "cpu_s": time.process_time() - self._cpu_s}


def best_gemm(dtype: str) -> dict[str, float]:
    """Return the best FLOP/s of a few products: by wall time, and per CPU-second of all threads together."""
    by_wall, by_cpu = 0.0, 0.0
    for m, k, n in GEMM_SIZES[dtype]:
        a, b = (torch.randn(*size).to(getattr(torch, dtype)) for size in ((m, k), (k, n)))
        for _ in range(4):
            timer = Timer()
            a @ b
            took = timer.read()
            by_wall = max(by_wall, 2 * m * k * n / took["wall_s"])
            by_cpu = max(by_cpu, 2 * m * k * n / took["cpu_s"])
    return {"flops_per_s": by_wall, "flops_per_cpu_s": by_cpu}


class Measured:
    """A trainer whose forward and backward pass is told apart from its optimizer."""

    def __init__(self, path: Path, *, dtype: str) -> None:
        settings = TrainerSettings(dtype=dtype, warmup_steps=0)  # type: ignore[arg-type]
        config = RollmillConfig().model_copy(update={"trainer": settings})
        self.trainer = Trainer(load_policy(path), config=config)
        self.vocabulary = self.trainer.model.config.vocab_size
        self._before_update: dict[str, float] = {}
        self._timer = Timer()
        optimizers.register_optimizer_step_pre_hook(self._note)

    def _note(self, *_: Any) -> None:
        self._before_update = self._timer.read()

    def step(self, groups: list[Any]) -> dict[str, float]:
        """Train one step: `passes_*` is everything before the update of the weights (clipping included)."""
        self._timer = Timer()
        metrics = self.trainer.train_step(groups, optimizer_step_of=lambda _: 0)
        whole = self._timer.read()
        return {
            "passes_wall_s": self._before_update["wall_s"],
            "passes_cpu_s": self._before_update["cpu_s"],
            **whole,
            "positions": metrics.computed_tokens,
            "loss_tokens": metrics.loss_tokens,
            "flops": metrics.model_flops,
        }


def measure(measured: Measured, *, dtype: str, shape: str, runs: int, warmups: int) -> dict[str, Any]:
    """Return `runs` steps with the best product before and after each, so that both see the same machine."""
    groups = groups_of(SHAPES[shape], vocabulary=measured.vocabulary)
    for _ in range(warmups):
        measured.step(groups)
    gemms = [best_gemm(dtype)]
    steps: list[dict[str, float]] = []
    for _ in range(runs):
        step = measured.step(groups)
        gemms.append(best_gemm(dtype))
        best = {name: max(gemms[-1][name], gemms[-2][name]) for name in gemms[-1]}
        step["share_by_wall"] = step["flops"] / step["passes_wall_s"] / best["flops_per_s"]
        step["share_by_cpu"] = step["flops"] / step["passes_cpu_s"] / best["flops_per_cpu_s"]
        steps.append(step)
    return {"shape": shape, "gemm": gemms, "steps": steps}


def parts(measured: Measured, *, shape: str) -> dict[str, float]:
    """Return part -> share of one step's time, from the profiler."""
    groups = groups_of(SHAPES[shape], vocabulary=measured.vocabulary)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as recorded:
        measured.step(groups)
    times: dict[str, float] = {}
    for event in recorded.key_averages(group_by_input_shape=True):
        part = part_of(event.key, event.input_shapes, vocabulary=measured.vocabulary)
        times[part] = times.get(part, 0.0) + event.self_cpu_time_total
    total = sum(times.values())
    return {part: spent / total for part, spent in sorted(times.items(), key=lambda item: -item[1])}


def checkpoints(measured: Measured, *, model: Path, folder: Path, runs: int) -> list[dict[str, Any]]:
    """Return what a checkpoint costs: written while training waits, and begun in the background then waited for."""
    with tempfile.TemporaryDirectory(dir=folder) as name:
        saving = Checkpointer(CheckpointFolder(Path(name), model=model), background=True, deadline_s=600.0)
        found = [
            {
                "written": _timed(saving.write, measured.trainer.state(), step=2 * number),
                "begun": _timed(saving.begin, measured.trainer.state(), step=2 * number + 1),
                "rest": _timed(lambda *_, **__: saving.settle(), None, step=0),
            }
            for number in range(runs + 1)
        ]
        saving.close()
    # the first makes the copy's memory
    return found[1:]


def _timed(call: Callable[..., None], state: TrainerState | None, *, step: int) -> dict[str, float]:
    commit = CommitPoint(history_id="h", optimizer_step=step, policy_version=1, trained_group_ids=(), journal_offset=0)
    timer = Timer()
    call(state, commit=commit)
    return timer.read()


def main() -> None:
    plan: dict[str, Any] = json.loads(sys.argv[1])
    keep_freed_memory()
    torch.set_num_threads(plan["threads"])
    model = Path(plan["model"])
    measured = Measured(model, dtype=plan["dtype"])
    result: dict[str, Any] = {"dtype": plan["dtype"], "threads": plan["threads"], "shapes": []}
    # the first step makes gradients and moments, the second still grows the heap
    for number, shape in enumerate(plan["shapes"]):
        warmups = (2 if plan["dtype"] == "float32" else 1) if number == 0 else 0
        result["shapes"].append(measure(measured, dtype=plan["dtype"], shape=shape, runs=plan["runs"], warmups=warmups))
    if plan["details"]:
        result["parts"] = parts(measured, shape=plan["shapes"][0])
        result["checkpoints"] = checkpoints(measured, model=model, folder=Path(plan["folder"]), runs=plan["runs"])
    print(json.dumps(result))


if __name__ == "__main__":
    main()
