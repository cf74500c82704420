"""The controller's shell with fake replicas and a fake trainer: runs end, books balance, instructions are obeyed."""

from __future__ import annotations

import asyncio

import pytest
from controller_world import World, config_of

from rollmill.errors import DeadlineExceeded
from rollmill.runtime.failure import first_cause
from rollmill.runtime.fold import fold
from rollmill.testing import FakeFaults, ScriptedEnvironment, run_virtual
from rollmill.types import PolicyFailed, Unscored


def balanced(world: World) -> bool:
    view = world.controller.scheduler.view()
    return view.admitted == view.in_flight + view.suspended + view.buffered + view.trained + sum(view.dropped.values())


@pytest.mark.parametrize("max_staleness", [0, 1, 3])
def test_a_run_makes_its_steps_inside_the_staleness_budget(max_staleness: int) -> None:
    world = World(config_of(steps=5, max_staleness=max_staleness))
    assert run_virtual(world.run(), clock=world.clock) == "steps_done"
    view = world.controller.scheduler.view()
    assert view.optimizer_step == 5
    assert view.trained == 5 * 2 * 2
    assert view.staleness_max <= max_staleness
    assert view.in_flight == 0
    assert balanced(world)


def test_versions_of_a_sample_are_those_that_the_engine_had_loaded() -> None:
    world = World(config_of(steps=6, max_staleness=2))
    run_virtual(world.run(), clock=world.clock)
    loaded = {1, *(version for _, version in world.loaded)}
    used = {
        version for group in world.reports.groups for rollout in group.rollouts for version in rollout.policy_versions
    }
    assert used <= loaded
    assert len(used) > 1


def test_the_state_is_the_fold_of_the_journal() -> None:
    world = World(config_of(steps=4))
    run_virtual(world.run(), clock=world.clock)
    live = world.controller.scheduler
    books = fold(world.store, live.settings)
    assert books.scheduler.view().rollouts() == live.view().rollouts()
    assert books.scheduler.view().optimizer_step == 4
    assert books.last_step_row == 4


def test_a_stop_drops_what_runs_and_keeps_what_is_buffered() -> None:
    async def stop_later(world: World) -> None:
        await asyncio.sleep(5.0)
        world.controller.request_stop("test")

    world = World(config_of(steps=100))
    assert run_virtual(world.run(meanwhile=stop_later), clock=world.clock) == "stopped"
    view = world.controller.scheduler.view()
    assert 0 < view.optimizer_step < 100
    assert view.in_flight == 0
    assert balanced(world)
    assert world.clock.now_s() < 10.0


def test_an_unscored_sibling_is_dropped_with_its_reason_and_never_a_reward() -> None:
    verdicts = [
        0.0,
        Unscored(reason="reward_failed(timeout)"),
        1.0,
        1.0,
        0.0,
        PolicyFailed(kind="bad_format", reward=0.0),
    ]
    world = World(config_of(steps=2, group_size=4), environment=ScriptedEnvironment(size=64, script=verdicts))
    run_virtual(world.run(), clock=world.clock)
    assert world.controller.scheduler.view().dropped["unscored"] > 0
    for group in world.reports.groups:
        for rollout, counts in zip(group.rollouts, group.in_loss, strict=True):
            assert counts != isinstance(rollout.outcome, Unscored)
    assert balanced(world)


def test_a_hanging_request_is_dispatched_again_at_its_deadline() -> None:
    world = World(config_of(steps=3), faults=(FakeFaults(hang_requests=frozenset({2})),))
    assert run_virtual(world.run(), clock=world.clock) == "steps_done"
    assert sum(world.controller.scheduler.view().redispatched.values()) == 1
    assert balanced(world)


def test_a_load_that_waited_for_an_evaluation_takes_the_newest_version() -> None:
    async def evaluate(world: World) -> None:
        async with world.controller.load_gate.closed(deadline_s=1.0):
            await asyncio.sleep(5.5)

    # Steps of 1 s: versions 2 to 4 come out while the gate is closed, and the budget of 3 lets no more.
    world = World(config_of(steps=6, max_staleness=3), step_s=1.0)
    assert run_virtual(world.run(meanwhile=evaluate), clock=world.clock) == "steps_done"
    first = world.loaded[0][1]
    assert first > 2
    assert [version for _, version in world.loaded] == sorted({version for _, version in world.loaded})


def test_a_late_sibling_joins_its_group_while_it_waits() -> None:
    faults = FakeFaults()
    config = config_of(steps=8, group_size=2, member_oversampling=2, reopen_groups=True, batch_groups=3)
    world = World(config, faults=(faults,), environment=ScriptedEnvironment(size=64, script=[0.0, 1.0, 0.0, 1.0]))
    assert run_virtual(world.run(), clock=world.clock) == "steps_done"
    assert max(len(group.rollouts) for group in world.reports.groups) > 2
    assert balanced(world)


def test_silence_ends_the_run_with_who_waits_for_whom() -> None:
    world = World(config_of(steps=3), quiet_trainer=True)
    with pytest.raises(ExceptionGroup) as caught:
        run_virtual(world.run(), clock=world.clock)
    cause = first_cause(caught.value)
    assert isinstance(cause, DeadlineExceeded)
    assert "run.stall_limit_s" in str(cause)
    assert "batch" in str(cause)
    stalls = [fields for kind, fields in world.reports.events if kind == "stall"]
    assert stalls
    assert all(fields["waits"] for fields in stalls)
