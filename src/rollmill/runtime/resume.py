"""Bringing a run directory back to its commit point before its processes start again.

The commit point is the newest checkpoint that verifies: what it lists is trained, what came after it belongs to an
abandoned history: later checkpoints are set aside, later versions are abandoned. Whatever was passed over is said in
words. A crash at any point of this leaves a directory on which it can be done again.
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

import msgspec

from rollmill.buffer.protocol import CommitPoint
from rollmill.buffer.sqlite import SqliteStore
from rollmill.errors import CheckpointError, RunDirectoryError, WeightError
from rollmill.runtime.incarnation import Incarnation, Segment, history_of, read_record, write_record
from rollmill.runtime.layout import ProcessLayout
from rollmill.weights.checkpoint import (
    SET_ASIDE,
    Checkpoint,
    latest_checkpoint,
    list_checkpoints,
    set_aside_newer,
)
from rollmill.weights.manifests import Manifests

WITNESS_BYTES = 8 << 20
"""More than SQLite keeps in a write-ahead log before it folds it back."""


def first_incarnation(layout: ProcessLayout) -> Incarnation:
    """Write and return the first incarnation of a new run."""
    incarnation = Incarnation(number=1, history_id=history_of(1))
    write_record(layout.incarnation, incarnation, durable=True)
    return incarnation


def next_incarnation(layout: ProcessLayout, *, replicas_live: bool = False) -> Incarnation:
    """Reconcile the store with the newest checkpoint; write and return the next incarnation.

    Args:
        replicas_live: the replicas go on, where only the trainer was lost; they keep their addresses.

    Raises:
        RunDirectoryError: if the records of the earlier start are missing or damaged.
        CheckpointError: if there are checkpoints and none of them verifies.
        StoreError: if the store is damaged or cannot be reconciled.
    """
    if not layout.incarnation.exists() and not layout.store.exists():
        # Killed before any process began: there is nothing to go back to, and nothing to lose.
        return first_incarnation(layout)
    before = read_record(layout.incarnation, Incarnation)
    checkpoint = newest_checkpoint(layout.checkpoints)
    commit = commit_point(checkpoint)
    # Before the store follows: the checkpoint that was chosen now must be the one that is chosen after a crash here.
    moved = set_aside_newer(layout.checkpoints, than=commit.optimizer_step)
    store = SqliteStore(layout.store)
    try:
        store.verify()
        lost = lost_groups(layout.run_directory / "rollouts.jsonl", store=store)
        reconciliation = store.reconcile(commit)
        store.set_note("phase", "starting")
        # Of an end that is none any more: the summary would show it as that of the run as it is now.
        for key in ("finish_reason", "eval:after"):
            store.set_note(key, None)
    finally:
        store.close()
    number = before.number + 1
    incarnation = Incarnation(
        number=number,
        history_id=history_of(number),
        optimizer_step=commit.optimizer_step,
        checkpoint=None if checkpoint is None else str(checkpoint.path),
        trained_group_ids=reconciliation.trained_group_ids,
        abandoned_versions=abandoned_versions(
            layout.weights, commit=commit, recorded=reconciliation.abandoned_versions
        ),
        parent_version=None if checkpoint is None else commit.policy_version,
        repairs=tuple(
            dict.fromkeys(
                (
                    *before.repairs,
                    *(() if replicas_live else _cut_off(layout)),
                    *_passed_over(checkpoint, _untold(layout.checkpoints, moved, told=before.repairs)),
                    *_lost(lost),
                    *_unreadable(layout.weights),
                )
            )
        ),
    )
    for stale in () if replicas_live else layout.processes.glob("*.address.json"):
        stale.unlink()
    layout.failure.unlink(missing_ok=True)
    write_record(layout.incarnation, incarnation, durable=True)
    return incarnation


def newest_checkpoint(root: Path) -> Checkpoint | None:
    """Return the newest checkpoint that verifies, or `None` if the run stopped before its first was complete.

    Raises:
        CheckpointError: if there are some and none verifies.
    """
    return latest_checkpoint(root) if list_checkpoints(root) else None


def abandoned_versions(weights: Path, *, commit: CommitPoint, recorded: tuple[int, ...]) -> tuple[int, ...]:
    """Return the versions that no surviving history has, ascending.

    The books know those whose step was recorded; a trainer that is killed between publication and record leaves one
    that only the repository knows. A later version without further updates has the checkpoint's own weights.

    Args:
        weights: folder of the model repository.
        recorded: as the reconciliation of the store returned them.
    """
    folder = weights / "manifests"
    if not folder.is_dir():
        return recorded
    manifests = Manifests(folder)
    later = [version for version in manifests.versions() if version > commit.policy_version]
    return tuple(sorted({*recorded, *(v for v in later if _is_later(manifests, v, commit=commit))}))


def _is_later(manifests: Manifests, version: int, *, commit: CommitPoint) -> bool:
    try:
        return manifests.read(version).optimizer_step > commit.optimizer_step
    except WeightError:
        # Nobody can say any more what it was: nothing that it sampled is trained.
        return True


def lost_groups(reported: Path, *, store: SqliteStore) -> tuple[str, ...]:
    """Return the groups that the run reported as stored and that the store does not know.

    The report is written after the store has answered, so it is a witness: a write-ahead log that is damaged or
    missing takes the newest transactions with it, whole, and SQLite does not say so. Only the newest are looked at:
    what is lost in this way always includes the last.

    Args:
        reported: `rollouts.jsonl` of the run.
    """
    if not reported.exists():
        return ()
    with reported.open("rb") as file:
        file.seek(max(0, reported.stat().st_size - WITNESS_BYTES))
        tail = file.read()
    named: list[str] = []
    for line in tail.splitlines():
        with contextlib.suppress(msgspec.DecodeError):  # the first line may be cut, the last torn by the crash
            named.append(msgspec.json.decode(line, type=_Reported).group_id)
    known = store.known_groups(named)
    return tuple(sorted({group_id for group_id in named if group_id not in known}))


class _Reported(msgspec.Struct):
    group_id: str


def _lost(groups: tuple[str, ...]) -> tuple[str, ...]:
    if not groups:
        return ()
    names = ", ".join(groups[:3]) + (", ..." if len(groups) > 3 else "")
    return (
        f"The store has lost {len(groups)} groups that it had acknowledged ({names}): the end of its write-ahead log "
        "was damaged, or store.sqlite-wal is missing. Their tasks are sampled again. Check the disk.",
    )


def _cut_off(layout: ProcessLayout) -> tuple[str, ...]:
    """Say that the supervisor before this one was killed: it could write nothing, and its last measure says so."""
    segments = sorted(layout.processes.glob("segment.*.json"), key=lambda path: path.stat().st_mtime)
    if not segments:
        return ()
    try:
        newest = read_record(segments[-1], Segment)
    except RunDirectoryError:
        return ()  # the summary tells of it
    if newest.ended != "running":
        return ()
    until = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(newest.started_wall_s + newest.wall_s))
    return (
        f"The supervisor of start {newest.number} was killed, or the machine went down, a few seconds after {until}: "
        "it measured for the last time then.",
    )


def _untold(root: Path, moved: tuple[Path, ...], *, told: tuple[str, ...]) -> tuple[Path, ...]:
    """Return what was set aside now, and what an earlier start set aside and was killed before it could say so."""
    aside = sorted(root.glob(f"*.{SET_ASIDE}*")) if root.is_dir() else []
    earlier = [path for path in aside if path not in moved and not any(path.name in words for words in told)]
    return (*earlier, *moved)


def _unreadable(weights: Path) -> tuple[str, ...]:
    folder = weights / "manifests"
    damaged = Manifests(folder).damaged() if folder.is_dir() else ()
    return tuple(
        f"The manifest of policy version {version} cannot be read; samples of that version count as of no history that "
        "goes on, and its number is not used again. Check the disk."
        for version in damaged
    )


def _passed_over(checkpoint: Checkpoint | None, moved: tuple[Path, ...]) -> tuple[str, ...]:
    if not moved:
        return ()
    skipped = checkpoint.skipped if checkpoint is not None else ()
    used = "the start" if checkpoint is None else f"checkpoint {checkpoint.path.name}"
    names = ", ".join(path.name for path in moved)
    return (*skipped, f"The run went on from {used}; set aside: {names}. Steps after it are made again.")


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
