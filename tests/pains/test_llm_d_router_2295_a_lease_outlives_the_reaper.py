"""llm-d-router 2295: a reaper forgot requests that still ran after 5 minutes: phantom capacity, runaway load.

Expected: a lease ends only by completion, by proven death or because it was not renewed and somebody else took it;
time alone frees no place.
"""

from __future__ import annotations

from buffer_builders import a_step, assign, put
from rollmill.buffer import MemoryStore
from rollmill.scheduling import events as ev
from simulation.scheduling_world import World, settings

HOUR_S = 3600.0


def test_rollouts_that_run_for_an_hour_keep_their_places() -> None:
    world = World(settings(batch_groups=2, group_size=2, max_staleness=1, rollout_deadline_s=1e6, group_deadline_s=1e7))
    world.begin()
    before = world.core.view()
    running = set(world.flights)
    for minutes in (4, 6, 60):
        world.tick(minutes * 60.0)
    view = world.core.view()
    assert (view.running, view.capacity, view.stock) == (before.running, before.capacity, before.stock)
    assert set(world.flights) == running, "nothing was started on a place that is taken"


def test_a_death_frees_the_places_at_once_and_completion_frees_its_own() -> None:
    world = World(settings(max_staleness=0))
    world.begin(replicas=2)
    running = world.core.view().running
    world.finish("g000000/0.1")
    assert world.core.view().running == running - 1
    for replica_id in ("r0", "r1"):
        world.leave(replica_id)
    for rollout_id in list(world.flights):
        world.fail(rollout_id, ev.FailureClass.INFRA, "the engine died")
    assert world.core.view().running == 0


def test_a_batch_that_is_trained_for_longer_than_its_lease_stays_the_trainers() -> None:
    store = MemoryStore()
    store.apply(put("a"))
    store.apply(assign(0, "a", step=0))
    store.lease_batch(optimizer_step=0, owner="trainer", now_s=0.0, lease_s=300.0)
    store.renew_lease(batch_id=0, owner="trainer", now_s=HOUR_S, lease_s=300.0)
    store.record_step(a_step(0, "a", step=1), owner="trainer")
    assert [record.group_ids for _, record in store.steps()] == [("a",)]
