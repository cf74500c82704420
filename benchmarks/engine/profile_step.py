"""Where a decode step's CPU-seconds go, by part and by rows, with and without the compiled kernels.

    python benchmarks/engine/profile_step.py                   # one minute on a quiet core; merges into profile.json
    python benchmarks/engine/profile_step.py --rows 32 --kernels auto --dtype bfloat16 --group 1

One thread, groups of 8 (`--group`) with prompts of 48 tokens, a few tokens into the answer. The rate is measured
without a profiler, the engines taking turns, in CPU-seconds; the parts with torch's profiler, which counts wall time:
read them as shares, on a quiet machine.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch.profiler import ProfilerActivity, profile, record_function

from rollmill.clock import SystemClock
from rollmill.generator.engines.embedded.budget import MemoryParts, plan_kv
from rollmill.generator.engines.embedded.core import EngineCore
from rollmill.generator.engines.embedded.kv import BLOCK_TOKENS, KvCache
from rollmill.generator.engines.embedded.model import ServedModel
from rollmill.generator.engines.embedded.native import Kernels
from rollmill.generator.engines.meter import SecondsMeter
from rollmill.generator.engines.sequence import Sequence
from rollmill.types import GenerateRequest, SamplingParams
from rollmill.weights.prepare import prepare

HERE = Path(__file__).parent
MODEL, PROMPT_TOKENS, STEPS, REPEATS = "smollm2-135m-instruct", 48, 6, 3
PARTS = {
    "products": ("native linear", "native linear_bfloat16", "aten::mm", "aten::addmm", "aten::bmm"),
    "attention": ("native attend", "aten::_scaled_dot_product_flash_attention_for_cpu"),
    "KV writes": ("native write", "aten::_index_put_impl_", "aten::index"),
    "sampling": ("native block_sums", "aten::exp", "aten::amax", "aten::sub_", "aten::cumsum", "aten::fill_"),
}


def new_core(kernels: Any, *, path: Path, slots: int, dtype: torch.dtype) -> EngineCore:
    """Return an engine without its thread."""
    clock = SystemClock()
    model = ServedModel(path, dtype=dtype, tensors=load_file(path / "model.safetensors"), kernels=kernels)
    budget = plan_kv(
        block_bytes=model.block_bytes(BLOCK_TOKENS),
        block_tokens=BLOCK_TOKENS,
        max_num_seqs=slots,
        max_model_len=128,
        parts=MemoryParts(weights=model.buffer_bytes, activations=0),
    )
    return EngineCore(
        model,
        policy_version=1,
        digest="benchmark",
        max_num_seqs=slots,
        max_model_len=128,
        max_num_batched_tokens=512,
        kv=KvCache(model, budget=budget),
        clock=clock,
        meter=SecondsMeter(clock, cause="startup"),
    )


def fill(core: EngineCore, rows: int, *, siblings: int) -> None:
    """Start `rows` rollouts in groups and take them past their prompts."""
    numbers, now_s = np.random.default_rng(rows), SystemClock().now_s()
    for group in range(rows // siblings):
        ids = numbers.integers(100, 40_000, PROMPT_TOKENS).astype(np.int32)
        for member in range(siblings):
            request = GenerateRequest(
                request_id=f"{group}-{member}",
                prompt_ids=ids,
                sampling=SamplingParams(max_new_tokens=64, seed=group * siblings + member),
                group_key=f"group-{group}",
                deadline_s=3600.0,
            )
            core.submit(Sequence(request, max_model_len=128, now_s=now_s, deliver=lambda turn: None))
    while core.waiting:
        core.step()
    core.step()
    if len(core.running) != rows:
        raise RuntimeError(f"{len(core.running)} of {rows} rollouts run: slots or deadlines do not fit the benchmark")


def tokens_per_cpu_s(core: EngineCore, rows: int, *, siblings: int) -> float:
    """Return new tokens per CPU-second of decode steps."""
    fill(core, rows, siblings=siblings)
    started = time.process_time()
    for _ in range(STEPS):
        core.step()
    seconds = time.process_time() - started
    core.abort_all()
    return rows * STEPS / seconds


def parts(core: EngineCore, rows: int, *, siblings: int) -> dict[str, float]:
    """Return milliseconds of a step by part."""
    fill(core, rows, siblings=siblings)
    started = time.process_time()
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        for _ in range(STEPS):
            core.step()
    total = (time.process_time() - started) * 1e3 / STEPS
    core.abort_all()
    own = {event.key: event.self_cpu_time_total / 1e3 / STEPS for event in seen.key_averages()}
    found = {part: float(sum(own.get(name, 0.0) for name in names)) for part, names in PARTS.items()}
    operators = sum(own.values())
    found["norms, rotary, activations"] = operators - sum(found.values())
    found["Python and the profiler"] = max(0.0, total - operators)
    return {part: round(milliseconds, 1) for part, milliseconds in found.items()}


def name_the_kernels() -> None:
    """Make the compiled functions visible to torch's profiler, which sees only its own operators."""
    for name in ("linear", "linear_bfloat16", "attend", "write", "norm", "gated", "block_sums"):
        plain = getattr(Kernels, name)

        @functools.wraps(plain)
        def named(*args: Any, _plain: Any = plain, _name: str = name, **keywords: Any) -> Any:
            with record_function(f"native {_name}"):
                return _plain(*args, **keywords)

        setattr(Kernels, name, named)


def main() -> None:
    """Measure and merge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[8, 16, 32, 48, 64])
    parser.add_argument("--kernels", nargs="+", default=["torch", "auto"], choices=["torch", "auto", "native"])
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--out", type=Path, default=HERE / "profile.json")
    args = parser.parse_args()
    torch.set_num_threads(1)
    path = Path(prepare(MODEL).path)
    dtype = getattr(torch, args.dtype)
    cores = {kernels: new_core(kernels, path=path, slots=max(args.rows), dtype=dtype) for kernels in args.kernels}
    result = json.loads(args.out.read_text()) if args.out.exists() else {}
    rates: dict[tuple[str, int], list[float]] = {}
    for rows in args.rows:
        for _ in range(REPEATS):
            for kernels, core in cores.items():
                rates.setdefault((kernels, rows), []).append(tokens_per_cpu_s(core, rows, siblings=args.group))
    name_the_kernels()
    for rows in args.rows:
        for kernels, core in cores.items():
            entry = {
                "tokens_per_cpu_s": round(statistics.median(rates[kernels, rows]), 1),
                "step_ms_by_part": parts(core, rows, siblings=args.group),
                "load_average": os.getloadavg()[0],
            }
            result[f"{args.dtype}-{kernels}-{rows}-in-{args.group}"] = entry
            print(kernels, rows, json.dumps(entry), flush=True)
            args.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
