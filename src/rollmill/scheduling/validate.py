"""Every cross-field invariant of the core, checked by counting anew. O(live groups): on in tests, off in runs."""

from __future__ import annotations

from rollmill.errors import InvariantViolation
from rollmill.ledger import RolloutState
from rollmill.scheduling.groups import (
    PENDING,
    UNASSIGNED,
    UNFINISHED,
    GroupRecord,
    GroupState,
    MemberState,
)
from rollmill.scheduling.state import State


def _require(condition: bool, what: str) -> None:
    if not condition:
        raise InvariantViolation(f"{what}. This is a bug of the scheduling core.")


def validate(state: State) -> None:
    """Check the whole state.

    Raises:
        InvariantViolation: naming the first relation that does not hold.
    """
    state.ledger.validate()
    _check_indexes(state)
    _check_attempts(state)
    _check_books(state)
    _check_batches(state)
    if state.settings.deterministic:
        _check_wave(state)


def _check_indexes(state: State) -> None:
    book = state.book
    groups = list(book.unassigned.values())
    _require(list(book.unassigned) == sorted(book.unassigned), "unassigned groups are not in order of their ids")
    _require(all(group.state in UNASSIGNED for group in groups), "a group among the unassigned is in another state")
    ready = [group for group in groups if group.state in (GroupState.READY, GroupState.BLANK)]
    _require(book.ready_count == len(ready), f"{book.ready_count} ready groups counted, {len(ready)} found")
    blanks = sum(group.state is GroupState.BLANK for group in groups)
    _require(book.blank_count == blanks, f"{book.blank_count} blank groups counted, {blanks} found")
    unfinished = sum(group.state in UNFINISHED for group in groups)
    _require(book.unfinished_count == unfinished, f"{book.unfinished_count} unfinished counted, {unfinished} found")
    expiring: dict[int, int] = {}
    indexed: dict[int, list[int]] = {}
    for group in groups:
        expiring[group.expires_step] = expiring.get(group.expires_step, 0) + 1
        _require(
            group.expires_step == group.floor_step + state.settings.max_staleness,
            f"group {group.group_id} expires at {group.expires_step} with tokens of step {group.floor_step}",
        )
    for group in ready:
        indexed.setdefault(group.expires_step, []).append(group.seq)
    _require(expiring == book.expiring, f"expiring groups counted {book.expiring}, found {expiring}")
    _require(indexed == book.ready, f"ready groups indexed {book.ready}, found {indexed}")


def _check_attempts(state: State) -> None:
    pending = 0
    for group in state.book.live.values():
        here = [member for member in group.members if member.state in PENDING]
        _require(group.pending == len(here), f"group {group.group_id} counts {group.pending} pending, has {len(here)}")
        _require(not here or group.state in UNASSIGNED, f"rollouts of assigned group {group.group_id} still run")
        for member in here:
            running = member.state is MemberState.RUNNING
            found = state.attempts.get(member.rollout_id) if running else state.parked.get(member.member_id)
            _require(found == (group, member), f"{member.rollout_id} is {member.state.value} but not indexed so")
        pending += len(here)
    indexed = len(state.attempts) + len(state.parked)
    _require(pending == indexed, f"{indexed} attempts are indexed, {pending} members run or wait")


def _check_wave(state: State) -> None:
    groups = list(state.book.unassigned.values())
    places = state.settings.batch_groups
    _require(len(groups) <= places, f"{len(groups)} groups are unassigned, a batch has {places} places")
    mixed = {group.wave for group in groups if group.state in UNFINISHED} - {state.waves.opened}
    _require(not mixed, f"groups of waves {sorted(mixed)} are unfinished while wave {state.waves.opened} runs")
    _require(not state.parked, f"{len(state.parked)} rollouts wait for a replica outside of any wave")


def _check_books(state: State) -> None:
    in_flight = buffered = 0
    for group in state.book.live.values():
        ids = set(group.buffered)
        for member_id in group.buffered:
            _require(
                state.ledger.state_of(member_id) is RolloutState.BUFFERED,
                f"{member_id} of a ready group is not buffered",
            )
        waiting = [m for m in group.members if m.state is not MemberState.GONE and m.member_id not in ids]
        for member in waiting:
            _require(
                state.ledger.state_of(member.member_id) is RolloutState.IN_FLIGHT,
                f"{member.member_id} is {member.state.value} but not in flight in the ledger",
            )
        in_flight += len(waiting)
        buffered += len(ids)
    ledger = state.ledger
    _require(
        in_flight == ledger.count(RolloutState.IN_FLIGHT),
        f"{in_flight} members of live groups are in flight, the ledger says {ledger.count(RolloutState.IN_FLIGHT)}",
    )
    _require(
        buffered == ledger.count(RolloutState.BUFFERED),
        f"{buffered} members of live groups are buffered, the ledger says {ledger.count(RolloutState.BUFFERED)}",
    )
    trained = sum(len(group.buffered) for group in state.book.trained.values())
    _require(
        trained == ledger.count(RolloutState.TRAINED),
        f"{trained} members of trained groups, the ledger says {ledger.count(RolloutState.TRAINED)}",
    )


def _check_batches(state: State) -> None:
    steps = [batch.optimizer_step for batch in state.batches.values()]
    _require(
        steps == list(range(state.optimizer_step, state.next_step)),
        f"batches are under way for steps {steps}, the trainer is at {state.optimizer_step} and the next is "
        f"{state.next_step}",
    )
    for batch in state.batches.values():
        _require(
            0 < len(batch.groups) <= state.settings.batch_groups, f"batch {batch.batch_id} has {len(batch.groups)}"
        )
        for group in batch.groups:
            _check_bound(state, group, step=batch.optimizer_step)


def _check_bound(state: State, group: GroupRecord, *, step: int) -> None:
    staleness = step - group.floor_step
    _require(
        staleness <= state.settings.max_staleness,
        f"group {group.group_id} is in the batch of step {step} with tokens of step {group.floor_step}: staleness "
        f"{staleness}, budget {state.settings.max_staleness}",
    )
    _require(
        group.state in (GroupState.ASSIGNED, GroupState.LEASED),
        f"group {group.group_id} is in a batch but {group.state.value}",
    )
