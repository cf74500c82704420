"""Two promises of the watchdog's law, for any history: no innocent sandbox is ended, and every bomb is, in time.

And those of the node guard: it never lets sandboxes start while a bound is passed, and evicts in its order.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from rollmill.sandboxes import DeathReason, Limits
from rollmill.sandboxes.watchdog import GuardSettings, NodeReading, Pressure, Sample, WatchdogSettings
from rollmill.sandboxes.watchdog.guard_law import Evict, Evictable, GuardState, decide
from rollmill.sandboxes.watchdog.law import judge, next_tick, trim
from rollmill.sandboxes.watchdog.records import Severity, newborn

MIB = 1024**2
LIMITS = Limits(memory_bytes=100 * MIB, disk_bytes=50 * MIB, inodes=1000, pids=100, cpus=2.0, output_bytes=10 * MIB)
CHOSEN = WatchdogSettings(cpu_kill_pressure=0.0)

steps = st.floats(0.2, 3.0)
shares = st.floats(0.0, 1.0)
pressures = st.builds(Pressure, cpu_some=shares, memory_some=shares, memory_full=shares, io_some=shares)


def maybe(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.none() | values


@st.composite
def innocent(draw: st.DrawFn) -> list[Sample]:
    """A history that stays below every bound: levels below full, counts that rise less in all than a window may see."""
    ticks = draw(st.integers(1, 20))
    at_s, cpu_s, refused, ooms, stalled_s, output = 0.0, 0.0, 0, 0, 0.0, 0
    samples = []
    for _ in range(ticks):
        step_s = draw(steps)
        at_s += step_s
        cpu_s += step_s * LIMITS.cpus * draw(st.floats(0.0, 1.49))
        stalled_s += step_s * draw(st.floats(0.0, 0.49))
        refused = min(19, refused + draw(st.integers(0, 3)))
        ooms = min(2, ooms + draw(st.integers(0, 1)))
        output = min(29 * MIB, output + draw(st.integers(0, 3 * MIB)))
        samples.append(
            Sample(
                at_s=at_s,
                pids=draw(maybe(st.integers(0, 94))),
                refused_forks=refused,
                cpu_s=cpu_s,
                memory_bytes=draw(maybe(st.integers(0, 100 * MIB))),
                oom_kills=ooms,
                memory_stall_s=stalled_s,
                disk_bytes=draw(maybe(st.integers(0, int(50 * MIB * 0.949)))),
                inodes=draw(maybe(st.integers(0, 949))),
                output_bytes=output,
            )
        )
    return samples


@given(samples=innocent(), pressure=pressures)
@settings(max_examples=40, deadline=None)
def test_a_sandbox_below_every_bound_is_never_ended(samples, pressure):
    for end in range(1, len(samples) + 1):
        window = trim(samples[:end], window_s=CHOSEN.window_s)
        found = judge(window, limits=LIMITS, settings=CHOSEN, pressure=pressure)
        assert found.severity is not Severity.KILL, found


BOMBS = {
    DeathReason.POLICY_INODES: {"inodes": 1000},
    DeathReason.POLICY_BYTES: {"disk_bytes": 50 * MIB},
    DeathReason.POLICY_PIDS: {"pids": 100, "refused_forks": 10_000},
    DeathReason.POLICY_MEMORY: {"oom_kills": 50},
    DeathReason.POLICY_OUTPUT: {"output_bytes": 40 * MIB},
}
QUIET = Sample(at_s=0.0, pids=3, refused_forks=0, oom_kills=0, disk_bytes=0, inodes=10, output_bytes=0)


@given(
    reason=st.sampled_from(sorted(BOMBS, key=lambda one: one.value)),
    quiet=st.lists(st.floats(0.5, 1.5), max_size=20),
    after=st.lists(st.floats(0.5, 1.5), min_size=10, max_size=10),
    pressure=st.none() | pressures,
)
@settings(max_examples=100, deadline=None)
def test_a_bomb_is_ended_as_soon_as_it_has_stood_for_the_time_that_it_is_given(reason, quiet, after, pressure):
    samples, at_s = [newborn(0.0)], 0.0
    for step_s in quiet:
        at_s += step_s
        samples.append(msgspec.structs.replace(QUIET, at_s=at_s))
    began_s = at_s + after[0]
    for step_s in after:
        at_s += step_s
        samples = trim([*samples, msgspec.structs.replace(QUIET, at_s=at_s, **BOMBS[reason])], window_s=CHOSEN.window_s)
        found = judge(samples, limits=LIMITS, settings=CHOSEN, pressure=pressure)
        if found.severity is Severity.KILL:
            assert found.reason is reason
            return
        assert at_s - began_s < CHOSEN.full_s, "it has stood for longer than it is given"
    raise AssertionError("never ended")


@given(times=st.lists(st.floats(0.01, 5.0), min_size=1, max_size=50), window_s=st.floats(0.5, 20.0))
def test_a_trimmed_window_holds_all_of_the_window_and_at_most_one_sample_before_it(times, window_s):
    at_s, samples = 0.0, []
    for step_s in times:
        at_s += step_s
        samples.append(Sample(at_s=at_s))
    kept = trim(samples, window_s=window_s)
    assert kept == samples[len(samples) - len(kept) :]
    assert [one for one in samples if one.at_s > at_s - window_s + 1e-3] == [
        one for one in kept if one.at_s > at_s - window_s + 1e-3
    ]
    assert sum(one.at_s < at_s - window_s - 1e-3 for one in kept) <= 1


@given(due_s=st.floats(0.0, 1e5), late_s=st.floats(0.0, 100.0), interval_s=st.floats(0.05, 10.0))
def test_the_next_tick_lies_ahead_on_the_grid_and_no_further_than_one_interval(due_s, late_s, interval_s):
    next_s, missed = next_tick(due_s, now_s=due_s + late_s, interval_s=interval_s)
    assert next_s > due_s + late_s - 1e-6
    assert next_s - (due_s + late_s) <= interval_s + 1e-6
    assert math.isclose((next_s - due_s) / interval_s, missed + 1, rel_tol=1e-6)


readings = st.builds(
    NodeReading,
    pressure=st.none() | pressures,
    memory_free=maybe(shares),
    disk_free=maybe(shares),
    inodes_free=maybe(shares),
    pids_free=maybe(shares),
)
looks = st.tuples(readings, st.integers(0, 50), st.integers(0, 50), st.floats(0.1, 5.0))


def passes(reading: NodeReading, bounds: GuardSettings) -> bool:
    pressure = reading.pressure or Pressure()
    stalls = ("cpu_some", "memory_some", "memory_full", "io_full")
    free = ("memory_free", "disk_free", "inodes_free", "pids_free")
    return any(getattr(pressure, name) >= getattr(bounds, name) for name in stalls) or any(
        (value := getattr(reading, name)) is not None and value < getattr(bounds, name) for name in free
    )


@given(history=st.lists(looks, min_size=1, max_size=30))
@settings(max_examples=60, deadline=None)
def test_the_guard_keeps_its_promises_in_any_history(history):
    bounds, state, now_s, last_s = GuardSettings(), GuardState(), 0.0, None
    for reading, pooled, suspended, step_s in history:
        now_s += step_s
        before = state
        found = decide(
            before, reading, evictable=Evictable(pooled=pooled, suspended=suspended), now_s=now_s, settings=bounds
        )
        state = found.state
        assert not (state.admitting and passes(reading, bounds)), "admits although a bound is passed"
        assert state.admitting == (not found.why)
        if before.admitting and not passes(reading, bounds):
            assert state.admitting, "closes although no bound is passed"
        if found.evict is Evict.POOLED:
            assert 1 <= found.count <= pooled
        elif found.evict is Evict.SUSPENDED:
            assert pooled == 0
            assert 1 <= found.count <= suspended
        if found.evict is not None:
            assert not state.admitting, "evicts while others may start"
            assert last_s is None or now_s - last_s >= bounds.settle_s
            last_s = now_s
