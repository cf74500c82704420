"""Whether guessing with a draft model pays at this moment. Pure: seconds in, yes or no out.

Measured, not modelled: a pass with guesses counts with everything that it took (the draft's passes, the longer pass of
the model, judging), against what its tokens would have taken one by one. The latter comes from recent passes without
guesses: one over `n` sequences takes as long as `free + n` rows (`PassCost`), so that batches of other sizes tell too.
Whether it pays depends on the batch: many rows leave nothing to gain. Each size of batch is judged on its own.

| guessing | passes | goes over when |
|---|---|---|
| off | without guesses | `pause` of them have passed: to trial |
| trial | with guesses, until `_TRIAL` told something, or fewer told enough | cost below `_BEGIN`: on; else off |
| on | with guesses, each `_PLAIN_EVERY`th without | cost above `_END`: off |

As the policy drifts away from the draft fewer guesses count, the cost of a token rises, and guessing ends. After each
trial that failed the next comes twice as late, up to `_LONGEST_PAUSE`; and not before what guessing has lost since the
trial before is a share of `_REGRET` of what has passed. So a draft that never pays costs that share and its first
trial. Not quite, if a pass with its guesses takes 40 times as long as one without: the longest pause is then too short.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from rollmill.generator.engines.embedded.speculation import PassCost

_PLAIN_FIRST = 5
"""Passes without guesses before the first trial: what guessing is compared with."""
_PLAIN_EVERY = 64
_TRIAL = 8
_TELLS_ENOUGH = ((2, 1.6), (4, 1.2))
"""Passes of a trial after which it has failed if a token costs more than so many times what it costs without."""
_REGRET = 0.02
_MOST_LOST = 40.0
"""Passes without guesses that a trial may cost before it has failed."""
_TRIAL_PATIENCE = 24
"""Most passes of a trial that tell nothing, because the draft had to read what it had missed."""
_BEGIN, _END = 0.95, 1.0
"""Cost of a token with guesses over that without; apart, so that noise does not switch back and forth."""
_FIRST_PAUSE, _LONGEST_PAUSE = 64, 4096
_PROVEN = 256
"""Passes with guesses after which an end is news, and the next trial comes early again."""
_LEAST = 16
"""Passes with guesses before they are judged."""
_FORGET = 0.98


@dataclass(slots=True)
class Share:
    """Sums of two quantities, forgetting slowly.

    Example:
        >>> share = Share()
        >>> share.see(3.0, of=2.0)
        >>> share.value
        1.5
    """

    sum: float = 0.0
    of: float = 0.0
    seen: int = 0

    def see(self, value: float, *, of: float) -> None:
        """Add one observation."""
        self.sum = self.sum * _FORGET + value
        self.of = self.of * _FORGET + of
        self.seen += 1

    @property
    def value(self) -> float:
        """Their ratio; 0 where nothing was seen."""
        return self.sum / self.of if self.of else 0.0


@dataclass(slots=True)
class _Size:
    """What is known of batches of about one size."""

    on: bool = False
    trial: int = 0
    patience: int = 0
    wait: int = 0
    pause: int = _FIRST_PAUSE
    since_plain: int = 0
    cost: Share = field(default_factory=Share)
    lost_passes: float = 0.0


class DraftLaw:
    """Says before each pass whether to guess, and learns what the pass took.

    Example:
        >>> law = DraftLaw()
        >>> for _ in range(5):  # one token each takes 10 ms
        ...     assert not law.guesses(1)
        ...     law.see_plain(1, seconds=0.010)
        >>> for _ in range(8):  # the trial: 3 tokens in 18 ms
        ...     assert law.guesses(1)
        ...     law.see_guessed(1, tokens=3, seconds=0.018, steady=True)
        >>> law.pays(1), round(law.cost(1), 2)
        (True, 0.6)
    """

    def __init__(self) -> None:
        self._plain, self._rows = Share(), PassCost()
        self._sizes: dict[int, _Size] = {}

    def pays(self, sequences: int) -> bool:
        """Return whether guessing is on for batches like this one."""
        return self._size(sequences).on

    def cost(self, sequences: int) -> float:
        """Return what a token costs with guesses over what it costs without; 0 where it is not known."""
        return self._size(sequences).cost.value

    def guesses(self, sequences: int) -> bool:
        """Return whether to guess in the next pass; asked once per pass."""
        size = self._size(sequences)
        if self._plain.seen < _PLAIN_FIRST:
            return False
        if size.on:
            size.since_plain += 1
            return size.since_plain < _PLAIN_EVERY
        if not size.trial:
            size.wait -= 1
            if size.wait > 0:
                return False
            size.trial, size.patience, size.cost, size.lost_passes = _TRIAL, _TRIAL_PATIENCE, Share(), 0.0
        return True

    def see_plain(self, sequences: int, *, seconds: float) -> None:
        """Take in a pass that gave each sequence one token."""
        self._rows.see(sequences, seconds=seconds)
        self._plain.see(seconds, of=self._rows.free_rows + sequences)
        self._size(sequences).since_plain = 0

    def see_guessed(self, sequences: int, *, tokens: int, seconds: float, steady: bool) -> None:
        """Take in a pass with guesses.

        Args:
            sequences: that ran.
            tokens: that they got.
            seconds: that guessing, the pass and judging took.
            steady: the draft had read all but the newest tokens before. Otherwise a trial is not judged by it, for in
                the long run that is done once per prompt; while guessing is on, everything counts.
        """
        size = self._size(sequences)
        plain_s = self._plain.value * (self._rows.free_rows + sequences)
        one_by_one = plain_s * tokens / sequences
        size.lost_passes += (seconds - one_by_one) / plain_s if plain_s else 0.0
        if size.on:
            size.cost.see(seconds, of=one_by_one)
            self._go_on(size)
        elif size.trial:
            size.patience -= not steady
            if steady:
                size.cost.see(seconds, of=one_by_one)
                size.trial -= 1
            if not size.trial or not size.patience or size.lost_passes > _MOST_LOST or _has_failed(size.cost):
                self._end_trial(size)

    def _go_on(self, size: _Size) -> None:
        if size.cost.seen >= _PROVEN:
            size.pause = _FIRST_PAUSE
        if size.cost.seen >= _LEAST and size.cost.value > _END:
            size.on = False
            self._wait(size)

    def _end_trial(self, size: _Size) -> None:
        told, size.trial = size.trial == 0, 0
        if told and size.cost.of and size.cost.value < _BEGIN:
            size.on, size.since_plain = True, 0
        else:
            self._wait(size)

    def _wait(self, size: _Size) -> None:
        enough = min(math.ceil(size.lost_passes / _REGRET), _LONGEST_PAUSE)
        size.wait, size.pause = max(size.pause, enough), min(2 * size.pause, _LONGEST_PAUSE)

    def _size(self, sequences: int) -> _Size:
        return self._sizes.setdefault(sequences.bit_length(), _Size())


def _has_failed(cost: Share) -> bool:
    """Return whether a trial needs no more passes to tell that guessing does not pay."""
    return any(cost.seen >= passes and cost.value > most for passes, most in _TELLS_ENOUGH)
