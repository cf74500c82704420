"""What takes memory in an embedded engine beside the KV of running sequences, and the tier behind that.

Sums what model, draft and adapters say of themselves; the arithmetic of what that leaves is `budget`'s.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from rollmill.clock import Clock
from rollmill.errors import ConfigError
from rollmill.generator.engines.embedded.budget import KvBudget, MemoryParts, plan_kv
from rollmill.generator.engines.embedded.drafting import DraftModel
from rollmill.generator.engines.embedded.host_tier import HostTier
from rollmill.generator.engines.embedded.kv import BLOCK_TOKENS
from rollmill.generator.engines.embedded.model import ServedModel
from rollmill.generator.engines.embedded.settings import EmbeddedSettings, Limits


def kv_budget(settings: EmbeddedSettings, *, limits: Limits, model: ServedModel, draft: DraftModel | None) -> KvBudget:
    """Return the blocks of an engine: what its settings leave beside model, draft and adapters.

    Args:
        settings: of the engine.
        limits: of its passes.
        model: that is served.
        draft: that guesses, if one does.

    Raises:
        ConfigError: if the memory that is given holds no sequence.
    """
    parts = _beside_kv(model, draft, staged=settings.stage_weights, limits=limits)
    return plan_kv(
        draft_block_bytes=0 if draft is None else draft.model.block_bytes(BLOCK_TOKENS),
        block_bytes=model.block_bytes(BLOCK_TOKENS),
        block_tokens=BLOCK_TOKENS,
        max_num_seqs=limits.max_num_seqs,
        max_model_len=limits.max_model_len,
        parts=_with_adapters(parts, model=model, rank=settings.max_lora_rank, count=settings.max_loras),
        kv_cache_memory_bytes=settings.kv_cache_memory_bytes,
        memory_limit_bytes=settings.memory_limit_bytes,
    )


def _beside_kv(model: ServedModel, draft: DraftModel | None, *, staged: bool, limits: Limits) -> MemoryParts:
    """Return what takes memory beside KV; a draft's weights are there once, for they are never swapped."""
    tokens, length, sequences = limits.max_num_batched_tokens, limits.max_model_len, limits.max_num_seqs
    rows = sequences if draft is None else min(tokens, sequences * (1 + draft.tokens))
    weights = model.buffer_bytes * (2 if staged else 1)
    activations = model.activation_bytes(tokens=tokens, rows=rows, length=length)
    if draft is not None:
        weights += draft.model.buffer_bytes
        activations += draft.model.activation_bytes(tokens=tokens, rows=rows, length=length)
    return MemoryParts(weights=weights, activations=activations)


def _with_adapters(parts: MemoryParts, *, model: ServedModel, rank: int, count: int) -> MemoryParts:
    """Return the parts with room for adapters, and for one more that is made ready while the others serve."""
    if model.low_rank is None:
        return parts
    return msgspec.structs.replace(parts, weights=parts.weights + (count + 1) * model.low_rank.bytes_of(rank))


def host_tier(folder: str | Path | None, *, nbytes: int | None, budget: KvBudget, clock: Clock) -> HostTier | None:
    """Return the tier of an engine, or `None` if it is given no bytes.

    Raises:
        ConfigError: if a size came without a folder, or the tier cannot be made.
    """
    if nbytes is None:
        return None
    if folder is None:
        raise ConfigError(
            f"generator.host_kv_bytes is {nbytes} and generator.host_kv_directory is not set: on a CPU the tier is a "
            "file, and you say on which disk. Name a folder, or leave both out"
        )
    block_bytes, tokens = budget.block_bytes, budget.block_tokens
    return HostTier(Path(folder), nbytes=nbytes, block_bytes=block_bytes, block_tokens=tokens, clock=clock)
