"""How many blocks of KV an engine gets: what its memory limit leaves beside weights and activations.

Pure arithmetic. `KV = memory limit - process - weights - activations`; without a limit, what `max_num_seqs` sequences
of `max_model_len` tokens need.
"""

from __future__ import annotations

import msgspec

from rollmill.errors import ConfigError

PROCESS_BYTES = 350_000_000
"""A process that has imported torch and transformers and no more (333 MiB of PSS measured with torch 2.13 on a CPU)."""
_IDLE_SEQUENCES = 8
"""Without a limit: what as many sequences of the greatest length leave behind is kept, other memory stays untouched."""


class MemoryParts(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of a replica beside its KV.

    Attributes:
        process: before anything was loaded.
        weights: every buffer of them, spare ones included.
        activations: of the largest pass.
    """

    process: int = PROCESS_BYTES
    weights: int
    activations: int

    @property
    def total(self) -> int:
        """Their sum."""
        return self.process + self.weights + self.activations


class KvBudget(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks of an engine.

    Attributes:
        blocks: for sequences.
        scratch: beside those, for one scored text.
        idle_limit: most blocks kept for later requests; `None` for all.
        block_bytes: bytes of one.
        block_tokens: tokens of one.
        draft_block_bytes: bytes of what a draft model keeps beside each, in the same numbers.
        why: where the number comes from.
    """

    blocks: int
    scratch: int
    idle_limit: int | None
    block_bytes: int
    block_tokens: int
    draft_block_bytes: int = 0
    why: str

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks."""
        return (self.blocks + self.scratch) * (self.block_bytes + self.draft_block_bytes)

    def without_idle(self) -> KvBudget:
        """Return the same blocks, none of which outlives its requests."""
        return msgspec.structs.replace(self, idle_limit=0)

    def text(self) -> str:
        """Return one line for the log.

        Example:
            >>> print(KvBudget(blocks=640, scratch=16, idle_limit=None, block_bytes=737_280, block_tokens=16,
            ...       why="asked for").text())
            KV: 640 blocks of 16 tokens, 10240 tokens in all, and 16 for scores; 484 MB = asked for
        """
        draft = (self.blocks + self.scratch) * self.draft_block_bytes
        of_draft = f", {_mb(draft)} of it for the draft model" if draft else ""
        return (
            f"KV: {self.blocks} blocks of {self.block_tokens} tokens, {self.blocks * self.block_tokens} tokens in all, "
            f"and {self.scratch} for scores; {_mb(self.nbytes)} = {self.why}{of_draft}"
        )


def plan_kv(
    *,
    block_bytes: int,
    block_tokens: int,
    max_num_seqs: int,
    max_model_len: int,
    parts: MemoryParts,
    draft_block_bytes: int = 0,
    kv_cache_memory_bytes: int | None = None,
    memory_limit_bytes: int | None = None,
) -> KvBudget:
    """Return the blocks of an engine.

    Args:
        block_bytes: keys and values of one block in all layers.
        block_tokens: its tokens.
        max_num_seqs: sequences decoded at once.
        max_model_len: longest prompt plus output, tokens.
        parts: what else takes memory.
        draft_block_bytes: what a draft model keeps beside each block.
        kv_cache_memory_bytes: given for KV, whatever the rest takes.
        memory_limit_bytes: given for everything.

    Raises:
        ConfigError: if not even one sequence of the greatest length fits, or the two figures contradict each other.

    Example:
        >>> parts = MemoryParts(process=300, weights=500, activations=100)
        >>> plan_kv(block_bytes=10, block_tokens=16, max_num_seqs=4, max_model_len=32, parts=parts,
        ...         memory_limit_bytes=1000).blocks
        8
    """
    longest, both = -(-max_model_len // block_tokens), block_bytes + draft_block_bytes
    rest = f"{_mb(parts.process)} process - {_mb(parts.weights)} weights - {_mb(parts.activations)} activations"
    limit = memory_limit_bytes
    left = None if limit is None else limit - parts.total
    nbytes = left if kv_cache_memory_bytes is None else kv_cache_memory_bytes
    if nbytes is None:
        blocks, idle = max_num_seqs * longest, _IDLE_SEQUENCES * longest
        why = f"{max_num_seqs} sequences of {max_model_len} tokens"
    else:
        blocks, idle = nbytes // both - longest, None
        why = f"{_mb(nbytes)} asked for" if limit is None else f"{_mb(limit)} limit - {rest}"
        if left is not None and nbytes > left:
            raise _more_than_is_left(nbytes, left=left, limit=limit, why=why)
        if blocks < longest:
            raise _holds_no_sequence(nbytes, why=why, max_model_len=max_model_len, needed=2 * longest * both)
    return KvBudget(
        blocks=blocks,
        scratch=longest,
        idle_limit=idle,
        block_bytes=block_bytes,
        block_tokens=block_tokens,
        draft_block_bytes=draft_block_bytes,
        why=why,
    )


def _more_than_is_left(nbytes: int, *, left: int, limit: int | None, why: str) -> ConfigError:
    return ConfigError(
        f"generator.kv_cache_memory_bytes {nbytes} is more than generator.memory_limit_bytes {limit} leaves, "
        f"which is {_mb(left)} ({why}); lower the first, raise the second, or give only one of them"
    )


def _holds_no_sequence(nbytes: int, *, why: str, max_model_len: int, needed: int) -> ConfigError:
    return ConfigError(
        f"{_mb(nbytes)} for keys and values ({why}) hold no sequence of max_model_len {max_model_len} and a "
        f"score beside it, which take {needed} bytes: raise generator.memory_limit_bytes or "
        "kv_cache_memory_bytes, lower generator.max_model_len, or set generator.stage_weights to false"
    )


def _mb(nbytes: int) -> str:
    return f"{nbytes / 1e6:.0f} MB"
