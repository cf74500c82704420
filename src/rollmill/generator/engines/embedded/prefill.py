"""Plans forward passes: which tokens are computed, which KV is shared, where everything goes.

Pure bookkeeping over token ids and block numbers. Three ways to share, all exact: siblings read the blocks of one
computed prompt and part where they begin to write; a prompt that begins like what is known already starts behind it; a
prompt that begins like an earlier one of the same pass reads the earlier one's blocks while they are being written.
Prompts and running sequences share a pass: reading all weights for a few prompt tokens alone would cost as much as a
whole decode step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from rollmill.generator.engines.embedded.attention import ForwardPlan, Segment, causal_mask, decode_mask
from rollmill.generator.engines.embedded.blocks import BlockTable, Match
from rollmill.generator.engines.embedded.kv import KvCache
from rollmill.generator.engines.embedded.low_rank import ServedAdapter
from rollmill.generator.engines.embedded.prefixes import common_prefix
from rollmill.generator.engines.sequence import Sequence


@dataclass(slots=True)
class PrefillJob:
    """Token ids whose KV has to be in the blocks of some tables after the pass.

    Attributes:
        ids: int64 [n].
        tables: of every sequence that starts from these ids; they differ in the last block at most, and the first one
            is read while computing.
        wants_logits: whether the logits of the last token are needed.
        resident: leading tokens that others have written or will write in this pass.
        shared: leading tokens that are not computed by this job.
        in_flight: leading tokens in blocks that an earlier job of this pass writes.
        adapter: computes it beside the base's weights; jobs of different ones share nothing.
    """

    ids: np.ndarray
    tables: tuple[BlockTable, ...]
    wants_logits: bool = True
    resident: int = 0
    shared: int = 0
    in_flight: int = 0
    adapter: ServedAdapter | None = None


@dataclass(frozen=True, slots=True)
class PackedPass:
    """One packed forward pass, ready to run.

    Attributes:
        keep: the tokens whose logits are wanted; `None` means all.
        owners: runs of tokens, in their order: whose adapter computes them, how many.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    plan: ForwardPlan
    keep: torch.Tensor | None
    owners: tuple[tuple[ServedAdapter | None, int], ...] = ()


@dataclass(frozen=True, slots=True)
class DecodeBatch:
    """Tokens of running sequences, each at its position behind KV that is there.

    Attributes:
        token_ids: int64 [n].
        positions: int64 [n].
        tables: int64 [n, blocks], the blocks of each one's sequence.
        owners: runs of tokens as in `PackedPass`; empty if the base alone computes them.
    """

    token_ids: np.ndarray
    positions: np.ndarray
    tables: np.ndarray
    owners: tuple[tuple[ServedAdapter | None, int], ...] = ()


def decode_batch(
    fed: list[tuple[Sequence, tuple[int, ...]]],
    *,
    kv: KvCache,
    adapter_of: Callable[[Sequence], ServedAdapter | None],
) -> DecodeBatch:
    """Return what running sequences are fed: the newest token of each, with what was guessed behind it."""
    positions = np.concatenate([np.arange(one.kv_tokens, one.kv_tokens + len(tokens)) for one, tokens in fed])
    return DecodeBatch(
        token_ids=np.array([token for _, tokens in fed for token in tokens], dtype=np.int64),
        positions=positions,
        tables=kv.tables([one for one, tokens in fed for _ in tokens], width=kv.store.needed(int(positions.max()) + 1)),
        owners=tuple((adapter_of(one), len(tokens)) for one, tokens in fed),
    )


@dataclass(slots=True)
class PrefillPlanner:
    """Collects the jobs of one pass.

    Args:
        size: tokens of a block.
    """

    size: int
    jobs: list[PrefillJob] = field(default_factory=list)
    computed: int = 0
    _rows: list[np.ndarray] = field(default_factory=list)

    def best_sibling(self, ids: np.ndarray, *, adapter: ServedAdapter | None = None) -> tuple[int, int]:
        """Return (index of the job with the longest common prefix, its length); length 0 if there is none.

        Args:
            ids: int64 [n], the prompt.
            adapter: that computes it; the job's must be the same.
        """
        best, length = -1, 0
        for index, job in enumerate(self.jobs):
            if job.adapter is not adapter:
                continue
            common = min(common_prefix(job.ids, ids), len(ids) - 1)
            if common > length:
                best, length = index, common
        return best, length

    def sibling_match(self, sibling: int, *, common: int) -> Match:
        """Return how a job starts that has its first `common` tokens in common with an earlier one."""
        source = self.jobs[sibling]
        whole = common // self.size * self.size
        resident = max(whole, min(source.resident, common))
        blocks = source.tables[0].blocks[: common // self.size]
        if resident == whole:
            return Match(tokens=whole, blocks=tuple(blocks))
        if whole < source.in_flight:
            raise AssertionError("the earliest job of a pass that has these tokens writes them, and was not chosen")
        return Match(tokens=resident, blocks=tuple(blocks), tail=source.tables[0].blocks[common // self.size])

    def add(self, job: PrefillJob, *, sibling: int = -1, common: int = 0) -> None:
        """Add a job whose first `job.resident` tokens are in place, or that shares `common` tokens with a sibling."""
        rows = np.full(len(job.ids), -1, dtype=np.int64)
        if sibling >= 0:
            job.in_flight = common // self.size * self.size
            rows[job.resident : common] = self._rows[sibling][job.resident : common]
        job.shared = max(job.resident, common)
        fresh = len(job.ids) - job.shared
        rows[job.shared :] = np.arange(self.computed, self.computed + fresh)
        self.jobs.append(job)
        self._rows.append(rows)
        self.computed += fresh

    def build(self, *, dtype: torch.dtype, masks: bool, decode: DecodeBatch | None = None) -> PackedPass:
        """Return the packed pass over the decode batch and all jobs; logits come in that order.

        Args:
            dtype: of the masks.
            masks: whether decoded tokens need one.
            decode: what runs.
        """
        first = 0 if decode is None else len(decode.token_ids)
        ids, positions = [job.ids[job.shared :] for job in self.jobs], [_fresh_positions(job) for job in self.jobs]
        writes = [self._writes(index, offset=first) for index in range(len(self.jobs))]
        if decode is not None:
            ids.insert(0, decode.token_ids)
            positions.insert(0, decode.positions)
            writes.insert(0, _decode_writes(decode, size=self.size))
        keep, segments = list(range(first)), []
        owners = [] if decode is None else [*(decode.owners or ((None, first),))]
        end = first
        for job in self.jobs:
            fresh = len(job.ids) - job.shared
            mask = causal_mask(start=job.shared, rows=fresh, dtype=dtype)
            table = torch.tensor(job.tables[0].blocks[: -(-len(job.ids) // self.size)])
            segments.append(Segment(table=table, first_row=end, rows=fresh, mask=mask))
            end += fresh
            owners.append((job.adapter, fresh))
            if job.wants_logits:
                keep.append(end - 1)
        write = torch.from_numpy(np.concatenate(writes, axis=1))
        plan = ForwardPlan(
            write_rows=write[0] if self.jobs else None,
            write_blocks=write[1],
            write_offsets=write[2],
            segments=tuple(segments),
            **({} if decode is None else _decode_reads(decode, size=self.size, dtype=dtype, masks=masks)),
        )
        return PackedPass(
            token_ids=torch.from_numpy(np.concatenate(ids)),
            positions=torch.from_numpy(np.concatenate(positions)),
            plan=plan,
            keep=torch.tensor(keep or [0], dtype=torch.int64) if self.jobs else None,
            owners=tuple(owners),
        )

    def _writes(self, index: int, *, offset: int) -> np.ndarray:
        """Return int64 [3, writes]: packed token, block and place in it of every KV entry of a job."""
        job = self.jobs[index]
        last = len(job.ids) // self.size * self.size
        parts = []
        for number, table in enumerate(job.tables):
            positions = np.arange(job.resident if number == 0 else max(job.resident, last), len(job.ids))
            blocks = np.array(table.blocks, dtype=np.int64)[positions // self.size]
            parts.append(np.stack([self._rows[index][positions] + offset, blocks, positions % self.size]))
        return np.concatenate(parts, axis=1)


def _fresh_positions(job: PrefillJob) -> np.ndarray:
    return np.arange(job.shared, len(job.ids))


def _decode_writes(decode: DecodeBatch, *, size: int) -> np.ndarray:
    rows = np.arange(len(decode.positions))
    return np.stack([rows, decode.tables[rows, decode.positions // size], decode.positions % size])


def _decode_reads(decode: DecodeBatch, *, size: int, dtype: torch.dtype, masks: bool) -> dict[str, torch.Tensor]:
    positions = torch.from_numpy(decode.positions)
    reads = {"decode_tables": torch.from_numpy(decode.tables), "decode_counts": positions + 1}
    if masks:
        reads["decode_mask"] = decode_mask(positions, length=decode.tables.shape[1] * size, dtype=dtype)
    return reads
