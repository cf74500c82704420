"""A run killed at any durable operation, again and again, and inside its own recovery: nothing acknowledged is lost."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from property.crash_world import CrashWorld, Killed
from rollmill.runtime.fold import fold, unheard_steps


def survive(world: CrashWorld) -> None:
    """Start again after a crash until a start succeeds; then the books must be right."""
    world.crash()
    world.go_on()
    world.check_resumed()


def play(world: CrashWorld, *, limit: int = 400, until: Callable[[], bool] = lambda: False) -> None:
    """Let a run that nobody kills come to its end, or to where `until` holds."""
    for turn in range(limit):
        if world.ended or until():
            return
        choices = world.turns()
        choices[turn % len(choices)]()
    raise AssertionError(f"the run hangs: {world.controller and world.controller.core.waits(0.0)}")


class CommitPointMachine(RuleBasedStateMachine):
    """Trainer and controller take turns in any order; a kill waits at some operation ahead."""

    def __init__(self) -> None:
        super().__init__()
        self.world: CrashWorld | None = None

    @initialize(max_staleness=st.integers(0, 2), checkpoint_every=st.integers(1, 2))
    def a_run_begins(self, max_staleness, checkpoint_every):
        self.world = CrashWorld(max_staleness=max_staleness, checkpoint_every=checkpoint_every)
        self.world.killer.__enter__()

    @property
    def run(self) -> CrashWorld:
        assert self.world is not None
        return self.world

    @rule(after=st.integers(1, 60), torn=st.sampled_from([0.0, 0.3, 0.99, 1.0]))
    def a_kill_waits_ahead(self, after, torn):
        self.run.killer.arm(after, torn=torn)

    @rule(order=st.lists(st.integers(0, 1_000), min_size=1, max_size=40))
    def they_take_turns(self, order):
        try:
            for choice in order:
                if self.run.ended:
                    return
                turns = self.run.turns()
                turns[choice % len(turns)]()
        except Killed:
            survive(self.run)

    @rule(after=st.integers(1, 40), torn=st.sampled_from([0.0, 0.5]))
    def killed_while_it_recovers(self, after, torn):
        self.run.crash()
        self.run.killer.arm(after, torn=torn)
        try:
            self.run.go_on()
        except Killed:
            self.run.killer.disarm()
            self.run.go_on()
        self.run.killer.disarm()
        self.run.check_resumed()

    @rule()
    def the_newest_checkpoint_rots_and_the_machine_goes_down(self):
        """There must be another one to go back to, so the run goes on until it has two."""
        try:
            play(self.run, until=lambda: len(self.run.checkpoints()) >= 2)
        except Killed:
            survive(self.run)
        if self.run.rot():
            survive(self.run)

    @invariant()
    def the_books_agree(self):
        if self.world is not None and not self.world.doubtful:
            self.world.check_books()

    def teardown(self):
        if self.world is None:
            return
        try:
            self.world.killer.disarm()
            play(self.world)
            self.world.check_end()
        finally:
            self.world.killer.__exit__()
            self.world.close()


TestCommitPointMachine = CommitPointMachine.TestCase
TestCommitPointMachine.settings = settings(
    max_examples=20, stateful_step_count=12, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


def end_after(number: int) -> int:
    """Kill a run at its durable operation `number`, let it end, check it; return how many operations it had."""
    world = CrashWorld()
    with world.killer:
        try:
            world.killer.arm(number, torn=(number % 4) / 3)
            play(world)
        except Killed:
            survive(world)
            play(world)
        operations = world.killer.operations
        world.check_end()
        world.close()
    return operations


NEVER = 1_000_000


@pytest.mark.parametrize("share", [0.02, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9])
def test_killed_anywhere_in_its_life_the_run_ends_with_each_task_trained_once(share: float) -> None:
    end_after(int(share * end_after(NEVER)))


def test_samples_of_weights_that_were_published_and_never_recorded_are_dropped_with_the_reason() -> None:
    """The trainer is killed between publication and record, after the replica has sampled with those weights."""
    world = CrashWorld(max_staleness=2)
    with world.killer:
        turn = 0
        while world.trainer.batch is None or world.trainer.version is None:
            turns = world.turns()
            turns[turn % len(turns)]()
            turn += 1
        unrecorded = world.trainer.version
        controller = world.controller
        assert controller is not None
        controller.look()
        controller.load()
        assert controller.served == unrecorded
        for rollout_id in list(controller.flights):
            controller.finish(rollout_id)
        sampled = {group for group in world.store.waiting_groups() if unrecorded in world.sampled_with[group]}
        assert sampled
        survive(world)
        assert unrecorded in world.incarnation.abandoned_versions
        play(world)
        trained = {group for _, record in world.store.steps() for group in record.group_ids}
        assert not trained & sampled
        assert world.controller is not None
        ledger = world.controller.core.ledger
        assert {ledger.reason_of(f"{group}/0") for group in sampled} == {"abandoned_history"}
        world.check_end()
        world.close()


def test_a_step_that_no_controller_lived_to_hear_of_is_news_to_the_next_one() -> None:
    """The trainer records step 2 and makes it final with a checkpoint; the controller dies before it looks."""
    world = CrashWorld(checkpoint_every=2)
    with world.killer:
        turn = 0
        while world.acknowledged_step < 2:
            # Once the first step is heard of, the controller does not look again.
            deaf = world.trainer.step >= 1 and world.controller is not None and world.controller.row >= 1
            turns = [one for one in world.turns() if not (deaf and one == world.controller.look)]
            turns[turn % len(turns)]()
            turn += 1
        survive(world)
        books = fold(world.store, world.settings)
        assert [record.optimizer_step for _, record in unheard_steps(world.store, books)] == [2]
        play(world)
        books = fold(world.store, world.settings)
        assert unheard_steps(world.store, books) == []
        world.close()


@pytest.mark.slow
def test_killed_at_every_single_operation_the_run_ends_with_each_task_trained_once() -> None:
    operations = end_after(NEVER)
    assert operations > 100
    for number in range(1, operations + 1):
        end_after(number)
