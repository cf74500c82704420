"""Joins the tokens of a stream into larger chunks, for readers who need them safe rather than at once. Pure.

The first token of a sample goes at once, because it says that the sample has begun. A chunk never spans two versions of
the weights.
"""

from __future__ import annotations

import numpy as np

from rollmill.types import TokenChunk


class ChunkJoiner:
    """Holds back the tokens of several siblings until there are enough of them.

    Args:
        size: tokens of a chunk; 1 holds nothing back.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._held: dict[int, list[TokenChunk]] = {}

    def add(self, index: int, chunk: TokenChunk) -> list[TokenChunk]:
        """Take the next tokens of a sibling; return what goes out now."""
        if self._size <= 1 or chunk.start_token == 0:
            return [chunk]
        held = self._held.setdefault(index, [])
        out: list[TokenChunk] = []
        if held and held[0].policy_version != chunk.policy_version:
            out = self.flush(index)
            held = self._held.setdefault(index, [])
        held.append(chunk)
        if sum(len(one.output_ids) for one in held) >= self._size:
            out += self.flush(index)
        return out

    def flush(self, index: int) -> list[TokenChunk]:
        """Return what is held of a sibling, as one chunk."""
        held = self._held.pop(index, [])
        if len(held) < 2:
            return held
        return [
            TokenChunk(
                start_token=held[0].start_token,
                output_ids=np.concatenate([one.output_ids for one in held]),
                behavior_logprobs=np.concatenate([one.behavior_logprobs for one in held]),
                policy_version=held[0].policy_version,
            )
        ]

    def flush_all(self) -> list[tuple[int, TokenChunk]]:
        """Return what is held of every sibling."""
        return [(index, chunk) for index in list(self._held) for chunk in self.flush(index)]
