"""When replicas of the generator are started and drained, and which ones."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from rollmill.errors import ConfigError
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

SETTINGS = ScalingSettings(max_replicas=8)


def replica(name: str = "a", **changes: Any) -> ReplicaLoad:
    """A replica with 10 seats and room for 1000 tokens."""
    usual = {"phase": ReplicaPhase.SERVING, "max_num_seqs": 10, "kv_capacity_tokens": 1000, "turns_per_s": 1.0}
    return ReplicaLoad(name=name, **{**usual, **changes})


def fleet(*replicas: ReplicaLoad, **changes: Any) -> Fleet:
    return Fleet(replicas=replicas, **changes)


def first(*replicas: ReplicaLoad, settings: ScalingSettings = SETTINGS, **changes: Any) -> Decision:
    """The decision of an autoscaler that has seen nothing before."""
    return decide(fleet(*replicas, **changes), Memory(), settings=settings, now_s=1000.0)[0]


def over_time(seen: Fleet, *, until_s: float, settings: ScalingSettings = SETTINGS, memory: Memory | None = None):
    """Decide every 5 s about a fleet that does not change; return (time, decision) of all that do something."""
    memory, done = Memory() if memory is None else memory, []
    for now_s in range(0, int(until_s) + 1, 5):
        decision, memory = decide(seen, memory, settings=settings, now_s=float(now_s))
        if decision.start or decision.drain:
            done.append((now_s, decision))
    return done


# -- more


def test_a_full_batch_without_a_queue_asks_for_nothing():
    assert first(replica(running=10)).start == 0


def test_a_queue_that_is_worked_off_in_time_asks_for_nothing():
    # 10 wait, and 1 turn ends per second: 10 s, which is the target.
    assert first(replica(running=10, waiting=10)).start == 0


def test_a_longer_queue_starts_as_many_as_work_it_off_in_time():
    # 30 wait at 2 turns/s: 15 s. Three replicas of 1 turn/s each would need 10 s.
    decision = first(replica("a", running=10, waiting=15), replica("b", running=10, waiting=15))
    assert (decision.start, decision.target) == (1, 3)
    assert "30 wait for 15.0 s" in decision.reason


def test_no_more_are_started_than_could_take_those_that_wait():
    # One waits for 100 s on slow replicas, but 11 sequences fill no more than 11 / (10 * 0.9) = 1.2 replicas.
    decision = first(replica(running=10, waiting=1, turns_per_s=0.01), settings=ScalingSettings(max_step_out=8))
    assert decision.target == 2


def test_where_no_turn_has_ended_yet_the_queue_alone_counts():
    # 40 sequences over 10 seats at 0.9
    decision = first(replica(running=10, waiting=30, turns_per_s=0.0), settings=ScalingSettings(max_step_out=8))
    assert decision.target == 4


def test_kv_use_over_the_high_mark_starts_a_replica_though_nothing_waits():
    assert first(replica(running=5, kv_used_tokens=890)).start == 0
    assert first(replica(running=5, kv_used_tokens=910)).start == 1


def test_those_that_wait_are_counted_with_the_kv_that_running_ones_have():
    # 5 of 100 tokens each run, 15 wait: 2000 tokens are 2 replicas' KV, though 20 sequences fill 2 replicas' seats too;
    # with seats for 100 only the KV says so.
    seen = fleet(replica(running=5, waiting=15, max_num_seqs=100, kv_used_tokens=500, turns_per_s=0.0))
    assert need_of(seen, settings=SETTINGS).at_least == 2
    assert need_of(seen, settings=SETTINGS).comfortable == 4  # 2 / 0.6


def test_the_queue_of_the_router_counts():
    assert first(replica(running=10), router_queue=40).start == 2


def test_a_step_is_bounded():
    decision = first(replica(running=10, waiting=500), settings=ScalingSettings(max_replicas=50, max_step_out=3))
    assert decision.start == 3


def test_a_replica_that_starts_counts_as_one_that_serves():
    starting = replica("b", phase=ReplicaPhase.STARTING, since_s=990.0)
    decision = first(replica(running=10, waiting=20), starting)
    assert decision.start == 0
    assert decision.target == 2


def test_between_two_starts_because_of_load_there_is_a_rest():
    seen = fleet(replica(running=10, waiting=100))
    times = [at for at, decision in over_time(seen, until_s=100) if decision.start]
    assert times == [0, 30, 60, 90]


def test_replicas_that_drain_hold_their_place_because_they_hold_memory():
    draining = replica("b", phase=ReplicaPhase.DRAINING)
    decision = first(replica(running=10, waiting=100), draining, settings=ScalingSettings(max_replicas=2))
    assert decision.start == 0
    assert "others must leave first" in decision.reason


# -- fewer


def test_a_small_load_drains_one_after_the_window_and_the_next_after_a_rest():
    quiet = [replica(name, running=1) for name in "abc"]
    times = [at for at, _ in over_time(fleet(*quiet), until_s=300)]
    # The window of 120 s ends first, then the rest of 120 s after each change.
    assert times == [120, 240]


def test_one_moment_of_more_load_in_the_window_keeps_all():
    quiet, busy = fleet(replica("a"), replica("b")), fleet(replica("a", running=8), replica("b", running=8))
    memory = Memory()
    drained = []
    for now_s in range(0, 301, 5):
        decision, memory = decide(busy if now_s == 100 else quiet, memory, settings=SETTINGS, now_s=float(now_s))
        drained += [now_s] if decision.drain else []
    assert drained[0] == 220  # the busy moment has left the window


def test_a_load_between_the_marks_moves_nothing():
    # 13 of 20 seats: one replica would be full, two are over the low mark of 0.6 (12).
    assert over_time(fleet(replica("a", running=7), replica("b", running=6)), until_s=1000) == []


def test_the_one_with_the_least_to_finish_leaves():
    seen = fleet(replica("a", running=2), replica("b", running=1, waiting=2), replica("c", running=2, kv_used_tokens=9))
    assert over_time(seen, until_s=120)[0][1].drain == ("a",)


def test_among_idle_ones_the_youngest_leaves():
    seen = fleet(replica("a", since_s=5.0), replica("b", since_s=50.0), replica("c", since_s=7.0))
    assert over_time(seen, until_s=120)[0][1].drain == ("b",)


@pytest.mark.parametrize("phase", [ReplicaPhase.STARTING, ReplicaPhase.UNFIT])
def test_nothing_leaves_while_another_starts_or_is_not_fit(phase):
    seen = fleet(replica("a"), replica("b"), replica("c", phase=phase, since_s=1e9))
    assert over_time(seen, until_s=600) == []


def test_what_is_being_finished_on_a_leaving_replica_still_counts_as_load():
    leaving = replica("c", phase=ReplicaPhase.DRAINING, running=9)
    seen = fleet(replica("a", running=2), replica("b", running=2), leaving)
    assert need_of(seen, settings=SETTINGS).comfortable == 3  # 13 / (10 * 0.6)
    assert over_time(seen, until_s=600) == []


def test_nothing_leaves_while_part_of_the_load_cannot_be_seen():
    assert over_time(fleet(replica("a"), replica("b"), blind=True), until_s=600) == []


# -- bounds


def test_below_the_minimum_replicas_are_started_at_once_and_all_together():
    decision = first(settings=ScalingSettings(min_replicas=3, max_step_out=1))
    assert (decision.start, decision.target) == (3, 3)


def test_a_loss_below_the_minimum_is_replaced_in_spite_of_a_rest():
    memory = Memory(began_s=0.0, out_at_s=99.0, changed_at_s=99.0)
    decision, after = decide(fleet(replica()), memory, settings=ScalingSettings(min_replicas=2), now_s=100.0)
    assert decision.start == 1
    assert after.out_at_s == 99.0  # and does not make the load wait


def test_over_the_maximum_the_surplus_leaves_at_once_and_starting_ones_go_first():
    starting = replica("z", phase=ReplicaPhase.STARTING, since_s=999.0)
    decision = first(
        replica("a", running=9), replica("b", running=3), starting, settings=ScalingSettings(max_replicas=1)
    )
    assert decision.drain == ("z", "b")


# -- what does not work


def test_a_replica_that_is_unfit_for_too_long_is_given_up_and_replaced_when_it_has_left():
    unfit = replica("b", phase=ReplicaPhase.UNFIT, since_s=0.0)
    settings = ScalingSettings(min_replicas=2, max_replicas=2)
    memory = Memory()
    before, memory = decide(fleet(replica(), unfit), memory, settings=settings, now_s=120.0)
    assert before.drain == ()
    decision, memory = decide(fleet(replica(), unfit), memory, settings=settings, now_s=121.0)
    assert (decision.drain, decision.start) == (("b",), 0)
    after, _ = decide(fleet(replica()), memory, settings=settings, now_s=125.0)
    assert after.start == 1


def test_a_replica_that_starts_for_too_long_is_given_up():
    stuck = replica("b", phase=ReplicaPhase.STARTING, since_s=0.0)
    assert first(replica(), stuck, settings=ScalingSettings(start_limit_s=999.0)).drain == ("b",)


@pytest.mark.parametrize(("failures", "delay_s"), [(1, 10), (2, 20), (4, 80), (40, 600)])
def test_every_failed_start_doubles_the_delay_of_the_next(failures, delay_s):
    for age_s, expected in ((delay_s - 1, 0), (delay_s, 1)):
        decision = first(failed_starts=failures, failed_at_s=1000.0 - age_s)
        assert decision.start == expected
    late = first(failed_starts=failures, failed_at_s=1000.0)
    assert f"{failures} replicas in a row" in late.reason


def test_memory_stays_small():
    memory = Memory()
    for now_s in range(2000):
        seen = fleet(replica(running=now_s % 10))
        _, memory = decide(seen, memory, settings=SETTINGS, now_s=float(now_s))
    assert len(memory.needs) <= SETTINGS.in_window_s


def test_every_decision_gives_its_numbers():
    decision = first(replica(running=3, kv_used_tokens=250))
    assert decision == Decision(
        target=1, reason="stay at 1: 1 serve 3 sequences on 10 seats with 25% of the KV, 0 wait for 0.0 s"
    )
    assert msgspec.structs.asdict(decision)["start"] == 0


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"min_replicas": 0}, "min_replicas 0"),
        ({"min_replicas": 5, "max_replicas": 4}, "below min_replicas 5"),
        ({"low_usage": 0.9, "high_usage": 0.9}, "low_usage 0.9"),
        ({"high_usage": 1.1}, "high_usage 1.1"),
        ({"max_step_in": 0}, "max_step_in 0"),
        ({"target_wait_s": 0.0}, "target_wait_s 0.0"),
        ({"out_rest_s": -1.0}, "out_rest_s -1.0"),
        ({"in_window_s": float("nan")}, "in_window_s nan"),
    ],
)
def test_settings_that_cannot_be_kept_are_refused_by_name(changes, complaint):
    with pytest.raises(ConfigError, match=complaint):
        ScalingSettings(**changes)
