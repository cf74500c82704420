"""What sandboxes show to Prometheus, read back with Prometheus' own parser."""

from __future__ import annotations

import doctest
from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest

import rollmill.sandboxes.tally
from rollmill.sandboxes import DeathReason, Lease, SandboxState, SandboxStatus
from rollmill.sandboxes.admission.records import PoolStatistics
from rollmill.sandboxes.lifecycle import death
from rollmill.sandboxes.metrics import METRICS, SandboxFigures, SandboxMetrics, collect, count_states
from rollmill.sandboxes.reaper import ReaperStatistics
from rollmill.sandboxes.tally import SandboxTally
from rollmill.sandboxes.watchdog import GuardStatistics, NodeReading, Pressure, WatchdogStatistics

prometheus = pytest.importorskip("prometheus_client.parser")


@dataclass
class Pool:
    hits: int = 7
    misses: int = 3
    dead_at_hand_out: int = 1
    evicted: int = 2
    places: Mapping[str, int] = field(default_factory=lambda: {"running": 4, "suspended": 5})
    waiting: Mapping[str, int] = field(default_factory=lambda: {"starting": 6})
    starting_cap: int = 8


def tally() -> SandboxTally:
    counted = SandboxTally()
    counted.queued(0.2)
    counted.started(create_s=0.004, ready_s=0.008)
    counted.started(create_s=0.004, ready_s=0.3)
    for reason in (DeathReason.POLICY_INODES, DeathReason.POLICY_INODES, DeathReason.PROVIDER_LOST):
        counted.ended(death(reason))
    counted.swept(removed=3, left=1)
    return counted


WHOLE = SandboxFigures(
    states={SandboxState.READY: 2, SandboxState.BUSY: 0},
    tally=tally().statistics(),
    pool=Pool(),
    watchdog=WatchdogStatistics(
        ticks=10, missed_ticks=2, late_samples=4, kills={DeathReason.POLICY_PIDS: 5}, failed_steps={"freeze": 1}
    ),
    guard=GuardStatistics(
        admitting=False,
        stops=2,
        stopped_s=1.5,
        evicted_pooled=3,
        reading=NodeReading(pressure=Pressure(memory_full=0.25), memory_free=0.5, disk_free=0.75),
    ),
    reaper=ReaperStatistics(waiting=9, entries=1000, failures=1),
)


def shown(figures: SandboxFigures) -> Mapping[tuple[str, tuple[tuple[str, str], ...]], float]:
    page = SandboxMetrics(lambda: figures).render().decode()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in prometheus.text_string_to_metric_families(page)
        for sample in family.samples
    }


def value(found: Mapping, name: str, **labels: str) -> float:
    return found[f"rollmill_{name}", tuple(sorted(labels.items()))]


def test_examples_in_the_docstrings_of_the_tally_work():
    result = doctest.testmod(rollmill.sandboxes.tally)
    assert result.failed == 0
    assert result.attempted > 0


def test_every_part_is_shown_under_its_names():
    found = shown(WHOLE)
    assert value(found, "sandboxes", state="ready") == 2
    assert value(found, "sandboxes", state="busy") == 0
    assert value(found, "sandbox_ends_total", reason="killed_by_policy_inodes", culprit="rollout") == 2
    assert value(found, "sandbox_ends_total", reason="provider_lost", culprit="infrastructure") == 1
    assert value(found, "sandbox_orphans_swept_total") == 3
    assert value(found, "sandbox_pool_hits_total") == 7
    assert value(found, "sandbox_pool_misses_total") == 3
    assert value(found, "sandbox_places", budget="suspended") == 5
    assert value(found, "sandbox_watchdog_ticks_missed_total") == 2
    assert value(found, "sandbox_watchdog_kills_total", reason="killed_by_policy_pids", culprit="rollout") == 5
    assert value(found, "sandbox_watchdog_failed_steps_total", step="freeze") == 1
    assert value(found, "sandbox_admitting") == 0
    assert value(found, "sandbox_node_pressure", resource="memory", extent="full") == 0.25
    assert value(found, "sandbox_node_free", resource="disk") == 0.75
    assert value(found, "sandbox_trash_deleted_total") == 1000


def test_starts_are_a_histogram_by_phase():
    found = shown(WHOLE)
    counts = {phase: value(found, "sandbox_start_seconds_count", phase=phase) for phase in ("queue", "create", "ready")}
    assert counts == {"queue": 1, "create": 2, "ready": 2}
    assert value(found, "sandbox_start_seconds_sum", phase="ready") == pytest.approx(0.308)
    assert value(found, "sandbox_start_seconds_bucket", phase="ready", le="0.01") == 1
    assert value(found, "sandbox_start_seconds_bucket", phase="ready", le="0.5") == 2
    assert value(found, "sandbox_start_seconds_bucket", phase="ready", le="+Inf") == 2


def test_everything_named_is_shown_once_all_parts_run_and_nothing_else():
    families = [one.name for one in collect(WHOLE)]
    assert families == [
        name.removesuffix("_total") if kind == "counter" else name for name, (kind, _) in METRICS.items()
    ]


def test_the_statistics_of_a_pool_have_what_is_shown_of_one():
    assert set(Pool.__dataclass_fields__) <= set(PoolStatistics.__struct_fields__)


def test_parts_that_do_not_run_show_nothing():
    assert list(collect(SandboxFigures())) == []
    assert [one.name for one in collect(SandboxFigures(reaper=ReaperStatistics()))] == [
        "rollmill_sandbox_trash_entries",
        "rollmill_sandbox_trash_deleted",
        "rollmill_sandbox_trash_failures",
    ]
    unread = SandboxFigures(guard=GuardStatistics())
    assert not [one for one in collect(unread) if one.name in ("rollmill_sandbox_node_free",)]


def test_states_are_counted_with_zeros_and_without_the_dead():
    states = [SandboxState.READY, SandboxState.READY, SandboxState.PAUSED, SandboxState.DEAD, SandboxState.LOST]
    lease = Lease(owner="me")
    counts = count_states(
        SandboxStatus(sandbox_id=str(number), state=state, labels={}, lease=lease, lease_left_s=1.0)
        for number, state in enumerate(states)
    )
    assert (counts[SandboxState.READY], counts[SandboxState.PAUSED], counts[SandboxState.STARTING]) == (2, 1, 0)
    assert SandboxState.DEAD not in counts
    assert SandboxState.LOST not in counts
