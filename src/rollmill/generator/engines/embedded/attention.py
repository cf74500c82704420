"""KV in blocks and the attention function that reads it, for unmodified transformers modules.

All tokens of a forward pass are packed into one row, `[1, tokens]`, so that no linear layer ever sees padding. A
`ForwardPlan` says into which blocks each token's K and V go (several where siblings part in the middle of a block) and
which blocks each token looks at. Decides nothing: the planner made the plan.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from rollmill.generator.engines.embedded.native import Kernels
from rollmill.generator.engines.embedded.pages import zeros

ATTENTION_NAME = "rollmill_blocks"


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive packed tokens of one sequence.

    Attributes:
        table: int64 [blocks], where its KV lies.
        first_row: index of its first packed token.
        rows: number of packed tokens.
        mask: float [rows, start + rows], added to the scores; causal, shifted by the tokens already computed.
    """

    table: torch.Tensor
    first_row: int
    rows: int
    mask: torch.Tensor


@dataclass(frozen=True, slots=True)
class ForwardPlan:
    """What one forward pass writes and reads.

    Attributes:
        write_rows: int64 [writes], packed token of each write; `None` writes every token once, in order.
        write_blocks: int64 [writes].
        write_offsets: int64 [writes], place in the block.
        decode_tables: int64 [batch, blocks]: packed token i < batch looks at these blocks. `None` if the pass decodes
            nothing.
        decode_counts: int64 [batch]: at that many tokens of them.
        decode_mask: float [batch, 1, 1, length], the same for torch's attention; `None` where compiled kernels attend.
        segments: what the tokens behind those look at, run by run.
    """

    write_rows: torch.Tensor | None
    write_blocks: torch.Tensor
    write_offsets: torch.Tensor
    decode_tables: torch.Tensor | None = None
    decode_counts: torch.Tensor | None = None
    decode_mask: torch.Tensor | None = None
    segments: tuple[Segment, ...] = ()


class BlockPool:
    """KV of all layers: `[layers, 2, blocks, kv_heads, size, head_dim]`, zeroed pages, committed on use."""

    def __init__(
        self,
        *,
        layers: int,
        blocks: int,
        kv_heads: int,
        size: int,
        head_dim: int,
        dtype: torch.dtype,
        kernels: Kernels | None = None,
    ) -> None:
        shape = (layers, 2, blocks, kv_heads, size, head_dim)
        # Masked positions must be finite, yet untouched pages should cost nothing.
        self._kv = zeros(shape, dtype=dtype)
        self._layers = [(self._kv[layer, 0], self._kv[layer, 1]) for layer in range(layers)]
        self._kernels = kernels
        self.plan: ForwardPlan | None = None

    @property
    def nbytes(self) -> int:
        """Bytes when every token of every block is used."""
        return self._kv.numel() * self._kv.element_size()

    # -- what transformers calls

    is_compileable = False

    def get_seq_length(self, layer_idx: int = 0, **_: Any) -> int:
        """Positions are always passed explicitly; nothing is derived from a length."""
        return 0

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write `[1, kv_heads, tokens, head_dim]` as planned; return all blocks of this layer."""
        plan = self.plan
        if plan is None:
            raise RuntimeError("the block pool was used outside a planned forward pass")
        pool_keys, pool_values = self._layers[layer_idx]
        if self._kernels is not None:
            self._kernels.write(
                keys[0],
                values[0],
                pool_keys,
                pool_values,
                rows=plan.write_rows,
                blocks=plan.write_blocks,
                offsets=plan.write_offsets,
            )
            return pool_keys, pool_values
        key_rows, value_rows = keys[0].transpose(0, 1), values[0].transpose(0, 1)
        if plan.write_rows is not None:
            key_rows, value_rows = key_rows[plan.write_rows], value_rows[plan.write_rows]
        pool_keys[plan.write_blocks, :, plan.write_offsets] = key_rows
        pool_values[plan.write_blocks, :, plan.write_offsets] = value_rows
        return pool_keys, pool_values

    # -- what the scheduler calls

    def copy(self, source: int, target: int, *, start: int, stop: int) -> None:
        """Copy tokens `start` to `stop` of one block into the same places of another, in all layers."""
        self._kv[:, :, target, :, start:stop] = self._kv[:, :, source, :, start:stop]

    def read(self, block: int, *, tokens: int) -> np.ndarray:
        """Return uint8 [n], a copy of the first tokens of one block in all layers."""
        return self._kv[:, :, block, :, :tokens].contiguous().view(torch.uint8).numpy().reshape(-1)

    def write(self, block: int, content: np.ndarray, *, tokens: int) -> None:
        """Write what `read` gave into the first tokens of one block."""
        there = self._kv[:, :, block, :, :tokens]
        there.copy_(torch.from_numpy(content).view(self._kv.dtype).view(there.shape))

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


def block_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    *,
    scaling: float | None = None,
    block_plan: ForwardPlan | None = None,
    block_kernels: Kernels | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attend from packed queries `[1, heads, tokens, head_dim]` to the blocks named by the plan.

    The query heads that share a kv head become query rows of that head, so K and V are never repeated.
    """
    if block_plan is None:
        raise RuntimeError(f"{type(module).__name__} does not hand keyword arguments on to its attention function")
    heads, tokens, head_dim = query.shape[1:]
    tables, counts = block_plan.decode_tables, block_plan.decode_counts
    batch, decoded = 0, None
    if tables is not None and counts is not None:
        batch = len(counts)
        rows = query[0, :, :batch].transpose(0, 1)
        mask = block_plan.decode_mask
        if mask is not None:
            decoded = _decode(rows, key, value, tables=tables, mask=mask, scaling=scaling)
        elif block_kernels is not None:
            scale = head_dim**-0.5 if scaling is None else scaling
            decoded = block_kernels.attend(rows, key, value, tables=tables, counts=counts, scale=scale)[None]
        else:
            raise RuntimeError("a pass without a mask needs the compiled kernels")
        if batch == tokens:
            return decoded, None
    out = query.new_empty(1, tokens, heads, head_dim)
    if decoded is not None:
        out[:, :batch] = decoded
    for segment in block_plan.segments:
        rows = slice(segment.first_row, segment.first_row + segment.rows)
        out[0, rows] = _prefill(query[0, :, rows], key, value, segment=segment, scaling=scaling)
    return out, None


def _decode(
    rows: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    tables: torch.Tensor,
    mask: torch.Tensor,
    scaling: float | None,
) -> torch.Tensor:
    """Attend with torch, over a copy in which the blocks of each sequence lie side by side."""
    batch, heads, head_dim = rows.shape
    kv_heads, length = key.shape[1], mask.shape[-1]
    attended = scaled_dot_product_attention(
        rows.reshape(batch, kv_heads, heads // kv_heads, head_dim),
        gathered(key, tables)[:, :, :length],
        gathered(value, tables)[:, :, :length],
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
    table = segment.table[None]
    attended = scaled_dot_product_attention(
        query.reshape(1, kv_heads, share * segment.rows, head_dim),
        gathered(key, table)[:, :, :length],
        gathered(value, table)[:, :, :length],
        attn_mask=segment.mask.repeat(share, 1),
        scale=scaling,
    )
    return attended.reshape(heads, segment.rows, head_dim).transpose(0, 1)


def gathered(kv: torch.Tensor, tables: torch.Tensor) -> torch.Tensor:
    """Return a copy, `[batch, kv_heads, tokens, head_dim]`, of the blocks in `tables`, int64 [batch, blocks]."""
    batch, width = tables.shape
    _, kv_heads, size, head_dim = kv.shape
    # Whole blocks of one head, in the order in which they are wanted: one copy of long runs.
    runs = tables[:, None] * kv_heads + torch.arange(kv_heads)[None, :, None]
    copied = kv.reshape(-1, size * head_dim).index_select(0, runs.flatten())
    return copied.view(batch, kv_heads, width * size, head_dim)


AttentionInterface.register(ATTENTION_NAME, block_attention)
