"""The rules of the sample store, shared by every backend.

Decides whether a change may be made, from the rows that a backend has read; says why not in words. Reads and
writes nothing itself, so that the backends cannot differ in what they refuse.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from rollmill.buffer.protocol import CommitPoint, StepRecord, Transition
from rollmill.errors import LeaseLost, StoreError


class GroupState(enum.Enum):
    """Where a stored group is."""

    BUFFERED = "buffered"
    ASSIGNED = "assigned"
    TRAINED = "trained"
    DROPPED = "dropped"


class BatchState(enum.Enum):
    """Where a batch is."""

    ASSIGNED = "assigned"
    LEASED = "leased"
    TRAINED = "trained"


class GroupRow(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a group without its samples.

    Attributes:
        batch_id: the batch it is assigned to or was trained in.
        position: its place in that batch.
        trained_step: optimizer step after the update that trained it.
        reason: why it was dropped.
    """

    group_id: str
    state: GroupState
    batch_id: int | None = None
    position: int | None = None
    trained_step: int | None = None
    reason: str | None = None


class BatchRow(msgspec.Struct, frozen=True, kw_only=True):
    """A batch and who holds it."""

    batch_id: int
    optimizer_step: int
    state: BatchState
    owner: str | None = None
    expires_s: float | None = None


class ReconciliationPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What must change for the store to agree with a commit point.

    Attributes:
        trained: (group_id, trained_step) of every group of the surviving history, in order of training.
        released: groups that become buffered again.
        kept_batches: batches that are trained in the surviving history; all others are deleted.
    """

    trained: tuple[tuple[str, int], ...]
    released: tuple[str, ...]
    kept_batches: frozenset[int]


def mentioned_groups(transition: Transition) -> set[str]:
    """Return the ids whose rows `check_transition` needs."""
    ids = {group.group_id for group in (*transition.puts, *transition.replaces)}
    ids.update(group_id for assignment in transition.assignments for group_id in assignment.group_ids)
    ids.update(group_id for group_id, _ in transition.drops)
    return ids


def check_transition(transition: Transition, *, groups: Mapping[str, GroupRow], batches: Iterable[BatchRow]) -> None:
    """Check that a transition may be applied as a whole: puts and replaces first, then assignments, drops.

    Args:
        groups: rows of the mentioned groups that exist.
        batches: rows of all batches whose id or optimizer step is mentioned.

    Raises:
        StoreError: naming the first id that cannot be changed so.
    """
    states: dict[str, str] = {group_id: describe(row) for group_id, row in groups.items()}
    for group in transition.puts:
        if group.group_id in states:
            raise StoreError(
                f"group {group.group_id!r} cannot be put: the store already has it ({states[group.group_id]}). "
                "An id is stored once; the sender repeated a transition or reused an id. Nothing was changed."
            )
        states[group.group_id] = GroupState.BUFFERED.value
    for group in transition.replaces:
        _check_buffered(group.group_id, states, doing="replaced by a larger one")
    taken = {batch.batch_id: batch.optimizer_step for batch in batches}
    for assignment in transition.assignments:
        _check_assignment(assignment.batch_id, assignment.optimizer_step, assignment.group_ids, taken=taken)
        taken[assignment.batch_id] = assignment.optimizer_step
        for group_id in assignment.group_ids:
            _check_buffered(group_id, states, doing=f"assigned to batch {assignment.batch_id}")
            states[group_id] = f"assigned to batch {assignment.batch_id}"
    for group_id, reason in transition.drops:
        _check_buffered(group_id, states, doing=f"dropped ({reason})")
        states[group_id] = f"dropped: {reason}"


def describe(row: GroupRow) -> str:
    """Return the state of a group in words."""
    match row.state:
        case GroupState.ASSIGNED:
            return f"assigned to batch {row.batch_id}"
        case GroupState.TRAINED:
            return f"trained in optimizer step {row.trained_step}"
        case GroupState.DROPPED:
            return f"dropped: {row.reason}"
        case _:
            return row.state.value


def _check_assignment(
    batch_id: int, optimizer_step: int, group_ids: Sequence[str], *, taken: Mapping[int, int]
) -> None:
    if not group_ids:
        raise StoreError(f"batch {batch_id} has no groups; a batch trains at least one. Nothing was changed.")
    if batch_id in taken:
        raise StoreError(f"batch {batch_id} exists already; ids of batches are used once. Nothing was changed.")
    for other, step in taken.items():
        if step == optimizer_step:
            raise StoreError(
                f"batch {batch_id} cannot be assigned to optimizer step {optimizer_step}: "
                f"batch {other} is assigned to it. Nothing was changed."
            )


def _check_buffered(group_id: str, states: Mapping[str, str], *, doing: str) -> None:
    state = states.get(group_id)
    if state is None:
        raise StoreError(
            f"group {group_id!r} cannot be {doing}: the store has never seen it. "
            "Put a group before, or in, the transition that speaks of it. Nothing was changed."
        )
    if state != GroupState.BUFFERED.value:
        raise StoreError(
            f"group {group_id!r} cannot be {doing}: it is {state}, and only a buffered group can. Nothing was changed."
        )


def check_lease(batch: BatchRow, *, owner: str, now_s: float) -> None:
    """Check that `owner` may lease the batch now.

    Raises:
        LeaseLost: if another owner's lease has not expired.
        StoreError: if the batch was trained.
    """
    if batch.state is BatchState.TRAINED:
        raise StoreError(
            f"batch {batch.batch_id} was trained already for optimizer step {batch.optimizer_step}. The trainer asks "
            f"for a step it has done: restore it from the newest checkpoint, or continue at {batch.optimizer_step + 1}."
        )
    left_s = (batch.expires_s or 0.0) - now_s
    if batch.state is BatchState.LEASED and batch.owner != owner and left_s > 0:
        raise LeaseLost(
            f"batch {batch.batch_id} is leased by {batch.owner!r} for another {left_s:.1f} s; "
            f"{owner!r} cannot have it. Two trainers run on one run directory: stop one of them."
        )


def check_holder(batch: BatchRow | None, *, batch_id: int, owner: str | None, doing: str) -> BatchRow:
    """Check that `owner` holds the lease of a batch, and return the batch.

    A lease past its time that nobody else took is still its owner's: time alone loses no work.

    Raises:
        LeaseLost: if another owner holds it.
        StoreError: if there is no such batch, it is not leased, or it was trained.
    """
    if batch is None:
        raise StoreError(f"cannot {doing} batch {batch_id}: there is no such batch. Was the store reconciled since?")
    if batch.state is BatchState.TRAINED:
        raise StoreError(
            f"cannot {doing} batch {batch_id}: it was trained before in this history (optimizer step "
            f"{batch.optimizer_step + 1}). Lease the batch of the next step."
        )
    if batch.state is not BatchState.LEASED:
        raise StoreError(f"cannot {doing} batch {batch_id}: it is not leased. Lease it first.")
    if owner is None:
        raise StoreError(
            f"cannot {doing} batch {batch_id}: this store handle has not leased it ({batch.owner!r} has). "
            "Lease it through this handle, or say who the owner is."
        )
    if batch.owner != owner:
        raise LeaseLost(
            f"cannot {doing} batch {batch_id} as {owner!r}: {batch.owner!r} leased it after the lease had expired. "
            "Discard this work; lengthen the lease or renew it more often."
        )
    return batch


def check_step(record: StepRecord, *, batch: BatchRow, group_ids: Sequence[str]) -> None:
    """Check that a step record speaks of exactly this batch.

    Raises:
        StoreError: if the optimizer step or the groups differ.
    """
    if record.optimizer_step != batch.optimizer_step + 1:
        raise StoreError(
            f"the record of batch {batch.batch_id} says optimizer step {record.optimizer_step}; the batch leads to "
            f"{batch.optimizer_step + 1}. Nothing was recorded."
        )
    if sorted(record.group_ids) != sorted(group_ids):
        raise StoreError(
            f"the record of batch {batch.batch_id} lists {len(record.group_ids)} groups that are not its "
            f"{len(group_ids)}: {sorted(set(record.group_ids) ^ set(group_ids))[:4]} differ. Nothing was recorded."
        )


def plan_reconciliation(commit: CommitPoint, *, groups: Sequence[GroupRow], journal_entries: int) -> ReconciliationPlan:
    """Decide which groups are trained and which wait again, given what the commit point lists.

    A group is trained if the commit point lists it, or if an update up to its optimizer step trained it (an earlier
    checkpoint lists those). All else that was assigned, leased or trained waits again.

    Raises:
        StoreError: if the checkpoint speaks of groups or journal entries that this store does not have.
    """
    _check_same_run(commit, groups=groups, journal_entries=journal_entries)
    listed = set(commit.trained_group_ids)
    trained: list[tuple[tuple[int, int, str], GroupRow]] = []
    released: list[str] = []
    for row in groups:
        step = row.trained_step if row.trained_step is not None else commit.optimizer_step
        survives = row.state is GroupState.TRAINED and step <= commit.optimizer_step
        if survives or row.group_id in listed:
            trained.append(((min(step, commit.optimizer_step), row.position or 0, row.group_id), row))
        elif row.state in (GroupState.ASSIGNED, GroupState.TRAINED):
            released.append(row.group_id)
    trained.sort(key=lambda item: item[0])
    return ReconciliationPlan(
        trained=tuple((row.group_id, key[0]) for key, row in trained),
        released=tuple(released),
        kept_batches=frozenset(row.batch_id for _, row in trained if row.batch_id is not None),
    )


def _check_same_run(commit: CommitPoint, *, groups: Sequence[GroupRow], journal_entries: int) -> None:
    if commit.journal_offset > journal_entries:
        raise StoreError(
            f"the checkpoint of optimizer step {commit.optimizer_step} was written at journal entry "
            f"{commit.journal_offset}, but the store has {journal_entries} entries. The store is older than the "
            "checkpoint or of another run: restore the store file that belongs to it, or resume an older checkpoint."
        )
    states = {row.group_id: row for row in groups}
    for group_id in commit.trained_group_ids:
        row = states.get(group_id)
        if row is None or row.state is GroupState.DROPPED:
            what = "does not have" if row is None else f"has as {describe(row)}"
            raise StoreError(
                f"the checkpoint of optimizer step {commit.optimizer_step} lists group {group_id!r} as trained, which "
                f"the store {what}. Checkpoint and store belong to different runs: resume with the matching pair."
            )


def missing_group(group_id: str, row: GroupRow | None) -> StoreError:
    """Return the error for a group whose samples cannot be read."""
    if row is None:
        return StoreError(f"the store has no group {group_id!r}: it was never put. Check the id.")
    return StoreError(f"the samples of group {group_id!r} are gone: it was {describe(row)}.")


def encode_note(key: str, value: Any) -> str:
    """Return the JSON text of a note.

    Raises:
        StoreError: if the value is not JSON.
    """
    try:
        return json.dumps(value, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise StoreError(f"note {key!r} cannot be kept: {error}. Notes hold plain finite JSON values.") from error
