"""A small language model that adds a little: made from a seed and taught by examples, in a minute on one core.

It is a Llama with characters as tokens. Prompts are `07+35=`, answers `042` and an end token. Teaching stops as soon as
held-out accuracy passes a threshold, so that reinforcement learning has something to gain and something to lose.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rollmill.weights import tiny_llama

LARGEST = 99
HELD_OUT = 512
TAUGHT_ACCURACY = 0.3
END = 2
HIDDEN, LAYERS, HEADS, INTERMEDIATE = 64, 2, 4, 192
BATCH, LEARNING_RATE, CHECK_EVERY, MOST_STEPS = 128, 3e-3, 10, 3000
# The tokenizer's template for chats would add 30 characters to a prompt of 6.
TEMPLATE = "{% for message in messages %}{{ message['content'] }}={% endfor %}"

Problem = tuple[int, int]


def problems(seed: int) -> tuple[list[Problem], list[Problem]]:
    """Return (training, held-out) problems: all pairs of numbers up to `LARGEST`, split at random."""
    pairs = [(a, b) for a in range(LARGEST + 1) for b in range(LARGEST + 1)]
    order = np.random.default_rng(seed).permutation(len(pairs))
    shuffled = [pairs[index] for index in order]
    return shuffled[HELD_OUT:], shuffled[:HELD_OUT]


def question(problem: Problem) -> str:
    """Return the text that the model sees, without the equals sign of the template."""
    return f"{problem[0]:02d}+{problem[1]:02d}"


def answer(problem: Problem) -> str:
    """Return the right answer."""
    return f"{sum(problem):03d}"


def make(folder: Path, *, seed: int) -> float:
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
    accuracy = _teach(model, training, held_out, seed=seed)
    model.save_pretrained(folder)
    return accuracy


def _teach(model: LlamaForCausalLM, training: list[Problem], held_out: list[Problem], *, seed: int) -> float:
    generator = np.random.default_rng(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0, fused=True)
    for step in range(1, MOST_STEPS + 1):
        chosen = [training[index] for index in generator.integers(len(training), size=BATCH)]
        ids, labels = _rows(chosen)
        loss = model(input_ids=ids, labels=labels).loss
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % CHECK_EVERY == 0:
            accuracy = _accuracy(model, held_out)
            if accuracy >= TAUGHT_ACCURACY:
                return accuracy
    raise RuntimeError(f"the model did not reach {TAUGHT_ACCURACY} in {MOST_STEPS} steps of teaching")


def _rows(chosen: list[Problem]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (ids, labels), all of one length; only answers are taught."""
    texts = [(f"{question(problem)}=", answer(problem)) for problem in chosen]
    ids = torch.tensor([[*map(ord, prompt + reply), END] for prompt, reply in texts])
    labels = ids.clone()
    labels[:, : len(texts[0][0])] = -100
    return ids, labels


@torch.no_grad()
def _accuracy(model: LlamaForCausalLM, held_out: list[Problem]) -> float:
    """Return the share of problems whose answer is the likeliest at every character."""
    ids, labels = _rows(held_out)
    predicted = model(input_ids=ids).logits[:, :-1].argmax(dim=-1)
    wanted = labels[:, 1:]
    return float(((predicted == wanted) | (wanted == -100)).all(dim=1).float().mean())
