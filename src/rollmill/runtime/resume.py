"""Bringing a run directory back to its commit point before its processes start again.

The commit point is the newest checkpoint that verifies: what it lists is trained, what came after it belongs to an
abandoned history.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from rollmill.buffer.protocol import CommitPoint
from rollmill.buffer.sqlite import SqliteStore
from rollmill.errors import CheckpointError
from rollmill.runtime.incarnation import Incarnation, read_record, write_record
from rollmill.runtime.layout import ProcessLayout
from rollmill.weights.checkpoint import Checkpoint, latest_checkpoint


def first_incarnation(layout: ProcessLayout) -> Incarnation:
    """Write and return the first incarnation of a new run."""
    incarnation = Incarnation(number=1, history_id="h001")
    write_record(layout.incarnation, incarnation)
    return incarnation


def next_incarnation(layout: ProcessLayout) -> Incarnation:
    """Reconcile the store with the newest checkpoint; write and return the next incarnation.

    Raises:
        RunDirectoryError: if the records of the earlier start are missing or damaged.
        StoreError: if the store cannot be reconciled.
    """
    before = read_record(layout.incarnation, Incarnation)
    checkpoint = newest_checkpoint(layout.checkpoints)
    commit = commit_point(checkpoint)
    store = SqliteStore(layout.store)
    try:
        reconciliation = store.reconcile(commit)
        store.set_note("phase", "starting")
    finally:
        store.close()
    number = before.number + 1
    incarnation = Incarnation(
        number=number,
        history_id=f"h{number:03d}",
        optimizer_step=commit.optimizer_step,
        checkpoint=None if checkpoint is None else str(checkpoint.path),
        trained_group_ids=reconciliation.trained_group_ids,
        abandoned_versions=reconciliation.abandoned_versions,
        parent_version=None if checkpoint is None else commit.policy_version,
    )
    for stale in layout.processes.glob("*.address.json"):
        stale.unlink()
    layout.failure.unlink(missing_ok=True)
    write_record(layout.incarnation, incarnation)
    return incarnation


def newest_checkpoint(root: Path) -> Checkpoint | None:
    """Return the newest checkpoint that verifies, or `None` if the run stopped before its first."""
    if not root.exists() or not any(root.glob("step-*")):
        return None
    return latest_checkpoint(root)


def commit_point(checkpoint: Checkpoint | None) -> CommitPoint:
    """Return what the checkpoint says about the books; without one nothing is trained.

    Raises:
        CheckpointError: if its commit record cannot be read.
    """
    if checkpoint is None:
        return CommitPoint(history_id="", optimizer_step=0, policy_version=0, trained_group_ids=(), journal_offset=0)
    try:
        return msgspec.convert(checkpoint.commit, CommitPoint)
    except msgspec.ValidationError as error:
        raise CheckpointError(
            f"the commit record of {checkpoint.path} cannot be read ({error}). Remove that checkpoint to resume from "
            "the one before it."
        ) from error
