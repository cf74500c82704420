"""The law of the node guard: from a reading of the node to whether sandboxes may start, and what is evicted. Pure.

Admission closes at the first bound that is passed, and opens when all are well clear of theirs. Eviction begins later,
and only for what it can give back: pooled sandboxes first, for nobody uses them; then, for memory and process ids
alone, paused ones are moved to disk. A short disk is not helped by moving anything there, and takes nothing either:
while it is below its own bound, they stay where they are.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable

from rollmill.sandboxes.records import Record
from rollmill.sandboxes.watchdog.records import NodeReading
from rollmill.sandboxes.watchdog.settings import GuardSettings

_PRESSURES = {
    "cpu_some": "of the time some work waited for processors",
    "memory_some": "of the time some work waited for memory",
    "memory_full": "of the time all work waited for memory",
    "io_full": "of the time all work waited for disks",
}
_FREE = {
    "memory_free": "of the memory is left",
    "disk_free": "of a disk's bytes are left",
    "inodes_free": "of a disk's inodes are left",
    "pids_free": "of the process ids are left",
}
_DISK = ("disk_free", "inodes_free")
_GIVEN_BACK_BY_SUSPENDING = ("memory_full", "memory_free", "pids_free")


class Evict(enum.Enum):
    """What goes first."""

    POOLED = "pooled"
    SUSPENDED = "suspended"


class Evictable(Record, frozen=True, kw_only=True):
    """What could be evicted.

    Attributes:
        pooled: sandboxes that wait in pools for somebody.
        suspended: paused sandboxes that are held in memory and can be moved to disk.
    """

    pooled: int = 0
    suspended: int = 0


class GuardState(Record, frozen=True, kw_only=True):
    """What the guard remembers from look to look.

    Attributes:
        admitting: whether sandboxes may start.
        evicted_s: when the last eviction was ordered.
    """

    admitting: bool = True
    evicted_s: float | None = None


class GuardDecision(Record, frozen=True, kw_only=True):
    """What follows from one look.

    Attributes:
        state: to be remembered.
        why: what keeps admission closed, in words with the numbers; empty while it is open.
        evict: what is to be evicted now, if anything.
        count: how many of these.
    """

    state: GuardState
    why: str = ""
    evict: Evict | None = None
    count: int = 0


def decide(
    state: GuardState, reading: NodeReading, *, evictable: Evictable, now_s: float, settings: GuardSettings
) -> GuardDecision:
    """Decide what follows from a reading.

    Args:
        state: as the decision before left it.
        reading: of the node; what is `None` in it closes nothing.
        evictable: what could go.
        now_s: on any clock that never goes back.
        settings: the bounds.
    """
    relief = 1.0 if state.admitting else settings.relief
    passed = list(_passed(reading, settings=settings, relief=relief))
    admitting = not passed
    evict, count = None, 0
    settled = state.evicted_s is None or now_s - state.evicted_s >= settings.settle_s
    if settled:
        evict, count = _eviction(reading, evictable=evictable, settings=settings)
    return GuardDecision(
        state=GuardState(admitting=admitting, evicted_s=now_s if evict else state.evicted_s),
        why="; ".join(text for _, text in passed),
        evict=evict,
        count=count,
    )


def _passed(reading: NodeReading, *, settings: GuardSettings, relief: float) -> Iterable[tuple[str, str]]:
    """Yield the name of each bound that is passed, and what to say of it."""
    for name, words in _PRESSURES.items():
        bound = getattr(settings, name)
        value = None if reading.pressure is None else getattr(reading.pressure, name)
        if value is not None and value >= bound * relief:
            yield name, f"{value:.0%} {words} ({name}: {bound * relief:.3g})"
    for name, words in _FREE.items():
        bound = getattr(settings, name)
        value = getattr(reading, name)
        if value is not None and value < min(bound / relief, 1.0):
            yield name, f"{value:.1%} {words} ({name}: {bound / relief:.3g})"


def _eviction(reading: NodeReading, *, evictable: Evictable, settings: GuardSettings) -> tuple[Evict | None, int]:
    short = [
        name
        for name in _FREE
        if (value := getattr(reading, name)) is not None and value < getattr(settings, name) * settings.evict_share
    ]
    if reading.pressure is not None and reading.pressure.memory_full >= settings.evict_memory_full:
        short.append("memory_full")
    if short and evictable.pooled:
        return Evict.POOLED, _part(evictable.pooled, settings)
    room = not any(_is_below(reading, name, settings) for name in _DISK)
    if evictable.suspended and room and any(name in _GIVEN_BACK_BY_SUSPENDING for name in short):
        return Evict.SUSPENDED, _part(evictable.suspended, settings)
    return None, 0


def _is_below(reading: NodeReading, name: str, settings: GuardSettings) -> bool:
    value = getattr(reading, name)
    return value is not None and value < getattr(settings, name)


def _part(number: int, settings: GuardSettings) -> int:
    return max(1, int(number * settings.evict_part))
