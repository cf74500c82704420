"""What numbered pieces of KV are known to hold, found by the tokens of a prompt.

Pure bookkeeping, the same for blocks in memory and for those on the host tier. A full piece is found by a chain of
digests of token ids; of one that is only partly equal, the equal beginning counts. Chains that begin with different
roots never meet: KV of another policy version or another adapter is other KV.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from dataclasses import dataclass

import numpy as np

_CANDIDATES = 64
"""Most pieces below one prefix that are compared for an equal beginning, newest first."""


def common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    """Return how many leading token ids two sequences share."""
    n = min(len(a), len(b))
    differs = np.flatnonzero(a[:n] != b[:n])
    return int(differs[0]) if len(differs) else n


def digest_of(parent: bytes, tokens: np.ndarray) -> bytes:
    """Return the digest of a full piece behind a prefix."""
    return hashlib.blake2b(tokens.tobytes(), digest_size=16, key=parent).digest()


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """What a piece is known to hold: tokens behind a prefix.

    Attributes:
        parent: digest of the prefix, or the root of its chain.
        tokens: int64 [n], at least one.
        digest: its own, if it is full.
        space: what its chain belongs to; see `BlockStore.root`.
    """

    parent: bytes
    tokens: np.ndarray
    digest: bytes | None
    space: bytes = b""


class PrefixIndex:
    """Number -> entry, and the ways to find it."""

    def __init__(self) -> None:
        self._entries: dict[int, Entry] = {}
        self._full: dict[bytes, int] = {}
        self._below: dict[tuple[bytes, int], OrderedDict[int, None]] = {}

    def __contains__(self, number: int) -> bool:
        return number in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def entry(self, number: int) -> Entry | None:
        """Return what a piece holds, if that is known."""
        return self._entries.get(number)

    def full(self, digest: bytes) -> int | None:
        """Return the full piece with this digest."""
        return self._full.get(digest)

    def longest_below(self, parent: bytes, ids: np.ndarray) -> tuple[int, int]:
        """Return the piece behind a prefix that begins most like these tokens, and how many are equal; or (-1, 0)."""
        best, length = -1, 0
        if len(ids) == 0:
            return best, length
        candidates = self._below.get((parent, int(ids[0])), ())
        for _, number in zip(range(_CANDIDATES), reversed(candidates), strict=False):
            common = common_prefix(self._entries[number].tokens, ids)
            if common > length:
                best, length = number, common
                if length == len(ids):
                    break
        return best, length

    def beginnings_of(self, entry: Entry) -> list[int]:
        """Return the pieces behind the same prefix that hold a shorter beginning of an entry's tokens."""
        candidates = self._below.get((entry.parent, int(entry.tokens[0])), ())
        return [
            number
            for _, number in zip(range(_CANDIDATES), reversed(candidates), strict=False)
            if len(tokens := self._entries[number].tokens) < len(entry.tokens)
            and common_prefix(tokens, entry.tokens) == len(tokens)
        ]

    def of_space(self, space: bytes) -> list[int]:
        """Return the pieces of one space."""
        return [number for number, entry in self._entries.items() if entry.space == space]

    def learn(self, number: int, entry: Entry) -> None:
        """Say what a piece holds now."""
        self.forget(number)
        self._entries[number] = entry
        self._below.setdefault((entry.parent, int(entry.tokens[0])), OrderedDict())[number] = None
        if entry.digest is not None:
            self._full[entry.digest] = number

    def forget(self, number: int) -> None:
        """Say that a piece holds nothing that is known."""
        entry = self._entries.pop(number, None)
        if entry is None:
            return
        key = (entry.parent, int(entry.tokens[0]))
        del self._below[key][number]
        if not self._below[key]:
            del self._below[key]
        if entry.digest is not None:
            del self._full[entry.digest]

    def clear(self) -> None:
        """Forget everything."""
        self._entries.clear()
        self._full.clear()
        self._below.clear()
