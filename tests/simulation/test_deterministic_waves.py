"""Deterministic mode: whatever happens in whatever order, each batch holds the same tasks, sampled in the same waves.

The recipe of a run is what fixes every bit of it: for each trained step the tasks of its batch in order, and for each
of them the wave it was sampled in (which rollouts shared the passes, in which order) and the weights that sampled it.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollmill.scheduling import DropReason, FailureClass, SchedulerSettings
from rollmill.scheduling import events as ev
from rollmill.scheduling import instructions as ins
from rollmill.types import Wave
from simulation.scheduling_world import World
from simulation.scheduling_world import settings as core_settings

QUIET = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large]}

Recipe = list[tuple[int, tuple[tuple[int, int, tuple[tuple[int, int], ...]], ...]]]


def deterministic(**changes: object) -> SchedulerSettings:
    """Two groups of two, budget 0, five steps, and no limit to losses unless said otherwise."""
    many = {"infra_attempts": 10_000, "data_retries": 10_000, "infra_failures_in_a_row": 10_000}
    return core_settings(**{"max_staleness": 0, "total_steps": 5, "deterministic": True, **many, **changes})


def world_of(chosen: SchedulerSettings) -> World:
    """Every third task has no signal, and some rollouts never count."""
    return World(
        chosen,
        has_signal=lambda task: task % 3 != 1,
        counts=lambda start: (start.task_index + start.sibling) % 11 != 10,
    )


def recipe(world: World) -> Recipe:
    waves: dict[str, list[tuple[int, tuple[int, int]]]] = {}
    wave_of: dict[str, str] = {}
    for start in world.dispatches:
        assert start.wave is not None
        wave_of[start.group_id] = start.wave.wave_id
        waves.setdefault(start.wave.wave_id, []).append((start.wave.index, (start.task_index, start.sibling)))
    rows = {wave_id: tuple(row for _, row in sorted(places)) for wave_id, places in waves.items()}
    return [
        (step, tuple((world.task_of_group[g], world.oldest_of_group[g], rows[wave_of[g]]) for g in batch))
        for step, batch in enumerate(world.trained)
    ]


def undisturbed(chosen: SchedulerSettings) -> World:
    world = world_of(chosen)
    world.begin()
    world.run()
    return world


@st.composite
def sizes(draw: st.DrawFn) -> SchedulerSettings:
    return deterministic(
        batch_groups=draw(st.integers(1, 4)),
        group_size=draw(st.integers(1, 3)),
        total_steps=draw(st.integers(1, 5)),
        replace_zero_advantage=draw(st.booleans()),
        data_limit=draw(st.sampled_from([None, None, 10])),
    )


def test_a_step_samples_what_its_batch_lacks_wave_by_wave() -> None:
    world = world_of(deterministic(total_steps=1))
    world.begin()
    # Tasks 0 and 1; task 1 has no signal, so task 2 replaces it in a wave of its own.
    assert [(s.task_index, s.sibling, s.wave) for s in world.dispatches] == [
        (0, 0, Wave(wave_id="w000001", size=4, index=0)),
        (0, 1, Wave(wave_id="w000001", size=4, index=1)),
        (1, 0, Wave(wave_id="w000001", size=4, index=2)),
        (1, 1, Wave(wave_id="w000001", size=4, index=3)),
    ]
    world.run()
    assert [(s.task_index, s.sibling, s.wave) for s in world.dispatches[4:]] == [
        (2, 0, Wave(wave_id="w000002", size=2, index=0)),
        (2, 1, Wave(wave_id="w000002", size=2, index=1)),
    ]
    assert world.trained_tasks == [0, 2]


def test_a_wave_opens_only_when_the_newest_weights_are_served() -> None:
    world = world_of(deterministic())
    world.begin()
    while world.training is None:
        world.act(world.actions()[0])
    sampled = len(world.dispatches)
    world.train()
    world.publish()
    assert len(world.dispatches) == sampled
    world.load("r0")
    assert len(world.dispatches) == sampled + 4


def test_a_wave_waits_for_the_version_of_the_resume_and_says_so() -> None:
    world = world_of(deterministic())
    world.begin()
    sampled = len(world.dispatches)
    world.crash(commit_step=0)
    world.join("r0", version=0)
    assert len(world.dispatches) == sampled
    (wait,) = [wait for wait in world.core.waits(world.now_s) if wait.who == "trainer"]
    assert "the next wave is opened when every replica serves policy version 1" in wait.sentence
    world.load("r0")
    assert len(world.dispatches) == sampled + 4


def test_rates_and_priors_decide_nothing() -> None:
    hurried = undisturbed(deterministic(prior_step_s=0.01, prior_group_s=500.0, prior_yield=0.01))
    patient = undisturbed(deterministic(prior_step_s=500.0, prior_group_s=0.01, prior_yield=1.0))
    assert recipe(hurried) == recipe(patient)
    assert hurried.dispatches == patient.dispatches


@given(chosen=sizes(), seed=st.integers(0, 2**32 - 1))
@settings(max_examples=60, **QUIET)
def test_the_order_of_events_changes_no_instruction(chosen: SchedulerSettings, seed: int) -> None:
    order = random.Random(seed)
    straight = undisturbed(chosen)
    shuffled = world_of(chosen)
    shuffled.begin()
    shuffled.run(choose=order.randrange)
    assert shuffled.ended == straight.ended
    pairs = zip(straight.dispatches, shuffled.dispatches, strict=True)
    assert shuffled.dispatches == [with_deadline_of(other, start) for start, other in pairs]
    assert shuffled.trained == straight.trained
    assert recipe(shuffled) == recipe(straight)


def with_deadline_of(other: ins.StartRollout, start: ins.StartRollout) -> ins.StartRollout:
    """Return the instruction with another's deadline: the world's clock moves with every event."""
    return msgspec.structs.replace(start, deadline_s=other.deadline_s)


def fail_one(world: World, order: random.Random) -> None:
    if world.flights:
        world.fail(order.choice(list(world.flights)), order.choice(list(FailureClass)))


def pass_a_deadline(world: World, order: random.Random) -> None:
    world.tick(world.now_s + order.choice([31.0, 80.0]))


def lose_the_replica(world: World, order: random.Random) -> None:
    if world.replicas:
        served = world.replicas.pop("r0")
        world.loads.pop("r0", None)
        world.feed(ev.ReplicaLeft(at_s=world.now_s, replica_id="r0", reason="died", then=ev.AfterLoss.AWAIT))
        world.join("r0", version=served if order.random() < 0.5 else None)


def restart_the_controller(world: World, order: random.Random) -> None:
    served = world.replicas["r0"]
    for lost in (world.flights, world.closings, world.loads, world.replicas):
        lost.clear()
    world.feed(ev.ControllerRestarted(at_s=world.now_s))
    world.join("r0", version=served)


def crash(world: World, order: random.Random) -> None:
    world.crash(commit_step=order.randint(max(0, world.trainer_step - 2), world.trainer_step))
    if world.ended is None:
        world.join("r0")


def stop_and_resume(world: World, order: random.Random) -> None:
    world.feed(ev.StopRequested(at_s=world.now_s, reason="Ctrl-C"))
    crash(world, order)


DISTURBANCES: tuple[Callable[[World, random.Random], None], ...] = (
    fail_one,
    pass_a_deadline,
    lose_the_replica,
    restart_the_controller,
    crash,
    stop_and_resume,
)


@given(chosen=sizes(), seed=st.integers(0, 2**32 - 1), share=st.sampled_from([0.02, 0.1]))
@settings(max_examples=60, **QUIET)
def test_losses_crashes_and_resumes_at_any_event_change_no_batch(
    chosen: SchedulerSettings, seed: int, share: float
) -> None:
    order = random.Random(seed)
    straight = undisturbed(chosen)
    world = world_of(chosen)
    world.begin()
    left = 12
    for _ in range(5_000):
        if world.ended is not None:
            break
        world.now_s += 1.0
        if left and order.random() < share:
            left -= 1
            order.choice(DISTURBANCES)(world, order)
        else:
            actions = world.actions()
            assert actions, f"the schedule hangs: {world.core.waits(world.now_s)}"
            world.act(order.choice(actions))
    assert world.ended == straight.ended
    assert recipe(world) == recipe(straight)
    world.core.ledger.recount()
    world.refold()


def test_killed_after_every_event_the_batches_from_the_commit_point_on_are_the_same() -> None:
    chosen = deterministic(total_steps=3)
    straight = undisturbed(chosen)
    for killed_after in range(len(straight.journal) - 2):
        world = world_of(chosen)
        world.begin()
        while len(world.journal) < 2 + killed_after:
            world.act(world.actions()[-1])
        for back in (0, 1):
            crash_at = max(0, world.trainer_step - back)
            world.crash(commit_step=crash_at)
            if world.ended is None:
                world.join("r0")
        world.run()
        assert recipe(world) == recipe(straight), f"killed after event {killed_after}"


def test_what_a_lost_wave_had_finished_is_dropped_with_a_reason_and_sampled_again() -> None:
    world = world_of(deterministic())
    world.begin()
    world.finish("g000000/0.1")
    world.finish("g000000/1.1")
    world.close("g000000")
    assert world.core.view().buffered == 2
    world.fail("g000001/0.1", FailureClass.INFRA)
    assert world.drops == [("g000000", DropReason.WAVE_RESTARTED), ("g000001", DropReason.WAVE_RESTARTED)]
    assert [abort.rollout_id for abort in world.aborts] == ["g000001/1.1"]
    assert world.core.view().dropped == {"wave_restarted": 3, "infra_failure": 1}
    again = [(s.task_index, s.sibling, s.wave) for s in world.dispatches[4:]]
    assert again == [
        (0, 0, Wave(wave_id="w000002", size=4, index=0)),
        (0, 1, Wave(wave_id="w000002", size=4, index=1)),
        (1, 0, Wave(wave_id="w000002", size=4, index=2)),
        (1, 1, Wave(wave_id="w000002", size=4, index=3)),
    ]


@pytest.mark.parametrize(
    ("failure", "limits"),
    [(FailureClass.INFRA, {"infra_attempts": 3}), (FailureClass.DATA, {"data_retries": 2})],
)
def test_a_wave_that_is_lost_again_and_again_ends_the_run_and_is_never_replaced(
    failure: FailureClass, limits: dict[str, int]
) -> None:
    world = world_of(deterministic(**limits))
    world.begin()
    for _ in range(3):
        world.fail(next(iter(world.flights)), failure, "the scorer hung")
    assert isinstance(world.ended, ins.Fail)
    assert world.ended.code == "wave_lost"
    assert "started 3 times" in world.ended.message
    assert "the scorer hung" in world.ended.message
    assert {start.task_index for start in world.dispatches} == {0, 1}


def test_a_passed_deadline_ends_the_run_with_its_name() -> None:
    world = world_of(deterministic(infra_attempts=2, rollout_deadline_s=30.0, group_deadline_s=70.0))
    world.begin()
    world.tick(31.0)
    world.tick(62.0)
    assert isinstance(world.ended, ins.Fail)
    assert "schedule.rollout_deadline_s" in world.ended.message


def test_a_wave_that_succeeds_clears_the_count_of_losses() -> None:
    world = world_of(deterministic(infra_attempts=2))
    world.begin()
    for _ in range(3):
        world.fail(next(iter(world.flights)), FailureClass.INFRA)
        step = world.trainer_step
        while world.ended is None and world.trainer_step == step:
            world.act(world.actions()[0])
        while not world.flights and world.ended is None:
            world.act(world.actions()[0])
    assert world.trainer_step >= 3
    assert not isinstance(world.ended, ins.Fail)


def test_the_loss_of_a_replica_does_not_count_against_the_wave() -> None:
    world = world_of(deterministic(infra_attempts=2))
    world.begin()
    for _ in range(5):
        lose_the_replica(world, random.Random(0))
    world.run()
    assert world.ended == ins.Finish(reason="steps_done")
