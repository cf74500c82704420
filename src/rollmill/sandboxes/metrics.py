"""What sandboxes tell Prometheus, put together from the records of their parts when somebody asks.

Decides nothing, counts nothing. The labels are states, phases, reasons and resources, never ids, runs or images: how
many series there are does not depend on what runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from rollmill.exposition import Sample, Table, metrics_of, page_of, require_client
from rollmill.sandboxes.lifecycle import culprit_of
from rollmill.sandboxes.reaper import ReaperStatistics
from rollmill.sandboxes.records import DeathReason, SandboxState, SandboxStatus
from rollmill.sandboxes.tally import TallyStatistics
from rollmill.sandboxes.watchdog.records import GuardStatistics, WatchdogStatistics

if TYPE_CHECKING:
    from prometheus_client.core import Metric

Samples = list[Sample]

METRICS: Table = {
    "rollmill_sandboxes": ("gauge", "Sandboxes that live, by state."),
    "rollmill_sandbox_start_seconds": (
        "histogram",
        "Seconds of a start by phase: queue (until its creation begins), create (until its first process runs), ready "
        "(until it answers).",
    ),
    "rollmill_sandbox_ends_total": ("counter", "Sandboxes that ended, by reason and by whose doing it was."),
    "rollmill_sandbox_orphans_swept_total": ("counter", "Sandboxes of killed owners that a sweep removed."),
    "rollmill_sandbox_orphans_left_total": ("counter", "Such sandboxes that did not go in time, once for each sweep."),
    "rollmill_sandbox_pool_hits_total": ("counter", "Sandboxes taken from a pool."),
    "rollmill_sandbox_pool_misses_total": ("counter", "Sandboxes made while somebody waited."),
    "rollmill_sandbox_pool_dead_total": (
        "counter",
        "Pooled sandboxes that were found dead when they were to be given.",
    ),
    "rollmill_sandbox_pool_evicted_total": ("counter", "Pooled sandboxes ended for room or pressure."),
    "rollmill_sandbox_places": ("gauge", "Sandboxes by the budget that they count in."),
    "rollmill_sandbox_waiting": ("gauge", "Callers that wait for a sandbox, by what they wait for."),
    "rollmill_sandbox_starting_cap": ("gauge", "Sandboxes that may be starting at a time, under the present pressure."),
    "rollmill_sandbox_watchdog_ticks_total": ("counter", "Sweeps of the watchdog."),
    "rollmill_sandbox_watchdog_ticks_missed_total": ("counter", "Sweeps left out because time had run over them."),
    "rollmill_sandbox_watchdog_late_seconds": ("gauge", "How late the last sweep began."),
    "rollmill_sandbox_watchdog_sweep_seconds": ("gauge", "How long the last sweep took."),
    "rollmill_sandbox_watchdog_samples_missed_total": ("counter", "Sandboxes not seen in time, once for each sweep."),
    "rollmill_sandbox_watchdog_failed_surveys_total": ("counter", "Sweeps that found nothing out."),
    "rollmill_sandbox_watched": ("gauge", "Sandboxes that the last sweep saw."),
    "rollmill_sandbox_warned": ("gauge", "Of these, those near a cap."),
    "rollmill_sandbox_watchdog_kills_total": (
        "counter",
        "Sandboxes that the watchdog ended, by reason and by whose doing it was.",
    ),
    "rollmill_sandbox_watchdog_failed_kills_total": ("counter", "Sandboxes that it could not end."),
    "rollmill_sandbox_watchdog_failed_steps_total": ("counter", "Steps of an end that failed, by step."),
    "rollmill_sandbox_admitting": ("gauge", "1 while the node guard lets sandboxes start, 0 while it does not."),
    "rollmill_sandbox_admission_stops_total": ("counter", "Times that it stopped admission."),
    "rollmill_sandbox_admission_stopped_seconds_total": ("counter", "Seconds in which it let nothing start."),
    "rollmill_sandbox_guard_evicted_total": ("counter", "Sandboxes that the guard had evicted, by kind."),
    "rollmill_sandbox_guard_failures_total": ("counter", "Readings and evictions that failed, by kind."),
    "rollmill_sandbox_node_pressure": (
        "gauge",
        "Share of the last ten seconds in which some or all work of the node waited, by resource and extent.",
    ),
    "rollmill_sandbox_node_free": ("gauge", "Share of the node that is left, by resource."),
    "rollmill_sandbox_trash_entries": ("gauge", "Entries of the trash that wait for the reaper."),
    "rollmill_sandbox_trash_deleted_total": ("counter", "Files and directories that the reaper deleted."),
    "rollmill_sandbox_trash_failures_total": ("counter", "Times that it could not delete something."),
}
"""Name -> kind and meaning, of everything that is exported."""

_DEAD = (SandboxState.DEAD, SandboxState.LOST)


class PoolFigures(Protocol):
    """What is shown of pools and admission; the statistics of a pool have it."""

    @property
    def hits(self) -> int:
        """Taken from the pool."""
        ...

    @property
    def misses(self) -> int:
        """Made for a caller."""
        ...

    @property
    def dead_at_hand_out(self) -> int:
        """Found dead when they were to be given."""
        ...

    @property
    def evicted(self) -> int:
        """Ended for room, for pressure, or because demand fell."""
        ...

    @property
    def places(self) -> Mapping[str, int]:
        """Sandboxes by budget."""
        ...

    @property
    def waiting(self) -> Mapping[str, int]:
        """Callers by what they wait for."""
        ...

    @property
    def starting_cap(self) -> int:
        """Starts allowed at a time."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxFigures:
    """What is known at one moment; a part that does not run is `None` and shows nothing.

    Attributes:
        states: sandboxes that live, by state; `count_states` makes it of a provider's list.
        tally: what the provider told.
        pool: of pools and admission.
        watchdog: of the watchdog.
        guard: of the node guard.
        reaper: of the reaper.
    """

    states: Mapping[SandboxState, int] = field(default_factory=dict)
    tally: TallyStatistics | None = None
    pool: PoolFigures | None = None
    watchdog: WatchdogStatistics | None = None
    guard: GuardStatistics | None = None
    reaper: ReaperStatistics | None = None


def count_states(statuses: Iterable[SandboxStatus], *, queued: int = 0) -> dict[SandboxState, int]:
    """Return how many sandboxes live in each state, zeros included; the dead are counted by their reasons elsewhere.

    Args:
        statuses: of a provider, which knows of none before its start.
        queued: that wait for their start in the pool in front of it.
    """
    counts = Counter(one.state for one in statuses)
    counts[SandboxState.QUEUED] += queued
    return {state: counts[state] for state in SandboxState if state not in _DEAD}


class SandboxMetrics:
    """The page of one service for Prometheus.

    Args:
        read: returns the figures of this moment; must not block.

    Raises:
        MissingExtraError: if the Prometheus client is not installed.
    """

    def __init__(self, read: Callable[[], SandboxFigures]) -> None:
        require_client()
        self._read = read

    def render(self) -> bytes:
        """Return the page in Prometheus' text form."""
        return page_of(collect(self._read()))


def collect(figures: SandboxFigures) -> Iterator[Metric]:
    """Yield the metrics of these figures; a name of which nothing is known is left out."""
    found: dict[str, Samples] = {}
    for part in (_of_states, _of_tally, _of_pool, _of_watchdog, _of_guard, _of_reaper):
        found |= {f"rollmill_{name}": samples for name, samples in part(figures).items()}
    return metrics_of({name: samples for name in METRICS if (samples := found.get(name))}, table=METRICS)


def _plain(value: float) -> Samples:
    return [({}, value)]


def _by(label: str, values: Mapping[str, float]) -> Samples:
    return [({label: name}, value) for name, value in values.items()]


def _ends(counts: Mapping[DeathReason, int]) -> Samples:
    return [({"reason": one.value, "culprit": culprit_of(one).value}, count) for one, count in counts.items()]


def _of_states(figures: SandboxFigures) -> dict[str, Samples]:
    return {"sandboxes": _by("state", {state.value: count for state, count in figures.states.items()})}


def _of_tally(figures: SandboxFigures) -> dict[str, Samples]:
    tally = figures.tally
    if tally is None:
        return {}
    return {
        "sandbox_start_seconds": [({"phase": phase}, spread) for phase, spread in tally.start_s.items()],
        "sandbox_ends_total": _ends(tally.ends),
        "sandbox_orphans_swept_total": _plain(tally.swept),
        "sandbox_orphans_left_total": _plain(tally.unswept),
    }


def _of_pool(figures: SandboxFigures) -> dict[str, Samples]:
    pool = figures.pool
    if pool is None:
        return {}
    return {
        "sandbox_pool_hits_total": _plain(pool.hits),
        "sandbox_pool_misses_total": _plain(pool.misses),
        "sandbox_pool_dead_total": _plain(pool.dead_at_hand_out),
        "sandbox_pool_evicted_total": _plain(pool.evicted),
        "sandbox_places": _by("budget", pool.places),
        "sandbox_waiting": _by("cause", pool.waiting),
        "sandbox_starting_cap": _plain(pool.starting_cap),
    }


def _of_watchdog(figures: SandboxFigures) -> dict[str, Samples]:
    watchdog = figures.watchdog
    if watchdog is None:
        return {}
    return {
        "sandbox_watchdog_ticks_total": _plain(watchdog.ticks),
        "sandbox_watchdog_ticks_missed_total": _plain(watchdog.missed_ticks),
        "sandbox_watchdog_late_seconds": _plain(watchdog.late_s),
        "sandbox_watchdog_sweep_seconds": _plain(watchdog.sweep_s),
        "sandbox_watchdog_samples_missed_total": _plain(watchdog.late_samples),
        "sandbox_watchdog_failed_surveys_total": _plain(watchdog.failed_surveys),
        "sandbox_watched": _plain(watchdog.watched),
        "sandbox_warned": _plain(watchdog.warned),
        "sandbox_watchdog_kills_total": _ends(watchdog.kills),
        "sandbox_watchdog_failed_kills_total": _plain(watchdog.failed_kills),
        "sandbox_watchdog_failed_steps_total": _by("step", watchdog.failed_steps),
    }


def _of_guard(figures: SandboxFigures) -> dict[str, Samples]:
    guard = figures.guard
    if guard is None:
        return {}
    reading = guard.reading
    free = {name: getattr(reading, f"{name}_free") for name in ("memory", "disk", "inodes", "pids")}
    pressure: Samples = []
    if reading.pressure is not None:
        for name in reading.pressure.__struct_fields__:
            resource, _, extent = name.partition("_")
            pressure.append(({"resource": resource, "extent": extent}, getattr(reading.pressure, name)))
    return {
        "sandbox_admitting": _plain(int(guard.admitting)),
        "sandbox_admission_stops_total": _plain(guard.stops),
        "sandbox_admission_stopped_seconds_total": _plain(guard.stopped_s),
        "sandbox_guard_evicted_total": _by(
            "kind", {"pooled": guard.evicted_pooled, "suspended": guard.evicted_suspended}
        ),
        "sandbox_guard_failures_total": _by(
            "kind", {"reading": guard.failed_readings, "eviction": guard.failed_evictions}
        ),
        "sandbox_node_pressure": pressure,
        "sandbox_node_free": _by("resource", {name: value for name, value in free.items() if value is not None}),
    }


def _of_reaper(figures: SandboxFigures) -> dict[str, Samples]:
    reaper = figures.reaper
    if reaper is None:
        return {}
    return {
        "sandbox_trash_entries": _plain(reaper.waiting),
        "sandbox_trash_deleted_total": _plain(reaper.entries),
        "sandbox_trash_failures_total": _plain(reaper.failures),
    }
