"""Slot KV cache and the attention function that reads it, for unmodified transformers modules.

All tokens of a forward pass are packed into one row, `[1, tokens]`, so that no linear layer ever sees padding. A
`ForwardPlan` says where each token's K and V go (possibly to several slots: siblings of a group, prompts with a common
prefix) and which slots each token looks at. Decides nothing: the planner made the plan.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from rollmill.generator.engines.embedded.native import Kernels

ATTENTION_NAME = "rollmill_slots"


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive packed tokens of one sequence.

    Attributes:
        slot: where its KV lies.
        first_row: index of its first packed token.
        rows: number of packed tokens.
        mask: float [rows, start + rows], added to the scores; causal, shifted by the tokens already in the slot.
    """

    slot: int
    first_row: int
    rows: int
    mask: torch.Tensor


@dataclass(frozen=True, slots=True)
class ForwardPlan:
    """What one forward pass writes and reads.

    Attributes:
        write_rows: int64 [writes], packed token of each write; `None` writes every token once, in order.
        write_slots: int64 [writes].
        write_positions: int64 [writes].
        decode_counts: int64 [batch]: packed token i < batch reads that many tokens of slot i. `None` if the pass
            decodes nothing.
        decode_mask: float [batch, 1, 1, length], the same for torch's attention; `None` where compiled kernels attend.
        segments: which slots the tokens behind those read, run by run.
    """

    write_rows: torch.Tensor | None
    write_slots: torch.Tensor
    write_positions: torch.Tensor
    decode_counts: torch.Tensor | None = None
    decode_mask: torch.Tensor | None = None
    segments: tuple[Segment, ...] = ()


class SlotPool:
    """KV of all layers: `[layers, 2, slots, kv_heads, length, head_dim]`, zeroed pages, committed on use."""

    def __init__(
        self, *, layers: int, slots: int, kv_heads: int, max_len: int, head_dim: int, dtype: torch.dtype
    ) -> None:
        shape = (layers, 2, slots, kv_heads, max_len, head_dim)
        plain = np.float32 if dtype == torch.float32 else np.int16
        # NumPy's zeros are calloc: masked positions must be finite, yet untouched pages should cost nothing.
        self._kv = torch.from_numpy(np.zeros(shape, dtype=plain)).view(dtype)
        self._layers = [(self._kv[layer, 0], self._kv[layer, 1]) for layer in range(layers)]
        self.plan: ForwardPlan | None = None

    @property
    def nbytes(self) -> int:
        """Bytes when every token of every slot is used."""
        return self._kv.numel() * self._kv.element_size()

    # -- what transformers calls

    is_compileable = False

    def get_seq_length(self, layer_idx: int = 0, **_: Any) -> int:
        """Positions are always passed explicitly; nothing is derived from a length."""
        return 0

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write `[1, kv_heads, tokens, head_dim]` as planned; return the whole slots of this layer."""
        plan = self.plan
        if plan is None:
            raise RuntimeError("the slot pool was used outside a planned forward pass")
        pool_keys, pool_values = self._layers[layer_idx]
        key_rows, value_rows = keys[0].transpose(0, 1), values[0].transpose(0, 1)
        if plan.write_rows is not None:
            key_rows, value_rows = key_rows[plan.write_rows], value_rows[plan.write_rows]
        pool_keys[plan.write_slots, :, plan.write_positions] = key_rows
        pool_values[plan.write_slots, :, plan.write_positions] = value_rows
        return pool_keys, pool_values

    # -- what the scheduler calls

    def copy(self, source: int, target: int, *, tokens: int) -> None:
        """Copy the first tokens of one slot into another, in all layers."""
        self._kv[:, :, target, :, :tokens] = self._kv[:, :, source, :, :tokens]

    def read(self, slot: int, *, tokens: int) -> torch.Tensor:
        """Return a copy of a slot's first tokens, `[layers, 2, kv_heads, tokens, head_dim]`."""
        return self._kv[:, :, slot, :, :tokens].clone()

    def write(self, kv: torch.Tensor, slot: int, *, tokens: int) -> None:
        """Put the first tokens of what `read` returned into a slot."""
        self._kv[:, :, slot, :, :tokens] = kv[:, :, :, :tokens]

    def clear(self) -> None:
        """Zero everything: KV that is not finite would leak through masked positions."""
        self._kv.zero_()


def causal_mask(*, start: int, rows: int, dtype: torch.dtype) -> torch.Tensor:
    """Return float [rows, start + rows]: row i sees positions up to `start + i`."""
    seen = torch.arange(start + rows)[None] <= torch.arange(start, start + rows)[:, None]
    return torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, float("-inf"))


def decode_mask(positions: torch.Tensor, *, length: int, dtype: torch.dtype) -> torch.Tensor:
    """Return float [batch, 1, 1, length]: row b sees positions up to `positions[b]`."""
    seen = torch.arange(length)[None] <= positions[:, None]
    return torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, float("-inf"))[:, None, None]


def slot_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    *,
    scaling: float | None = None,
    slot_plan: ForwardPlan | None = None,
    slot_kernels: Kernels | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attend from packed queries `[1, heads, tokens, head_dim]` to the slots named by the plan.

    The query heads that share a kv head become query rows of that head, so K and V are never repeated.
    """
    if slot_plan is None:
        raise RuntimeError(f"{type(module).__name__} does not hand keyword arguments on to its attention function")
    heads, tokens, head_dim = query.shape[1:]
    batch = 0 if slot_plan.decode_counts is None else len(slot_plan.decode_counts)
    decoded = None
    if batch:
        decoded = _decode(query[:, :, :batch], key, value, plan=slot_plan, scaling=scaling, kernels=slot_kernels)
        if batch == tokens:
            return decoded, None
    out = query.new_empty(1, tokens, heads, head_dim)
    if decoded is not None:
        out[:, :batch] = decoded
    for segment in slot_plan.segments:
        rows = slice(segment.first_row, segment.first_row + segment.rows)
        out[0, rows] = _prefill(query[0, :, rows], key, value, segment=segment, scaling=scaling)
    return out, None


def _decode(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    plan: ForwardPlan,
    scaling: float | None,
    kernels: Kernels | None,
) -> torch.Tensor:
    heads, batch, head_dim = query.shape[1:]
    kv_heads, mask = key.shape[1], plan.decode_mask
    rows = query[0].transpose(0, 1)
    if mask is None:
        if kernels is None or plan.decode_counts is None:
            raise RuntimeError("a pass without a mask needs the compiled kernels")
        scale = head_dim**-0.5 if scaling is None else scaling
        return kernels.attend(rows, key, value, counts=plan.decode_counts, scale=scale)[None]
    length = mask.shape[-1]
    attended = scaled_dot_product_attention(
        rows.reshape(batch, kv_heads, heads // kv_heads, head_dim),
        key[:batch, :, :length],
        value[:batch, :, :length],
        attn_mask=mask,
        scale=scaling,
    )
    return attended.reshape(1, batch, heads, head_dim)


def _prefill(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, segment: Segment, scaling: float | None
) -> torch.Tensor:
    heads, _, head_dim = query.shape
    kv_heads, length = key.shape[1], segment.mask.shape[1]
    share = heads // kv_heads
    slot = slice(segment.slot, segment.slot + 1)
    attended = scaled_dot_product_attention(
        query.reshape(1, kv_heads, share * segment.rows, head_dim),
        key[slot, :, :length],
        value[slot, :, :length],
        attn_mask=segment.mask.repeat(share, 1),
        scale=scaling,
    )
    return attended.reshape(heads, segment.rows, head_dim).transpose(0, 1)


AttentionInterface.register(ATTENTION_NAME, slot_attention)
