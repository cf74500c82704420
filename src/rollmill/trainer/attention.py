"""Exact attention over a packed row, as an attention function that transformers calls.

A packed row holds prompts and their completions side by side. Attending over the whole row with one dense mask would
compute (all positions)^2 scores; here the segments are gathered into a few padded blocks, each completion sees its
prompt's keys and its own, and only the attention call is padded, never the linear layers. The model's modules stay
unmodified: any architecture that routes attention through `AttentionInterface` works.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn import functional
from transformers import AttentionInterface

from rollmill.errors import ModelError
from rollmill.trainer.packing import Segment

ATTENTION_NAME = "rollmill_packed"

PADDING_LIMIT = 1.5
"""Segments share a block while its padded scores are at most this multiple of the needed ones."""
SMALL_BLOCK = 1 << 13
"""Below this many scores a block costs less than a second call would."""
LARGE_BLOCK = 1 << 24
"""No segment joins a block of more scores than this, to bound the memory of its mask."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionBlock:
    """Segments that attend in one call.

    Attributes:
        queries: int64 [rows, q] positions of the packed row; padding points at position 0.
        keys: int64 [rows, k].
        mask: float32 [rows, 1, q, k]: 0 where the query sees the key, -inf elsewhere.
    """

    queries: torch.Tensor
    keys: torch.Tensor
    mask: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedLayout:
    """How a packed row attends.

    Attributes:
        restore: int64 [positions]: where each position's output stands in the concatenated rows of all blocks.
        longest: positions that the longest query can look back over, itself included.
    """

    blocks: tuple[AttentionBlock, ...]
    restore: torch.Tensor
    longest: int


def plan_layout(segments: Sequence[Segment]) -> PackedLayout:
    """Return the attention blocks of a packed row.

    Args:
        segments: cover every position of the row exactly once.
    """
    ordered = sorted(segments, key=lambda s: (s.length, s.prefix_length + s.length), reverse=True)
    buckets: list[list[Segment]] = []
    for segment in ordered:
        if not buckets or not _fits(buckets[-1], segment):
            buckets.append([])
        buckets[-1].append(segment)
    positions = sum(segment.length for segment in segments)
    restore = np.full(positions, -1, dtype=np.int64)
    blocks, base = [], 0
    for bucket in buckets:
        width = max(segment.length for segment in bucket)
        for row, segment in enumerate(bucket):
            restore[segment.start : segment.start + segment.length] = base + row * width + np.arange(segment.length)
        base += len(bucket) * width
        blocks.append(_block(bucket))
    longest = max(segment.prefix_length + segment.length for segment in segments)
    return PackedLayout(blocks=tuple(blocks), restore=torch.from_numpy(restore), longest=longest)


def _fits(bucket: Sequence[Segment], segment: Segment) -> bool:
    rows = [*bucket, segment]
    padded = len(rows) * max(s.length for s in rows) * max(s.prefix_length + s.length for s in rows)
    needed = sum(s.length * (s.prefix_length + s.length) for s in rows)
    return padded <= SMALL_BLOCK or (padded <= PADDING_LIMIT * needed and padded <= LARGE_BLOCK)


def _block(bucket: Sequence[Segment]) -> AttentionBlock:
    q_width = max(s.length for s in bucket)
    k_width = max(s.prefix_length + s.length for s in bucket)
    queries = np.zeros((len(bucket), q_width), dtype=np.int64)
    keys = np.zeros((len(bucket), k_width), dtype=np.int64)
    seen = np.zeros((len(bucket), 1, q_width, k_width), dtype=bool)
    for row, s in enumerate(bucket):
        own = np.arange(s.start, s.start + s.length)
        queries[row, : s.length] = own
        before = [np.arange(start, start + length) for start, length in s.prefix]
        keys[row, : s.prefix_length + s.length] = np.concatenate([*before, own])
        seen[row, 0, : s.length] = np.arange(k_width) <= s.prefix_length + np.arange(s.length)[:, None]
        # a padded query must see something, or its softmax is NaN; nobody reads its output
        seen[row, 0, s.length :, 0] = True
    mask = torch.zeros(seen.shape).masked_fill_(torch.from_numpy(~seen), float("-inf"))
    return AttentionBlock(queries=torch.from_numpy(queries), keys=torch.from_numpy(keys), mask=mask)


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    packed_layout: PackedLayout | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attend over a packed row; the signature is transformers' own.

    Args:
        query: [1, heads, positions, head_dim].
        key: [1, kv_heads, positions, head_dim].
        value: [1, kv_heads, positions, head_dim].
        packed_layout: passed to the model's forward by keyword and handed down by it.

    Returns:
        [1, positions, heads, head_dim], and no attention weights.

    Raises:
        ModelError: if the architecture wants something that this attention does not compute.
    """
    if packed_layout is None:
        raise ModelError(
            f"{type(module).__name__} did not hand the packed layout down to its attention; the trainer cannot pack "
            "for this architecture. Use a model whose forward passes keyword arguments to its attention."
        )
    if (
        softcap is not None
        or s_aux is not None
        or (sliding_window is not None and packed_layout.longest > sliding_window)
    ):
        raise ModelError(
            f"{type(module).__name__} wants soft-capped scores ({softcap}), attention sinks ({s_aux is not None}) or a "
            f"sliding window ({sliding_window}) shorter than the longest sequence ({packed_layout.longest}); the "
            "trainer's attention computes none of these. Use a model with standard attention, or shorter sequences."
        )
    heads, positions, head_dim = query.shape[1], query.shape[2], query.shape[3]
    flat_query, flat_key, flat_value = (_flat(tensor) for tensor in (query, key, value))
    outputs = []
    for block in packed_layout.blocks:
        attended = functional.scaled_dot_product_attention(
            _rows(flat_query, block.queries, head_dim),
            _rows(flat_key, block.keys, head_dim),
            _rows(flat_value, block.keys, head_dim),
            attn_mask=block.mask.to(query.dtype),
            dropout_p=dropout,
            scale=scaling,
            enable_gqa=True,
        )
        outputs.append(attended.transpose(1, 2).reshape(-1, heads * head_dim))
    joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return functional.embedding(packed_layout.restore, joined).view(1, positions, heads, head_dim), None


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """[1, heads, positions, head_dim] -> [positions, heads * head_dim]."""
    return tensor.squeeze(0).transpose(0, 1).flatten(1)


def _rows(flat: torch.Tensor, index: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Gather [positions, heads * head_dim] into [rows, heads, width, head_dim].

    Embedding lookup instead of indexing: its backward adds whole rows and is far faster than a general scatter.
    """
    rows, width = index.shape
    return functional.embedding(index, flat).view(rows, width, -1, head_dim).transpose(1, 2)


AttentionInterface.register(ATTENTION_NAME, packed_attention)
