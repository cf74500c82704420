"""Plans forward passes: which tokens are computed, which KV is shared, where everything goes.

Pure bookkeeping over token ids. Three ways to share, all exact: siblings get the KV of one computed prompt; a prompt
that begins like one already in the engine starts behind the common prefix; a prompt that begins like an earlier one of
the same pass reads the earlier one's tokens while they are being written. Prompts and running sequences share a pass:
reading all weights for a few prompt tokens alone would cost as much as a whole decode step.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

import numpy as np
import torch

from rollmill.generator.engines.embedded.attention import ForwardPlan, Segment, SlotPool, causal_mask


def common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    """Return how many leading token ids two sequences share."""
    n = min(len(a), len(b))
    differs = np.flatnonzero(a[:n] != b[:n])
    return int(differs[0]) if len(differs) else n


@dataclass(slots=True)
class PrefillJob:
    """Token ids whose KV has to be in some slots after the pass.

    Attributes:
        ids: int64 [n].
        slots: every slot that gets the KV; the first one is read while computing.
        wants_logits: whether the logits of the last token are needed.
        resident: leading tokens whose KV lies in all slots before the pass.
        shared: leading tokens that are not computed by this job.
    """

    ids: np.ndarray
    slots: tuple[int, ...]
    wants_logits: bool = True
    resident: int = 0
    shared: int = 0


@dataclass(frozen=True, slots=True)
class PackedPass:
    """One packed forward pass, ready to run. `keep` names the tokens whose logits are wanted; `None` means all."""

    token_ids: torch.Tensor
    positions: torch.Tensor
    plan: ForwardPlan
    keep: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class DecodeBatch:
    """The running sequences, in slots 0..n-1, each of which gets one token.

    Attributes:
        token_ids: int64 [n], the newest token of each.
        positions: int64 [n], its position.
        counts: int64 [n], how many tokens of its slot each looks at.
        mask: float [n, 1, 1, length], or `None` where compiled kernels attend.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    counts: torch.Tensor
    mask: torch.Tensor | None

    def alone(self) -> PackedPass:
        """Return the pass that does nothing else."""
        plan = ForwardPlan(
            write_rows=None,
            write_slots=torch.arange(len(self.token_ids)),
            write_positions=self.positions,
            decode_counts=self.counts,
            decode_mask=self.mask,
        )
        return PackedPass(token_ids=self.token_ids, positions=self.positions, plan=plan, keep=None)


@dataclass(slots=True)
class PrefillPlanner:
    """Collects jobs of one pass; the KV a job starts from is copied when the job is added."""

    pool: SlotPool
    jobs: list[PrefillJob] = field(default_factory=list)
    computed: int = 0
    _rows: list[np.ndarray] = field(default_factory=list)

    def best_sibling(self, ids: np.ndarray) -> tuple[int, int]:
        """Return (index of the job with the longest common prefix, its length); length 0 if there is none."""
        best, length = -1, 0
        for index, job in enumerate(self.jobs):
            common = min(common_prefix(job.ids, ids), len(ids) - 1)
            if common > length:
                best, length = index, common
        return best, length

    def add(self, job: PrefillJob, *, sibling: int = -1, common: int = 0) -> None:
        """Add a job whose first `job.resident` tokens are in place, or that shares `common` tokens with a sibling."""
        rows = np.full(len(job.ids), -1, dtype=np.int64)
        if sibling >= 0:
            source = self.jobs[sibling]
            job.resident = min(source.resident, common)
            for slot in job.slots:
                if job.resident:
                    self.pool.copy(source.slots[0], slot, tokens=job.resident)
            rows[job.resident : common] = self._rows[sibling][job.resident : common]
        job.shared = max(job.resident, common)
        fresh = len(job.ids) - job.shared
        rows[job.shared :] = np.arange(self.computed, self.computed + fresh)
        self.jobs.append(job)
        self._rows.append(rows)
        self.computed += fresh

    def build(self, *, dtype: torch.dtype, decode: DecodeBatch | None = None) -> PackedPass:
        """Return the packed pass over the decode batch and all jobs; logits come in that order."""
        first = 0 if decode is None else len(decode.token_ids)
        ids, positions = [job.ids[job.shared :] for job in self.jobs], [_fresh_positions(job) for job in self.jobs]
        writes = [self._writes(index, offset=first) for index in range(len(self.jobs))]
        keep, segments = list(range(first)), []
        if decode is not None:
            at = np.arange(first)
            ids.insert(0, decode.token_ids.numpy())
            positions.insert(0, decode.positions.numpy())
            writes.insert(0, np.stack([at, at, decode.positions.numpy()]))
        for job in self.jobs:
            fresh = len(job.ids) - job.shared
            mask = causal_mask(start=job.shared, rows=fresh, dtype=dtype)
            segments.append(Segment(slot=job.slots[0], first_row=first, rows=fresh, mask=mask))
            first += fresh
            if job.wants_logits:
                keep.append(first - 1)
        write = torch.from_numpy(np.concatenate(writes, axis=1))
        return PackedPass(
            token_ids=torch.from_numpy(np.concatenate(ids)),
            positions=torch.from_numpy(np.concatenate(positions)),
            plan=ForwardPlan(
                write_rows=write[0],
                write_slots=write[1],
                write_positions=write[2],
                decode_counts=None if decode is None else decode.counts,
                decode_mask=None if decode is None else decode.mask,
                segments=tuple(segments),
            ),
            keep=torch.tensor(keep or [0], dtype=torch.int64),
        )

    def _writes(self, index: int, *, offset: int) -> np.ndarray:
        """Return int64 [3, writes]: packed token, slot and position of every KV entry of a job."""
        job = self.jobs[index]
        rows = self._rows[index][job.resident :] + offset
        positions = np.arange(job.resident, len(job.ids))
        return np.concatenate([np.stack([rows, np.full_like(rows, slot), positions]) for slot in job.slots], axis=1)


def _fresh_positions(job: PrefillJob) -> np.ndarray:
    return np.arange(job.shared, len(job.ids))


class PrefixStore:
    """KV of a few recent prompts, all of one policy version; least recently used goes first.

    Entries are keyed by token ids; the version is the store's: `flush` is called whenever it changes.
    """

    def __init__(self, *, entries: int) -> None:
        self._limit = entries
        self._entries: OrderedDict[bytes, tuple[np.ndarray, torch.Tensor]] = OrderedDict()

    def longest(self, ids: np.ndarray) -> tuple[int, torch.Tensor | None]:
        """Return (common tokens, KV) of the entry that shares the longest prefix."""
        best, length = b"", 0
        for key, (known, _) in self._entries.items():
            common = common_prefix(known, ids)
            if common > length:
                best, length = key, common
        if not length:
            return 0, None
        self._entries.move_to_end(best)
        return length, self._entries[best][1]

    def put(self, ids: np.ndarray, kv: torch.Tensor) -> None:
        """Keep the KV of these tokens, `[layers, 2, kv_heads, len(ids), head_dim]`."""
        self._entries[ids.tobytes()] = (ids, kv)
        self._entries.move_to_end(ids.tobytes())
        while len(self._entries) > self._limit:
            self._entries.popitem(last=False)

    def flush(self) -> None:
        """Forget everything."""
        self._entries.clear()

    def __len__(self) -> int:
        return len(self._entries)
