"""In which order replicas load new weights. Pure.

    waiting --start--> loading --done--> loaded | kept (the old version serves on) | broken (dirty or gone)

Loading and broken replicas together are at most `max_unavailable`, so a version that breaks replicas breaks that many
and no more: then the update halts, and the rest is reported as skipped.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence


class Result(enum.StrEnum):
    """What became of a replica in an update."""

    WAITING = "waiting"
    LOADING = "loading"
    LOADED = "loaded"
    KEPT = "kept"
    BROKEN = "broken"
    SKIPPED = "skipped"


class RollingUpdate:
    """One update over some replicas.

    Args:
        names: in the order in which they load.
        max_unavailable: replicas that may load or be broken at once.

    Example:
        >>> update = RollingUpdate(["a", "b", "c"], max_unavailable=2)
        >>> update.start()
        ['a', 'b']
        >>> update.done("a", Result.LOADED)
        >>> update.start()
        ['c']
    """

    def __init__(self, names: Sequence[str], *, max_unavailable: int) -> None:
        self._results = dict.fromkeys(names, Result.WAITING)
        self._max_unavailable = max_unavailable

    def start(self) -> list[str]:
        """Return who loads now; none while as many as may be are unavailable."""
        room = self._max_unavailable - self._count(Result.LOADING) - self._count(Result.BROKEN)
        waiting = [name for name, result in self._results.items() if result is Result.WAITING]
        chosen = waiting[: max(room, 0)]
        for name in chosen:
            self._results[name] = Result.LOADING
        if not chosen and not self._count(Result.LOADING):
            for name in waiting:
                self._results[name] = Result.SKIPPED
        return chosen

    def done(self, name: str, result: Result) -> None:
        """A replica has loaded, or failed to."""
        self._results[name] = result

    @property
    def over(self) -> bool:
        """Whether nobody loads and nobody will."""
        return not self._count(Result.LOADING) and not self._count(Result.WAITING)

    @property
    def results(self) -> dict[str, Result]:
        """Return replica -> what became of it."""
        return dict(self._results)

    def _count(self, result: Result) -> int:
        return sum(one is result for one in self._results.values())
