from __future__ import annotations

import time

import pytest

from rollmill.errors import InvariantViolation
from rollmill.scheduling import events as ev
from rollmill.scheduling import instructions as ins
from simulation.scheduling_world import World, settings


def published(world: World, *steps: int) -> None:
    for step in steps:
        world.feed(ev.WeightsPublished(at_s=world.now_s, policy_version=step, optimizer_step=step))


def loads(out: list[ins.AnyInstruction]) -> list[tuple[str, int]]:
    return [(i.replica_id, i.policy_version) for i in out if isinstance(i, ins.LoadWeights)]


def test_a_replica_loads_the_newest_version_one_at_a_time_and_skips_what_was_overtaken() -> None:
    world = World(settings())
    world.begin()
    published(world, 1)
    assert world.loads == {"r0": 1}
    published(world, 2, 3)
    assert world.loads == {"r0": 1}
    out = world.feed(ev.WeightsLoaded(at_s=1.0, replica_id="r0", policy_version=1))
    assert loads(out) == [("r0", 3)]
    assert loads(world.feed(ev.WeightsLoaded(at_s=2.0, replica_id="r0", policy_version=3))) == []


def test_replicas_load_one_after_the_other_those_furthest_behind_first() -> None:
    world = World(settings())
    world.begin(replicas=3)
    published(world, 1)
    assert world.loads == {"r0": 1}
    assert loads(world.feed(ev.WeightsLoaded(at_s=1.0, replica_id="r0", policy_version=1))) == [("r1", 1)]
    published(world, 2)
    assert loads(world.feed(ev.WeightsLoaded(at_s=2.0, replica_id="r1", policy_version=1))) == [("r2", 2)]
    assert loads(world.feed(ev.WeightsLoaded(at_s=3.0, replica_id="r2", policy_version=2))) == [("r0", 2)]


def test_a_replica_that_leaves_while_it_loads_lets_the_next_one_load() -> None:
    world = World(settings())
    world.begin(replicas=2)
    published(world, 1)
    out = world.feed(ev.ReplicaLeft(at_s=1.0, replica_id="r0", reason="killed", then=ev.AfterLoss.AWAIT))
    assert loads(out) == [("r1", 1)]


def test_as_many_load_at_once_as_the_setting_says() -> None:
    world = World(settings(loads_at_once=2))
    world.begin(replicas=3)
    published(world, 1)
    assert world.loads == {"r0": 1, "r1": 1}


def test_a_replica_that_joins_late_loads_the_newest_version() -> None:
    world = World(settings(loads_at_once=2))
    world.begin()
    published(world, 1)
    out = world.feed(ev.ReplicaJoined(at_s=1.0, replica_id="r7", slots=4, policy_version=0))
    assert loads(out) == [("r7", 1)]


def test_a_version_rolled_back_under_a_new_number_is_loaded_like_any_other() -> None:
    world = World(settings())
    world.begin()
    out = world.feed(ev.WeightsPublished(at_s=0.0, policy_version=9, optimizer_step=0))
    assert loads(out) == [("r0", 9)]


def test_a_load_of_a_replica_that_has_left_is_ignored() -> None:
    world = World(settings())
    world.begin(replicas=2)
    published(world, 1)
    world.leave("r0")
    assert world.feed(ev.WeightsLoaded(at_s=1.0, replica_id="r0", policy_version=1)) == []


def test_a_version_nobody_published_is_refused() -> None:
    world = World(settings())
    world.begin()
    with pytest.raises(InvariantViolation, match=r"version 4, which was never published .*newest known: 0"):
        world.feed(ev.ReplicaJoined(at_s=0.0, replica_id="r9", slots=1, policy_version=4))


def test_the_books_of_the_view_are_those_of_the_summary() -> None:
    world = World(settings(total_steps=2), has_signal=lambda task: task % 2 == 0)
    world.begin()
    world.run()
    rollouts = world.core.view().rollouts()
    dropped = rollouts.pop("dropped")
    admitted = rollouts.pop("admitted")
    assert isinstance(dropped, dict)
    assert admitted == sum(rollouts.values()) + sum(dropped.values())  # type: ignore[arg-type]
    assert set(rollouts) == {"in_flight", "suspended", "buffered", "trained"}


def bound(world: World) -> str:
    return world.core.view().bound_by


def test_what_bounds_the_run_follows_from_who_waits() -> None:
    world = World(settings(batch_groups=1, group_size=1, max_staleness=0, total_steps=3))
    world.begin(slots=1)
    assert bound(world) == "start"
    world.finish("g000000/0.1")
    world.close("g000000")
    world.take()
    assert bound(world) == "trainer"
    world.train()
    assert bound(world) == "weights"
    world.publish()
    world.load("r0")
    assert bound(world) == "generator"  # its only slot is busy
    world.finish("g000001/0.1")
    assert bound(world) == "admission"  # nothing runs, and the budget allows nothing more
    world.feed(ev.StopRequested(at_s=0.0, reason="Ctrl-C"))
    assert bound(world) == "data"


def test_the_time_under_each_bound_adds_up_to_the_time_of_the_run() -> None:
    world = World(settings(batch_groups=1, group_size=1, max_staleness=0, total_steps=3))
    world.begin(slots=1)
    world.run()
    seconds = world.core.view().seconds_bound
    assert sum(seconds.values()) == pytest.approx(world.now_s)
    assert world.core.view().bound_most == max(seconds, key=lambda name: seconds[name])
    # One event a second. Start: finish, close, take. Weights: publish, load, twice. Trainer: take and train of steps
    # 1 and 2, train of step 0; its take of step 0 ended the start.
    assert seconds["start"] == 3.0
    assert seconds["weights"] == 4.0
    assert seconds["trainer"] == 5.0


def test_the_stall_report_says_why_nothing_is_admitted() -> None:
    world = World(settings(max_staleness=0, total_steps=3))
    world.begin()
    while world.trainer_step < 1:
        world.act(world.actions()[0])
    trainer = world.core.waits(10.0)[0]
    assert trainer.who == "trainer"
    assert "staleness budget 0 is used up (serving weights are 1 steps behind the trainer)" in trainer.waits_for
    world.publish()
    replica = next(wait for wait in world.core.waits(10.0) if wait.who == "replica r0")
    assert replica.sentence == "replica r0 waits for policy version 1 to load (serves 0), for 10.0 s now."


def test_the_stall_report_names_a_batch_the_trainer_does_not_finish() -> None:
    world = World(settings(max_staleness=0))
    world.begin()
    while world.training is None:
        world.act(world.actions()[0])
    wait = world.core.waits(60.0)[0]
    assert (wait.who, wait.waits_for, wait.age_s) == ("batch 0", "the trainer to finish step 0", 60.0)
    assert wait.pending == ("g000000", "g000001")


def test_a_stall_sentence_names_what_is_pending_and_when_it_is_given_up() -> None:
    world = World(settings(rollout_deadline_s=30.0, group_deadline_s=70.0))
    world.begin()
    sentence = next(wait for wait in world.core.waits(10.0) if wait.who == "group g000001").sentence
    assert sentence == (
        "group g000001 waits for 2 of 2 rollouts of task 1 to finish, for 10.0 s now "
        "(g000001/0.1, g000001/1.1); given up in 60.0 s."
    )


def test_an_event_costs_well_under_a_millisecond_with_a_thousand_rollouts_in_flight() -> None:
    world = World(
        settings(batch_groups=42, group_size=8, max_staleness=2, total_steps=50, prior_group_s=1e6), validate=False
    )
    world.begin(slots=2000)
    assert len(world.flights) == 1008
    finished = [
        ev.RolloutFinished(at_s=1.0, rollout_id=rollout_id, output_tokens=1, oldest_optimizer_step=0, counts=True)
        for rollout_id in world.flights
    ]
    begin = time.process_time()
    for event in finished:
        world.core.handle(event)
    per_event_s = (time.process_time() - begin) / len(finished)
    # About 0.02 ms on the reference machine; a scan over all groups costs ten times the limit.
    assert per_event_s < 0.0005
