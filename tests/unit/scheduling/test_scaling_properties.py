"""What the law of scaling keeps for every load: bounds, room for the load, and quiet where the load is."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from rollmill.scheduling.scaling import (
    Decision,
    Fleet,
    Memory,
    ReplicaLoad,
    ReplicaPhase,
    ScalingSettings,
    decide,
    need_of,
)

TICK_S = 5.0
SEATS = 8


@dataclass
class World:
    """Replicas that share a load evenly: closed (so many sequences, always) or open (so many arrive per second).

    A turn takes `turn_s`; a replica takes `start_s` to start, and leaves when it has finished what it had.
    """

    law: ScalingSettings
    turn_s: float
    start_s: float
    at_s: float = 0.0
    queue: float = 0.0
    in_service: float = 0.0
    serving: dict[str, float] = field(default_factory=dict)
    starting: dict[str, float] = field(default_factory=dict)
    leaving: dict[str, tuple[float, int]] = field(default_factory=dict)
    memory: Memory = field(default_factory=Memory)
    named: int = 0
    history: list[tuple[Fleet, Decision]] = field(default_factory=list)

    def seen(self) -> Fleet:
        count = max(1, len(self.serving))
        replicas = [
            ReplicaLoad(
                name=name,
                phase=ReplicaPhase.SERVING,
                since_s=since_s,
                running=round(self.in_service / count),
                waiting=round(self.queue / count),
                max_num_seqs=SEATS,
                turns_per_s=self.in_service / count / self.turn_s,
            )
            for name, since_s in self.serving.items()
        ]
        replicas += [
            ReplicaLoad(name=name, phase=ReplicaPhase.STARTING, since_s=since_s, max_num_seqs=SEATS)
            for name, since_s in self.starting.items()
        ]
        replicas += [
            ReplicaLoad(name=name, phase=ReplicaPhase.DRAINING, since_s=since_s, running=running, max_num_seqs=SEATS)
            for name, (since_s, running) in self.leaving.items()
        ]
        return Fleet(replicas=tuple(replicas))

    def tick(self, *, closed: int | None = None, arrivals_per_s: float = 0.0) -> Decision:
        """Let the load do its work for a tick, then decide and act."""
        self.starting, ready = (
            {n: s for n, s in self.starting.items() if self.at_s - s < self.start_s},
            [n for n, s in self.starting.items() if self.at_s - s >= self.start_s],
        )
        self.serving |= dict.fromkeys(ready, self.at_s)
        self.leaving = {n: (s, r) for n, (s, r) in self.leaving.items() if self.at_s - s < self.turn_s}
        seats = SEATS * len(self.serving)
        if closed is None:
            done = self.in_service / self.turn_s * TICK_S
            total = max(0.0, self.queue + self.in_service + arrivals_per_s * TICK_S - done)
        else:
            total = float(closed)
        self.in_service = min(float(seats), total)
        self.queue = total - self.in_service
        fleet = self.seen()
        decision, self.memory = decide(fleet, self.memory, settings=self.law, now_s=self.at_s)
        self.history.append((fleet, decision))
        for _ in range(decision.start):
            self.named += 1
            self.starting[f"r{self.named}"] = self.at_s
        for name in decision.drain:
            self.serving.pop(name, None)
            self.starting.pop(name, None)
            self.leaving[name] = (self.at_s, round(self.in_service / max(1, len(self.serving) + 1)))
        self.at_s += TICK_S
        return decision


laws = st.builds(
    ScalingSettings,
    min_replicas=st.integers(1, 3),
    max_replicas=st.integers(3, 9),
    high_usage=st.floats(0.7, 1.0),
    low_usage=st.floats(0.2, 0.65),
    target_wait_s=st.floats(1, 60),
    max_step_out=st.integers(1, 4),
    max_step_in=st.integers(1, 3),
    out_rest_s=st.floats(0, 60),
    in_rest_s=st.floats(0, 120),
    in_window_s=st.floats(1, 120),
)
worlds = st.builds(World, law=laws, turn_s=st.floats(1, 30), start_s=st.floats(0, 60))
loads = st.lists(st.integers(0, 100), min_size=1, max_size=6)
common = settings(max_examples=30, deadline=None)
long = settings(max_examples=8, deadline=None)


def actions(world: World) -> list[Decision]:
    return [decision for _, decision in world.history if decision.start or decision.drain]


@common
@given(worlds, loads)
def test_the_number_stays_within_its_bounds_whatever_the_load(world, loads):
    for load in loads:
        for _ in range(20):
            world.tick(closed=load)
            there = len(world.serving) + len(world.starting)
            assert world.law.min_replicas <= there
            assert there + len(world.leaving) <= world.law.max_replicas


@common
@given(worlds, loads)
def test_no_step_is_larger_than_allowed_once_the_minimum_is_there(world, loads):
    for load in loads:
        for _ in range(20):
            world.tick(closed=load)
    for fleet, decision in world.history:
        there = fleet.of(ReplicaPhase.SERVING, ReplicaPhase.STARTING)
        if len(there) >= world.law.min_replicas:
            assert decision.start <= world.law.max_step_out
        assert len(decision.drain) <= world.law.max_step_in
        assert not (decision.start and decision.drain)


@common
@given(worlds, loads)
def test_nothing_is_drained_that_the_load_needs(world, loads):
    for load in loads:
        for _ in range(30):
            world.tick(closed=load)
    for fleet, decision in world.history:
        if decision.drain:
            need = need_of(fleet, settings=world.law)
            assert decision.target >= need.at_least
            # Every sequence that was there has a seat on what is left.
            outstanding = sum(r.running + r.waiting for r in fleet.replicas)
            assert decision.target * SEATS >= outstanding


@long
@given(worlds, st.integers(0, 100), st.lists(st.integers(0, 100), max_size=3))
def test_a_constant_number_of_sequences_lets_the_fleet_settle(world, load, before):
    for other in before:
        for _ in range(20):
            world.tick(closed=other)
    # Longest way: 9 starts or drains, each followed by its rest, window or start.
    for _ in range(9 * 60):
        world.tick(closed=load)
    settled = len(actions(world))
    for _ in range(100):
        world.tick(closed=load)
    assert len(actions(world)) == settled


@long
@given(worlds, st.floats(0, 6))
def test_a_constant_rate_of_arrivals_lets_the_fleet_settle(world, rate):
    for _ in range(9 * 60):
        world.tick(arrivals_per_s=rate)
    settled = len(actions(world))
    for _ in range(100):
        world.tick(arrivals_per_s=rate)
    assert len(actions(world)) == settled
    able = SEATS / world.turn_s * len(world.serving)
    assert able >= min(rate, SEATS / world.turn_s * world.law.max_replicas) * 0.999


def test_a_step_of_load_is_followed_within_two_starts_and_given_back_one_by_one():
    world = World(law=ScalingSettings(max_replicas=8), turn_s=10.0, start_s=20.0)
    for _ in range(10):
        world.tick(closed=4)
    assert len(world.serving) == 1
    # 80 sequences, 8 seats and 0.8 turns/s each. One replica: 72 wait for 90 s. Three: 56 wait for 23 s. Five: 40 wait
    # for 10 s: the target. So two are started twice, 30 s apart, and take 20 s.
    stepped_s = world.at_s
    for _ in range(12):
        world.tick(closed=80)
    assert [decision.start for _, decision in world.history if decision.start] == [1, 2, 2]
    assert max(world.serving.values()) - stepped_s <= 55.0
    for _ in range(60):
        world.tick(closed=80)
    assert len(world.serving) == 5
    dropped_s = world.at_s
    drained_s = []
    for _ in range(150):
        at_s = world.at_s
        if world.tick(closed=4).drain:
            drained_s.append(at_s - dropped_s)
    # The first when the load has left the window, then one after every rest of 120 s; before the last, the load of the
    # one that drains counts for a moment.
    assert drained_s == [115.0, 235.0, 355.0, 480.0]
    assert len(world.serving) == 1
