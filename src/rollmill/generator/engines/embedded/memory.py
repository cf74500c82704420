"""What takes memory in an embedded engine beside the KV of running sequences, and the tier behind that.

Sums what model, draft and adapters say of themselves; how many blocks that leaves is `budget`'s to say.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from rollmill.clock import Clock
from rollmill.errors import ConfigError
from rollmill.generator.engines.embedded.budget import KvBudget, MemoryParts
from rollmill.generator.engines.embedded.drafting import DraftModel
from rollmill.generator.engines.embedded.host_tier import HostTier
from rollmill.generator.engines.embedded.model import ServedModel


def beside_kv(
    model: ServedModel, draft: DraftModel | None, *, staged: bool, limit: int, max_num_seqs: int, max_model_len: int
) -> MemoryParts:
    """Return what takes memory beside KV; a draft's weights are there once, for they are never swapped."""
    rows = max_num_seqs if draft is None else min(limit, max_num_seqs * (1 + draft.tokens))
    weights = model.buffer_bytes * (2 if staged else 1)
    activations = model.activation_bytes(tokens=limit, rows=rows, length=max_model_len)
    if draft is not None:
        weights += draft.model.buffer_bytes
        activations += draft.model.activation_bytes(tokens=limit, rows=rows, length=max_model_len)
    return MemoryParts(weights=weights, activations=activations)


def with_adapters(parts: MemoryParts, *, model: ServedModel, rank: int, count: int) -> MemoryParts:
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
