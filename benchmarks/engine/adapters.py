"""What adapters beside the base cost: tokens per CPU-second with requests of 0, 1, ... adapters in one batch.

    python benchmarks/engine/adapters.py --model smollm2-135m-instruct --adapters 0 1 4

One thread, float32, groups of siblings as in a rollout; a group asks for one adapter, groups take adapters in turn. The
matrices are random: what they cost does not depend on their numbers. The engine is one and the same for all rows, so
that places for adapters that nobody asks for are in each of them. Medians of the ratios of each turn.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rollmill.clock import SystemClock
from rollmill.config.schema import GeneratorSettings, TrainerSettings
from rollmill.generator.engines.embedded.engine import EmbeddedEngine
from rollmill.generator.main import build_engine
from rollmill.types import Adapter, GenerateRequest, SamplingParams
from rollmill.weights.fixed import FixedModel
from rollmill.weights.prepare import prepare

HERE = Path(__file__).parent
TARGETS = TrainerSettings().lora_targets


def pairs_for(weights: dict[str, torch.Tensor], *, rank: int, seed: int) -> dict[str, torch.Tensor]:
    """Return an adapter of every linear layer that a trainer adapts unless told otherwise."""
    numbers, out = torch.Generator().manual_seed(seed), {}
    for name, weight in weights.items():
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] in TARGETS:
            out[f"{module}.lora_A.weight"] = 0.01 * torch.randn(rank, weight.shape[1], generator=numbers)
            out[f"{module}.lora_B.weight"] = 0.01 * torch.randn(weight.shape[0], rank, generator=numbers)
    return out


async def load_all(engine: EmbeddedEngine, weights: dict[str, torch.Tensor], *, count: int, rank: int) -> None:
    """Load adapters `0`, `1`, ..."""
    desk = engine.adapters
    assert desk is not None
    for number in range(count):
        settings = Adapter(base_digest=engine.info().digest, rank=rank, alpha=float(rank))
        name, digest = str(number), f"random-{number}"
        pairs = pairs_for(weights, rank=rank, seed=number)
        await desk.stage(pairs, name=name, settings=settings, policy_version=1, digest=digest)
        await desk.serve(name, policy_version=1, kv="keep")


async def turn(engine: EmbeddedEngine, *, adapters: int, seed: int, args: argparse.Namespace) -> float:
    """Return tokens per CPU-second of all groups at once."""
    numbers = np.random.default_rng(seed)
    requests = []
    for group in range(args.groups):
        prompt = numbers.integers(0, engine.info().vocabulary_size, args.prompt_tokens).astype(np.int32)
        requests += [
            GenerateRequest(
                request_id=f"{seed}-{adapters}-{group}-{n}",
                prompt_ids=prompt,
                group_key=f"{seed}-{group}",
                adapter=str(group % adapters) if adapters else "",
                sampling=SamplingParams(max_new_tokens=args.new_tokens, seed=1000 * group + n),
                deadline_s=600.0,
            )
            for n in range(args.siblings)
        ]
    started_s = time.process_time()
    turns = await asyncio.gather(*(engine.generate(request) for request in requests))
    return sum(len(one.output_ids) for one in turns) / (time.process_time() - started_s)


async def measure(path: Path, *, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return for each number of adapters the rate, and its ratio to that of the base alone."""
    repository = FixedModel(path, at_s=0.0)
    weights = dict(repository.load(1))
    engine = build_engine(
        path,
        settings=GeneratorSettings(
            dtype="float32",
            max_num_seqs=args.groups * args.siblings,
            max_model_len=args.prompt_tokens + args.new_tokens,
            max_loras=max(args.adapters),
            max_lora_rank=args.rank,
            stage_weights=False,
        ),
        tensors=weights,
        policy_version=1,
        digest=repository.manifest(1).digest,
        clock=SystemClock(),
    )
    assert isinstance(engine, EmbeddedEngine)
    await load_all(engine, weights, count=max(args.adapters), rank=args.rank)
    rates: dict[int, list[float]] = {count: [] for count in args.adapters}
    for repeat in range(args.repeats + 1):
        for count in args.adapters:
            rate = await turn(engine, adapters=count, seed=repeat, args=args)
            if repeat:  # the first one warms up
                rates[count].append(rate)
    await engine.close()
    base = rates[args.adapters[0]]
    return [
        {
            "adapters": count,
            "tokens_per_cpu_s": statistics.median(found),
            "ratio": statistics.median(a / b for a, b in zip(found, base, strict=True)),
        }
        for count, found in rates.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument(
        "--adapters", type=int, nargs="+", default=[0, 1, 4], help="the first is what others are held to"
    )
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument("--siblings", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=HERE / "adapters.json")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = asyncio.run(measure(prepare(args.model).path, args=args))
    for row in rows:
        print(json.dumps(row), flush=True)
    arguments = {name: value for name, value in vars(args).items() if name != "out"}
    args.out.write_text(json.dumps({"arguments": arguments, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
