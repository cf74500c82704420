"""T01, SkyRL 1691, tinker-cookbook 945, NeMo-RL 3488, TRL 5751.

A worker dies, its error is swallowed in a background task, and the trainer waits for ever on an empty buffer. Expected:
the run ends at once with the original error as its cause and no task left; when all producers end quietly, the error
says that nobody is left.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "simulation"))

from controller_world import World, config_of

from rollmill.errors import EngineDead, ProducersGone
from rollmill.runtime.failure import first_cause
from rollmill.scheduling.events import ReplicaLeft
from rollmill.testing import FakeFaults, run_virtual


class _DyingLoad(World):
    """Replica 2 of 4 dies at t = 3, in the background task that loads its weights."""

    async def _load(self, replica_id: str, policy_version: int) -> None:
        if replica_id == "generator-2" and self.clock.now_s() >= 3.0:
            raise EngineDead("generator-2: the engine's thread ended with CUDA error 700")
        await super()._load(replica_id, policy_version)


def test_the_error_of_a_background_task_ends_the_run_as_its_cause() -> None:
    left: set[asyncio.Task[object]] = set()

    async def main(world: World) -> None:
        try:
            await world.run()
        finally:
            left.update(task for task in asyncio.all_tasks() if task is not asyncio.current_task())

    world = _DyingLoad(config_of(steps=100), faults=(FakeFaults(),) * 4, step_s=1.0)
    with pytest.raises(ExceptionGroup) as caught:
        run_virtual(main(world), clock=world.clock)
    cause = first_cause(caught.value)
    assert isinstance(cause, EngineDead)
    assert "CUDA error 700" in str(cause)
    # The first load after t = 3 is that of the step which ends then; a step takes one second.
    assert world.clock.now_s() <= 3.0 + 1.0 + 1.0
    assert left == set()


def test_producers_that_all_end_quietly_are_named_as_gone() -> None:
    async def leave(world: World) -> None:
        await asyncio.sleep(3.0)
        for name in tuple(world.engines):
            world.replicas.leave(name)
            world.controller.inbox.put(ReplicaLeft(at_s=world.clock.now_s(), replica_id=name, reason="ended"))

    world = World(config_of(steps=100), faults=(FakeFaults(),) * 4)
    with pytest.raises(ExceptionGroup) as caught:
        run_virtual(world.run(meanwhile=leave), clock=world.clock)
    cause = first_cause(caught.value)
    assert isinstance(cause, ProducersGone)
    assert cause.alive == 0
    # What was buffered is still trained: at most max_staleness + 1 = 3 batches of 2 s each; then nothing can come.
    assert world.clock.now_s() <= 3.0 + 3 * 2.0 + 1.0
