"""A draft for a model that has no small sibling: some of its own layers, taught on its own samples.

    python benchmarks/engine/make_draft.py --model smollm2-135m-instruct --layers 2 --out DIR
    python benchmarks/engine/speculation.py --model smollm2-135m-instruct --draft DIR

The draft keeps the embedding, the head, the first layers and the last one, so its tokens are the model's. The model
answers questions like those of the benchmark, never the same ones; the draft learns its distribution over them. What is
printed is the overlap, the sum over tokens of the smaller of both probabilities: the share of guesses that rejection
accepts at temperature 1, measured on the benchmark's own questions. One thread; the time is what `--sample-s` and
`--train-s` say.

Reference: Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", arXiv 2211.17192, section 3.
"""

from __future__ import annotations

import argparse
import copy
import random
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM

from rollmill.environments.rendering import Renderer
from rollmill.types import Message
from rollmill.weights.prepare import prepare

WHO = ("A farmer", "A baker", "A driver", "A teacher", "Anna", "Omar", "Li", "Maria")
WHAT = ("apples", "loaves", "stamps", "bricks", "tickets", "litres of milk")
HOW = (
    "{who} has {a} {what} and gets {b} more each day. How many {what} are there after {c} days? Think step by step.",
    "{who} sells {b} {what} an hour. How many hours does it take to sell {a} {what}? Think step by step.",
    "{who} shares {a} {what} among {c} people and keeps the rest. How many are kept? Think step by step.",
)
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")


def shortened(teacher: Any, *, layers: int) -> Any:
    """Return the first layers of a model and its last one, with embedding, norm and head."""
    count = teacher.config.num_hidden_layers
    kept = [*range(layers - 1), count - 1]
    config = copy.deepcopy(teacher.config)
    config.num_hidden_layers = layers
    if getattr(config, "layer_types", None):
        config.layer_types = [config.layer_types[layer] for layer in kept]
    draft = type(teacher)(config)
    weights = {}
    for name, tensor in teacher.state_dict().items():
        parts = name.split(".")
        at = next((place for place, part in enumerate(parts) if part.isdigit()), None)
        if at is not None:
            if int(parts[at]) not in kept:
                continue
            parts[at] = str(kept.index(int(parts[at])))
        weights[".".join(parts)] = tensor.clone()
    draft.load_state_dict(weights)
    return draft


def questions(seed: int) -> Iterator[str]:
    """Yield questions without end."""
    numbers = random.Random(seed)
    while True:
        a, b, c = numbers.randint(20, 400), numbers.randint(2, 20), numbers.randint(2, 12)
        yield numbers.choice(HOW).format(who=numbers.choice(WHO), what=numbers.choice(WHAT), a=a, b=b, c=c)


@torch.no_grad()
def answers(teacher: Any, prompt: Sequence[int], *, count: int, new_tokens: int) -> torch.Tensor:
    """Return int64 [count, tokens]: a prompt with answers drawn from the model itself."""
    ids = torch.tensor([list(prompt)] * count)
    return teacher.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=new_tokens,
        min_new_tokens=new_tokens,
        pad_token_id=0,
    )


@torch.no_grad()
def overlap(teacher: Any, draft: Any, sequences: Sequence[torch.Tensor]) -> float:
    """Return the mean over positions of sum(min(p, q)): how many guesses would be accepted."""
    shares = [
        torch.minimum(teacher(ids).logits.softmax(-1), draft(ids).logits.softmax(-1)).sum(-1).mean()
        for ids in sequences
    ]
    return float(torch.stack(shares).mean())


def teach(
    teacher: Any, draft: Any, sequences: Sequence[torch.Tensor], *, go_on: Callable[[], bool], learning_rate: float
) -> int:
    """Move the draft's distribution to the model's, again and again over the same samples; return the steps."""
    optimizer = torch.optim.AdamW(draft.parameters(), lr=learning_rate, betas=(0.9, 0.99), weight_decay=0.0)
    steps = 0
    while go_on():
        ids = sequences[steps % len(sequences)]
        with torch.no_grad():
            wanted = teacher(ids).logits.log_softmax(-1)
        found = draft(ids).logits.log_softmax(-1)
        loss = functional.kl_div(found.flatten(0, 1), wanted.flatten(0, 1), reduction="batchmean", log_target=True)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(draft.parameters(), 1.0)
        optimizer.step()
        steps += 1
    return steps


def save(draft: Any, folder: Path, *, like: Path) -> None:
    """Write the draft with the model's tokenizer."""
    draft.save_pretrained(folder)
    for name in TOKENIZER:
        if (like / name).exists():
            shutil.copyfile(like / name, folder / name)


def for_seconds(seconds: float) -> Callable[[], bool]:
    end_s = time.monotonic() + seconds
    return lambda: time.monotonic() < end_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--sample-s", type=float, default=300.0)
    parser.add_argument("--train-s", type=float, default=900.0)
    parser.add_argument("--answers", type=int, default=4, help="of each question")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--learning-rate", type=float, default=5e-4)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    from speculation import QUESTIONS

    torch.set_num_threads(1)
    torch.manual_seed(0)
    path = prepare(args.model).path
    teacher = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    draft, renderer = shortened(teacher, layers=args.layers), Renderer(path)

    def sampled(question: str) -> torch.Tensor:
        prompt = renderer.render((Message("user", question),))
        return answers(teacher, prompt, count=args.answers, new_tokens=args.new_tokens)

    held_out = [sampled(question) for question in QUESTIONS]
    print(f"overlap before: {overlap(teacher, draft, held_out):.3f}", flush=True)
    go_on, asked = for_seconds(args.sample_s), questions(seed=0)
    samples = [sampled(next(asked))]
    while go_on():
        samples.append(sampled(next(asked)))
    print(f"{len(samples) * args.answers} answers of {args.new_tokens} tokens", flush=True)
    go_on = for_seconds(args.train_s)
    steps = teach(teacher, draft, samples, go_on=go_on, learning_rate=args.learning_rate)
    print(f"overlap after {steps} steps: {overlap(teacher, draft, held_out):.3f}", flush=True)
    save(draft, args.out, like=path)


if __name__ == "__main__":
    main()
