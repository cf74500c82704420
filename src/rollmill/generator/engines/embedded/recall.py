"""Whether the KV of a prompt comes back from the host tier, and what came of that.

Decides by the room there is and by what moving and computing cost; moves nothing itself. One lookup is counted for each
time a sequence enters the batch, however often it was planned before it did.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from rollmill.generator.engines.embedded.blocks import Match
from rollmill.generator.engines.embedded.host_tier import HostTier
from rollmill.generator.engines.embedded.kv import KvCache
from rollmill.generator.engines.sequence import Sequence


class Recall:
    """Asks the host tier about prompts.

    Args:
        kv: the cache in front of the tier.
        tier: its tier.
    """

    def __init__(self, kv: KvCache, *, tier: HostTier) -> None:
        self._kv, self._tier = kv, tier

    def lengthen(
        self,
        head: Sequence,
        ids: np.ndarray,
        *,
        match: Match,
        common: int,
        room: Callable[[], int | None],
        promised: int,
        left: int | None,
        space: bytes = b"",
    ) -> Match:
        """Return what is known of a prompt once KV came back, if it fits, pays, and the prompt enters the pass.

        Args:
            head: whose prompt it is.
            ids: int64 [n], the prompt.
            match: what is in memory.
            common: leading tokens that an earlier prompt of the pass shares.
            room: gives the blocks that nobody was promised; `None` where nobody runs.
            promised: blocks that the sequence must find later.
            left: tokens that may be added to the pass, if a prompt with more of them has to wait; `None` if not.
            space: the match's.
        """
        kv, limit = self._kv, len(ids) - 1
        if not kv.uses_tier(head):
            return match
        known = max(match.tokens, common)
        found = kv.on_tier(ids, match=match, limit=limit, space=space)
        if found.tokens <= known or (left is not None and len(ids) - found.tokens > left):
            return match
        # One block more: the last piece may have to be copied before it is written behind.
        needed = kv.store.needed(len(ids)) + 1 - kv.store.to_reference(match)
        free = room()
        if needed > kv.store.available or (free is not None and needed + promised > free):
            return match
        if not self._tier.costs.decide_load(nbytes=found.nbytes, tokens=found.tokens - known):
            return match
        kv.bring_back(found, match=match)
        match = kv.store.match(ids, limit=limit, space=space)
        head.restored_tokens += max(0, match.tokens - known)
        return match

    def count(self, sequence: Sequence) -> None:
        """Count, for one that enters, whether the tier helped where it might have: a session's or a suspended one."""
        if not self._kv.uses_tier(sequence):
            return
        if sequence.restored_tokens:
            self._tier.counts.hits += 1
        elif sequence.request.session_id or sequence.count:
            self._tier.counts.misses += 1
        sequence.restored_tokens = 0

    def see_prefill(self, computed: int, *, beside: int, seconds: float) -> None:
        """Learn what a token of a prompt costs, from passes that were mostly that.

        Args:
            computed: tokens of prompts in the pass.
            beside: decoded ones.
            seconds: that it took.
        """
        if computed >= max(beside, self._kv.store.size):
            self._tier.costs.prefill.see(computed + beside, seconds=seconds)
