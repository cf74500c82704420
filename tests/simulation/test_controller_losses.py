"""The controller's shell when a replica, the trainer or the controller before it is lost; virtual clock, fakes."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from controller_world import World, config_of

from rollmill.config.schema import RollmillConfig
from rollmill.controller.replicas import ReplicaLost, ReplicaSet
from rollmill.errors import EngineDead, ProducersGone
from rollmill.runtime.fold import fold
from rollmill.scheduling.events import AfterLoss, ControllerRestarted
from rollmill.testing import FakeFaults, run_virtual
from rollmill.types import GenerateRequest, SamplingParams


class Losing(World):
    """A world whose replicas can be lost; `back_after_s` later another process serves under the name."""

    token_s = 0.4

    def __init__(
        self,
        config: RollmillConfig,
        *,
        replicas: int = 1,
        then: AfterLoss = AfterLoss.AWAIT,
        back_after_s: float | None = 2.0,
        **others: Any,
    ) -> None:
        super().__init__(config, faults=(FakeFaults(),) * replicas, **others)
        self.replicas = ReplicaSet(on_lost=self._tell)
        self.then = then
        self.back_after_s = back_after_s
        self.listening = True
        self.losses = 0

    def _tell(self, name: str, reason: str) -> None:
        self.losses += 1
        self.controller.replica_lost(name, reason=reason, then=self.then)

    def ring(self) -> None:
        if self.listening:
            super().ring()

    async def train(self) -> None:
        """The trainer, where it outlives a controller."""
        await self._train()

    async def lose(self, name: str) -> None:
        """Kill a replica; a broken call tells, or at last whoever sees its process end."""
        losses = self.losses
        self.engines[name].kill(EngineDead("killed by SIGKILL"))
        await asyncio.sleep(0.1)
        if self.losses == losses:
            self.replicas.leave(name)
            self._tell(name, "its process ended")
        if self.back_after_s is not None:
            await asyncio.sleep(self.back_after_s)
            self.come_back(name)

    def come_back(self, name: str) -> None:
        newest = self.repository.manifests()[-1]
        self.controller.look()
        self._join(name, FakeFaults(), digest=newest.digest, policy_version=newest.policy_version)

    async def _load(self, replica_id: str, policy_version: int) -> None:
        try:
            await super()._load(replica_id, policy_version)
        except EngineDead as error:
            raise ReplicaLost(str(error)) from error


def balanced(world: World) -> bool:
    view = world.controller.scheduler.view()
    return view.admitted == view.in_flight + view.suspended + view.buffered + view.trained + sum(view.dropped.values())


def test_a_lost_replica_comes_back_and_its_rollouts_are_made_again() -> None:
    async def lose_twice(world: Losing) -> None:
        for _ in range(2):
            await asyncio.sleep(3.0)
            await world.lose("generator-0")

    # Two failures in a row would end the run, and more than two rollouts are in flight.
    world = Losing(config_of(steps=8, max_staleness=3, infra_failures_in_a_row=2))
    assert run_virtual(world.run(meanwhile=lose_twice), clock=world.clock) == "steps_done"
    view = world.controller.scheduler.view()
    assert world.losses == 2
    assert view.redispatched["infra_failure"] > 2
    assert view.trained == 8 * 2 * 2
    assert balanced(world)


def test_the_loss_of_one_of_two_replicas_moves_its_rollouts_to_the_other() -> None:
    async def lose(world: Losing) -> None:
        await asyncio.sleep(3.1)
        await world.lose("generator-1")

    world = Losing(config_of(steps=5, max_staleness=3), replicas=2, back_after_s=None)
    assert run_virtual(world.run(meanwhile=lose), clock=world.clock) == "steps_done"
    assert balanced(world)


class DiesInLoad(Losing):
    """The only replica dies in its second load, and is back 2 s later."""

    async def _load(self, replica_id: str, policy_version: int) -> None:
        if not self.losses and len(self.loaded) == 1:
            self.engines[replica_id].kill(EngineDead("killed by SIGKILL"))
            self.replicas.leave(replica_id)
            self._tell(replica_id, "its process ended")
            asyncio.get_running_loop().call_later(2.0, self.come_back, replica_id)
        await super()._load(replica_id, policy_version)


def test_a_load_under_way_at_the_loss_ends_quietly() -> None:
    world = DiesInLoad(config_of(steps=6, max_staleness=1))
    assert run_virtual(world.run(), clock=world.clock) == "steps_done"
    assert [kind for kind, _ in world.reports.events].count("load_lost") == 1
    assert balanced(world)


def test_a_degraded_run_trains_what_is_there_and_finishes() -> None:
    async def lose(world: Losing) -> None:
        await asyncio.sleep(4.0)
        await world.lose("generator-0")

    world = Losing(config_of(steps=100, max_staleness=2), then=AfterLoss.DEGRADE, back_after_s=None)
    assert run_virtual(world.run(meanwhile=lose), clock=world.clock) == "degraded"
    view = world.controller.scheduler.view()
    assert 0 < view.optimizer_step < 100
    assert view.in_flight == view.buffered == 0
    # At most the budget of 2 and the batch in hand are trained without it, 2 s each.
    assert view.degraded_steps <= 3
    assert world.clock.now_s() <= 4.0 + 3 * 2.0 + 1.0
    assert balanced(world)


def test_giving_up_ends_a_session_as_a_crash_would_and_the_fold_of_its_journal_is_its_state() -> None:
    async def give_up(world: Losing) -> None:
        await asyncio.sleep(0.5)
        world.controller.give_up("trainer_lost")

    world = Losing(config_of(steps=100))
    assert run_virtual(world.run(meanwhile=give_up), clock=world.clock) == "trainer_lost"
    live = world.controller.scheduler
    assert fold(world.store, live.settings).scheduler.view() == live.view()
    assert live.view().in_flight > 0


def test_what_a_transaction_leaves_to_do_is_not_begun_once_the_session_was_given_up() -> None:
    """The trainer may die while a transaction is written; whoever goes on begins what followed from it."""
    world = Losing(config_of(steps=100))
    begun: list[object] = []

    async def give_up(_: World) -> None:
        controller = world.controller
        absorb, obey = controller._absorb, controller._obey

        async def given_up_meanwhile(events: Any) -> Any:
            effects = await absorb(events)
            if effects and world.clock.now_s() > 0.5:
                controller.give_up("trainer_lost")
            return effects

        def note(instruction: Any) -> None:
            if controller.finished.done():
                begun.append(instruction)
            obey(instruction)

        controller._absorb, controller._obey = given_up_meanwhile, note

    assert run_virtual(world.run(meanwhile=give_up), clock=world.clock) == "trainer_lost"
    assert begun == []
    assert fold(world.store, world.controller.scheduler.settings).scheduler.view() == world.controller.scheduler.view()


async def _two_controllers(world: Losing, *, lost_at_s: float, silent_s: float) -> str:
    """Run with one controller, lose it, let the trainer work unheard, go on with another."""
    async with asyncio.TaskGroup() as tasks:

        async def lose(_: World) -> None:
            await asyncio.sleep(lost_at_s)
            world.listening = False
            world.controller.give_up("lost")

        trainer = tasks.create_task(world.train())
        await world.run(meanwhile=lose)
        await asyncio.sleep(silent_s)
        settings = world.controller.scheduler.settings
        books = fold(world.store, settings)
        controller = world.new_controller(
            books.scheduler, stored_groups=books.stored_groups, last_step_row=books.heard_step_row
        )
        known = books.scheduler.known_versions
        for manifest in world.repository.manifests():
            if manifest.policy_version in known:
                controller.know_version(manifest.policy_version, optimizer_step=manifest.optimizer_step)
        controller.inbox.put(ControllerRestarted(at_s=world.clock.now_s()))
        world.listening = True
        controller.look()
        world.come_back("generator-0")
        reason = await controller.run()
        trainer.cancel()
    return reason


@pytest.mark.parametrize("silent_s", [0.0, 1.0, 5.0])
@pytest.mark.parametrize("lost_at_s", [0.5, 2.6, 3.0, 5.3])
def test_a_new_controller_goes_on_where_the_journal_ends_and_hears_what_was_done_unheard(
    lost_at_s: float, silent_s: float
) -> None:
    world = Losing(config_of(steps=8), quiet_trainer=True)
    assert (
        run_virtual(_two_controllers(world, lost_at_s=lost_at_s, silent_s=silent_s), clock=world.clock) == "steps_done"
    )
    view = world.controller.scheduler.view()
    assert (view.optimizer_step, view.trained) == (8, 8 * 2 * 2)
    assert [record.optimizer_step for record in world.reports.steps] == list(range(1, 9))
    assert balanced(world)
    trained = [group_id for record in world.reports.steps for group_id in record.group_ids]
    assert len(trained) == len(set(trained))
    assert view.in_flight == 0


def request(name: str) -> GenerateRequest:
    import numpy as np

    return GenerateRequest(
        request_id=name,
        prompt_ids=np.array([1, 2], dtype=np.int32),
        sampling=SamplingParams(temperature=1.0, max_new_tokens=4, seed=1),
        deadline_s=100.0,
    )


def test_an_evaluation_asks_again_when_its_replica_is_lost() -> None:
    async def ask(world: Losing) -> None:
        asked = [asyncio.create_task(world.replicas.generate_until_answered(request(f"e{i}"))) for i in range(3)]
        await asyncio.sleep(0.05)
        await world.lose("generator-0")
        turns = await asyncio.gather(*asked)
        assert [turn.request_id for turn in turns] == ["e0~1", "e1~1", "e2~1"]
        world.controller.request_stop("asked")

    world = Losing(config_of(steps=100))
    assert run_virtual(world.run(meanwhile=ask), clock=world.clock) == "stopped"


def test_an_evaluation_is_told_when_nobody_comes_any_more() -> None:
    async def main() -> None:
        replicas = ReplicaSet()
        asked = asyncio.create_task(replicas.generate_until_answered(request("e")))
        await asyncio.sleep(1.0)
        assert not asked.done()
        replicas.end()
        with pytest.raises(ProducersGone):
            await asked

    world = Losing(config_of(steps=1))
    run_virtual(main(), clock=world.clock)
