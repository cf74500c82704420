"""Failures and deadlines: whose budget pays, who is dispatched again, what ends the run.

Infrastructure failures are dispatched again and never become a reward; data failures are tried a few times
and then cost the group; a rollout past its deadline is dispatched again while its group's deadline allows.
"""

from __future__ import annotations

import heapq

from rollmill.scheduling.assignment import abort_in_flight
from rollmill.scheduling.events import (
    AfterLoss,
    FailureClass,
    ReplicaJoined,
    ReplicaLeft,
    ReplicaResized,
    RolloutFailed,
)
from rollmill.scheduling.groups import UNFINISHED, GroupRecord, GroupState, Member, MemberState, Replica
from rollmill.scheduling.instructions import DropReason, Fail
from rollmill.scheduling.lifecycle import (
    abort_pending,
    consider_closing,
    drop_group,
    settle_member,
    start,
    withdraw,
)
from rollmill.scheduling.state import State
from rollmill.scheduling.waves import lose_wave


def on_rollout_failed(state: State, event: RolloutFailed) -> None:
    """Charge the failure to its class and decide whether the member gets another attempt."""
    found = state.attempts.pop(event.rollout_id, None)
    if found is None:
        state.ledger.late_result()
        return
    group, member = found
    if event.failure is FailureClass.INFRA:
        _count_infra_failure(state, member, event)
    state.tell(group.group_id, f"rollout {event.rollout_id} failed ({event.failure.value}): {event.reason}")
    if state.settings.deterministic:
        _lose_wave_of(state, group, member, event)
        return
    if group.state is not GroupState.OPEN:
        # A straggler of a group that has closed without it: not worth another attempt.
        group.pending -= 1
        settle_member(state, member, _reason_of(event.failure))
    elif event.failure is FailureClass.INFRA:
        _after_infra_failure(state, group, member)
    else:
        _after_data_failure(state, group, member, event)


def _count_infra_failure(state: State, member: Member, event: RolloutFailed) -> None:
    if member.start_order < state.start_order_at_loss:
        # It may have run there: the loss of one replica is one failure, not as many as it had slots.
        return
    state.infra_in_a_row += 1
    limit = state.settings.infra_failures_in_a_row
    if state.infra_in_a_row >= limit:
        fail(
            state,
            code="engine_dead",
            message=(
                f"{state.infra_in_a_row} infrastructure failures came with no success between them "
                f"(limit {limit}); the last was {event.rollout_id}: {event.reason}. The generator or the sandboxes "
                "are down; read the first error above, repair it, and resume the run."
            ),
        )


def _lose_wave_of(state: State, group: GroupRecord, member: Member, event: RolloutFailed) -> None:
    infra = event.failure is FailureClass.INFRA
    member.state = MemberState.FAILED
    member.reason = _reason_of(event.failure)
    group.pending -= 1
    limit = state.settings.infra_attempts if infra else state.settings.data_retries + 1
    # The loss of a replica has a budget of its own.
    explained = infra and member.start_order < state.start_order_at_loss
    lose_wave(state, why=f"rollout {event.rollout_id}: {event.reason}", limit=None if explained else limit)


def _after_infra_failure(state: State, group: GroupRecord, member: Member) -> None:
    member.infra_failures += 1
    if member.infra_failures < state.settings.infra_attempts:
        redispatch(state, group, member, why="infra_failure")
        return
    member.state = MemberState.FAILED
    member.reason = DropReason.INFRA_FAILURE
    group.pending -= 1
    state.tell(group.group_id, f"rollout {member.member_id} is given up after {member.infra_failures} attempts")
    consider_closing(state, group)


def _after_data_failure(state: State, group: GroupRecord, member: Member, event: RolloutFailed) -> None:
    member.data_failures += 1
    if member.data_failures <= state.settings.data_retries:
        redispatch(state, group, member, why="data_failure")
        return
    member.state = MemberState.FAILED
    member.reason = DropReason.DATA_FAILURE
    group.pending -= 1
    state.tell(group.group_id, f"task {group.task_index} failed {member.data_failures} attempts: {event.reason}")
    drop_group(state, group, DropReason.DATA_FAILURE)
    state.data_drops_in_a_row += 1
    limit = state.settings.data_failure_limit
    if state.data_drops_in_a_row >= limit:
        fail(
            state,
            code="data",
            message=(
                f"{state.data_drops_in_a_row} groups in a row were dropped for their data (limit {limit}); the last "
                f"was task {group.task_index}: {event.reason}. The data set or the environment is broken for most "
                "tasks; try one task by hand, or raise schedule.data_failure_limit."
            ),
        )


def _reason_of(failure: FailureClass) -> DropReason:
    return DropReason.INFRA_FAILURE if failure is FailureClass.INFRA else DropReason.DATA_FAILURE


def redispatch(state: State, group: GroupRecord, member: Member, *, why: str) -> None:
    """Give a member its next attempt, at once or when a replica serves."""
    member.attempt += 1
    state.ledger.redispatched(reason=why)
    if state.stopping or state.halted:
        # Reached only while the event that halts the run is handled; the halt books the member.
        _park(state, group, member)
    elif state.loaded_step is None:
        state.tell(group.group_id, f"attempt {member.rollout_id} waits for a replica")
        _park(state, group, member)
    else:
        _start_again(state, group, member, loaded_step=state.loaded_step)


def _park(state: State, group: GroupRecord, member: Member) -> None:
    member.state = MemberState.PARKED
    state.parked[member.member_id] = (group, member)


def _start_again(state: State, group: GroupRecord, member: Member, *, loaded_step: int) -> None:
    if loaded_step < group.floor_step:
        state.book.set_floor(group, loaded_step)
    state.tell(group.group_id, f"dispatched again: {member.rollout_id}")
    start(state, group, member)


def on_replica_joined(state: State, event: ReplicaJoined) -> None:
    """Count the replica in, and dispatch what waited for one."""
    state.replicas[event.replica_id] = Replica(
        replica_id=event.replica_id, slots=event.slots, policy_version=event.policy_version
    )
    state.had_replica = True
    state.awaited.pop(event.replica_id, None)
    state.missing.discard(event.replica_id)
    refresh_replicas(state)
    if state.loaded_step is None or state.stopping or state.halted:
        return
    parked, state.parked = state.parked, {}
    for group, member in parked.values():
        _start_again(state, group, member, loaded_step=state.loaded_step)


def on_replica_resized(state: State, event: ReplicaResized) -> None:
    """Count what it can run now; what runs already goes on."""
    if (replica := state.replicas.get(event.replica_id)) is not None:
        replica.slots = event.slots
        refresh_replicas(state)


def on_replica_left(state: State, event: ReplicaLeft) -> None:
    """Count the replica out; its rollouts fail in events of their own."""
    if state.replicas.pop(event.replica_id, None) is not None:
        state.start_order_at_loss = state.start_order
        if state.settings.deterministic:
            lose_wave(state, why=f"replica {event.replica_id} left: {event.reason}", limit=None)
    refresh_replicas(state)
    state.awaited.pop(event.replica_id, None)
    state.missing.discard(event.replica_id)
    if event.then is AfterLoss.AWAIT:
        state.awaited[event.replica_id] = state.now_s
    elif event.then is AfterLoss.DEGRADE:
        state.missing.add(event.replica_id)
        _consider_end_of_producers(state)


def _consider_end_of_producers(state: State) -> None:
    """Give up what only a producer could finish, once the last one is missing for good."""
    if state.replicas or state.awaited or state.producers_ended or state.stopping or state.halted:
        return
    state.producers_ended = True
    abort_in_flight(state, reason=DropReason.INFRA_FAILURE)


def refresh_replicas(state: State) -> None:
    """Recompute what depends on which replicas serve which version."""
    replicas = state.replicas.values()
    state.loaded_step = min((state.step_of_version[r.policy_version] for r in replicas), default=None)
    state.slots = sum(replica.slots for replica in replicas)


def check_producers(state: State) -> None:
    """End the run when nobody serves any more and the trainer has used up what was assigned."""
    if state.replicas or not state.had_replica or state.underway or state.stopping:
        return
    if state.awaited or state.producers_ended:
        return
    fail(
        state,
        code="producers_gone",
        message=(
            f"no producer is left to fill the batch of step {state.next_step}: 0 replicas alive, "
            f"{state.book.ready_count - state.book.blank_count} of {state.settings.batch_groups} groups buffered. "
            "The first error above says why they ended; repair it and resume the run."
        ),
    )


def fail(state: State, *, code: str, message: str) -> None:
    """Tell the shell that the run cannot go on; the first cause is the only one told."""
    if not state.halted:
        state.halted = True
        state.out.append(Fail(code=code, message=message))


def check_deadlines(state: State) -> None:
    """Act on every deadline that has passed."""
    while not state.halted and state.deadlines and state.deadlines[0][0] <= state.now_s:
        _, _, kind, key = heapq.heappop(state.deadlines)
        if kind == "group":
            _group_deadline(state, key)
        else:
            _rollout_deadline(state, key)


def _group_deadline(state: State, group_id: str) -> None:
    group = state.book.live.get(group_id)
    if group is None or group.deadline_s > state.now_s:
        return
    if state.settings.deterministic and group.state in UNFINISHED:
        why = f"group {group_id} passed its deadline (schedule.group_deadline_s)"
        lose_wave(state, why=why, limit=state.settings.infra_attempts)
    elif group.state in UNFINISHED:
        drop_group(state, group, DropReason.GROUP_DEADLINE)
    elif group.pending:
        abort_pending(state, group, DropReason.SURPLUS)


def _rollout_deadline(state: State, rollout_id: str) -> None:
    found = state.attempts.get(rollout_id)
    if found is None:
        return
    group, member = found
    if member.deadline_s > state.now_s or group.deadline_s <= state.now_s:
        # Past the group's deadline the group's own entry drops it whole.
        return
    waited_s = state.now_s - member.started_s
    if state.settings.deterministic:
        why = f"rollout {rollout_id} passed its deadline after {waited_s:.0f} s (schedule.rollout_deadline_s)"
        lose_wave(state, why=why, limit=state.settings.infra_attempts)
        return
    withdraw(state, member, why=DropReason.ROLLOUT_DEADLINE.value)
    if group.state is GroupState.OPEN:
        state.tell(group.group_id, f"rollout {rollout_id} passed its deadline after {waited_s:.3f}s")
        redispatch(state, group, member, why="rollout_deadline")
    else:
        group.pending -= 1
        settle_member(state, member, DropReason.SURPLUS)
