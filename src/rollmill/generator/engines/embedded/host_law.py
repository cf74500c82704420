"""When keys and values are worth moving to the host tier and back: seconds to move against seconds to compute.

Pure: what was measured in, a yes or no out. All three costs are measured while the engine runs and follow the machine
slowly. What was never measured is tried; what does not pay is tried again now and then, since a disk that was busy may
be idle later.
"""

from __future__ import annotations

from dataclasses import dataclass, field

_NEWEST = 0.2
"""Weight of the newest measurement: five of them tell most of the average."""
_TRY_EVERY = 64
"""After this many refusals in a row one move is made all the same, to measure it."""


@dataclass(slots=True)
class Cost:
    """Seconds per unit of something, averaged over what was measured last.

    Example:
        >>> cost = Cost()
        >>> cost.of(10) is None
        True
        >>> cost.see(4, seconds=2.0)
        >>> cost.see(4, seconds=4.0)
        >>> cost.of(10)
        6.0
    """

    per_unit: float | None = None

    def see(self, units: int, *, seconds: float) -> None:
        """Learn what so many units took."""
        new = seconds / units
        self.per_unit = new if self.per_unit is None else self.per_unit + _NEWEST * (new - self.per_unit)

    def of(self, units: int) -> float | None:
        """Return the seconds that so many units will take; `None` before anything was measured."""
        return None if self.per_unit is None else units * self.per_unit


@dataclass(slots=True)
class Tries:
    """Lets one of many refused moves happen."""

    refused: int = 0

    def decide(self, pays: bool) -> bool:
        """Return whether to move."""
        if pays or self.refused >= _TRY_EVERY:
            self.refused = 0
            return True
        self.refused += 1
        return False


@dataclass(slots=True)
class MoveCosts:
    """What moving and computing cost.

    Attributes:
        prefill: per token of a prompt.
        store: per byte, to the tier.
        load: per byte, back.
    """

    prefill: Cost = field(default_factory=Cost)
    store: Cost = field(default_factory=Cost)
    load: Cost = field(default_factory=Cost)
    _stores: Tries = field(default_factory=Tries)
    _loads: Tries = field(default_factory=Tries)

    def decide_load(self, *, nbytes: int, tokens: int) -> bool:
        """Return whether to read this much, where so many tokens would have to be computed instead.

        Example:
            >>> costs = MoveCosts(prefill=Cost(0.004), load=Cost(1e-9))  # 4 ms a token, 1 GB/s
            >>> costs.decide_load(nbytes=40_000_000, tokens=16), costs.decide_load(nbytes=80_000_000, tokens=16)
            (True, False)
        """
        return self._loads.decide(_at_most(self.load.of(nbytes), self.prefill.of(tokens)))

    def decide_store(self, *, nbytes: int, tokens: int) -> bool:
        """Return whether to write this much: only if writing and reading it again is cheaper than computing it.

        Example:
            >>> costs = MoveCosts(prefill=Cost(0.004), store=Cost(1e-9), load=Cost(1e-9))
            >>> costs.decide_store(nbytes=30_000_000, tokens=16), costs.decide_store(nbytes=40_000_000, tokens=16)
            (True, False)
        """
        store, load = self.store.of(nbytes), self.load.of(nbytes)
        both = store if store is None or load is None else store + load
        return self._stores.decide(_at_most(both, self.prefill.of(tokens)))


def _at_most(moving: float | None, computing: float | None) -> bool:
    return moving is None or computing is None or moving <= computing
