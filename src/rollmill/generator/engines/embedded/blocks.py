"""Which block of KV belongs to whom: references, what is free, and what a prompt finds already computed.

Pure bookkeeping over numbers; the KV itself lies in `attention.BlockPool`. Tokens are kept in blocks of one size. A
block is in use (references), idle (no reference, but what it holds is known and may be hit), or free. Idle blocks are
given up least recently used first, the end of a chain before its beginning. Full blocks are found by a chain of digests
that starts from the store's epoch, so that `flush` makes everything from before unreachable at once; of a block that is
only partly equal, the equal beginning may be copied.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from dataclasses import dataclass, field

import numpy as np

_CANDIDATES = 64
"""Most blocks below one prefix that are compared for an equal beginning, newest first."""


def common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    """Return how many leading token ids two sequences share."""
    n = min(len(a), len(b))
    differs = np.flatnonzero(a[:n] != b[:n])
    return int(differs[0]) if len(differs) else n


@dataclass(slots=True)
class BlockTable:
    """The blocks of one sequence, in order.

    Attributes:
        blocks: block of each run of tokens.
        chain: digest of each leading full block that is known to the store.
        epoch: the store's epoch when the KV was made; behind it nothing of this table is shared any more.
    """

    blocks: list[int] = field(default_factory=list)
    chain: list[bytes] = field(default_factory=list)
    epoch: int = 0


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


@dataclass(frozen=True, slots=True)
class _Entry:
    """What a block is known to hold: tokens behind a prefix, the digest if it is full."""

    parent: bytes
    tokens: np.ndarray
    digest: bytes | None


class BlockStore:
    """References and contents of a fixed number of blocks.

    Args:
        blocks: how many there are; their numbers count from `first`.
        size: tokens of a block.
        first: number of the first one.
        idle_limit: most idle blocks kept, so that memory that was never needed stays untouched; `None` keeps all.
    """

    def __init__(self, *, blocks: int, size: int, first: int = 0, idle_limit: int | None = None) -> None:
        self.total, self.size, self.epoch = blocks, size, 0
        self.used = 0
        self._idle_limit = blocks if idle_limit is None else idle_limit
        # Taken from the end: low numbers first, and what was freed last is touched again first.
        self._free = list(range(first + blocks - 1, first - 1, -1))
        self._references: dict[int, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._entries: dict[int, _Entry] = {}
        self._full: dict[bytes, int] = {}
        self._below: dict[tuple[bytes, int], OrderedDict[int, None]] = {}

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
            if block in self._entries:
                self._idle[block] = None
            else:
                self._free.append(block)
        while len(self._idle) > self._idle_limit:
            self._give_up_oldest()

    def _give_up_oldest(self) -> None:
        block, _ = self._idle.popitem(last=False)
        self._forget(block)
        self._free.append(block)

    # -- contents

    def root(self) -> bytes:
        """Return the digest in front of every first block."""
        return b"epoch %d" % self.epoch

    def match(self, ids: np.ndarray, *, limit: int) -> Match:
        """Return the longest known beginning of these token ids, `limit` tokens at most; takes no reference."""
        blocks: list[int] = []
        chain: list[bytes] = []
        parent, at = self.root(), 0
        while at + self.size <= limit:
            digest = digest_of(parent, ids[at : at + self.size])
            block = self._full.get(digest)
            if block is None:
                break
            blocks.append(block)
            chain.append(digest)
            parent, at = digest, at + self.size
        tail, tokens = self._longest_below(parent, ids[at : min(limit, at + self.size)])
        return Match(tokens=at + tokens, blocks=tuple(blocks), chain=tuple(chain), tail=tail)

    def _longest_below(self, parent: bytes, ids: np.ndarray) -> tuple[int, int]:
        best, length = -1, 0
        if len(ids) == 0:
            return best, length
        candidates = self._below.get((parent, int(ids[0])), ())
        for _, block in zip(range(_CANDIDATES), reversed(candidates), strict=False):
            common = common_prefix(self._entries[block].tokens, ids)
            if common > length:
                best, length = block, common
                if length == len(ids):
                    break
        return best, length

    def register(self, table: BlockTable, ids: np.ndarray, *, partial: bool) -> None:
        """Make known what a table holds.

        Args:
            table: its blocks hold the KV of at least `ids`.
            ids: int64 [n], the tokens.
            partial: whether a last block that is not full is made known too.
        """
        if table.epoch != self.epoch:
            return
        for index in range(len(table.chain), len(ids) // self.size):
            parent = table.chain[-1] if table.chain else self.root()
            tokens = ids[index * self.size : (index + 1) * self.size]
            digest = digest_of(parent, tokens)
            if digest not in self._full:
                self._learn(table.blocks[index], _Entry(parent, tokens.copy(), digest))
            table.chain.append(digest)
        rest = ids[len(table.chain) * self.size :]
        if partial and len(rest):
            parent = table.chain[-1] if table.chain else self.root()
            block = table.blocks[len(table.chain)]
            known = self._entries.get(block)
            if known is None or len(known.tokens) < len(rest):
                self._learn(block, _Entry(parent, rest.copy(), None))

    def _learn(self, block: int, entry: _Entry) -> None:
        self._forget(block)
        self._entries[block] = entry
        self._below.setdefault((entry.parent, int(entry.tokens[0])), OrderedDict())[block] = None
        if entry.digest is not None:
            self._full[entry.digest] = block

    def _forget(self, block: int) -> None:
        entry = self._entries.pop(block, None)
        if entry is None:
            return
        key = (entry.parent, int(entry.tokens[0]))
        del self._below[key][block]
        if not self._below[key]:
            del self._below[key]
        if entry.digest is not None:
            del self._full[entry.digest]

    def flush(self) -> None:
        """Forget all contents; what was made before is neither hit nor made known again."""
        self.epoch += 1
        self._free.extend(reversed(self._idle))
        self._idle.clear()
        self._entries.clear()
        self._full.clear()
        self._below.clear()


def digest_of(parent: bytes, tokens: np.ndarray) -> bytes:
    """Return the digest of a full block behind a prefix."""
    return hashlib.blake2b(tokens.tobytes(), digest_size=16, key=parent).digest()
