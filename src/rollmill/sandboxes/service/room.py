"""What a node has room for, as it tells a router: from what its pool and its guard know. Pure."""

from __future__ import annotations

from rollmill.sandboxes.admission.records import Place, PoolStatistics
from rollmill.sandboxes.records import Record
from rollmill.sandboxes.watchdog.records import GuardStatistics


class Room(Record, frozen=True, kw_only=True):
    """What a node has left; `None` where it is not known.

    Attributes:
        admitting: whether sandboxes may start.
        why: what keeps them from it, in words with the numbers; empty while they may.
        ready: sandboxes that are handed out without a start.
        starting_free: starts that could begin now.
        running_free: places of the budget for running sandboxes that no running one holds; those that start are not
            taken off.
        memory_free: share of the node's memory that could still be given out.
        disk_free: share of the bytes of the fullest disk.
    """

    admitting: bool = True
    why: str = ""
    ready: int = 0
    starting_free: int | None = None
    running_free: int | None = None
    memory_free: float | None = None
    disk_free: float | None = None


def room_of(pool: PoolStatistics | None, guard: GuardStatistics | None, *, max_running: int) -> Room:
    """Return what a node has left.

    Args:
        pool: of the pool in front of its provider, if it has one.
        guard: of its guard, if it has one.
        max_running: the pool's budget for running sandboxes.
    """
    why = _closed(pool, guard)
    memory_free = None if guard is None else guard.reading.memory_free
    disk_free = None if guard is None else guard.reading.disk_free
    if pool is None:
        return Room(admitting=not why, why=why, memory_free=memory_free, disk_free=disk_free)
    places = pool.places
    return Room(
        admitting=not why,
        why=why,
        ready=places.get(Place.POOLED.value, 0),
        starting_free=max(0, pool.starting_cap - places.get(Place.STARTING.value, 0)),
        running_free=max(0, max_running - places.get(Place.RUNNING.value, 0)),
        memory_free=memory_free,
        disk_free=disk_free,
    )


def _closed(pool: PoolStatistics | None, guard: GuardStatistics | None) -> str:
    if guard is not None and not guard.admitting:
        return guard.why or "the guard of the node lets nothing start"
    if pool is None:
        return ""
    if pool.stopped:
        return pool.stopped
    if pool.breakers.get("provider") == "open":
        return "starts failed one after the other, and none is tried for a while (breaker_failures)"
    return ""
