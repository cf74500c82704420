"""Trains with TRL's GRPOTrainer what a work file says; runs in TRL's own environment, without Rollmill.

    python trl_worker.py work.json

Speaks JSON lines on stdout: `begin`, one `step` for each optimizer step, `saved` for weights that wait to be
evaluated, `end`. After `saved` it waits for a line on stdin, `go` or `stop`. Its clock and its CPU count stand still
from the moment a step has ended until that answer, so that saving and evaluating cost TRL nothing.
"""

from __future__ import annotations

import json
import os
import re
import resource
import sys
import time
from pathlib import Path
from typing import Any

import datasets  # pyright: ignore[reportMissingImports] - only in TRL's own environment
import torch
import transformers
import trl  # pyright: ignore[reportMissingImports]
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports]

INTEGER = re.compile(r"-?\d+")


class StoppableClock:
    """Wall and CPU seconds of this process, without the stretches in which it was stopped."""

    def __init__(self) -> None:
        self._wall_s = self._cpu_s = 0.0
        self._since: tuple[float, float] | None = None

    def go(self) -> None:
        self._since = _now()

    def stop(self) -> None:
        self._wall_s, self._cpu_s = self.read()
        self._since = None

    def read(self) -> tuple[float, float]:
        if self._since is None:
            return self._wall_s, self._cpu_s
        wall_s, cpu_s = _now()
        return self._wall_s + wall_s - self._since[0], self._cpu_s + cpu_s - self._since[1]


def _now() -> tuple[float, float]:
    usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return time.monotonic(), sum(one.ru_utime + one.ru_stime for one in usage)


class Reward:
    """Last integer right or wrong, and the soft penalty on length; keeps what it saw for the record."""

    def __init__(self, work: dict[str, Any]) -> None:
        self._work = work
        self.seen: list[tuple[float, int]] = []

    def __call__(self, completions: list[Any], answer: list[str], completion_ids: list[Any], **_: Any) -> list[float]:
        rewards: list[float] = []
        for completion, expected, ids in zip(completions, answer, completion_ids, strict=True):
            found = INTEGER.findall(completion[0]["content"])
            raw = float(bool(found) and found[-1] == expected)
            self.seen.append((raw, len(ids)))
            rewards.append(raw + self._penalty(len(ids)))
        return rewards

    def _penalty(self, tokens: int) -> float:
        buffer = self._work["overlong_buffer_tokens"]
        if not buffer:
            return 0.0
        excess = (tokens - (self._work["max_new_tokens"] - buffer)) / buffer
        return -self._work["overlong_penalty"] * min(max(excess, 0.0), 1.0)

    def take(self, *, group_size: int) -> dict[str, float]:
        """Return the figures of the rollouts since the last call, and forget them."""
        seen, self.seen = self.seen, []
        groups = [seen[at : at + group_size] for at in range(0, len(seen), group_size)]
        return {
            "reward_mean": sum(raw for raw, _ in seen) / len(seen),
            "mean_tokens": sum(tokens for _, tokens in seen) / len(seen),
            "groups": len(groups),
            "groups_without_signal": sum(len({raw for raw, _ in group}) == 1 for group in groups),
        }


class Reporter(TrainerCallback):
    """Stops the clock, reports a step, hands weights over, and starts the clock again."""

    def __init__(self, work: dict[str, Any], *, reward: Reward, clock: StoppableClock, say: Any) -> None:
        self._work, self._reward, self._clock, self._say = work, reward, clock, say

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._say({"event": "begin", "versions": _versions(), "threads": torch.get_num_threads()})
        self._clock.go()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._clock.stop()
        wall_s, cpu_s = self._clock.read()
        step = state.global_step
        figures = self._reward.take(group_size=self._work["group_size"])
        self._say({"event": "step", "step": step, "wall_s": wall_s, "cpu_s": cpu_s, **figures})
        if self._work["save_every"] and step % self._work["save_every"] == 0:
            path = Path(self._work["weights_folder"]) / f"step-{step:04d}.safetensors"
            save_file({name: p.detach() for name, p in kwargs["model"].named_parameters()}, path)
            self._say({"event": "saved", "step": step, "path": str(path)})
            if sys.stdin.readline().strip() != "go":
                control.should_training_stop = True
        self._clock.go()


def _versions() -> dict[str, str]:
    return {"trl": trl.__version__, "transformers": transformers.__version__, "torch": torch.__version__}


def _config(work: dict[str, Any]) -> GRPOConfig:
    rollouts = work["prompts_per_step"] * work["group_size"]
    return GRPOConfig(
        output_dir=work["scratch_folder"],
        use_cpu=True,
        seed=work["seed"],
        max_steps=work["steps"],
        report_to="none",
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        shuffle_dataset=False,
        # one generation of all rollouts per step, then forward and backward in micro-batches
        per_device_train_batch_size=work["micro_batch"],
        gradient_accumulation_steps=rollouts // work["micro_batch"],
        num_generations=work["group_size"],
        max_completion_length=work["max_new_tokens"],
        temperature=work["temperature"],
        top_p=1.0,
        top_k=0,
        beta=0.0,
        num_iterations=1,
        epsilon=work["clip_low"],
        epsilon_high=work["clip_high"],
        loss_type="dapo",
        scale_rewards="group",
        max_grad_norm=work["max_grad_norm"],
        learning_rate=work["learning_rate"],
        bf16=work["dtype"] == "bfloat16",
        gradient_checkpointing=False,
        use_transformers_continuous_batching=work["continuous_batching"],
    )


def main() -> None:
    # Whatever the libraries print must not get between the JSON lines.
    lines = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(record: dict[str, Any]) -> None:
        lines.write(json.dumps(record) + "\n")
        lines.flush()

    work = json.loads(Path(sys.argv[1]).read_text())
    tokenizer = AutoTokenizer.from_pretrained(work["model"], padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(work["model"], dtype=torch.float32)
    assert model.generation_config is not None
    model.generation_config.eos_token_id = work["stop_token_ids"]
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=work["learning_rate"],
        betas=tuple(work["betas"]),
        eps=work["eps"],
        weight_decay=work["weight_decay"],
        fused=True,
    )
    warmup = max(work["warmup_steps"], 1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / warmup))
    reward, clock = Reward(work), StoppableClock()
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=_config(work),
        train_dataset=datasets.Dataset.from_list(work["problems"]),
        processing_class=tokenizer,
        callbacks=[Reporter(work, reward=reward, clock=clock, say=say)],
        optimizers=(optimizer, schedule),
    )
    trainer.train()
    clock.stop()
    wall_s, cpu_s = clock.read()
    say({"event": "end", "wall_s": wall_s, "cpu_s": cpu_s})


if __name__ == "__main__":
    main()
