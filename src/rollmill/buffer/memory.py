"""A sample store in memory, for tests and simulation.

Keeps the same rules and the same round trip through the wire form as the durable store; keeps nothing when the process
ends.
"""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from rollmill.buffer import rules
from rollmill.buffer.protocol import (
    CommitPoint,
    LeasedBatch,
    Reconciliation,
    StepRecord,
    StoreStatistics,
    Transition,
)
from rollmill.buffer.rules import BatchRow, BatchState, GroupRow, GroupState
from rollmill.types import Group, decode, encode

_replace = msgspec.structs.replace


class MemoryStore:
    """`SampleStore` in memory.

    Example:
        >>> store = MemoryStore()
        >>> store.apply(Transition(journal=(b"first", b"second")))
        2
        >>> list(store.journal(after=1))
        [(2, b'second')]
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._journal: list[bytes] = []
        self._groups: dict[str, GroupRow] = {}
        self._blobs: dict[str, bytes] = {}
        self._batches: dict[int, BatchRow] = {}
        self._steps: list[tuple[StepRecord, bool]] = []
        self._notes: dict[str, str] = {}

    def apply(self, transition: Transition) -> int:
        """Apply a transition as a whole; return the journal's length after it."""
        with self._lock:
            rules.check_transition(transition, groups=self._mentioned(transition), batches=self._batches.values())
            blobs = {group.group_id: encode(group) for group in (*transition.puts, *transition.replaces)}
            self._journal.extend(transition.journal)
            for group_id, blob in blobs.items():
                self._blobs[group_id] = blob
                self._groups[group_id] = GroupRow(group_id=group_id, state=GroupState.BUFFERED)
            for assignment in transition.assignments:
                self._batches[assignment.batch_id] = BatchRow(
                    batch_id=assignment.batch_id, optimizer_step=assignment.optimizer_step, state=BatchState.ASSIGNED
                )
                for position, group_id in enumerate(assignment.group_ids):
                    self._change(group_id, state=GroupState.ASSIGNED, batch_id=assignment.batch_id, position=position)
            for group_id, reason in transition.drops:
                self._change(group_id, state=GroupState.DROPPED, reason=reason)
                del self._blobs[group_id]
            return len(self._journal)

    def _mentioned(self, transition: Transition) -> dict[str, GroupRow]:
        ids = rules.mentioned_groups(transition)
        return {group_id: self._groups[group_id] for group_id in ids if group_id in self._groups}

    def _change(self, group_id: str, **fields: Any) -> None:
        self._groups[group_id] = _replace(self._groups[group_id], **fields)

    def journal(self, *, after: int = 0) -> Iterator[tuple[int, bytes]]:
        """Yield (offset, entry) for all entries after that offset, in order."""
        at = after
        while at < len(self._journal):
            at += 1
            yield at, self._journal[at - 1]

    def group(self, group_id: str) -> Group:
        """Return a stored group that is not dropped."""
        with self._lock:
            row = self._groups.get(group_id)
            if row is None or row.state is GroupState.DROPPED:
                raise rules.missing_group(group_id, row)
            return decode(self._blobs[group_id], Group)

    def lease_batch(self, *, optimizer_step: int, owner: str, now_s: float, lease_s: float) -> LeasedBatch | None:
        """Lease the batch assigned to this optimizer step, or return `None` if none is assigned yet."""
        with self._lock:
            batch = next((b for b in self._batches.values() if b.optimizer_step == optimizer_step), None)
            if batch is None:
                return None
            rules.check_lease(batch, owner=owner, now_s=now_s)
            groups = tuple(self.group(group_id) for group_id in self._members(batch.batch_id))
            expires_s = now_s + lease_s
            self._set_batch(batch, state=BatchState.LEASED, owner=owner, expires_s=expires_s)
            return LeasedBatch(
                batch_id=batch.batch_id,
                optimizer_step=optimizer_step,
                groups=groups,
                owner=owner,
                expires_s=expires_s,
            )

    def _members(self, batch_id: int) -> list[str]:
        rows = [row for row in self._groups.values() if row.batch_id == batch_id]
        return [row.group_id for row in sorted(rows, key=lambda row: row.position or 0)]

    def _set_batch(self, batch: BatchRow, **fields: Any) -> None:
        self._batches[batch.batch_id] = _replace(batch, **fields)

    def renew_lease(self, *, batch_id: int, owner: str, now_s: float, lease_s: float) -> None:
        """Extend a lease to `now_s + lease_s`."""
        with self._lock:
            batch = rules.check_holder(self._batches.get(batch_id), batch_id=batch_id, owner=owner, doing="renew")
            self._set_batch(batch, expires_s=now_s + lease_s)

    def release_batch(self, *, batch_id: int, owner: str) -> None:
        """Give a leased batch back untrained; it stays assigned."""
        with self._lock:
            batch = rules.check_holder(self._batches.get(batch_id), batch_id=batch_id, owner=owner, doing="release")
            self._set_batch(batch, state=BatchState.ASSIGNED, owner=None, expires_s=None)

    def record_step(self, record: StepRecord, *, owner: str | None = None) -> None:
        """Mark the batch trained and keep the trainer's report."""
        with self._lock:
            batch = self._batches.get(record.batch_id)
            holder = owner or (batch.owner if batch else None)
            batch = rules.check_holder(batch, batch_id=record.batch_id, owner=holder, doing="record")
            group_ids = self._members(record.batch_id)
            rules.check_step(record, batch=batch, group_ids=group_ids)
            self._steps.append((record, False))
            self._set_batch(batch, state=BatchState.TRAINED, owner=None, expires_s=None)
            for group_id in group_ids:
                self._change(group_id, state=GroupState.TRAINED, trained_step=record.optimizer_step)

    def steps(self, *, after: int = 0, abandoned: bool = False) -> Sequence[tuple[int, StepRecord]]:
        """Return (row, record) after that row: of the surviving history, or of the abandoned ones."""
        with self._lock:
            rows = enumerate(self._steps[after:], start=after + 1)
            return [(row, record) for row, (record, gone) in rows if gone is abandoned]

    def leased_batches(self) -> Sequence[int]:
        """Return the ids of the batches that a trainer holds now, ascending."""
        with self._lock:
            return sorted(batch.batch_id for batch in self._batches.values() if batch.state is BatchState.LEASED)

    def waiting_groups(self) -> Sequence[str]:
        """Return the ids of groups that are neither trained nor dropped, in order of id."""
        with self._lock:
            waiting = (GroupState.BUFFERED, GroupState.ASSIGNED)
            return sorted(row.group_id for row in self._groups.values() if row.state in waiting)

    def reconcile(self, commit: CommitPoint) -> Reconciliation:
        """Make the store agree with the commit point: release what it does not list."""
        with self._lock:
            plan = rules.plan_reconciliation(
                commit, groups=tuple(self._groups.values()), journal_entries=len(self._journal)
            )
            for group_id, step in plan.trained:
                self._change(group_id, state=GroupState.TRAINED, trained_step=step)
            for group_id in plan.released:
                self._change(group_id, state=GroupState.BUFFERED, batch_id=None, position=None, trained_step=None)
            self._batches = {
                batch_id: _replace(batch, state=BatchState.TRAINED, owner=None, expires_s=None)
                for batch_id, batch in self._batches.items()
                if batch_id in plan.kept_batches
            }
            self._steps = [
                (record, gone or record.optimizer_step > commit.optimizer_step) for record, gone in self._steps
            ]
            versions = {record.policy_version for record, gone in self._steps if gone}
            return Reconciliation(
                trained_group_ids=tuple(group_id for group_id, _ in plan.trained),
                released_group_ids=plan.released,
                abandoned_versions=tuple(sorted(v for v in versions if v > commit.policy_version)),
            )

    def set_note(self, key: str, value: Any) -> None:
        """Keep a small JSON value."""
        with self._lock:
            self._notes[key] = rules.encode_note(key, value)

    def note(self, key: str, default: Any = None) -> Any:
        """Return a note, or `default` where there is none."""
        text = self._notes.get(key)
        return default if text is None else json.loads(text)

    def notes(self, *, prefix: str) -> dict[str, Any]:
        """Return all notes whose key begins with `prefix`."""
        with self._lock:
            return {key: json.loads(text) for key, text in sorted(self._notes.items()) if key.startswith(prefix)}

    def statistics(self) -> StoreStatistics:
        """Return depth and bytes by state."""
        with self._lock:
            count = Counter(row.state for row in self._groups.values())
            leased = {batch.batch_id for batch in self._batches.values() if batch.state is BatchState.LEASED}
            held = sum(row.batch_id in leased for row in self._groups.values())
            return StoreStatistics(
                buffered_groups=count[GroupState.BUFFERED],
                assigned_groups=count[GroupState.ASSIGNED] - held,
                leased_groups=held,
                trained_groups=count[GroupState.TRAINED],
                dropped_groups=count[GroupState.DROPPED],
                sample_bytes=sum(map(len, self._blobs.values())),
                journal_entries=len(self._journal),
            )

    def close(self) -> None:
        """Do nothing: there is nothing to release."""
