"""Which block of KV belongs to whom: references, what is free, and what a prompt finds already computed.

Pure bookkeeping over numbers; the KV itself lies in `attention.BlockPool`. Tokens are kept in blocks of one size. A
block is in use (references), idle (no reference, but what it holds is known and may be hit), or free. Idle blocks are
given up least recently used first, the end of a chain before its beginning. Full blocks are found by a chain of digests
that starts from the store's epoch, so that `flush` makes everything from before unreachable at once; of a block that is
only partly equal, the equal beginning may be copied. Whoever keeps KV elsewhere hears of a block before it is given up.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np

from rollmill.generator.engines.embedded.prefixes import Entry, PrefixIndex, digest_of


@dataclass(slots=True)
class BlockTable:
    """The blocks of one sequence, in order.

    Attributes:
        blocks: block of each run of tokens.
        chain: digest of each leading full block that is known to the store.
        epoch: the store's epoch when the KV was made; behind it nothing of this table is shared any more.
        space: whose KV it is, see `BlockStore.root`.
    """

    blocks: list[int] = field(default_factory=list)
    chain: list[bytes] = field(default_factory=list)
    epoch: int = 0
    space: bytes = b""


@dataclass(frozen=True, slots=True)
class Match:
    """What of a prompt is computed already.

    Attributes:
        tokens: leading tokens whose KV is there.
        blocks: full blocks of it, to be shared.
        chain: their digests.
        tail: block whose first tokens follow, to be copied, or -1.
    """

    tokens: int = 0
    blocks: tuple[int, ...] = ()
    chain: tuple[bytes, ...] = ()
    tail: int = -1

    def without_tail(self, size: int) -> Match:
        """Return the whole blocks of it, of `size` tokens each."""
        return Match(tokens=len(self.blocks) * size, blocks=self.blocks, chain=self.chain)


class BlockStore:
    """References and contents of a fixed number of blocks.

    Args:
        blocks: how many there are; their numbers count from `first`.
        size: tokens of a block.
        first: number of the first one.
        idle_limit: most idle blocks kept, so that memory that was never needed stays untouched; `None` keeps all.

    Attributes:
        known: what blocks hold.
        on_give_up: called with an idle block that is worth keeping and what it holds, before it is given up.
    """

    def __init__(self, *, blocks: int, size: int, first: int = 0, idle_limit: int | None = None) -> None:
        self.total, self.size, self.epoch = blocks, size, 0
        self.used = 0
        # How often each block was given to somebody: what others know of its content holds for one life.
        self.lives = np.zeros(first + blocks, dtype=np.int64)
        self._idle_limit = blocks if idle_limit is None else idle_limit
        # Taken from the end: low numbers first, and what was freed last is touched again first.
        self._free = list(range(first + blocks - 1, first - 1, -1))
        self._references: dict[int, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._worth_keeping: set[int] = set()
        self.known = PrefixIndex()
        self.on_give_up: Callable[[int, Entry], None] | None = None

    @property
    def available(self) -> int:
        """Blocks that can be allocated: free ones and idle ones."""
        return len(self._free) + len(self._idle)

    @property
    def idle(self) -> int:
        """Blocks without a reference whose content is known."""
        return len(self._idle)

    def needed(self, tokens: int) -> int:
        """Return how many blocks hold this many tokens."""
        return -(-tokens // self.size)

    # -- references

    def allocate(self, count: int) -> list[int]:
        """Return blocks with one reference each and no content; at most `available`."""
        if count > self.available:
            raise AssertionError(f"{count} blocks were asked for and {self.available} are available")
        taken = []
        for _ in range(count):
            if not self._free:
                self._give_up_oldest()
            taken.append(self._free.pop())
        for block in taken:
            self._references[block] = 1
            self.lives[block] += 1
        self.used += count
        return taken

    def share(self, blocks: list[int] | tuple[int, ...]) -> None:
        """Add one reference to each of these blocks, used or idle."""
        for block in blocks:
            if block in self._idle:
                del self._idle[block]
                self._references[block] = 0
                self.used += 1
            self._references[block] += 1

    def release(self, blocks: list[int]) -> None:
        """Take one reference from each; what is known and nobody's becomes idle, the rest free."""
        for block in reversed(blocks):
            self._references[block] -= 1
            if self._references[block]:
                continue
            del self._references[block]
            self.used -= 1
            if block in self.known:
                self._idle[block] = None
            else:
                self._free.append(block)
        while len(self._idle) > self._idle_limit:
            self._give_up_oldest()

    def _give_up_oldest(self) -> None:
        block, _ = self._idle.popitem(last=False)
        entry = self.known.entry(block)
        if entry is not None and block in self._worth_keeping and self.on_give_up is not None:
            self.on_give_up(block, entry)
        self._forget(block)
        self._free.append(block)

    # -- contents

    def root(self, space: bytes = b"") -> bytes:
        """Return the digest in front of every first block.

        Args:
            space: what else than the tokens decides about KV, 32 bytes at most: an adapter's version; empty without.
        """
        return b"epoch %d " % self.epoch + space

    def match(self, ids: np.ndarray, *, limit: int, space: bytes = b"") -> Match:
        """Return the longest known beginning of these token ids, `limit` tokens at most; takes no reference."""
        blocks: list[int] = []
        chain: list[bytes] = []
        parent, at = self.root(space), 0
        while at + self.size <= limit:
            digest = digest_of(parent, ids[at : at + self.size])
            block = self.known.full(digest)
            if block is None:
                break
            blocks.append(block)
            chain.append(digest)
            parent, at = digest, at + self.size
        tail, tokens = self.known.longest_below(parent, ids[at : min(limit, at + self.size)])
        return Match(tokens=at + tokens, blocks=tuple(blocks), chain=tuple(chain), tail=tail)

    def to_reference(self, match: Match) -> int:
        """Return how many blocks of a match are in use by others already."""
        return sum(block in self._references for block in match.blocks)

    def register(self, table: BlockTable, ids: np.ndarray, *, partial: bool, worth_keeping: bool = False) -> None:
        """Make known what a table holds.

        Args:
            table: its blocks hold the KV of at least `ids`.
            ids: int64 [n], the tokens.
            partial: whether a last block that is not full is made known too.
            worth_keeping: whether `on_give_up` is told before one of these blocks is given up.
        """
        if table.epoch != self.epoch:
            return
        for index in range(len(table.chain), len(ids) // self.size):
            parent = table.chain[-1] if table.chain else self.root(table.space)
            tokens = ids[index * self.size : (index + 1) * self.size]
            digest = digest_of(parent, tokens)
            if self.known.full(digest) is None:
                self._learn(table.blocks[index], Entry(parent, tokens.copy(), digest, table.space))
            table.chain.append(digest)
        rest = ids[len(table.chain) * self.size :]
        if partial and len(rest):
            parent = table.chain[-1] if table.chain else self.root(table.space)
            block = table.blocks[len(table.chain)]
            entry = self.known.entry(block)
            if entry is None or len(entry.tokens) < len(rest):
                self._learn(block, Entry(parent, rest.copy(), None, table.space))
        if worth_keeping:
            self._keep(table)

    def _keep(self, table: BlockTable) -> None:
        # The block that holds a run of tokens may be another than the table's, which was computed at the same time.
        holders = [self.known.full(digest) for digest in table.chain]
        self._worth_keeping.update(block for block in holders if block is not None)
        self._worth_keeping.update(block for block in table.blocks[len(table.chain) :] if block in self.known)

    def restore(self, block: int, entry: Entry) -> None:
        """Make known what a block was filled with that came back from elsewhere, and may go there again."""
        self._learn(block, entry)
        self._worth_keeping.add(block)

    def _learn(self, block: int, entry: Entry) -> None:
        self._forget(block)
        self.known.learn(block, entry)

    def _forget(self, block: int) -> None:
        self.known.forget(block)
        self._worth_keeping.discard(block)

    def forget_space(self, space: bytes) -> None:
        """Forget what belongs to one space; blocks in use stay with who uses them."""
        self._free_idle(block for block in self.known.of_space(space))

    def _free_idle(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self._forget(block)
            if block in self._idle:
                del self._idle[block]
                self._free.append(block)

    def flush(self) -> None:
        """Forget all contents; what was made before is neither hit nor made known again."""
        self.epoch += 1
        self._free.extend(reversed(self._idle))
        self._idle.clear()
        self._worth_keeping.clear()
        self.known.clear()
