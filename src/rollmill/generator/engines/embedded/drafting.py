"""A small model guesses for a large one.

The draft has KV of its own in the same blocks: what the tables say about a token's place holds for both, so the draft's
KV is shared, freed and given up with the model's, and costs no bookkeeping but one number per block: how many of its
tokens the draft has read. What it has not read (a prompt, tokens from passes without guesses) it reads when it guesses
next. Siblings read a shared prompt once: who finds blocks that another reads in this pass guesses in the next one.

Decides who guesses how far; whether guessing pays is `draft_law`'s to say, which guesses count is `rejection`'s. The
draft is never swapped: as the policy drifts away from it fewer of its guesses count. It never guesses in a wave, whose
passes must not depend on the clock.
"""

from __future__ import annotations

import dataclasses
import logging
from dataclasses import dataclass, field

import numpy as np
import torch

from rollmill.errors import ConfigError
from rollmill.generator.engines.embedded.blocks import BlockStore, BlockTable
from rollmill.generator.engines.embedded.draft_law import DraftLaw
from rollmill.generator.engines.embedded.kv import KvCache
from rollmill.generator.engines.embedded.model import ServedModel
from rollmill.generator.engines.embedded.prefill import DecodeBatch, PackedPass, PrefillJob, PrefillPlanner
from rollmill.generator.engines.embedded.rejection import Draft
from rollmill.generator.engines.embedded.sampling import pick, shaped, stream, weigh
from rollmill.generator.engines.embedded.settings import SpeculationChoice
from rollmill.generator.engines.embedded.speculation import Guess
from rollmill.generator.engines.sequence import Sequence
from rollmill.generator.engines.streams import DRAFT_LANE

_log = logging.getLogger(__name__)

_ROW_BY_ROW = 16
"""Most unread tokens that are read like decoded ones; longer runs are read like prompts."""
_STEADY_LAG = 2
"""A draft whose guesses all counted has not read the last of them, nor the newest token."""


@dataclass(frozen=True, slots=True)
class DraftModel:
    """A draft, and how it is used.

    Attributes:
        model: of the vocabulary of the model that it guesses for.
        tokens: most tokens of a guess.
        law: says whether guessing pays.
    """

    model: ServedModel
    tokens: int
    law: DraftLaw = field(default_factory=DraftLaw)

    def check(self, served: ServedModel) -> None:
        """Refuse a draft whose token ids cannot be those of the model that it guesses for.

        Raises:
            ConfigError: with both sizes.
        """
        if self.model.vocabulary_size != served.vocabulary_size:
            raise ConfigError(
                f"the draft model {self.model.name} has {self.model.vocabulary_size} tokens and {served.name} has "
                f"{served.vocabulary_size}: a guess must be a token of the model that is served. Name a draft of the "
                'same family in generator.draft_model, or set generator.speculation to "ngram"'
            )


def draft_for(served: ServedModel, *, speculation: SpeculationChoice, draft: DraftModel | None) -> DraftModel | None:
    """Return the draft that guesses for a model, `None` where none is asked for.

    Raises:
        ConfigError: if one is asked for and is missing, or has another vocabulary.
    """
    if speculation != "draft":
        return None
    if draft is None:
        raise ConfigError(
            'generator.speculation is "draft" and no draft model was given: name one in generator.draft_model'
        )
    draft.check(served)
    return draft


class ReadTokens:
    """How many leading tokens of each block the draft has read.

    Args:
        store: whose blocks; a block that was given to somebody else since counts as unread.
    """

    def __init__(self, store: BlockStore) -> None:
        self._store = store
        self._counts = np.zeros(len(store.lives), dtype=np.int64)
        self._lives = np.full(len(store.lives), -1, dtype=np.int64)

    def leading(self, blocks: list[int]) -> int:
        """Return how many leading tokens of these blocks were read."""
        at = np.array(blocks, dtype=np.int64)
        counts = np.where(self._lives[at] == self._store.lives[at], self._counts[at], 0)
        short = np.flatnonzero(counts < self._store.size)
        if not len(short):
            return len(blocks) * self._store.size
        return int(short[0]) * self._store.size + int(counts[short[0]])

    def set(self, blocks: list[int] | tuple[int, ...], *, start: int, stop: int) -> None:
        """Note that of the blocks from token `start` on just the tokens before `stop` were read."""
        size = self._store.size
        for index in range(start // size, min(len(blocks), -(-stop // size))):
            block = blocks[index]
            self._counts[block] = min(size, stop - index * size)
            self._lives[block] = self._store.lives[block]

    def cut(self, blocks: list[int] | tuple[int, ...], *, stop: int, read: int) -> None:
        """Note that of what was read, up to token `read`, only the tokens before `stop` were the right ones."""
        size = self._store.size
        for index in range(stop // size, min(len(blocks), -(-read // size))):
            self._counts[blocks[index]] = min(size, max(0, stop - index * size))


@dataclass(slots=True)
class _Drafted:
    """A sequence that guesses in this pass, and what it has guessed so far."""

    place: int
    sequence: Sequence
    ids: np.ndarray
    read: int
    most: int
    tokens: list[int] = field(default_factory=list)
    chances: list[float] = field(default_factory=list)
    weights: list[torch.Tensor] = field(default_factory=list)
    totals: list[float] = field(default_factory=list)

    @property
    def unread(self) -> np.ndarray:
        """Tokens that the draft has not read, the newest one at the end."""
        return self.ids[self.read :]

    @property
    def goes_on(self) -> bool:
        """Whether a token is guessed behind the last one."""
        stop_ids = self.sequence.request.sampling.stop_token_ids
        return len(self.tokens) < self.most and self.tokens[-1] not in stop_ids


class Drafter:
    """Guesses with a draft model.

    Args:
        draft: the model and how it is used.
        kv: of the model that it guesses for; says where tokens lie, and gives blocks to those who guess.
        max_num_batched_tokens: most tokens of one pass of the draft.

    Attributes:
        guessed: tokens that were guessed.
        accepted: of those, how many counted.
        law: whether guessing pays.
        model: that guesses.
        pool: its KV.
    """

    def __init__(self, draft: DraftModel, *, kv: KvCache, max_num_batched_tokens: int) -> None:
        self.guessed = self.accepted = 0
        self.law = draft.law
        self.model, self._tokens, self._kv = draft.model, draft.tokens, kv
        self._limit = max_num_batched_tokens
        store, scratch = kv.store, len(kv.scratch.blocks)
        self.pool = draft.model.new_pool(blocks=scratch + store.total, size=store.size)
        self._read = ReadTokens(store)
        self._broken = False
        self._guessing, self._steady = False, True

    # -- before a pass

    def guess(self, sequences: list[Sequence], *, rows: int, most: int) -> list[Guess]:
        """Return a guess, often empty, for each sequence, see `Guesser`."""
        found = [Guess()] * len(sequences)
        lengths = [self._longest(sequence) for sequence in sequences]
        self._guessing = not self._broken and any(lengths) and most > 0 and self.law.guesses(len(sequences))
        if not self._guessing:
            return found
        self._steady = True
        drafted, reading = self._plan(sequences, lengths=lengths, most=most)
        if not drafted and not reading:
            return found
        logits = self._first_pass(drafted, reading)
        going = drafted
        while going and self._draw(going, logits):
            going = [one for one in going if one.goes_on]
            if going:
                logits = self._next_pass(going)
        for one in drafted:
            if one.tokens:
                found[one.place] = self._draft_of(one)
        return found

    def _longest(self, sequence: Sequence) -> int:
        """Return how many tokens may be guessed: one less than may come, within the draft's context."""
        if sequence.request.wave is not None:
            return 0
        left = min(sequence.capacity - sequence.count - 1, self.model.context_len - sequence.kv_tokens - 1)
        return max(0, min(self._tokens, left))

    def _plan(
        self, sequences: list[Sequence], *, lengths: list[int], most: int
    ) -> tuple[list[_Drafted], list[PrefillJob]]:
        """Return who guesses, and what is only read in this pass."""
        drafted: list[_Drafted] = []
        reading: list[PrefillJob] = []
        room, size = self._limit, self._kv.store.size
        being_read: set[int] = set()
        for place, (sequence, length) in enumerate(zip(sequences, lengths, strict=True)):
            length = min(length, most)
            if not length or not room:
                continue
            if not self._kv.grow(sequence, tokens=sequence.kv_tokens + 1 + length):
                continue
            blocks, newest = self._kv.blocks_of(sequence), sequence.kv_tokens
            read = min(self._read.leading(blocks), newest)
            self._steady &= newest + 1 - read <= _STEADY_LAG
            into = set(blocks[read // size : newest // size + 1])
            if into & being_read:
                continue
            being_read |= into
            ids = np.append(sequence.kv_ids(), sequence.last_token)
            if newest + 1 - read > room:
                reading.append(PrefillJob(ids[: read + room], (BlockTable(blocks=blocks),), False, resident=read))
                room = 0
                continue
            room -= newest + 1 - read
            most -= length
            drafted.append(_Drafted(place, sequence, ids, read, length))
        # In the order in which a pass computes them.
        drafted.sort(key=lambda one: len(one.unread) > _ROW_BY_ROW)
        return drafted, reading

    # -- passes of the draft

    def _first_pass(self, drafted: list[_Drafted], reading: list[PrefillJob]) -> torch.Tensor:
        """Read what is unread; return the logits behind the newest token of each who guesses."""
        long = [one for one in drafted if len(one.unread) > _ROW_BY_ROW]
        short = [one for one in drafted if len(one.unread) <= _ROW_BY_ROW]
        planner = PrefillPlanner(self._kv.store.size)
        for one in long:
            table = BlockTable(blocks=self._kv.blocks_of(one.sequence))
            planner.add(PrefillJob(one.ids, (table,), resident=one.read))
        for job in reading:
            planner.add(job)
        decode = self._batch([(one.sequence, one.unread) for one in short]) if short else None
        work = planner.build(dtype=self.model.dtype, masks=self.model.needs_masks, decode=decode)
        ends = np.cumsum([len(one.unread) for one in (*short, *long)]) - 1
        # Only the newest tokens' logits are wanted: the head is the larger part of a small model.
        keep = torch.from_numpy(ends) if drafted else torch.tensor([0])
        logits = self._forward(dataclasses.replace(work, keep=keep))
        for job in reading:
            self._read.set(job.tables[0].blocks, start=job.resident, stop=len(job.ids))
        for one in drafted:
            self._read.set(self._kv.blocks_of(one.sequence), start=one.read, stop=len(one.ids))
        return logits

    def _next_pass(self, going: list[_Drafted]) -> torch.Tensor:
        """Read the newest guess of each; return the logits behind it."""
        runs = [(one.sequence, np.array(one.tokens[-1:])) for one in going]
        batch = self._batch(runs, behind=[len(one.tokens) for one in going])
        planner = PrefillPlanner(self._kv.store.size)
        logits = self._forward(planner.build(dtype=self.model.dtype, masks=self.model.needs_masks, decode=batch))
        for one in going:
            at = one.sequence.kv_tokens + len(one.tokens)
            self._read.set(self._kv.blocks_of(one.sequence), start=at, stop=at + 1)
        return logits

    def _batch(self, runs: list[tuple[Sequence, np.ndarray]], *, behind: list[int] | None = None) -> DecodeBatch:
        """Return tokens of each sequence that end `behind` its newest one, or with it."""
        ends = [one.kv_tokens + 1 + (0 if behind is None else behind[n]) for n, (one, _) in enumerate(runs)]
        positions = np.concatenate([np.arange(end - len(ids), end) for end, (_, ids) in zip(ends, runs, strict=True)])
        return DecodeBatch(
            token_ids=np.concatenate([ids for _, ids in runs]).astype(np.int64),
            positions=positions,
            tables=self._kv.tables([one for one, ids in runs for _ in ids], width=self._kv.store.needed(max(ends))),
        )

    def _forward(self, work: PackedPass) -> torch.Tensor:
        return self.model.forward(
            work.token_ids, positions=work.positions, plan=work.plan, pool=self.pool, keep=work.keep
        )

    def _draw(self, going: list[_Drafted], logits: torch.Tensor) -> bool:
        """Draw the next guess of each; return whether that could be done."""
        params = [one.sequence.request.sampling for one in going]
        logits = shaped(logits, params=params)
        weights, totals = weigh(logits, params=params)
        if not np.isfinite(totals).all():
            self._broken = True
            _log.error(
                "the draft model %s gives numbers that are not finite and guesses no more; what is served is not "
                "concerned. Give sound weights in generator.draft_model",
                self.model.name,
            )
            return False
        counters = np.array([one.sequence.count + len(one.tokens) for one in going])
        drawn, _ = pick(weights, stream(params, counters + DRAFT_LANE))
        greedy = np.array([own.temperature <= 0 for own in params])
        tokens = np.where(greedy, logits.argmax(-1).numpy(), drawn)
        chances = weights.numpy()[np.arange(len(going)), tokens] / totals
        for row, one in enumerate(going):
            one.tokens.append(int(tokens[row]))
            one.chances.append(float(chances[row]))
            one.weights.append(weights[row])
            one.totals.append(float(totals[row]))
        return True

    def _draft_of(self, one: _Drafted) -> Draft:
        return Draft(
            tokens=tuple(one.tokens),
            chances=tuple(one.chances),
            weights=tuple(one.weights),
            totals=tuple(one.totals),
            start=one.sequence.kv_tokens,
            blocks=tuple(self._kv.blocks_of(one.sequence)),
        )

    # -- after it

    def see(self, guess: Guess, *, right: int) -> None:
        """Learn how many tokens of a guess counted, and forget that the others were read."""
        self.guessed += len(guess.tokens)
        self.accepted += right
        if isinstance(guess, Draft):
            # The last guess was not read.
            read = guess.start + len(guess.tokens)
            self._read.cut(guess.blocks, stop=min(read, guess.start + 1 + right), read=read)

    def passed(self, *, sequences: int, rows: int, tokens: int, seconds: float) -> None:
        """Take in what a pass took that computed no prompt, with the guessing in front of it."""
        if not self._guessing:
            self.law.see_plain(sequences, seconds=seconds)
        else:
            self.law.see_guessed(sequences, tokens=tokens, seconds=seconds, steady=self._steady and rows > sequences)

    def forget(self, sequence: Sequence) -> None:
        """Nothing is kept per sequence: what the draft has read is known by block."""

    def clear(self) -> None:
        """As `forget`, for all."""
