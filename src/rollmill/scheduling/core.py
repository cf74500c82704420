"""The scheduling core: events in, instructions out. The one place that decides order, window and batches.

    Event                       What moves                              What may follow
    RunStarted, RunResumed      the whole state                         groups are admitted when a replica joins
    ControllerRestarted         everything in flight is given up        DropGroup, AssignBatch, Finish
    ReplicaJoined, ReplicaLeft  who serves which weights                LoadWeights, StartRollout, Fail, Finish
    ReplicaResized              how many can run at once                StartRollout
    WeightsPublished, ...Loaded which weights are newest, and served    LoadWeights, StartRollout (the ceiling rises)
    RolloutFinished, ...Failed  a member, then perhaps its group        CloseGroup, StartRollout again, DropGroup, Fail
    GroupClosed                 its group                               AssignBatch, DropGroup, StartRollout
    BatchTaken, BatchTrained    a batch, the trainer's step             AssignBatch, StartRollout, Finish
    StopRequested               everything in flight is given up        AbortRollout, DropGroup, Finish
    Tick                        nothing but deadlines                   AbortRollout, StartRollout, DropGroup

No real clock, no randomness, no I/O: equal event sequences give equal instructions, so the state is the fold of the
journal. It does not route rollouts to replicas, compute advantages, or store anything; the shell does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rollmill.errors import InvariantViolation
from rollmill.ledger import RolloutLedger
from rollmill.scheduling import events as ev
from rollmill.scheduling.admission import admit
from rollmill.scheduling.assignment import abort_in_flight, account_hold, assign
from rollmill.scheduling.failures import (
    check_deadlines,
    check_producers,
    on_replica_joined,
    on_replica_left,
    on_replica_resized,
    on_rollout_failed,
)
from rollmill.scheduling.groups import GroupBook
from rollmill.scheduling.instructions import AnyInstruction, DropReason, Finish
from rollmill.scheduling.lifecycle import on_group_closed, on_rollout_finished
from rollmill.scheduling.rates import Rates
from rollmill.scheduling.resume import on_controller_restarted, on_run_resumed, on_run_started
from rollmill.scheduling.settings import SchedulerSettings
from rollmill.scheduling.state import State
from rollmill.scheduling.training import on_batch_taken, on_batch_trained
from rollmill.scheduling.validate import validate
from rollmill.scheduling.view import SchedulerView, Wait, bound_by, view, waits
from rollmill.scheduling.weights import (
    check_version,
    on_weights_loaded,
    on_weights_published,
    request_loads,
)


class Scheduler:
    """The state machine.

    Example:
        >>> settings = SchedulerSettings(batch_groups=1, group_size=2, max_staleness=0, total_steps=1)
        >>> core = Scheduler(settings)
        >>> core.handle(ev.RunStarted(at_s=0.0, history_id="h0", optimizer_step=0, policy_version=0))
        []
        >>> [step.rollout_id for step in core.handle(
        ...     ev.ReplicaJoined(at_s=0.0, replica_id="r0", slots=4, policy_version=0))]
        ['g000000/0.1', 'g000000/1.1']
    """

    def __init__(self, settings: SchedulerSettings) -> None:
        self._state = State(
            settings=settings,
            ledger=RolloutLedger(),
            book=GroupBook(max_staleness=settings.max_staleness),
            rates=Rates.from_priors(settings),
        )
        self._bound = bound_by(self._state).value

    def handle(self, event: ev.AnyEvent) -> list[AnyInstruction]:
        """Fold one event into the state and return what the shell must do, in order.

        A tick that returns nothing has changed nothing and need not be journaled.

        Raises:
            InvariantViolation: if the event cannot follow what came before, or the books do not balance after it.
            StalenessViolation: if a batch was taken with a group over the budget.
        """
        state = self._state
        if isinstance(event, ev.Tick) and not self._is_due(event.at_s):
            return []
        if not state.started and not isinstance(event, ev.RunStarted | ev.RunResumed):
            raise InvariantViolation(
                f"{type(event).__name__} came before RunStarted; the first event of a journal must begin the run."
            )
        self._advance(event)
        _HANDLERS[type(event)](state, event)
        self._settle()
        out, state.out = state.out, []
        return out

    def next_deadline_s(self) -> float | None:
        """Return when a tick is due next (controller clock), or `None`; it may prove to be overtaken."""
        return self._state.deadlines[0][0] if self._state.deadlines else None

    def validate(self) -> None:
        """Check every invariant by counting anew; O(live groups), for tests.

        Raises:
            InvariantViolation: naming the relation that does not hold.
        """
        validate(self._state)

    def view(self) -> SchedulerView:
        """Return the state in numbers, for the live view and the summary."""
        return view(self._state)

    def waits(self, at_s: float) -> tuple[Wait, ...]:
        """Return who waits for whom, since when and until when, for the stall report."""
        return waits(self._state, at_s=at_s)

    def story(self, group_id: str) -> tuple[str, ...]:
        """Return what happened to a group, oldest line first; empty if it is unknown or long finished."""
        return tuple(self._state.stories.get(group_id, ()))

    @property
    def settings(self) -> SchedulerSettings:
        """The settings in force: those given, or those that the journal brought since."""
        return self._state.settings

    @property
    def history_id(self) -> str:
        """History that the run is in; empty before its first event."""
        return self._state.history_id

    @property
    def known_versions(self) -> frozenset[int]:
        """Policy versions that the core has heard of."""
        return frozenset(self._state.step_of_version)

    @property
    def ledger(self) -> RolloutLedger:
        """The book of rollouts; for reading."""
        return self._state.ledger

    def _is_due(self, at_s: float) -> bool:
        due_s = self.next_deadline_s()
        return due_s is not None and due_s <= at_s and not self._state.halted

    def _advance(self, event: ev.AnyEvent) -> None:
        """Move time forward and book the time since the last event to what bounded the run."""
        state = self._state
        if isinstance(event, ev.RunStarted | ev.RunResumed):
            # Another incarnation, perhaps with another clock.
            state.now_s = event.at_s
            return
        passed_s = event.at_s - state.now_s
        if passed_s > 0:
            state.seconds_bound[self._bound] = state.seconds_bound.get(self._bound, 0.0) + passed_s
            state.now_s = event.at_s

    def _settle(self) -> None:
        """Draw the consequences that any event may have."""
        state = self._state
        check_deadlines(state)
        assign(state)
        admit(state)
        check_producers(state)
        self._consider_finish()
        account_hold(state)
        state.ledger.validate()
        self._bound = bound_by(state).value

    def _consider_finish(self) -> None:
        state = self._state
        if state.halted:
            return
        if state.next_step >= state.settings.total_steps and state.book.unfinished_count:
            # No step is left that could use what still runs.
            abort_in_flight(state, reason=DropReason.STOPPED)
        if state.optimizer_step >= state.settings.total_steps:
            self._finish("steps_done")
        elif state.stopping:
            if not state.training and not state.book.unfinished_count:
                self._finish("stopped")
        elif not state.draws_left and not state.underway and not state.book.live:
            self._finish("degraded" if state.producers_ended else "end_of_data")

    def _finish(self, reason: str) -> None:
        self._state.halted = True
        self._state.out.append(Finish(reason=reason))


def _on_replica_joined(state: State, event: ev.ReplicaJoined) -> None:
    check_version(state, event.policy_version, who=event.replica_id)
    on_replica_joined(state, event)
    request_loads(state)


def _on_replica_left(state: State, event: ev.ReplicaLeft) -> None:
    on_replica_left(state, event)
    request_loads(state)  # it may have been loading, and others wait for that


def _on_stop_requested(state: State, event: ev.StopRequested) -> None:
    if not state.stopping:
        state.stopping = True
        abort_in_flight(state, reason=DropReason.STOPPED)


def _on_tick(state: State, event: ev.Tick) -> None:
    """Deadlines are looked at after every event."""


_HANDLERS: dict[type[Any], Callable[[State, Any], None]] = {
    ev.RunStarted: on_run_started,
    ev.RunResumed: on_run_resumed,
    ev.ControllerRestarted: on_controller_restarted,
    ev.ReplicaJoined: _on_replica_joined,
    ev.ReplicaLeft: _on_replica_left,
    ev.ReplicaResized: on_replica_resized,
    ev.WeightsPublished: on_weights_published,
    ev.WeightsLoaded: on_weights_loaded,
    ev.RolloutFinished: on_rollout_finished,
    ev.RolloutFailed: on_rollout_failed,
    ev.GroupClosed: on_group_closed,
    ev.BatchTaken: on_batch_taken,
    ev.BatchTrained: on_batch_trained,
    ev.StopRequested: _on_stop_requested,
    ev.Tick: _on_tick,
}
