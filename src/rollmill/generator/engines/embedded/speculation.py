"""Speculative decoding: who guesses, and guesses without a second model.

What came after the last tokens before, here or in a sibling, is tried. (A draft model guesses in `drafting`.) Decides
what is guessed and whether it pays; draws nothing. A guess is fed behind the newest token in one pass. Each position's
token is then drawn from the model's own distribution with that position's own uniform number, and counts as long as it
is what was guessed: the tokens are those of decoding without guesses, to the last one.

A row more costs time whether its token is used or not, and passes with many rows are bound by arithmetic. A guess with
probability `p` of being right pays in a pass of `rows` rows where `p > rows / (free + rows)`; a pass takes as long as
`free + rows` rows would, which is measured as passes go by. Rates of success are measured too, forgetting slowly, so
that guessing ends where the policy has drifted away from what it repeats, and is tried again now and then.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from typing import Protocol

from rollmill.generator.engines.sequence import Sequence

MOST_GUESSED = 8
"""Longest guess behind one token; less than a block of KV, so that a guess never needs two."""
_ORDERS = (4, 3, 2)
"""Lengths of the runs of tokens that are looked up, the longest first."""
_FORGET_RATE = 0.99
_FORGET_COST = 1.01
_TRY_EVERY = 64
"""Passes without a guess before a few are made to see whether that still does not pay."""
_TRIED = 4
"""Sequences that guess then."""
_FREE_ROWS = 11.0
"""Measured with SmolLM2 on AVX2, one thread: a pass over 8, 16, 32, 64 rows costs as much as 19, 27, 43, 75."""
_BELIEVED = (2.0, 40.0)
"""What is measured outside of this is noise: with AVX-512 the same model has 26."""
_PASSES_TO_TRUST, _SIZES_TO_TRUST = 5, 3
_KEPT = 16
"""Prompts whose answers are remembered after the last of them ended, for siblings that come later."""


@dataclass(slots=True)
class Rate:
    """How often something succeeded, of late.

    Example:
        >>> rate = Rate()
        >>> round(rate.value, 2)
        0.5
        >>> for _ in range(200):
        ...     rate.see(False)
        >>> rate.value < 0.1
        True
    """

    successes: float = 1.0
    trials: float = 2.0

    @property
    def value(self) -> float:
        """Share of successes."""
        return self.successes / self.trials

    def see(self, success: bool) -> None:
        """Count one trial."""
        self.successes = self.successes * _FORGET_RATE + success
        self.trials = self.trials * _FORGET_RATE + 1.0


class PassCost:
    """What a row of a pass costs beside what every pass costs: a line through the quick passes of each size.

    Other work on the machine only ever adds time, so of each number of rows the least time counts, slowly forgotten.

    Example:
        >>> cost = PassCost()
        >>> for rows in (1, 4, 16, 8) * 10:
        ...     cost.see(rows, seconds=0.020 + 0.004 * rows)
        >>> round(cost.free_rows, 6)
        5.0
        >>> round(cost.break_even(15), 6)
        0.75
    """

    def __init__(self) -> None:
        self._least: dict[int, tuple[float, int]] = {}

    def see(self, rows: int, *, seconds: float) -> None:
        """Take in one pass that computed no prompt."""
        least, seen = self._least.get(rows, (seconds, 0))
        self._least[rows] = min(seconds, least * _FORGET_COST), seen + 1

    @property
    def free_rows(self) -> float:
        """How many rows cost as much as a pass without any."""
        known = [(rows, least) for rows, (least, seen) in self._least.items() if seen >= _PASSES_TO_TRUST]
        if len(known) < _SIZES_TO_TRUST:
            return _FREE_ROWS
        mean_rows = sum(rows for rows, _ in known) / len(known)
        mean_s = sum(least for _, least in known) / len(known)
        spread = sum((rows - mean_rows) ** 2 for rows, _ in known)
        slope = sum((rows - mean_rows) * (least - mean_s) for rows, least in known) / spread
        if slope <= 0.0:
            return _FREE_ROWS
        low, high = _BELIEVED
        return min(max(mean_s / slope - mean_rows, low), high)

    def break_even(self, rows: int) -> float:
        """Return the probability of being right above which one row more pays."""
        return rows / (self.free_rows + rows)


@dataclass(slots=True)
class _Corpus:
    """What sequences with one prompt have said: run of tokens -> the list it stands in, and the place behind it."""

    after: dict[tuple[int, ...], tuple[list[int], int]] = field(default_factory=dict)
    members: int = 0


@dataclass(slots=True)
class _Followed:
    tokens: list[int]
    corpus: _Corpus
    prompt_tokens: int
    indexed: int


@dataclass(frozen=True, slots=True)
class Guess:
    """Tokens that may follow, and how many tokens before them were seen to lead there."""

    tokens: Many[int] = ()
    order: int = 0


class Guesser(Protocol):
    """Says what may follow, and learns what came of it."""

    @property
    def guessed(self) -> int:
        """Tokens that were guessed."""
        ...

    @property
    def accepted(self) -> int:
        """Of those, how many counted."""
        ...

    def guess(self, sequences: list[Sequence], *, rows: int, most: int) -> list[Guess]:
        """Return a guess, often empty, for each sequence.

        Args:
            sequences: that get a token in the pass.
            rows: of the pass without guesses.
            most: rows that may be added.
        """
        ...

    def see(self, guess: Guess, *, right: int) -> None:
        """Learn how many tokens of a guess counted."""
        ...

    def passed(self, *, sequences: int, rows: int, tokens: int, seconds: float) -> None:
        """Take in what a pass took that computed no prompt, with the guessing in front of it.

        Args:
            sequences: that ran.
            rows: decoded, guesses included.
            tokens: that came of it.
            seconds: that it took.
        """
        ...

    def forget(self, sequence: Sequence) -> None:
        """Follow a sequence no longer."""
        ...

    def clear(self) -> None:
        """Follow nobody."""
        ...


class Speculator:
    """Guesses from what was said before.

    Attributes:
        guessed: tokens that were guessed.
        accepted: of those, how many were drawn.
        cost: of passes.
    """

    def __init__(self) -> None:
        self.guessed = self.accepted = 0
        self.cost = PassCost()
        self._followed: dict[Sequence, _Followed] = {}
        self._corpora: OrderedDict[bytes, _Corpus] = OrderedDict()
        self._first = {order: Rate() for order in _ORDERS}
        self._further = Rate()
        self._passes_without = 0

    # -- before a pass

    def guess(self, sequences: list[Sequence], *, rows: int, most: int) -> list[Guess]:
        """Return a guess, often empty, for each sequence.

        Args:
            sequences: that get a token in the pass.
            rows: of the pass without guesses.
            most: rows that may be added.
        """
        needed = self.cost.break_even(rows)
        trying = self._passes_without >= _TRY_EVERY
        if not trying and max(rate.value for rate in self._first.values()) <= needed:
            self._passes_without += 1
            return [Guess()] * len(sequences)
        guesses, left = [], most
        for place, sequence in enumerate(sequences):
            few = trying and place < _TRIED
            guess = self._guess(sequence, needed=0.0 if few else needed, most=min(left, 1 if few else MOST_GUESSED))
            guesses.append(guess)
            left -= len(guess.tokens)
        self._passes_without = 0 if left < most else self._passes_without + 1
        return guesses

    def _guess(self, sequence: Sequence, *, needed: float, most: int) -> Guess:
        if sequence.request.wave is not None:  # a wave's passes are the same in every run; these depend on the clock
            return Guess()
        most = min(most, sequence.capacity - sequence.count - 1)
        if most < 1:
            return Guess()
        followed = self._follow(sequence)
        tokens, after = followed.tokens, followed.corpus.after
        for order in _ORDERS:
            rate = self._first[order].value
            if rate <= needed:
                continue
            known = after.get(tuple(tokens[-order:]))
            if known is None:
                continue
            said, at = known
            count = 1
            while count < most and (rate := rate * self._further.value) > needed:
                count += 1
            return Guess(tuple(said[at : at + count]), order)
        return Guess()

    # -- after it

    def see(self, guess: Guess, *, right: int) -> None:
        """Learn how many tokens of a guess were drawn before one that was not."""
        self.guessed += len(guess.tokens)
        self.accepted += right
        for place in range(min(right + 1, len(guess.tokens))):
            (self._further if place else self._first[guess.order]).see(place < right)

    def passed(self, *, sequences: int, rows: int, tokens: int, seconds: float) -> None:
        """Take in what a pass took that computed no prompt."""
        self.cost.see(rows, seconds=seconds)

    def forget(self, sequence: Sequence) -> None:
        """Follow a sequence no longer; its siblings may go on repeating it."""
        if sequence not in self._followed:
            return
        followed = self._follow(sequence)
        del self._followed[sequence]
        followed.corpus.members -= 1
        over = [key for key, corpus in self._corpora.items() if not corpus.members]
        for key in over[: len(over) - _KEPT]:
            del self._corpora[key]

    def clear(self) -> None:
        """Follow nobody."""
        self._followed.clear()
        self._corpora.clear()

    # -- what was said

    def _follow(self, sequence: Sequence) -> _Followed:
        """Take in what a sequence has said since the last time."""
        followed = self._followed.get(sequence)
        if followed is None:
            corpus = self._corpora.setdefault(sequence.prompt_key, _Corpus())
            self._corpora.move_to_end(sequence.prompt_key)
            prompt = sequence.prompt.tolist()
            followed = _Followed(prompt, corpus, len(prompt), len(prompt) if corpus.after else 0)
            corpus.members += 1
            self._followed[sequence] = followed
        tokens = followed.tokens
        tokens += sequence.output_since(len(tokens) - followed.prompt_tokens)
        # The newest token is behind every run that is put in, so that no run leads to what is not there yet.
        for end in range(max(followed.indexed, 1), len(tokens)):
            for order in _ORDERS:
                if order <= end:
                    followed.corpus.after[tuple(tokens[end - order : end])] = (tokens, end)
        followed.indexed = len(tokens)
        return followed
