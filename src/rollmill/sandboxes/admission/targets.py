"""How many idle sandboxes a template should have, and which idle ones go first. Pure.

The target follows the demand signal at once, up and down, without marks to cross. What a fall of demand wastes is then
what was starting when it fell: one warm-up of each. Beyond the demand a template keeps only what is taken during one
warm-up, because that is how long a replacement takes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from rollmill.sandboxes.admission.settings import PoolSettings
from rollmill.sandboxes.records import Record

_EPSILON = 1e-9


def idle_target(*, demand: int, busy: int, rate_per_s: float, warm_up_s: float, settings: PoolSettings) -> int:
    """Return how many should be idle.

    Args:
        demand: sandboxes wanted in all: rollouts in flight and about to start.
        busy: handed out, starting for somebody, or waited for.
        rate_per_s: at which they are taken.
        warm_up_s: how long one takes to start.
        settings: bounds.

    Example:
        >>> idle_target(demand=960, busy=96, rate_per_s=0.0, warm_up_s=0.02, settings=PoolSettings())
        864
        >>> idle_target(demand=96, busy=96, rate_per_s=10.0, warm_up_s=0.5, settings=PoolSettings())
        5
    """
    if demand <= 0:
        return 0
    spare = min(math.ceil(rate_per_s * warm_up_s - _EPSILON), math.ceil(settings.spare_share * demand - _EPSILON))
    return min(settings.max_idle, max(demand - busy, spare, settings.min_idle, 0))


class TakeRate:
    """How often something is taken: each taking counts 1 and fades within the window.

    Example:
        >>> rate = TakeRate(window_s=10.0)
        >>> for at_s in (0.0, 0.0, 10.0):
        ...     rate.taken(now_s=at_s)
        >>> round(rate.per_s(now_s=10.0), 4)  # (2 / e + 1) / 10
        0.1736
    """

    __slots__ = ("_at_s", "_sum", "_window_s")

    def __init__(self, *, window_s: float) -> None:
        self._window_s = window_s
        self._sum, self._at_s = 0.0, 0.0

    def taken(self, *, now_s: float) -> None:
        """Count one."""
        self._sum = self._left(now_s) + 1.0
        self._at_s = now_s

    def per_s(self, *, now_s: float) -> float:
        """Return the rate."""
        return self._left(now_s) / self._window_s

    def _left(self, now_s: float) -> float:
        return self._sum * math.exp((self._at_s - now_s) / self._window_s)


class Idle(Record, frozen=True, kw_only=True):
    """A sandbox that nobody works in.

    Attributes:
        sandbox_id: its id.
        since_s: idle or suspended since.
        suspended: it holds a rollout's work, so it goes after everything else.
        over_target: its template has more than it should.
        demand: of its template.
    """

    sandbox_id: str
    since_s: float
    suspended: bool = False
    over_target: bool = False
    demand: int = 0


def eviction_order(candidates: Iterable[Idle]) -> list[str]:
    """Return ids, the first to go first.

    Idle before suspended, those over their target before others, templates of little demand before others, and then by
    age.

    Example:
        >>> a = Idle(sandbox_id="a", since_s=1.0, suspended=True)
        >>> b = Idle(sandbox_id="b", since_s=5.0, demand=9)
        >>> c = Idle(sandbox_id="c", since_s=6.0, demand=2)
        >>> eviction_order([a, b, c])
        ['c', 'b', 'a']
    """
    ordered = sorted(candidates, key=lambda one: (one.suspended, not one.over_target, one.demand, one.since_s))
    return [one.sandbox_id for one in ordered]
