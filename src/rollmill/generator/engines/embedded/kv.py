"""The KV of an engine: the pool of blocks, who holds which, and what a prompt starts from.

Joins the bookkeeping (`blocks`), the memory (`attention.BlockPool`) and, where there is one, the host tier. Decides no
admission: it is told how many blocks others were promised, and says whether a start fits beside that.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from rollmill.generator.engines.embedded.blocks import BlockStore, BlockTable, Match
from rollmill.generator.engines.embedded.budget import KvBudget
from rollmill.generator.engines.embedded.host_tier import HostTier
from rollmill.generator.engines.embedded.model import ServedModel
from rollmill.generator.engines.embedded.prefixes import Entry, digest_of
from rollmill.generator.engines.sequence import Sequence

BLOCK_TOKENS = 16
"""Tokens of a block: at head dimension 64 the keys of one head fill a page of memory."""


@dataclass(frozen=True, slots=True)
class OnTier:
    """What of a prompt lies on the host tier and not in memory.

    Attributes:
        pieces: slot and entry of each, in order.
        tokens: leading tokens of the prompt that are there once they are in memory.
        nbytes: of all pieces.
    """

    pieces: tuple[tuple[int, Entry], ...] = ()
    tokens: int = 0
    nbytes: int = 0


class KvCache:
    """Blocks of running sequences and of what they left behind.

    Args:
        model: gives the shape.
        budget: how many blocks there are, and how many are kept for later requests.
        tier: takes what sessions and suspended sequences left behind when its blocks are needed; `None` forgets it.
    """

    def __init__(self, model: ServedModel, *, budget: KvBudget, tier: HostTier | None = None) -> None:
        size, scratch = budget.block_tokens, budget.scratch
        self.pool = model.new_pool(blocks=scratch + budget.blocks, size=size)
        self.store = BlockStore(blocks=budget.blocks, size=size, first=scratch, idle_limit=budget.idle_limit)
        self.scratch = BlockTable(blocks=list(range(scratch)))
        self.tier = tier
        if tier is not None:
            self.store.on_give_up = self._give_to_tier
        self._tables: dict[Sequence, BlockTable] = {}
        self._chunk: BlockTable | None = None

    def blocks_of(self, sequence: Sequence) -> list[int]:
        """Return the blocks of a running sequence, in order."""
        return self._tables[sequence].blocks

    def shares_now(self, sequence: Sequence) -> bool:
        """Return whether the KV of a running sequence was made since the last flush."""
        return self._tables[sequence].epoch == self.store.epoch

    def begin(
        self, match: Match, *, tokens: int, promises: list[int], room: int | None, space: bytes = b""
    ) -> tuple[BlockTable, ...]:
        """Return tables for as many of the sequences that start from the same tokens as there are blocks for.

        Args:
            match: what they start from; its beginning is shared, its tail copied.
            tokens: how many tokens the first pass writes or shares.
            promises: blocks that each of them must find later, in order.
            room: blocks that may be taken, what is promised included; `None` takes all there are for the first
                sequence, whatever it was promised.
            space: whose KV it is, see `BlockStore.root`.

        Returns:
            one table for each sequence that fits, from the first on.
        """
        pinned = [*match.blocks, *([match.tail] if match.tail >= 0 else [])]
        store = self.store
        before = store.available
        store.share(pinned)
        left = store.available if room is None else room - (before - store.available)
        fresh = store.needed(tokens) - len(match.blocks)
        last = tokens // store.size
        tables: list[BlockTable] = []
        for promise in promises:
            own = fresh if not tables else (1 if tokens % store.size else 0)
            if own + (0 if room is None and not tables else promise) > left:
                break
            left -= own + promise
            if tables:
                store.share(tables[0].blocks[:last])
                first = tables[0].blocks[:last]
            else:
                first = list(match.blocks)
                store.share(first)
            tables.append(BlockTable(blocks=[*first, *store.allocate(own)], epoch=store.epoch, space=space))
        if tables:
            tables[0].chain.extend(match.chain)
            self._copy_tails(match, tables, last=last)
        store.release(pinned)
        return tuple(tables)

    def _copy_tails(self, match: Match, tables: list[BlockTable], *, last: int) -> None:
        """Give each table its own copy of the tokens that lie in the block where it goes on writing."""
        size, at = self.store.size, len(match.blocks)
        if match.tail >= 0:
            self.pool.copy(match.tail, tables[0].blocks[at], start=0, stop=match.tokens - at * size)
        there = match.tokens - last * size
        if there > 0:
            for table in tables[1:]:
                self.pool.copy(tables[0].blocks[last], table.blocks[last], start=0, stop=there)

    def adopt(self, sequence: Sequence, table: BlockTable) -> None:
        """Say whose a table is."""
        self._tables[sequence] = table

    def grow(self, sequence: Sequence, *, tokens: int) -> bool:
        """Give a running sequence blocks for this many tokens; return whether there were enough."""
        table = self._tables[sequence]
        missing = self.store.needed(tokens) - len(table.blocks)
        if missing > self.store.available:
            return False
        if missing > 0:
            table.blocks += self.store.allocate(missing)
        return True

    def end(self, sequence: Sequence, *, suspended: bool = False) -> None:
        """Take a sequence's blocks; what they hold may be hit until they are needed.

        Args:
            suspended: whether the sequence goes on later; its KV is then worth the host tier, as that of a session is.
        """
        table = self._tables.pop(sequence)
        worth_keeping = self.uses_tier(sequence) and (suspended or bool(sequence.request.session_id))
        self.store.register(table, sequence.kv_ids(), partial=True, worth_keeping=worth_keeping)
        self.store.release(table.blocks)

    def hold_chunk(self, table: BlockTable, ids: np.ndarray) -> None:
        """Make the computed beginning of a prompt known, and keep it until the next `drop_chunk`."""
        self.store.register(table, ids, partial=True)
        self.drop_chunk()
        self._chunk = table

    def drop_chunk(self) -> bool:
        """Let go of the beginning kept by `hold_chunk`; return whether there was one. It may still be hit."""
        if self._chunk is None:
            return False
        self.store.release(self._chunk.blocks)
        self._chunk = None
        return True

    # -- the host tier

    def uses_tier(self, sequence: Sequence) -> bool:
        """Return whether KV of this sequence may go to the tier and come back.

        Never that of a wave: which tokens are computed together would depend on what moving costs at that moment.
        """
        return self.tier is not None and sequence.request.wave is None

    def _give_to_tier(self, block: int, entry: Entry) -> None:
        if self.tier is not None:
            self.tier.put(entry, lambda: self.pool.read(block, tokens=len(entry.tokens)))

    def on_tier(self, ids: np.ndarray, *, match: Match, limit: int, space: bytes = b"") -> OnTier:
        """Return what would lengthen a match.

        Args:
            ids: int64 [n], the prompt.
            match: what of it is in memory.
            limit: most tokens that may be known.
            space: the match's.
        """
        tier, memory, size = self.tier, self.store.known, self.store.size
        if tier is None or not len(tier.known):
            return OnTier()
        slots: list[int] = []
        parent = match.chain[-1] if match.chain else self.store.root(space)
        at = len(match.chain) * size
        while at + size <= limit:
            digest = digest_of(parent, ids[at : at + size])
            if memory.full(digest) is None:
                slot = tier.known.full(digest)
                if slot is None:
                    break
                slots.append(slot)
            parent, at = digest, at + size
        rest = ids[at : min(limit, at + size)]
        _, known = memory.longest_below(parent, rest)
        slot, there = tier.known.longest_below(parent, rest)
        if there > known and not self._is_in_memory(tier.known.entry(slot)):
            slots.append(slot)
            known = there
        pieces = tuple((slot, entry) for slot in slots if (entry := tier.known.entry(slot)) is not None)
        return OnTier(pieces, at + known, sum(tier.nbytes_of(entry) for _, entry in pieces))

    def _is_in_memory(self, entry: Entry | None) -> bool:
        return entry is None or (entry.digest is not None and self.store.known.full(entry.digest) is not None)

    def bring_back(self, found: OnTier, *, match: Match) -> None:
        """Read pieces from the tier into blocks that are then hit like any other; stops at one that is lost.

        Args:
            found: its blocks are available, beside those of the match.
            match: stays in memory meanwhile.
        """
        tier, store = self.tier, self.store
        if tier is None:
            return
        pinned = [*match.blocks, *([match.tail] if match.tail >= 0 else [])]
        store.share(pinned)
        tier.touch([slot for slot, _ in found.pieces])
        restored: list[int] = []
        for slot, entry in found.pieces:
            (block,) = store.allocate(1)
            restored.append(block)
            # Making room may have pushed something else out of the tier, at worst this very piece.
            content = tier.get(slot, entry)
            if content is None:
                break
            self.pool.write(block, content, tokens=len(entry.tokens))
            store.restore(block, entry)
        store.release(restored)
        store.release(pinned)

    def close(self) -> None:
        """Give back what lies outside this process's memory."""
        if self.tier is not None:
            self.store.on_give_up = None
            self.tier.close()

    def flush(self) -> None:
        """Nothing that is computed now is ever hit; running sequences go on with what they hold."""
        self.drop_chunk()
        self.store.flush()
        if self.tier is not None:
            self.tier.clear()

    def clear(self) -> None:
        """Forget everybody, and zero the memory."""
        self.forget()
        self.pool.clear()

    def forget(self) -> None:
        """Take the blocks of all running sequences, without making them known."""
        self.retract(list(self._tables))
        self.flush()

    def retract(self, sequences: Iterable[Sequence]) -> None:
        """Take the blocks of these, without making them known."""
        for sequence in sequences:
            self.store.release(self._tables.pop(sequence).blocks)

    def disown(self, sequences: Iterable[Sequence]) -> None:
        """Let these go on with what they hold; it is never made known: what computed it is served no more."""
        for sequence in sequences:
            self._tables[sequence].epoch = -1

    def forget_space(self, space: bytes) -> None:
        """Forget what is known of one space, here and on the tier."""
        self.drop_chunk()
        self.store.forget_space(space)
        if self.tier is not None:
            self.tier.forget_space(space)

    def tables(self, sequences: list[Sequence], *, width: int) -> np.ndarray:
        """Return int64 [n, width], the blocks of each; what a sequence has not got is block 0."""
        out = np.zeros((len(sequences), width), dtype=np.int64)
        for row, sequence in enumerate(sequences):
            blocks = self._tables[sequence].blocks[:width]
            out[row, : len(blocks)] = blocks
        return out
