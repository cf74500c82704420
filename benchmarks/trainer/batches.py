"""Batches of a stated shape, and what they cost: random tokens train as slowly as any others."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from rollmill.algorithms.grouping import close_group
from rollmill.config.schema import AlgorithmSettings
from rollmill.types import Group, Rollout, SamplingParams, Scored, StopReason, Task, Turn, VersionSpan


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """Groups of siblings; answers have a uniform length between `shortest` and `longest` tokens, both included."""

    groups: int
    siblings: int
    system_tokens: int
    prompt_tokens: int
    shortest: int
    longest: int


SHAPES = {
    "main_job": Shape(groups=4, siblings=8, system_tokens=20, prompt_tokens=45, shortest=8, longest=24),
    "long": Shape(groups=8, siblings=8, system_tokens=20, prompt_tokens=84, shortest=64, longest=64),
    "one_group": Shape(groups=1, siblings=8, system_tokens=0, prompt_tokens=45, shortest=8, longest=24),
}


def groups_of(shape: Shape, *, vocabulary: int, seed: int = 0) -> list[Group]:
    """Return closed groups with signal; all prompts begin with the same system prompt."""
    rng = np.random.default_rng(seed)
    system = rng.integers(0, vocabulary, shape.system_tokens)
    groups: list[Group] = []
    for number in range(shape.groups):
        prompt = np.concatenate([system, rng.integers(0, vocabulary, shape.prompt_tokens - shape.system_tokens)])
        members = [
            _rollout(
                f"g{number}",
                sibling,
                prompt=prompt,
                output=rng.integers(0, vocabulary, int(rng.integers(shape.shortest, shape.longest + 1))),
            )
            for sibling in range(shape.siblings)
        ]
        groups.append(close_group(f"g{number}", number, members, settings=AlgorithmSettings(), optimizer_step_of=_zero))
    return groups


def _rollout(group_id: str, sibling: int, *, prompt: np.ndarray, output: np.ndarray) -> Rollout:
    turn = Turn(
        request_id="r",
        prompt_ids=prompt.astype(np.int32),
        output_ids=output.astype(np.int32),
        behavior_logprobs=np.full(len(output), -10.0, dtype=np.float32),
        version_spans=(VersionSpan(0, len(output), 1),),
        stop_reason=StopReason.STOP,
    )
    reward = float(sibling % 2)
    return Rollout(
        rollout_id=f"{group_id}/{sibling}.1",
        group_id=group_id,
        sibling=sibling,
        attempt=1,
        task=Task(task_id="t", environment="random", messages=()),
        turns=(turn,),
        outcome=Scored(raw_reward=reward, shaped_reward=reward),
        sampling=SamplingParams(),
        started_at_s=0.0,
        finished_at_s=1.0,
    )


def _zero(_: int) -> int:
    return 0


PARTS = {
    "attention": ("scaled_dot_product",),
    "AdamW": ("_fused_adamw",),
    "gradient norm and clip": ("linalg_vector_norm", "_foreach", "clamp", "stack"),
    "lookups (embedding, packing)": ("embedding", "index_select", "gather", "scatter"),
    "softmax of the head": ("exp", "amax", "log"),
    "filling, copying, joining": ("fill_", "copy_", "cat", "zero_", "clone"),
    "element by element (norms, SwiGLU, rotation, sums)": (
        *("mul", "add", "silu", "sub", "div", "pow", "rsqrt", "mean", "sum", "neg", "cos", "sin", "where"),
        *("isfinite", "minimum", "lt", "eq", "ne"),
    ),
}
"""Part -> beginnings of the names of its operations, without `aten::`; products are told apart by their shapes."""


def part_of(name: str, shapes: Any, *, vocabulary: int) -> str:
    """Return the part of a step that an operation of the profiler belongs to."""
    name = name.removeprefix("aten::")
    if name in ("mm", "addmm", "bmm", "matmul"):
        sizes = {size for shape in shapes for size in shape if isinstance(size, int)}
        return "products of the head" if vocabulary in sizes else "products of the body"
    for part, beginnings in PARTS.items():
        if name.lstrip("_").startswith(beginnings) or name.startswith(beginnings):
            return part
    return "Python and autograd"
