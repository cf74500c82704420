"""slime 1474: a buffer that was too short was filled with empty placeholder samples.

Expected: wait for real samples, or end; never invent one.
"""

from __future__ import annotations

import pytest

from rollmill.buffer import Assignment, MemoryStore, Transition
from rollmill.errors import StoreError
from rollmill.scheduling import instructions as ins
from simulation.scheduling_world import World, settings


def test_a_batch_waits_until_all_its_groups_are_there() -> None:
    world = World(settings(batch_groups=3, group_size=2, max_staleness=0, total_steps=1))
    world.begin()
    for group in ("g000000", "g000001"):
        world.finish(f"{group}/0.1")
        world.finish(f"{group}/1.1")
        world.close(group)
    assert world.assigned == []
    assert [wait.pending for wait in world.core.waits(9.0) if wait.who == "trainer"] == [("g000002",)]


@pytest.mark.parametrize("max_staleness", [0, 2])
def test_the_last_batch_of_the_data_is_short_and_real(max_staleness: int) -> None:
    world = World(settings(batch_groups=2, max_staleness=max_staleness, total_steps=100, data_limit=5))
    world.begin()
    world.run()
    assert world.ended == ins.Finish(reason="end_of_data")
    assert [len(batch) for batch in world.trained] == [2, 2, 1]
    assert sorted(world.trained_tasks) == [0, 1, 2, 3, 4]
    view = world.core.view()
    assert view.trained == view.admitted == 5 * 2


@pytest.mark.parametrize("groups", [(), ("g1",)])
def test_the_store_takes_no_batch_without_stored_samples(groups: tuple[str, ...]) -> None:
    batch = Assignment(batch_id=0, optimizer_step=0, group_ids=groups)
    with pytest.raises(StoreError):
        MemoryStore().apply(Transition(assignments=(batch,)))
