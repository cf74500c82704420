"""The sample store: keyed, durable, in one transaction with the journal.

Decides nothing: the scheduling core says what is put, assigned and dropped. Put is durable before it returns.
Journal entries are opaque bytes here. Every backend passes the same contract tests.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import msgspec

from rollmill.types import Group


class Assignment(msgspec.Struct, frozen=True, kw_only=True):
    """The groups of one batch, for the update that leads from `optimizer_step` to `optimizer_step + 1`."""

    batch_id: int
    optimizer_step: int
    group_ids: tuple[str, ...]


class Transition(msgspec.Struct, frozen=True, kw_only=True):
    """What one transaction changes.

    Attributes:
        journal: entries to append, in order.
        puts: groups to store.
        replaces: buffered groups to store again, larger: a late sibling joined (schedule.reopen_groups).
        assignments: batches to assign.
        drops: (group_id, reason) whose samples are no longer needed; the reason is kept, the arrays may go.
    """

    journal: tuple[bytes, ...] = ()
    puts: tuple[Group, ...] = ()
    replaces: tuple[Group, ...] = ()
    assignments: tuple[Assignment, ...] = ()
    drops: tuple[tuple[str, str], ...] = ()


class LeasedBatch(msgspec.Struct, frozen=True, kw_only=True):
    """A batch in the hands of one trainer until `expires_s` (controller clock)."""

    batch_id: int
    optimizer_step: int
    groups: tuple[Group, ...]
    owner: str
    expires_s: float


class StepRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What the trainer reports of one optimizer update.

    Attributes:
        optimizer_step: after the update.
        policy_version: version published for it.
        seconds: cause -> seconds since the previous step ended; they sum to the wall time between.
        metrics: scalar metrics (loss, grad_norm, mismatch, staleness_mean, ...).
    """

    batch_id: int
    history_id: str
    optimizer_step: int
    policy_version: int
    group_ids: tuple[str, ...]
    finished_at_s: float
    seconds: dict[str, float]
    metrics: dict[str, float]


class CommitPoint(msgspec.Struct, frozen=True, kw_only=True):
    """What a checkpoint says about the books: everything it lists is trained, nothing else is.

    Attributes:
        trained_group_ids: groups trained since the checkpoint before it.
        journal_offset: entries of the journal that had been written.
    """

    history_id: str
    optimizer_step: int
    policy_version: int
    trained_group_ids: tuple[str, ...]
    journal_offset: int


class Reconciliation(msgspec.Struct, frozen=True, kw_only=True):
    """How the store differs from the commit point after `reconcile` has put it right.

    Attributes:
        trained_group_ids: all groups of the surviving history up to the commit point.
        released_group_ids: groups that were assigned, leased or trained after it and wait again.
        abandoned_versions: policy versions published after it.
    """

    trained_group_ids: tuple[str, ...]
    released_group_ids: tuple[str, ...]
    abandoned_versions: tuple[int, ...]


class StoreStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Depth and bytes by state."""

    buffered_groups: int
    assigned_groups: int
    leased_groups: int
    trained_groups: int
    dropped_groups: int
    sample_bytes: int
    journal_entries: int


class SampleStore(Protocol):
    """Durable store of groups, batches, journal and step records. All methods block; call them off the event loop."""

    def apply(self, transition: Transition) -> int:
        """Commit a transition durably; return the journal's length after it.

        Raises:
            StoreError: on an unknown, repeated or already trained id; nothing is changed then.
        """
        ...

    def journal(self, *, after: int = 0) -> Iterator[tuple[int, bytes]]:
        """Yield (offset, entry) for all entries after that offset, in order."""
        ...

    def group(self, group_id: str) -> Group:
        """Return a stored group that is not dropped."""
        ...

    def lease_batch(self, *, optimizer_step: int, owner: str, now_s: float, lease_s: float) -> LeasedBatch | None:
        """Lease the batch assigned to this optimizer step, or return `None` if none is assigned yet.

        Raises:
            LeaseLost: if another owner holds it and its lease has not expired.
        """
        ...

    def renew_lease(self, *, batch_id: int, owner: str, now_s: float, lease_s: float) -> None:
        """Extend a lease to `now_s + lease_s`.

        Raises:
            LeaseLost: if it expired and another owner took it.
        """
        ...

    def release_batch(self, *, batch_id: int, owner: str) -> None:
        """Give a leased batch back untrained; it stays assigned."""
        ...

    def record_step(self, record: StepRecord, *, owner: str | None = None) -> None:
        """Mark the batch trained (final once a checkpoint lists it) and keep the trainer's report.

        Args:
            owner: who leased the batch; `None` means whoever leased it through this store object.

        Raises:
            StoreError: if the batch is not leased or was trained before in this history.
            LeaseLost: if the lease expired and another owner took it.
        """
        ...

    def steps(self, *, after: int = 0) -> Sequence[tuple[int, StepRecord]]:
        """Return (row, record) of the step records after that row, in order; rows only grow."""
        ...

    def leased_batches(self) -> Sequence[int]:
        """Return the ids of the batches that a trainer holds now."""
        ...

    def waiting_groups(self) -> Sequence[str]:
        """Return the ids of stored groups that are neither trained nor dropped, in order of id."""
        ...

    def reconcile(self, commit: CommitPoint) -> Reconciliation:
        """Make the store agree with the commit point: release what it does not list."""
        ...

    def set_note(self, key: str, value: Any) -> None:
        """Keep a small JSON value durably (phase of the run, seconds of a process, cursor...)."""
        ...

    def note(self, key: str, default: Any = None) -> Any:
        """Return a note, or `default` where there is none."""
        ...

    def notes(self, *, prefix: str) -> dict[str, Any]:
        """Return all notes whose key begins with `prefix`."""
        ...

    def statistics(self) -> StoreStatistics:
        """Return depth and bytes by state."""
        ...

    def close(self) -> None:
        """Release what the store holds; idempotent."""
        ...
