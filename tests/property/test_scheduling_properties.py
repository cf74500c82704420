"""Whatever happens in whatever order: the bound holds, the books balance, batches are exact, nothing hangs."""

from __future__ import annotations

import random
from collections import Counter

from hypothesis import HealthCheck, given, settings, target
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rollmill.ledger import RolloutState
from rollmill.scheduling import DropReason, FailureClass, SchedulerSettings
from rollmill.scheduling import events as ev
from rollmill.scheduling import instructions as ins
from simulation.scheduling_world import World
from simulation.scheduling_world import settings as core_settings

QUIET = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large]}


@st.composite
def calm_settings(draw: st.DrawFn) -> SchedulerSettings:
    """Any sizes, no oversampling, no deadline that could pass."""
    return core_settings(
        batch_groups=draw(st.integers(1, 4)),
        group_size=draw(st.integers(1, 3)),
        max_staleness=draw(st.integers(0, 4)),
        total_steps=draw(st.integers(1, 7)),
        window_groups=draw(st.sampled_from([1, 2, 3, 8])),
        replace_zero_advantage=draw(st.booleans()),
        prior_yield=draw(st.sampled_from([0.1, 0.5, 1.0])),
        prior_group_s=draw(st.sampled_from([1.0, 50.0])),
    )


@given(data=st.data(), chosen=calm_settings(), replicas=st.integers(1, 3), seed=st.integers(0, 2**32 - 1))
@settings(max_examples=150, **QUIET)
def test_without_failures_nothing_is_ever_dropped_for_its_age_and_the_run_ends(
    data: st.DataObject, chosen: SchedulerSettings, replicas: int, seed: int
) -> None:
    # A seed rather than drawn choices: shrinking thousands of choices would take minutes and show nothing.
    order = random.Random(seed)
    silent = data.draw(st.integers(2, 6))
    starved = data.draw(st.integers(0, 8))
    world = World(chosen, has_signal=lambda task: task % silent != 1)
    world.begin(replicas=replicas)

    def choose(n: int) -> int:
        # Actions list rollouts first, oldest first. The oldest few wait until nothing else can happen: only a batch
        # that must not pass them by then keeps them inside the bound.
        return order.randrange(starved, n) if n > starved else order.randrange(n)

    world.run(choose=choose)
    target(float(max(world.staleness, default=0)))
    assert world.ended == ins.Finish(reason="steps_done")
    assert [drop for drop in world.drops if drop[1] is DropReason.STALE] == []
    assert max(world.staleness) <= chosen.max_staleness
    if chosen.replace_zero_advantage:
        assert all(len(batch) == chosen.batch_groups for batch in world.trained)
    assert len(set(world.trained_tasks)) == len(world.trained_tasks)
    world.core.ledger.recount()


@given(seed=st.integers(0, 2**32 - 1), chosen=calm_settings())
@settings(max_examples=40, **QUIET)
def test_the_state_is_the_fold_of_the_journal(seed: int, chosen: SchedulerSettings) -> None:
    order = random.Random(seed)
    world = World(chosen, has_signal=lambda task: task % 3 != 0)
    world.begin(replicas=2)
    world.run(choose=order.randrange, limit=10_000)
    again = world.refold()
    assert again.view() == world.core.view()
    assert again.waits(world.now_s) == world.core.waits(world.now_s)
    assert [again.story(group) for group in world.task_of_group] == [
        world.core.story(group) for group in world.task_of_group
    ]


class AnythingHappens(RuleBasedStateMachine):
    """Failures, losses, late results, deadlines, replicas that come and go, stops and crashes, in any order.

    `World` validates the whole core after every event; the invariants below use the world's own truth.
    """

    @initialize(
        batch_groups=st.integers(1, 3),
        group_size=st.integers(1, 3),
        max_staleness=st.integers(0, 3),
        window=st.sampled_from([1, 4]),
        oversampling=st.sampled_from([1.0, 1.0, 1.5]),
        extra=st.sampled_from([0, 0, 1]),
        reopen=st.booleans(),
        replace=st.booleans(),
        data_limit=st.sampled_from([None, None, 9]),
    )
    def start(
        self,
        batch_groups: int,
        group_size: int,
        max_staleness: int,
        window: int,
        oversampling: float,
        extra: int,
        reopen: bool,
        replace: bool,
        data_limit: int | None,
    ) -> None:
        self.world = World(
            core_settings(
                batch_groups=batch_groups,
                group_size=group_size,
                max_staleness=max_staleness,
                total_steps=6,
                window_groups=window,
                group_oversampling=oversampling,
                member_oversampling=extra,
                reopen_groups=reopen,
                replace_zero_advantage=replace,
                rollout_deadline_s=30.0,
                group_deadline_s=70.0,
                infra_attempts=3,
                infra_failures_in_a_row=1000,
                data_retries=1,
                data_failure_limit=1000,
                data_limit=data_limit,
            ),
            has_signal=lambda task: task % 4 != 2,
            counts=lambda start: (start.task_index + start.sibling) % 7 != 6,
        )
        self.gone: list[str] = []
        self.world.begin(replicas=2)

    @property
    def running(self) -> bool:
        return self.world.ended is None

    @precondition(lambda self: self.running and self.world.actions())
    @rule(choice=st.integers(0, 10_000))
    def something_outstanding_happens(self, choice: int) -> None:
        self.world.now_s += 1.0
        actions = self.world.actions()
        self.world.act(actions[choice % len(actions)])

    @precondition(lambda self: self.running and self.world.flights)
    @rule(choice=st.integers(0, 10_000), failure=st.sampled_from(FailureClass))
    def a_rollout_fails(self, choice: int, failure: FailureClass) -> None:
        ids = list(self.world.flights)
        self.gone.append(ids[choice % len(ids)])
        self.world.fail(self.gone[-1], failure)

    @precondition(lambda self: self.running and self.gone)
    @rule(choice=st.integers(0, 10_000))
    def a_late_result_comes_twice(self, choice: int) -> None:
        before = self.world.core.view().late_results
        rollout_id = self.gone[choice % len(self.gone)]
        for _ in range(2):
            self.world.feed(
                ev.RolloutFinished(
                    at_s=self.world.now_s, rollout_id=rollout_id, output_tokens=1, oldest_optimizer_step=0, counts=True
                )
            )
        assert self.world.core.view().late_results == before + 2

    @precondition(lambda self: self.running)
    @rule(seconds=st.sampled_from([5.0, 31.0, 80.0]))
    def time_passes(self, seconds: float) -> None:
        self.world.tick(self.world.now_s + seconds)

    @precondition(lambda self: self.running and len(self.world.replicas) > 1)
    @rule()
    def a_replica_leaves(self) -> None:
        self.world.leave(next(iter(self.world.replicas)))

    @precondition(lambda self: self.running and self.world.replicas)
    @rule(then=st.sampled_from([ev.AfterLoss.AWAIT, ev.AfterLoss.DEGRADE]))
    def a_replica_is_lost_and_comes_back_or_is_done_without(self, then: ev.AfterLoss) -> None:
        self.world.leave(next(iter(self.world.replicas)), then=then)

    @precondition(lambda self: self.running and self.world.core.view().awaited)
    @rule()
    def an_awaited_replica_comes_back(self) -> None:
        self.world.join(self.world.core.view().awaited[0])

    @rule(at_once=st.booleans())
    def the_controller_is_lost_and_another_goes_on(self, at_once: bool) -> None:
        replicas = dict(self.world.replicas)
        self.world.restart_controller()
        if self.world.ended is None:
            for name, version in replicas.items() if at_once else ():
                self.world.join(name, version=version)
            if not self.world.replicas:
                self.world.join("r0")

    @precondition(lambda self: self.running)
    @rule(slots=st.sampled_from([1, 5, 64]), known=st.booleans())
    def a_fleet_grows_or_shrinks(self, slots: int, known: bool) -> None:
        name = next(iter(self.world.replicas), "r0") if known else "nobody"
        flights = dict(self.world.flights)
        self.world.feed(ev.ReplicaResized(at_s=self.world.now_s, replica_id=name, slots=slots))
        assert flights.keys() <= self.world.flights.keys()  # what runs already goes on

    @precondition(lambda self: self.running and len(self.world.replicas) < 3)
    @rule(name=st.integers(0, 99), behind=st.sampled_from([0, 0, 1, 3]))
    def a_replica_joins_perhaps_with_old_weights(self, name: int, behind: int) -> None:
        if f"r{name}" not in self.world.replicas:
            self.world.join(f"r{name}", version=max(0, self.world.version - behind))

    @rule(back=st.integers(0, 2))
    def everything_crashes_and_goes_on(self, back: int) -> None:
        self.world.crash(commit_step=max(0, self.world.trainer_step - back))
        if self.world.ended is None:
            self.world.join("r0")

    @invariant()
    def admitted_equals_the_sum_of_all_states(self) -> None:
        if not hasattr(self, "world"):
            return
        view = self.world.core.view()
        accounted = view.in_flight + view.suspended + view.buffered + view.trained + sum(view.dropped.values())
        assert view.admitted == accounted
        self.world.core.ledger.recount()

    @invariant()
    def the_ledger_agrees_with_the_world(self) -> None:
        if not hasattr(self, "world"):
            return
        view = self.world.core.view()
        assert view.running == len(self.world.flights)
        ids = [group_id for batch in self.world.trained for group_id in batch]
        assert len(ids) == len(set(ids))
        trained = sum(
            self.world.core.ledger.state_of(f"{group_id}/{sibling}") is RolloutState.TRAINED
            for group_id in ids
            for sibling in range(8)
        )
        assert view.trained == trained

    @invariant()
    def no_task_runs_twice_at_once(self) -> None:
        if not hasattr(self, "world"):
            return
        groups = {flight.start.group_id: flight.start.task_index for flight in self.world.flights.values()}
        assert max(Counter(groups.values()).values(), default=0) <= 1

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        world = self.world
        for name in world.core.view().awaited:
            if world.ended is None:
                world.join(name)
        if world.ended is None:
            # Left alone, the run must end: nothing may wait for ever.
            world.run(choose=random.Random(0).randrange, limit=3_000)
        world.refold()


AnythingHappens.TestCase.settings = settings(max_examples=60, stateful_step_count=60, **QUIET)
TestAnythingHappens = AnythingHappens.TestCase
