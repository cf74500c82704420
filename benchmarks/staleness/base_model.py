"""A small language model that knows how to add and says so too rarely: made from a seed, in a minute on one core.

It is a Llama with characters as tokens. Prompts are `07+35=`, answers `240` and an end token: digits from the units up,
which is how a small model learns to carry. It is taught right answers until it knows them, then answers that are mostly
random numbers until it gives the right one in about three of ten samples. So most groups of rollouts hold right and
wrong answers, and reinforcement learning has something to gain and something to lose.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rollmill.weights import tiny_llama

LARGEST = 99
HELD_OUT = 512
KNOWN, TAUGHT_ACCURACY = 0.97, 0.3
NOISE = 0.8  # share of random answers in the second part
END = 2
ANSWER_TOKENS = 4  # three digits and the end
HIDDEN, LAYERS, HEADS, INTERMEDIATE = 64, 2, 4, 192
BATCH, LEARNING_RATE, NOISE_LEARNING_RATE = 128, 3e-3, 3e-4
CHECK_EVERY, NOISE_CHECK_EVERY, MOST_STEPS = 25, 2, 3000
# The tokenizer's template for chats would add 30 characters to a prompt of 6.
TEMPLATE = "{% for message in messages %}{{ message['content'] }}={% endfor %}"

Problem = tuple[int, int]
Sampled = tuple[np.ndarray, np.ndarray]


def problems(seed: int) -> tuple[list[Problem], list[Problem]]:
    """Return (training, held-out) problems: all pairs of numbers up to `LARGEST`, split at random."""
    pairs = [(a, b) for a in range(LARGEST + 1) for b in range(LARGEST + 1)]
    order = np.random.default_rng(seed).permutation(len(pairs))
    shuffled = [pairs[index] for index in order]
    return shuffled[HELD_OUT:], shuffled[:HELD_OUT]


def question(problem: Problem) -> str:
    """Return the text that the model sees, without the equals sign of the template."""
    return f"{problem[0]:02d}+{problem[1]:02d}"


def spelled(number: int) -> str:
    """Return a number as the model writes it: three digits, units first."""
    return f"{number:03d}"[::-1]


def answer(problem: Problem) -> str:
    """Return the right answer."""
    return spelled(sum(problem))


def make(folder: Path, *, seed: int) -> dict[str, float]:
    """Write the taught model into a folder; return its held-out accuracy."""
    folder.mkdir(parents=True, exist_ok=True)
    tiny_llama.make(folder)  # for its tokenizer; model and template are replaced
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    torch.manual_seed(seed)
    settings = json.loads((folder / "config.json").read_text())
    sizes = {
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "head_dim": HIDDEN // HEADS,
        "intermediate_size": INTERMEDIATE,
    }
    model = LlamaForCausalLM(LlamaConfig(**{**settings, **sizes}))
    training, held_out = problems(seed)
    _teach_to_know(model, training, held_out, seed=seed)
    found = _teach_to_doubt(model, training, held_out, seed=seed)
    model.save_pretrained(folder)
    return found


@torch.no_grad()
def accuracy(model: LlamaForCausalLM, asked: list[Problem]) -> dict[str, float]:
    """Return the mean probability of the right answer, and the share of problems whose greedy answer is right.

    The first is what sampling at temperature 1 gives on average, without the noise of a sample.
    """
    ids, labels = _rows(asked, [answer(problem) for problem in asked])
    taught = labels[:, 1:] != -100
    logprobs = model(input_ids=ids).logits[:, :-1].log_softmax(dim=-1)
    chosen = logprobs.gather(-1, ids[:, 1:, None])[..., 0]
    greedy = ((logprobs.argmax(dim=-1) == ids[:, 1:]) | ~taught).all(dim=1)
    return {
        "accuracy": float(torch.where(taught, chosen, 0.0).sum(dim=1).exp().mean()),
        "greedy": float(greedy.float().mean()),
    }


@torch.no_grad()
def sample(model: LlamaForCausalLM, asked: list[Problem], *, generator: torch.Generator) -> list[Sampled]:
    """Return for each problem the (ids, log-probs) of an answer sampled at temperature 1, up to its end token."""
    ids = torch.tensor([list(map(ord, f"{question(problem)}=")) for problem in asked])
    prompt = ids.shape[1]
    scored: list[torch.Tensor] = []
    for _ in range(ANSWER_TOKENS):
        logprobs = model(input_ids=ids, use_cache=False, logits_to_keep=1).logits[:, -1].log_softmax(dim=-1)
        chosen = torch.multinomial(logprobs.exp(), 1, generator=generator)
        scored.append(logprobs.gather(1, chosen))
        ids = torch.cat([ids, chosen], dim=1)
    found: list[Sampled] = []
    for row, row_scored in zip(ids[:, prompt:].numpy(), torch.cat(scored, dim=1).numpy(), strict=True):
        ends = np.flatnonzero(row == END)
        length = int(ends[0]) + 1 if len(ends) else ANSWER_TOKENS
        found.append((row[:length].astype(np.int32), row_scored[:length]))
    return found


def _teach_to_know(
    model: LlamaForCausalLM, training: list[Problem], held_out: list[Problem], *, seed: int
) -> dict[str, float]:
    for step in _teach(model, training, learning_rate=LEARNING_RATE, noise=0.0, seed=seed):
        if step % CHECK_EVERY == 0 and (found := accuracy(model, held_out))["greedy"] >= KNOWN:
            return found
    raise RuntimeError(f"the model did not reach a greedy accuracy of {KNOWN} in {MOST_STEPS} steps of teaching")


def _teach_to_doubt(
    model: LlamaForCausalLM, training: list[Problem], held_out: list[Problem], *, seed: int
) -> dict[str, float]:
    for step in _teach(model, training, learning_rate=NOISE_LEARNING_RATE, noise=NOISE, seed=seed + 1):
        if step % NOISE_CHECK_EVERY == 0 and (found := accuracy(model, held_out))["accuracy"] <= TAUGHT_ACCURACY:
            return found
    raise RuntimeError(f"the model did not fall to an accuracy of {TAUGHT_ACCURACY} in {MOST_STEPS} steps of noise")


def _teach(
    model: LlamaForCausalLM, training: list[Problem], *, learning_rate: float, noise: float, seed: int
) -> Iterator[int]:
    """Teach, and yield the number of steps made after each."""
    generator = np.random.default_rng(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.0, fused=True)
    for step in range(1, MOST_STEPS + 1):
        chosen = [training[index] for index in generator.integers(len(training), size=BATCH)]
        random = zip(generator.random(BATCH) < noise, generator.integers(2 * LARGEST + 1, size=BATCH), strict=True)
        replies = [
            spelled(number) if wrong else answer(problem)
            for problem, (wrong, number) in zip(chosen, random, strict=True)
        ]
        ids, labels = _rows(chosen, replies)
        loss = model(input_ids=ids, labels=labels).loss
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        yield step


def _rows(chosen: list[Problem], replies: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (ids, labels), all of one length; only answers are taught."""
    prompts = [f"{question(problem)}=" for problem in chosen]
    ids = torch.tensor([[*map(ord, prompt + reply), END] for prompt, reply in zip(prompts, replies, strict=True)])
    labels = ids.clone()
    labels[:, : len(prompts[0])] = -100
    return ids, labels
