"""How a run begins, and how it goes on after a stop or a crash. Reconciles the state to the commit point."""

from __future__ import annotations

from collections import deque

from rollmill.errors import InvariantViolation
from rollmill.scheduling.events import ControllerRestarted, RunResumed, RunStarted
from rollmill.scheduling.failures import refresh_replicas
from rollmill.scheduling.groups import PENDING, UNFINISHED, GroupRecord, GroupState
from rollmill.scheduling.instructions import DropReason
from rollmill.scheduling.lifecycle import drop_group, settle_member
from rollmill.scheduling.rates import Rates
from rollmill.scheduling.state import State
from rollmill.scheduling.training import mark_trained
from rollmill.scheduling.waves import lose_wave, rewind_step
from rollmill.scheduling.weights import register_version


def on_run_started(state: State, event: RunStarted) -> None:
    """Begin at the given step and weights.

    Raises:
        InvariantViolation: if the run has begun already.
    """
    if state.started:
        raise InvariantViolation(
            f"RunStarted came at {event.at_s:.3f} s for a run that has begun already (history {state.history_id}); "
            "a run that goes on is told RunResumed."
        )
    _begin(state, event)
    state.rates = Rates.from_priors(state.settings)


def on_run_resumed(state: State, event: RunResumed) -> None:
    """Reconcile to the commit point: what it lists is trained, nothing else is, and nothing runs.

    Raises:
        InvariantViolation: if it lists a group as trained that this history never closed.
    """
    state.replicas.clear()
    refresh_replicas(state)
    _settle_trained(state, frozenset(event.trained_group_ids))
    _put_back(state, frozenset(event.trained_group_ids))
    for group in list(state.book.unassigned.values()):
        if group.state is GroupState.BLANK:
            state.book.take(group, GroupState.DROPPED)
    _drop_lost(state, abandoned=frozenset(event.abandoned_group_ids))
    _reset(state)
    _begin(state, event)
    if state.settings.deterministic:
        rewind_step(state)


def on_controller_restarted(state: State, event: ControllerRestarted) -> None:
    """Give up what the old controller held in memory; keep the batches, which the trainer holds.

    A run that had finished, and whose controller died before it had wound everything up, finishes anew.
    """
    state.replicas.clear()
    refresh_replicas(state)
    if state.settings.deterministic:
        _forget_waits(state)
        lose_wave(state, why="the controller was restarted", limit=None)
        return
    _drop_lost(state, abandoned=frozenset())
    _forget_waits(state)


def _drop_lost(state: State, *, abandoned: frozenset[str]) -> None:
    """Drop the groups that were not stored whole, and those of abandoned weights; their tasks are drawn first."""
    redo: list[int] = []
    for group in list(state.book.unassigned.values()):
        if group.state in UNFINISHED:
            reason = DropReason.LOST_IN_RESTART
        elif group.group_id in abandoned:
            reason = DropReason.ABANDONED_HISTORY
        else:
            continue
        redo.append(group.task_index)
        _forget_flights(state, group)
        drop_group(state, group, reason)
    state.requeued = deque(sorted([*state.requeued, *redo]))


def _settle_trained(state: State, listed: frozenset[str]) -> None:
    """Book as trained what the checkpoint lists and the journal had not heard of yet."""
    for batch in state.batches.values():
        for group in batch.groups:
            if group.group_id in listed:
                mark_trained(state, group)
    missing = sorted(group_id for group_id in listed if group_id not in state.book.trained)
    if missing:
        raise InvariantViolation(
            f"the checkpoint lists {len(missing)} groups as trained that the journal does not know as closed and "
            f"assigned, among them {missing[0]}. The checkpoint and the journal are of different runs."
        )


def _put_back(state: State, listed: frozenset[str]) -> None:
    """Make ready again what was assigned, leased, or trained after the commit point."""
    back: list[GroupRecord] = []
    for batch in state.batches.values():
        back += [group for group in batch.groups if group.state is not GroupState.TRAINED]
    for group_id in [group_id for group_id in state.book.trained if group_id not in listed]:
        group = state.book.trained.pop(group_id)
        for member_id in group.buffered:
            state.ledger.restore(member_id)
        back.append(group)
    for group in back:
        state.tell(group.group_id, "ready again after a restart")
    state.batches.clear()
    state.book.put_back(back)


def _forget_flights(state: State, group: GroupRecord) -> None:
    """Nothing is left to abort: the attempts ended with their processes."""
    for member in group.members:
        if member.state in PENDING:
            state.attempts.pop(member.rollout_id, None)
            state.parked.pop(member.member_id, None)
            settle_member(state, member, DropReason.LOST_IN_RESTART)
    group.pending = 0


def _reset(state: State) -> None:
    _forget_waits(state)
    state.had_batch = False
    state.held_since_s = state.trainer_idle_since_s = state.trained_at_s = None


def _forget_waits(state: State) -> None:
    """Nobody runs, nobody is awaited, nothing has a deadline."""
    for group in state.book.unassigned.values():
        _forget_flights(state, group)
    state.deadlines.clear()
    state.awaited.clear()
    state.missing.clear()
    state.stopping = state.halted = state.had_replica = state.producers_ended = False
    state.infra_in_a_row = state.data_drops_in_a_row = 0


def _begin(state: State, event: RunStarted | RunResumed) -> None:
    if event.settings is not None:
        state.settings = event.settings
    state.book.reindex(max_staleness=state.settings.max_staleness)
    state.started = True
    state.history_id = event.history_id
    state.optimizer_step = state.next_step = event.optimizer_step
    register_version(state, policy_version=event.policy_version, optimizer_step=event.optimizer_step)
