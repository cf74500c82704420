"""The fake trainer does to the store and the repository what a real one does, in the same order."""

from __future__ import annotations

import asyncio

import pytest

from buffer_builders import assign, put
from rollmill.buffer.memory import MemoryStore
from rollmill.buffer.protocol import StepRecord
from rollmill.clock import VirtualClock
from rollmill.config.schema import RollmillConfig
from rollmill.errors import LeaseLost
from rollmill.scheduling.instructions import StartRollout
from rollmill.testing import (
    FakeRepository,
    FakeTrainer,
    ScriptedEnvironment,
    ToyTokenizer,
    in_place,
    reply_with,
    rollout_runner,
    run_virtual,
)
from rollmill.types import Rollout, derive_seed


class Around:
    """A store in memory with a fake trainer that needs 2 s a step and looks every 0.5 s."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.store = MemoryStore()
        self.repository = FakeRepository()
        self.log: list[str] = []
        self.trainer = FakeTrainer(
            store=self.store,
            repository=self.repository,
            clock=self.clock,
            ring=self._look,
            step_s=2.0,
            look_every_s=0.5,
        )

    def _look(self) -> None:
        steps = len(self.repository.manifests())
        self.log.append(f"{self.clock.now_s():g}: {steps} published, {len(self.store.steps())} recorded")

    def assign(self, batch_id: int, *, step: int) -> None:
        self.store.apply(put(f"g{batch_id}", journal=(b"e",)))
        self.store.apply(assign(batch_id, f"g{batch_id}", step=step))


def test_a_step_is_leased_then_published_then_recorded_and_both_ends_ring() -> None:
    around = Around()
    around.assign(1, step=0)
    record = run_virtual(around.trainer.step(), clock=around.clock)
    assert around.log == ["0: 0 published, 0 recorded", "2: 1 published, 1 recorded"]
    assert (record.batch_id, record.optimizer_step, record.policy_version) == (1, 1, 1)
    assert (record.group_ids, record.finished_at_s, record.seconds) == (("g1",), 2.0, {"train": 2.0})
    assert [stored for _, stored in around.store.steps()] == [record]
    latest = around.repository.latest()
    assert latest is not None
    assert (latest.optimizer_step, latest.published_at_s) == (1, 2.0)
    assert around.store.statistics().trained_groups == 1


def test_a_batch_of_another_step_is_not_taken_and_the_right_one_is_waited_for() -> None:
    around = Around()
    around.assign(2, step=1)

    async def main() -> tuple[StepRecord, StepRecord]:
        async with asyncio.TaskGroup() as tasks:
            first = tasks.create_task(around.trainer.step())
            await asyncio.sleep(1.2)
            around.assign(1, step=0)
        return await first, await around.trainer.step()

    one, two = run_virtual(main(), clock=around.clock)
    # found at the look at 1.5 s; the second is there already
    assert [(r.batch_id, r.finished_at_s) for r in (one, two)] == [(1, 3.5), (2, 5.5)]


def test_a_trainer_that_is_cancelled_leaves_its_batch_leased_and_untrained() -> None:
    around = Around()
    around.assign(1, step=0)

    async def main() -> None:
        await asyncio.wait_for(around.trainer.step(), timeout=1.0)

    with pytest.raises(TimeoutError):
        run_virtual(main(), clock=around.clock)
    assert around.repository.latest() is None
    assert around.store.statistics().trained_groups == 0
    with pytest.raises(LeaseLost, match="leased by 'trainer'"):
        around.store.lease_batch(optimizer_step=0, owner="another", now_s=1.0, lease_s=1.0)


def test_the_rollout_runner_samples_as_the_configuration_says() -> None:
    base, toy, clock = RollmillConfig(), ToyTokenizer(), VirtualClock()
    config = base.model_copy(
        update={
            "run": base.run.model_copy(update={"seed": 7}),
            "sampling": base.sampling.model_copy(update={"temperature": 0.5, "max_new_tokens": 3}),
        }
    )
    run = rollout_runner(
        config,
        environment=ScriptedEnvironment(size=1),
        renderer=toy,
        generate=reply_with("1", tokenizer=toy),
        clock=clock,
    )
    start = StartRollout(rollout_id="g0/1.0", group_id="g0", task_index=0, sibling=1, attempt=0, deadline_s=60.0)
    rollout: Rollout = run_virtual(run(start), clock=clock)
    sampling = rollout.sampling
    assert (sampling.temperature, sampling.max_new_tokens, sampling.seed) == (0.5, 3, derive_seed(7, "g0", 1))


def test_a_blocking_call_in_place_ends_before_anything_else_runs() -> None:
    order: list[str] = []

    async def main() -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(in_place(order.append, "blocking"))
            tasks.create_task(in_place(order.append, "after"))

    run_virtual(main())
    assert order == ["blocking", "after"]
