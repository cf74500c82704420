"""The node guard: its law by numbers, and what it does with it in virtual time."""

from __future__ import annotations

import asyncio

import pytest

from rollmill.errors import SandboxError
from rollmill.sandboxes.watchdog import Evictable, GuardSettings, NodeGuard, NodeReading, Pressure
from rollmill.sandboxes.watchdog.guard_law import Evict, GuardDecision, GuardState, decide
from rollmill.testing import run_virtual

SETTINGS = GuardSettings()
CALM = NodeReading(pressure=Pressure(), memory_free=0.8, disk_free=0.8, inodes_free=0.8, pids_free=0.8)
CLOSED = GuardState(admitting=False)


OPEN = GuardState()


def decided(
    reading: NodeReading, *, state: GuardState = OPEN, pooled: int = 0, suspended: int = 0, now_s: float = 100.0
) -> GuardDecision:
    evictable = Evictable(pooled=pooled, suspended=suspended)
    return decide(state, reading, evictable=evictable, now_s=now_s, settings=SETTINGS)


def test_a_calm_node_admits_and_evicts_nothing():
    found = decided(CALM, pooled=5, suspended=5)
    assert (found.state.admitting, found.why, found.evict, found.count) == (True, "", None, 0)


def test_what_cannot_be_read_closes_nothing():
    assert decided(NodeReading()).state.admitting


@pytest.mark.parametrize(
    ("reading", "says"),
    [
        (NodeReading(pressure=Pressure(cpu_some=0.95)), "95% of the time some work waited for processors"),
        (NodeReading(pressure=Pressure(memory_some=0.2)), "20% of the time some work waited for memory"),
        (NodeReading(pressure=Pressure(memory_full=0.1)), "10% of the time all work waited for memory"),
        (NodeReading(pressure=Pressure(io_full=0.5)), "50% of the time all work waited for disks"),
        (NodeReading(memory_free=0.099), "9.9% of the memory is left"),
        (NodeReading(disk_free=0.05), "5.0% of a disk's bytes are left"),
        (NodeReading(inodes_free=0.02), "2.0% of a disk's inodes are left"),
        (NodeReading(pids_free=0.1), "10.0% of the process ids are left"),
    ],
)
def test_each_bound_stops_admission_and_says_so(reading, says):
    found = decided(reading)
    assert not found.state.admitting
    assert found.why.startswith(says)


def test_several_bounds_are_told_together():
    found = decided(NodeReading(memory_free=0.05, disk_free=0.01))
    assert (
        found.why == "5.0% of the memory is left (memory_free: 0.1); 1.0% of a disk's bytes are left (disk_free: 0.1)"
    )


def test_admission_opens_again_only_when_all_is_well_clear_of_its_bound():
    # Closed, the bounds are 0.1 / 0.8 = 0.125 of the memory and 0.2 * 0.8 = 0.16 of the time.
    assert not decided(NodeReading(memory_free=0.12), state=CLOSED).state.admitting
    assert decided(NodeReading(memory_free=0.125), state=CLOSED).state.admitting
    assert not decided(NodeReading(pressure=Pressure(memory_some=0.161)), state=CLOSED).state.admitting
    assert decided(NodeReading(pressure=Pressure(memory_some=0.15)), state=CLOSED).state.admitting


def test_pooled_ones_go_first_a_quarter_at_a_time_then_paused_ones():
    short = NodeReading(memory_free=0.04)
    first = decided(short, pooled=10, suspended=10)
    assert (first.evict, first.count) == (Evict.POOLED, 2)
    assert (decided(short, pooled=1, suspended=10).evict, decided(short, pooled=1).count) == (Evict.POOLED, 1)
    then = decided(short, suspended=10)
    assert (then.evict, then.count) == (Evict.SUSPENDED, 2)
    assert decided(short).evict is None


def test_moving_paused_ones_to_disk_is_for_memory_and_process_ids_not_for_a_short_disk():
    for reading in (NodeReading(disk_free=0.01), NodeReading(inodes_free=0.01)):
        assert decided(reading, pooled=4, suspended=4).evict is Evict.POOLED
        assert decided(reading, suspended=4).evict is None
    assert decided(NodeReading(pids_free=0.05), suspended=4).evict is Evict.SUSPENDED
    assert decided(NodeReading(pressure=Pressure(memory_full=0.25)), suspended=4).evict is Evict.SUSPENDED


def test_between_stopping_and_evicting_there_is_room():
    assert decided(NodeReading(memory_free=0.06), pooled=4).evict is None
    assert decided(NodeReading(memory_free=0.049), pooled=4).evict is Evict.POOLED
    assert decided(NodeReading(pressure=Pressure(cpu_some=1.0)), pooled=4, suspended=4).evict is None


def test_an_eviction_is_given_time_to_be_felt():
    short = NodeReading(memory_free=0.01)
    evicted = GuardState(admitting=False, evicted_s=100.0)
    assert decided(short, state=evicted, pooled=4, now_s=102.9).evict is None
    assert decided(short, state=evicted, pooled=4, now_s=103.0).evict is Evict.POOLED


# -- the shell -------------------------------------------------------------------------------------------------------


class FakeGate:
    def __init__(self, *, pooled: int = 0, suspended: int = 0) -> None:
        self.story: list[tuple[float, str]] = []
        self.left = Evictable(pooled=pooled, suspended=suspended)
        self.takes_s = 0.0
        self.fails: Exception | None = None

    def _tell(self, what: str) -> None:
        self.story.append((asyncio.get_running_loop().time(), what))

    def stop_admission(self, why: str) -> None:
        self._tell(f"stop: {why}")

    def resume_admission(self) -> None:
        self._tell("resume")

    def evictable(self) -> Evictable:
        return self.left

    async def _evict(self, kind: str, count: int) -> int:
        self._tell(f"{kind} {count}")
        await asyncio.sleep(self.takes_s)
        if self.fails is not None:
            raise self.fails
        left = {"pooled": self.left.pooled, "suspended": self.left.suspended}
        self.left = Evictable(**{**left, kind: left[kind] - count})
        return count

    async def evict_pooled(self, count: int) -> int:
        return await self._evict("pooled", count)

    async def evict_suspended(self, count: int) -> int:
        return await self._evict("suspended", count)


class Node:
    """A node that reads as the last entry whose time has come says."""

    def __init__(self, *changes: tuple[float, NodeReading | Exception | None]) -> None:
        self.changes = changes
        self.reads = 0

    async def __call__(self) -> NodeReading:
        self.reads += 1
        now_s = asyncio.get_running_loop().time()
        value = [value for at_s, value in self.changes if at_s <= now_s][-1]
        if value is None:
            await asyncio.sleep(5.0)
            return CALM
        if isinstance(value, Exception):
            raise value
        return value


def guard(gate: FakeGate, node: Node, seconds: float, settings: GuardSettings = SETTINGS) -> NodeGuard:
    async def whole() -> NodeGuard:
        async with NodeGuard(gate, settings=settings, read=node) as found:
            await asyncio.sleep(seconds)
        return found

    return run_virtual(whole())


def test_admission_stops_once_is_told_of_a_new_reason_and_opens_again():
    memory, disk = NodeReading(memory_free=0.09), NodeReading(disk_free=0.09)
    gate = FakeGate()
    found = guard(gate, Node((0.0, CALM), (1.5, memory), (4.5, disk), (6.5, CALM)), 9.5)
    assert gate.story == [
        (2.0, "stop: 9.0% of the memory is left (memory_free: 0.1)"),
        (3.0, "stop: 9.0% of the memory is left (memory_free: 0.125)"),
        (5.0, "stop: 9.0% of a disk's bytes are left (disk_free: 0.125)"),
        (7.0, "resume"),
    ]
    statistics = found.statistics()
    assert (statistics.admitting, statistics.why, statistics.stops, statistics.stopped_s) == (True, "", 1, 5.0)


def test_pools_are_emptied_step_by_step_and_then_paused_ones_moved_to_disk():
    gate = FakeGate(pooled=3, suspended=2)
    found = guard(gate, Node((0.0, NodeReading(memory_free=0.01))), 14.5)
    evictions = [(at_s, what) for at_s, what in gate.story if not what.startswith("stop")]
    assert evictions == [(0, "pooled 1"), (3, "pooled 1"), (6, "pooled 1"), (9, "suspended 1"), (12, "suspended 1")]
    assert (found.statistics().evicted_pooled, found.statistics().evicted_suspended) == (3, 2)


def test_an_eviction_that_hangs_or_fails_is_counted_and_the_guard_goes_on():
    settings = GuardSettings(evict_s=1.5)
    gate = FakeGate(pooled=3)
    gate.takes_s = 1e6
    statistics = guard(gate, Node((0.0, NodeReading(memory_free=0.01))), 2.8, settings).statistics()
    assert (statistics.failed_evictions, statistics.evicted_pooled, statistics.missed_ticks) == (1, 0, 1)
    gate = FakeGate(pooled=3)
    gate.fails = SandboxError("no")
    statistics = guard(gate, Node((0.0, NodeReading(memory_free=0.01))), 3.5).statistics()
    assert (statistics.failed_evictions, statistics.evicted_pooled) == (2, 0)


def test_a_node_that_cannot_be_read_leaves_admission_as_it_is_and_is_not_asked_twice_at_once():
    gate = FakeGate()
    node = Node((0.0, NodeReading(memory_free=0.01)), (0.5, None), (6.5, OSError("no /proc")), (8.5, CALM))
    found = guard(gate, node, 9.5)
    # The reading of 1 s hangs until 6 s: not in time at 1, 2, 3, 4 and 5 s. At 6 s it is there, and calm.
    assert [at_s for at_s, what in gate.story if what == "resume"] == [6.0]
    assert found.statistics().failed_readings == 5 + 2  # and the failures of 7 and 8 s
    assert node.reads == 5  # at 0, 1, 7, 8 and 9 s
    assert found.pressure() == CALM.pressure
