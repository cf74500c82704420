"""Builders of rollouts, groups, configurations and tiny models for tests of the trainer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from rollmill.algorithms.grouping import close_group
from rollmill.config.schema import AlgorithmSettings, RollmillConfig
from rollmill.types import (
    Group,
    Outcome,
    Rollout,
    SamplingParams,
    Scored,
    StopReason,
    Task,
    Turn,
    VersionSpan,
)

VOCABULARY = 53


def tiny_model(kind: str = "llama", *, seed: int = 0) -> PreTrainedModel:
    """A randomly initialised model with grouped key-value heads; Llama's embeddings are tied."""
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 256,
        # large enough that positions and attention matter to the log-probs
        "initializer_range": 0.3,
    }
    torch.manual_seed(seed)
    if kind == "llama":
        return LlamaForCausalLM(LlamaConfig(tie_word_embeddings=True, **sizes))
    if kind == "qwen2":
        return Qwen2ForCausalLM(Qwen2Config(tie_word_embeddings=False, **sizes))
    return Qwen3ForCausalLM(Qwen3Config(tie_word_embeddings=False, head_dim=16, **sizes))


def config(**sections: dict[str, Any]) -> RollmillConfig:
    """The default configuration in float32 with these sections' fields changed: `config(trainer={"threads": 1})`."""
    base = RollmillConfig()
    sections = {**sections, "trainer": {"dtype": "float32", "warmup_steps": 0, **sections.get("trainer", {})}}
    changed = {name: getattr(base, name).model_copy(update=fields) for name, fields in sections.items()}
    return base.model_copy(update=changed)


def scored(reward: float) -> Scored:
    return Scored(raw_reward=reward, shaped_reward=reward)


def turn(
    prompt: Sequence[int],
    output: Sequence[int],
    *,
    logprobs: Sequence[float] | None = None,
    spans: tuple[VersionSpan, ...] | None = None,
) -> Turn:
    n = len(output)
    return Turn(
        request_id="r",
        prompt_ids=np.asarray(prompt, dtype=np.int32),
        output_ids=np.asarray(output, dtype=np.int32),
        behavior_logprobs=np.full(n, -4.0, dtype=np.float32) if logprobs is None else np.float32(logprobs),
        version_spans=((VersionSpan(0, n, 1),) if n else ()) if spans is None else spans,
        stop_reason=StopReason.STOP,
    )


def rollout(
    group_id: str, sibling: int, *turns: Turn, outcome: Outcome | None = None, temperature: float = 1.0
) -> Rollout:
    return Rollout(
        rollout_id=f"{group_id}/{sibling}.1",
        group_id=group_id,
        sibling=sibling,
        attempt=1,
        task=Task(task_id="t", environment="scripted", messages=()),
        turns=turns,
        outcome=scored(float(sibling % 2)) if outcome is None else outcome,
        sampling=SamplingParams(temperature=temperature),
        started_at_s=0.0,
        finished_at_s=1.0,
    )


def closed(group_id: str, rollouts: Sequence[Rollout], *, optimizer_step: int = 0, advantage: str = "grpo") -> Group:
    return close_group(
        group_id,
        0,
        rollouts,
        settings=AlgorithmSettings(advantage=advantage),  # type: ignore[arg-type]
        optimizer_step_of=lambda _: optimizer_step,
    )


def random_groups(
    *, groups: int = 2, siblings: int = 4, seed: int = 0, temperature: float = 1.0, optimizer_step: int = 0
) -> list[Group]:
    """Groups whose prompts begin alike, with uneven lengths; completions from 1 token up."""
    rng = np.random.default_rng(seed)
    result = []
    for g in range(groups):
        prompt = np.concatenate([[3, 1, 4], rng.integers(0, VOCABULARY, 2 + 4 * g)])
        members = [
            rollout(
                f"g{g}",
                i,
                turn(prompt, rng.integers(0, VOCABULARY, 1 + (3 * i + g) % 7), spans=None),
                temperature=temperature,
            )
            for i in range(siblings)
        ]
        result.append(closed(f"g{g}", members, optimizer_step=optimizer_step))
    return result


def padded_logprobs(model: PreTrainedModel, member: Rollout) -> torch.Tensor:
    """The plain way: one row for one rollout, transformers' own attention, the whole head. Single turn."""
    (only,) = member.turns
    ids = torch.from_numpy(np.concatenate([only.prompt_ids, only.output_ids]).astype(np.int64)).unsqueeze(0)
    logits = model(input_ids=ids, use_cache=False).logits[0, len(only.prompt_ids) - 1 : -1].float()
    logprobs = torch.log_softmax(logits / member.sampling.temperature, dim=-1)
    return logprobs.gather(1, ids[0, len(only.prompt_ids) :, None]).squeeze(1)
