"""How many sandboxes may start at a time: additive increase, multiplicative decrease. Pure.

A start takes longer the more start beside it, while the rate stays the same from about as many as there are processors.
So the cap grows by one for each cap's worth of starts that were crowded and not slow, and shrinks where starts became
slow, failed, or found no room. What began before a cut says nothing about the cap after it. Slow is measured against a
template's best, which is given up at the lowest cap only, where it is not our own starts that slow each other.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

_SLOW_CUT = 0.75
_FAILED_CUT = 0.5
_WEIGHT = 0.3
_DRIFT = 0.05
_LEAST_SAMPLES = 4
_REMEMBERED_TEMPLATES = 1000


class _Times:
    """Start times of one template: a smoothed mean, and the best that such a mean was."""

    __slots__ = ("best_s", "count", "mean_s")

    def __init__(self) -> None:
        self.count = 0
        self.mean_s = 0.0
        self.best_s = 0.0

    def add(self, seconds: float, *, at_floor: bool) -> None:
        self.mean_s = seconds if self.count == 0 else self.mean_s + _WEIGHT * (seconds - self.mean_s)
        self.count += 1
        if self.judged and (self.best_s == 0.0 or self.mean_s < self.best_s):
            self.best_s = self.mean_s
        elif at_floor and self.best_s:  # a machine that became slower for good is the new normal in the end
            self.best_s += _DRIFT * max(0.0, self.mean_s - self.best_s)

    @property
    def judged(self) -> bool:
        """Return whether there were enough starts since the last cut to say something."""
        return self.count >= _LEAST_SAMPLES


class StartingCap:
    """The adaptive cap.

    Args:
        minimum: it never falls below.
        initial: at the beginning.
        maximum: it never grows above.
        slow_factor: how many times slower than its best a template's mean may be.

    Example:
        >>> cap = StartingCap(minimum=1, initial=4, maximum=8, slow_factor=3.0)
        >>> for _ in range(4):
        ...     cap.succeeded("python", began_s=0.0, took_s=0.05, crowded=True, now_s=0.05)
        >>> round(cap.value, 2)
        4.92
        >>> cap.failed(began_s=0.0, now_s=1.0), cap.limit(factor=1.0, stop=False)
        (True, 2)
    """

    def __init__(self, *, minimum: int, initial: int, maximum: int, slow_factor: float) -> None:
        self._minimum, self._maximum = minimum, maximum
        self._slow_factor = slow_factor
        self.value = float(min(max(initial, minimum), maximum))
        self._cut_s = float("-inf")
        self._times: OrderedDict[Hashable, _Times] = OrderedDict()

    def limit(self, *, factor: float, stop: bool) -> int:
        """Return how many may start now, under the node's pressure."""
        return 0 if stop else max(self._minimum, int(self.value * factor + 1e-9))

    def warm_up_s(self, template: Hashable) -> float:
        """Return how long a start of a template takes, 0 if none was seen."""
        times = self._times.get(template)
        return 0.0 if times is None else times.mean_s

    def succeeded(self, template: Hashable, *, began_s: float, took_s: float, crowded: bool, now_s: float) -> None:
        """Note a start.

        Args:
            template: starts of one template are compared with each other only.
            began_s: when it began.
            took_s: how long it took.
            crowded: whether as many as the cap were starting with it; otherwise it says nothing about a larger cap.
            now_s: time.
        """
        if began_s < self._cut_s:
            return
        times = self._times.setdefault(template, _Times())
        self._times.move_to_end(template)
        while len(self._times) > _REMEMBERED_TEMPLATES:
            self._times.popitem(last=False)
        times.add(took_s, at_floor=self.value <= self._minimum)
        if times.judged and times.mean_s > self._slow_factor * times.best_s:
            times.count = 0
            self._cut(_SLOW_CUT, now_s=now_s)
        elif crowded and (
            times.judged or not times.best_s
        ):  # after a cut it waits until it knows that it is fast again
            self.value = min(float(self._maximum), self.value + 1.0 / self.value)

    def failed(self, *, began_s: float, now_s: float) -> bool:
        """Note a start that failed or found no room; return whether it was the first since the last cut."""
        if began_s < self._cut_s:
            return False
        self._cut(_FAILED_CUT, now_s=now_s)
        return True

    def _cut(self, factor: float, *, now_s: float) -> None:
        self.value = max(float(self._minimum), self.value * factor)
        self._cut_s = now_s
