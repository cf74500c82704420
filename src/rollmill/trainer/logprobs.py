"""Log-probs of the loss tokens of a packed micro-batch.

Runs the unmodified model body over the packed row, then the head only where a loss token is predicted. Decides
nothing about the loss.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from rollmill.errors import ModelError
from rollmill.trainer.attention import ATTENTION_NAME, PackedLayout, plan_layout
from rollmill.trainer.head import head_logprobs
from rollmill.trainer.packing import MicroBatch, Segment


def prepare_model(model: PreTrainedModel) -> PreTrainedModel:
    """Switch a model to packed attention; dropout stays off, as it was when the rollouts were sampled.

    Raises:
        ModelError: if the model's head does more to its logits than a linear layer.
    """
    text = model.config.get_text_config()
    for name in ("final_logit_softcapping", "logit_scale", "logits_scaling"):
        if getattr(text, name, None) not in (None, 1.0):
            raise ModelError(
                f"{type(model).__name__} post-processes its logits ({name} = {getattr(text, name)}), which the trainer "
                "does not compute. Use a model with a plain linear head."
            )
    if not isinstance(model.get_output_embeddings(), torch.nn.Linear):
        raise ModelError(
            f"{type(model).__name__} has no linear head over its vocabulary, so it is not a causal language model that "
            "the trainer can score. Use a model of the AutoModelForCausalLM family."
        )
    model.set_attn_implementation(ATTENTION_NAME)
    return model.eval()


class PackedInput:
    """The tensors of a micro-batch, made once and used for every pass over it."""

    def __init__(self, batch: MicroBatch) -> None:
        self.batch = batch
        self.input_ids = torch.from_numpy(batch.input_ids).unsqueeze(0)
        self.position_ids = torch.from_numpy(batch.position_ids).unsqueeze(0)
        self.layout = plan_layout(batch.segments)
        self.source = torch.from_numpy(batch.source)
        self.targets = torch.from_numpy(batch.targets)
        self.temperature = torch.from_numpy(batch.temperature)
        self.behaviour = torch.from_numpy(batch.behaviour)
        self.advantages = torch.from_numpy(batch.advantages)
        self.sequence_index = torch.from_numpy(batch.sequence_index)


def packed_logprobs(model: PreTrainedModel, packed: PackedInput) -> torch.Tensor:
    """Return float32 [loss_tokens]: log-prob of each loss token at its rollout's temperature."""
    hidden = _hidden(model, packed.input_ids, packed.position_ids, packed.layout)
    # embedding lookup, not indexing: siblings share the prompt's last position, and its backward adds whole rows
    rows = torch.nn.functional.embedding(packed.source, hidden)
    return token_logprobs(model, rows, targets=packed.targets, temperature=packed.temperature)


def score_tokens(model: PreTrainedModel, token_ids: torch.Tensor) -> torch.Tensor:
    """Return float32 [n - 1]: log-prob of token i + 1 given the tokens up to i, at temperature 1.

    Args:
        token_ids: int64 [n], n at least 2.
    """
    n = len(token_ids) - 1
    layout = plan_layout([Segment(prefix=(), start=0, length=n)])
    hidden = _hidden(model, token_ids[None, :n], torch.arange(n).unsqueeze(0), layout)
    return token_logprobs(model, hidden, targets=token_ids[1:], temperature=torch.ones(n))


def _hidden(
    model: PreTrainedModel, input_ids: torch.Tensor, position_ids: torch.Tensor, layout: PackedLayout
) -> torch.Tensor:
    """Return [positions, hidden] of the last layer."""
    body: Any = model.base_model
    output = body(input_ids=input_ids, position_ids=position_ids, use_cache=False, packed_layout=layout)
    return output.last_hidden_state.squeeze(0)


def token_logprobs(
    model: PreTrainedModel, hidden: torch.Tensor, *, targets: torch.Tensor, temperature: torch.Tensor
) -> torch.Tensor:
    """Return float32 [tokens] log-probs; the logits are divided by the temperature before the softmax, as in sampling.

    Args:
        hidden: [tokens, hidden].
        targets: int64 [tokens].
        temperature: float32 [tokens].
    """
    head: Any = model.get_output_embeddings()
    return head_logprobs(hidden, head.weight, head.bias, targets=targets, temperature=temperature)
