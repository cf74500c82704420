"""What guessing gains: tokens per CPU-second with n-grams and with a draft model, over those without.

    python benchmarks/engine/speculation.py --model DIR --draft DIR
    python benchmarks/engine/speculation.py --model DIR                   # n-grams alone

Model and draft are names of `rollmill model list` or Hugging Face directories with the same tokens. One thread,
float32, prompts that are questions in words, siblings of one prompt as in a rollout of a group. The engines take turns,
so that other work on the machine meets all of them; medians of the ratios of each turn. The law decides by itself
whether a draft guesses: `guessed` says how much it did.
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
from rollmill.config.schema import GeneratorSettings
from rollmill.environments.rendering import Renderer
from rollmill.generator.engines.protocol import Engine
from rollmill.generator.main import build_engine
from rollmill.types import GenerateRequest, Message, SamplingParams
from rollmill.weights.fixed import FixedModel
from rollmill.weights.prepare import prepare

HERE = Path(__file__).parent
QUESTIONS = (
    "A farmer has 17 hens and buys 5 more each week. How many hens does he have after 6 weeks? Think step by step.",
    "Tom reads 12 pages a day. How many days does he need for a book of 300 pages? Think step by step.",
    "A train goes 80 km in one hour. How far does it go in two and a half hours? Think step by step.",
)


def engine_of(path: Path, *, args: argparse.Namespace, speculation: str) -> Engine:
    """Return an engine over the model's own weights."""
    repository = FixedModel(path, at_s=0.0)
    manifest = repository.manifest(1)
    settings = {"speculation": speculation, "stage_weights": False, "dtype": "float32"}
    settings |= {"max_num_seqs": max(args.in_flight), "max_model_len": 256 + args.new_tokens}
    if speculation == "draft":
        settings |= {"draft_model": args.draft, "draft_tokens": args.draft_tokens}
    return build_engine(
        path,
        settings=GeneratorSettings.model_validate(settings),
        tensors=repository.load(1),
        policy_version=1,
        digest=manifest.digest,
        clock=SystemClock(),
    )


async def turn(engine: Engine, *, prompt: np.ndarray, siblings: int, seed: int, args: argparse.Namespace) -> float:
    """Return tokens per CPU-second of one group."""
    requests = [
        GenerateRequest(
            request_id=f"{seed}-{n}",
            prompt_ids=prompt,
            group_key=str(seed),
            sampling=SamplingParams(temperature=args.temperature, max_new_tokens=args.new_tokens, seed=1000 * seed + n),
            deadline_s=600.0,
        )
        for n in range(siblings)
    ]
    started_s = time.process_time()
    turns = await asyncio.gather(*(engine.generate(request) for request in requests))
    return sum(len(one.output_ids) for one in turns) / (time.process_time() - started_s)


async def measure(path: Path, *, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return for each number of siblings what the kinds gain, and how many of their guesses counted."""
    kinds = ["off", "ngram", *(["draft"] if args.draft else [])]
    renderer, found = Renderer(path), []
    prompts = [np.array(renderer.render((Message("user", text),)), dtype=np.int32) for text in QUESTIONS]
    for siblings in args.in_flight:
        engines = {kind: engine_of(path, args=args, speculation=kind) for kind in kinds}
        rates: dict[str, list[float]] = {kind: [] for kind in kinds}
        for repeat in range(args.repeats + 1):
            prompt = prompts[repeat % len(prompts)]
            for kind, engine in engines.items():
                rate = await turn(engine, prompt=prompt, siblings=siblings, seed=repeat, args=args)
                if repeat:  # the first one warms up, and lets the law make its first trial
                    rates[kind].append(rate)
        row: dict[str, Any] = {"siblings": siblings, "tokens_per_cpu_s": statistics.median(rates["off"])}
        for kind in kinds[1:]:
            load = engines[kind].load()
            row[kind] = {
                "gain": statistics.median(a / b for a, b in zip(rates[kind], rates["off"], strict=True)),
                "guessed": load.guessed_tokens,
                "accepted_share": load.accepted_tokens / load.guessed_tokens if load.guessed_tokens else None,
                "tokens_per_pass": load.output_tokens / load.decode_passes,
            }
        for engine in engines.values():
            await engine.close()
        found.append(row)
        print(json.dumps(row), flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--draft", default=None)
    parser.add_argument("--draft-tokens", type=int, default=4)
    parser.add_argument("--in-flight", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=HERE / "speculation.json")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = asyncio.run(measure(prepare(args.model).path, args=args))
    arguments = {name: value for name, value in vars(args).items() if name != "out"}
    args.out.write_text(json.dumps({"arguments": arguments, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
