"""The sample store on SQLite: the default, and the one truth of a run on one machine.

Every change is one transaction in a write-ahead log with `synchronous=FULL`: when a method returns, the change
survives a power cut. Several processes open the same file at once: the controller writes transitions, the trainer
leases batches and records steps. What may change is decided in `rollmill.buffer.rules`; nothing is decided here.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

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
from rollmill.buffer.sqlite_file import SEALED, WHAT_TO_DO, damages, open_database, seal, translated
from rollmill.errors import StoreError
from rollmill.types import Group, decode, encode

_JOURNAL_PAGE = 1000


class SqliteStore:
    """`SampleStore` in one SQLite file.

    One connection under a lock: any thread may call; calls of one object take turns.

    Args:
        path: the database file; `-wal` and `-shm` files appear beside it.
        create: make the file (and its folder) if it is missing; `False` refuses a missing file.
        busy_timeout_s: longest wait for another process's transaction.

    Raises:
        RunDirectoryError: if the file is missing, unwritable, not a store, or of another schema version.
    """

    def __init__(self, path: str | Path, *, create: bool = True, busy_timeout_s: float = 30.0) -> None:
        self._path = Path(path)
        self._lock = threading.RLock()
        self._leased_as: dict[int, str] = {}
        self._connection = open_database(self._path, create=create, busy_timeout_s=busy_timeout_s)

    def verify(self) -> None:
        """Look at the whole file: structure, seals, digests, gaps.

        Raises:
            StoreError: naming what is damaged, and what to do.
        """
        with self._transaction("DEFERRED") as db:
            found = damages(db)
        if found:
            raise StoreError(f"{self._path} is damaged: {'; '.join(found)}. {WHAT_TO_DO}")

    def known_groups(self, group_ids: Iterable[str]) -> set[str]:
        """Return those of these ids that the store has ever stored."""
        with self._transaction("DEFERRED") as db:
            return {row.group_id for row in self._group_rows(db, group_ids)}

    @contextlib.contextmanager
    def _transaction(self, kind: str = "IMMEDIATE") -> Iterator[sqlite3.Connection]:
        """Run a block in one transaction; anything raised inside undoes all of it."""
        with self._lock, translated(self._path):
            self._connection.execute(f"BEGIN {kind}")
            try:
                yield self._connection
                self._connection.execute("COMMIT")
            except BaseException:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise

    def apply(self, transition: Transition) -> int:
        """Commit a transition durably; return the journal's length after it."""
        blobs = [(group.group_id, encode(group)) for group in transition.puts]
        larger = [(group.group_id, encode(group)) for group in transition.replaces]
        with self._transaction() as db:
            groups = {row.group_id: row for row in self._group_rows(db, rules.mentioned_groups(transition))}
            rules.check_transition(transition, groups=groups, batches=self._mentioned_batches(db, transition))
            db.executemany(
                "INSERT INTO journal(sha256, entry) VALUES (?, ?)", [_sealed(entry) for entry in transition.journal]
            )
            db.executemany(
                "INSERT INTO groups(group_id, state) VALUES (?, 'buffered')", [(group_id,) for group_id, _ in blobs]
            )
            db.executemany(
                "INSERT INTO samples(group_id, sha256, blob) VALUES (?, ?, ?)",
                [(group_id, *_sealed(blob)) for group_id, blob in blobs],
            )
            db.executemany(
                "UPDATE samples SET sha256 = ?, blob = ? WHERE group_id = ?",
                [(*_sealed(blob), group_id) for group_id, blob in larger],
            )
            _assign(db, transition)
            db.executemany(
                "UPDATE groups SET state = 'dropped', reason = ? WHERE group_id = ?",
                [(reason, group_id) for group_id, reason in transition.drops],
            )
            db.executemany("DELETE FROM samples WHERE group_id = ?", [(group_id,) for group_id, _ in transition.drops])
            return _journal_entries(db)

    def journal(self, *, after: int = 0) -> Iterator[tuple[int, bytes]]:
        """Yield (offset, entry) for all entries after that offset, in order.

        Reads in pages, so that a slow reader holds no transaction open and the write-ahead log can be folded back.

        Raises:
            StoreError: if an entry is damaged.
        """
        at = after
        while True:
            with self._transaction("DEFERRED") as db:
                page = db.execute(
                    "SELECT offset, sha256, entry FROM journal WHERE offset > ? ORDER BY offset LIMIT ?",
                    (at, _JOURNAL_PAGE),
                ).fetchall()
            for offset, digest, entry in page:
                if offset != at + 1:
                    raise self._damaged(f"journal entry {at + 1}", "it is missing")
                at = offset
                yield at, self._unsealed(digest, entry, what=f"journal entry {at}")
            if len(page) < _JOURNAL_PAGE:
                return

    def group(self, group_id: str) -> Group:
        """Return a stored group that is not dropped.

        Raises:
            StoreError: if it is unknown, dropped, or its samples are damaged.
        """
        with self._transaction("DEFERRED") as db:
            return self._read_group(db, group_id)

    def _read_group(self, db: sqlite3.Connection, group_id: str) -> Group:
        found = db.execute("SELECT sha256, blob FROM samples WHERE group_id = ?", (group_id,)).fetchone()
        if found is None:
            raise rules.missing_group(group_id, next(iter(self._group_rows(db, [group_id])), None))
        return decode(self._unsealed(*found, what=f"group {group_id!r}"), Group)

    def lease_batch(self, *, optimizer_step: int, owner: str, now_s: float, lease_s: float) -> LeasedBatch | None:
        """Lease the batch assigned to this optimizer step, or return `None` if none is assigned yet."""
        with self._transaction() as db:
            batch = self._batch(db, "optimizer_step", optimizer_step)
            if batch is None:
                return None
            rules.check_lease(batch, owner=owner, now_s=now_s)
            groups = tuple(self._read_group(db, group_id) for group_id in self._members(db, batch.batch_id))
            expires_s = now_s + lease_s
            db.execute(
                "UPDATE batches SET state = 'leased', owner = ?, expires_s = ? WHERE batch_id = ?",
                (owner, expires_s, batch.batch_id),
            )
        self._leased_as[batch.batch_id] = owner
        return LeasedBatch(
            batch_id=batch.batch_id, optimizer_step=optimizer_step, groups=groups, owner=owner, expires_s=expires_s
        )

    def renew_lease(self, *, batch_id: int, owner: str, now_s: float, lease_s: float) -> None:
        """Extend a lease to `now_s + lease_s`."""
        with self._transaction() as db:
            rules.check_holder(self._batch(db, "batch_id", batch_id), batch_id=batch_id, owner=owner, doing="renew")
            db.execute("UPDATE batches SET expires_s = ? WHERE batch_id = ?", (now_s + lease_s, batch_id))

    def release_batch(self, *, batch_id: int, owner: str) -> None:
        """Give a leased batch back untrained; it stays assigned."""
        with self._transaction() as db:
            rules.check_holder(self._batch(db, "batch_id", batch_id), batch_id=batch_id, owner=owner, doing="release")
            db.execute(
                "UPDATE batches SET state = 'assigned', owner = NULL, expires_s = NULL WHERE batch_id = ?", (batch_id,)
            )

    def record_step(self, record: StepRecord, *, owner: str | None = None) -> None:
        """Mark the batch trained (final once a checkpoint lists it) and keep the trainer's report."""
        batch_id = record.batch_id
        owner = owner or self._leased_as.get(batch_id)
        with self._transaction() as db:
            found = self._batch(db, "batch_id", batch_id)
            batch = rules.check_holder(found, batch_id=batch_id, owner=owner, doing="record")
            rules.check_step(record, batch=batch, group_ids=self._members(db, batch_id))
            db.execute(
                "INSERT INTO steps(optimizer_step, policy_version, sha256, record) VALUES (?, ?, ?, ?)",
                (record.optimizer_step, record.policy_version, *_sealed(encode(record))),
            )
            db.execute(
                "UPDATE batches SET state = 'trained', owner = NULL, expires_s = NULL WHERE batch_id = ?", (batch_id,)
            )
            db.execute(
                "UPDATE groups SET state = 'trained', trained_step = ? WHERE batch_id = ?",
                (record.optimizer_step, batch_id),
            )

    def steps(self, *, after: int = 0, abandoned: bool = False) -> Sequence[tuple[int, StepRecord]]:
        """Return (row, record) after that row: of the surviving history, or of the abandoned ones."""
        with self._transaction("DEFERRED") as db:
            found = db.execute(
                f"SELECT sha256, record, seal, {', '.join(SEALED['steps'])} FROM steps WHERE row > ? ORDER BY row",
                (after,),
            ).fetchall()
        records: list[tuple[int, StepRecord]] = []
        for digest, data, said, *columns in found:
            row, gone = columns[0], columns[-1]
            self._check_seal(said, columns, what=f"step record {row}")
            if bool(gone) is abandoned:
                records.append((row, decode(self._unsealed(digest, data, what=f"step record {row}"), StepRecord)))
        return records

    def leased_batches(self) -> Sequence[int]:
        """Return the ids of the batches that a trainer holds now, ascending."""
        with self._transaction("DEFERRED") as db:
            found = db.execute("SELECT batch_id FROM batches WHERE state = 'leased' ORDER BY batch_id").fetchall()
        return [batch_id for (batch_id,) in found]

    def waiting_groups(self) -> Sequence[str]:
        """Return the ids of groups that are neither trained nor dropped, in order of id."""
        with self._transaction("DEFERRED") as db:
            found = db.execute(
                "SELECT group_id FROM groups WHERE state IN ('buffered', 'assigned') ORDER BY group_id"
            ).fetchall()
        return [group_id for (group_id,) in found]

    def reconcile(self, commit: CommitPoint) -> Reconciliation:
        """Make the store agree with the commit point: release what it does not list.

        Raises:
            StoreError: if the checkpoint speaks of groups or journal entries that this store does not have.
        """
        with self._transaction() as db:
            plan = rules.plan_reconciliation(
                commit, groups=self._group_rows(db, None), journal_entries=_journal_entries(db)
            )
            db.executemany(
                "UPDATE groups SET state = 'trained', trained_step = ? WHERE group_id = ?",
                [(step, group_id) for group_id, step in plan.trained],
            )
            db.executemany(
                "UPDATE groups SET state = 'buffered', batch_id = NULL, position = NULL, trained_step = NULL "
                "WHERE group_id = ?",
                [(group_id,) for group_id in plan.released],
            )
            db.execute(
                "DELETE FROM batches WHERE batch_id NOT IN (SELECT value FROM json_each(?))",
                (json.dumps(sorted(plan.kept_batches)),),
            )
            db.execute("UPDATE batches SET state = 'trained', owner = NULL, expires_s = NULL")
            db.execute("UPDATE steps SET abandoned = 1 WHERE optimizer_step > ?", (commit.optimizer_step,))
            versions = db.execute(
                "SELECT DISTINCT policy_version FROM steps WHERE abandoned = 1 AND policy_version > ? ORDER BY 1",
                (commit.policy_version,),
            ).fetchall()
        self._leased_as.clear()
        return Reconciliation(
            trained_group_ids=tuple(group_id for group_id, _ in plan.trained),
            released_group_ids=plan.released,
            abandoned_versions=tuple(version for (version,) in versions),
        )

    def set_note(self, key: str, value: Any) -> None:
        """Keep a small JSON value durably."""
        text = rules.encode_note(key, value)
        with self._transaction() as db:
            db.execute(
                "INSERT INTO notes(key, value) VALUES (?, ?) ON CONFLICT(key) DO UPDATE SET value = excluded.value",
                (key, text),
            )

    def note(self, key: str, default: Any = None) -> Any:
        """Return a note, or `default` where there is none."""
        with self._transaction("DEFERRED") as db:
            found = db.execute("SELECT value, seal FROM notes WHERE key = ?", (key,)).fetchone()
        return default if found is None else self._read_note(key, *found)

    def notes(self, *, prefix: str) -> dict[str, Any]:
        """Return all notes whose key begins with `prefix`."""
        with self._transaction("DEFERRED") as db:
            found = db.execute(
                "SELECT key, value, seal FROM notes WHERE substr(key, 1, ?) = ? ORDER BY key", (len(prefix), prefix)
            ).fetchall()
        return {key: self._read_note(key, text, said) for key, text, said in found}

    def _read_note(self, key: str, text: str, said: bytes | None) -> Any:
        self._check_seal(said, (key, text), what=f"note {key!r}")
        return json.loads(text)

    def statistics(self) -> StoreStatistics:
        """Return depth and bytes by state."""
        with self._transaction("DEFERRED") as db:
            count = dict(db.execute("SELECT state, COUNT(*) FROM groups GROUP BY state").fetchall())
            (held,) = db.execute(
                "SELECT COUNT(*) FROM groups JOIN batches USING (batch_id) WHERE batches.state = 'leased'"
            ).fetchone()
            (sample_bytes,) = db.execute("SELECT COALESCE(SUM(LENGTH(blob)), 0) FROM samples").fetchone()
            return StoreStatistics(
                buffered_groups=count.get("buffered", 0),
                assigned_groups=count.get("assigned", 0) - held,
                leased_groups=held,
                trained_groups=count.get("trained", 0),
                dropped_groups=count.get("dropped", 0),
                sample_bytes=sample_bytes,
                journal_entries=_journal_entries(db),
            )

    def close(self) -> None:
        """Close the file; the store cannot be used afterwards."""
        with self._lock, translated(self._path):
            self._connection.close()

    # reading with a comparison

    def _group_rows(self, db: sqlite3.Connection, ids: Iterable[str] | None) -> list[GroupRow]:
        """Return the rows of these groups, or of all, oldest first."""
        query = f"SELECT seal, {', '.join(SEALED['groups'])} FROM groups"
        if ids is None:
            found = db.execute(f"{query} ORDER BY seq")
        else:
            found = db.execute(
                f"{query} WHERE group_id IN (SELECT value FROM json_each(?)) ORDER BY seq", (json.dumps(sorted(ids)),)
            )
        return [self._group_row(*row) for row in found]

    def _group_row(self, said: bytes | None, group_id: str, *columns: Any) -> GroupRow:
        self._check_seal(said, (group_id, *columns), what=f"the row of group {group_id!r}")
        state, batch_id, position, trained_step, reason = columns
        return GroupRow(
            group_id=group_id,
            state=GroupState(state),
            batch_id=batch_id,
            position=position,
            trained_step=trained_step,
            reason=reason,
        )

    def _mentioned_batches(self, db: sqlite3.Connection, transition: Transition) -> list[BatchRow]:
        found = [self._batch(db, "batch_id", assignment.batch_id) for assignment in transition.assignments]
        found += [self._batch(db, "optimizer_step", assignment.optimizer_step) for assignment in transition.assignments]
        return [batch for batch in found if batch is not None]

    def _batch(self, db: sqlite3.Connection, column: str, value: int) -> BatchRow | None:
        found = db.execute(
            f"SELECT seal, {', '.join(SEALED['batches'])} FROM batches WHERE {column} = ?", (value,)
        ).fetchone()
        if found is None:
            return None
        said, *columns = found
        batch_id, optimizer_step, _, state, owner, expires_s = columns
        self._check_seal(said, columns, what=f"the row of batch {batch_id}")
        return BatchRow(
            batch_id=batch_id, optimizer_step=optimizer_step, state=BatchState(state), owner=owner, expires_s=expires_s
        )

    def _members(self, db: sqlite3.Connection, batch_id: int) -> list[str]:
        """Return the ids of a batch's groups in their order; exactly as many as were assigned."""
        query = f"SELECT seal, {', '.join(SEALED['groups'])} FROM groups WHERE batch_id = ? ORDER BY position"
        members = [self._group_row(*row).group_id for row in db.execute(query, (batch_id,))]
        ((wanted,),) = db.execute("SELECT groups FROM batches WHERE batch_id = ?", (batch_id,)).fetchall()
        if len(members) != wanted:
            raise self._damaged(f"batch {batch_id}", f"it has {len(members)} groups, {wanted} were assigned")
        return members

    def _check_seal(self, said: bytes | None, columns: Iterable[object], *, what: str) -> None:
        if said != seal(*columns):
            raise self._damaged(what, "its seal does not fit")

    def _unsealed(self, digest: bytes, data: bytes, *, what: str) -> bytes:
        found = hashlib.sha256(data).digest()
        if found != digest:
            raise self._damaged(what, f"its sha256 is {found.hex()[:16]}..., written was {digest.hex()[:16]}...")
        return data

    def _damaged(self, what: str, why: str) -> StoreError:
        return StoreError(f"{what} in {self._path} is damaged: {why}. {WHAT_TO_DO}")


def _sealed(data: bytes) -> tuple[bytes, bytes]:
    return hashlib.sha256(data).digest(), data


def _assign(db: sqlite3.Connection, transition: Transition) -> None:
    for assignment in transition.assignments:
        db.execute(
            "INSERT INTO batches(batch_id, optimizer_step, groups, state) VALUES (?, ?, ?, 'assigned')",
            (assignment.batch_id, assignment.optimizer_step, len(assignment.group_ids)),
        )
        db.executemany(
            "UPDATE groups SET state = 'assigned', batch_id = ?, position = ? WHERE group_id = ?",
            [(assignment.batch_id, position, group_id) for position, group_id in enumerate(assignment.group_ids)],
        )


def _journal_entries(db: sqlite3.Connection) -> int:
    return db.execute("SELECT COALESCE(MAX(offset), 0) FROM journal").fetchone()[0]
