"""The database file behind `SqliteStore`: opening, schema, damage, and SQLite's errors in our words.

SQLite has no checksum of its own pages. So every row that says something carries one: large values a sha256 beside
them, small rows a `seal` over their columns, kept by triggers. Whatever is read is compared; `damages` looks at all.

Decides nothing about samples.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from rollmill.errors import RollmillError, RunDirectoryError, StoreError
from rollmill.file_lock import take_lock

SCHEMA_VERSION = 2
PREPARE_LIMIT_S = 30.0
WHAT_TO_DO = (
    "The disk or another program changed it; check the disk. Without its books a run cannot go on: restore "
    "store.sqlite with its -wal file from a copy and resume. What a checkpoint learned is safe: start a new run with "
    "--set model.source=<the newest folder in checkpoints>."
)
_APPLICATION_ID = 0x524D5354  # "RMST": tells our file from any other SQLite database

_SCHEMA = """
CREATE TABLE journal (
    offset INTEGER PRIMARY KEY,
    sha256 BLOB NOT NULL,
    entry BLOB NOT NULL
) STRICT;
CREATE TABLE groups (
    seq INTEGER PRIMARY KEY,
    group_id TEXT NOT NULL UNIQUE,
    state TEXT NOT NULL CHECK (state IN ('buffered', 'assigned', 'trained', 'dropped')),
    batch_id INTEGER,
    position INTEGER,
    trained_step INTEGER,
    reason TEXT,
    seal BLOB
) STRICT;
CREATE INDEX groups_of_batch ON groups(batch_id, position);
CREATE TABLE samples (
    group_id TEXT PRIMARY KEY,
    sha256 BLOB NOT NULL,
    blob BLOB NOT NULL
) STRICT;
CREATE TABLE batches (
    batch_id INTEGER PRIMARY KEY,
    optimizer_step INTEGER NOT NULL UNIQUE,
    groups INTEGER NOT NULL,
    state TEXT NOT NULL CHECK (state IN ('assigned', 'leased', 'trained')),
    owner TEXT,
    expires_s REAL,
    seal BLOB
) STRICT;
CREATE TABLE steps (
    row INTEGER PRIMARY KEY AUTOINCREMENT,
    optimizer_step INTEGER NOT NULL,
    policy_version INTEGER NOT NULL,
    abandoned INTEGER NOT NULL DEFAULT 0,
    sha256 BLOB NOT NULL,
    record BLOB NOT NULL,
    seal BLOB
) STRICT;
CREATE TABLE notes (key TEXT PRIMARY KEY, value TEXT NOT NULL, seal BLOB) STRICT;
"""

SEALED = {
    "groups": ("group_id", "state", "batch_id", "position", "trained_step", "reason"),
    "batches": ("batch_id", "optimizer_step", "groups", "state", "owner", "expires_s"),
    "steps": ("row", "optimizer_step", "policy_version", "abandoned"),
    "notes": ("key", "value"),
}
"""Columns that the seal of a row covers; the first names the row."""
_DIGESTED = {"journal": ("offset", "entry"), "samples": ("group_id", "blob"), "steps": ("row", "record")}
_LISTED = 5


def seal(*values: object) -> bytes:
    """Return the checksum of a row's columns."""
    return hashlib.blake2b(repr(values).encode(), digest_size=8).digest()


def _triggers() -> str:
    """Return the triggers that keep the seals: no statement that changes a row can forget it."""
    return "\n".join(
        _trigger(table, event, columns)
        for table, columns in SEALED.items()
        for event in ("INSERT", f"UPDATE OF {', '.join(columns)}")
    )


def _trigger(table: str, event: str, columns: tuple[str, ...]) -> str:
    new = ", ".join(f"NEW.{column}" for column in columns)
    return (
        f"CREATE TRIGGER {table}_sealed_{event.split()[0].lower()} AFTER {event} ON {table} BEGIN "
        f"UPDATE {table} SET seal = seal({new}) WHERE rowid = NEW.rowid; END;"
    )


def damages(connection: sqlite3.Connection) -> tuple[str, ...]:
    """Return every damage of the file in words: its schema, structure, seals and digests, gaps in the journal."""
    if _schema_of(connection) != _expected_schema():
        return ("the schema is not the one that was written",)
    found = [f"structure: {text}" for (text,) in connection.execute("PRAGMA integrity_check(5)") if text != "ok"]
    if found:
        # The rows of a broken tree cannot be trusted to be all the rows.
        return tuple(found)
    for table, columns in SEALED.items():
        names = f"SELECT {columns[0]} FROM {table} WHERE seal IS NOT seal({', '.join(columns)})"
        found += _listed(f"{table}: the seal does not fit the row", connection.execute(names))
    for table, (name, value) in _DIGESTED.items():
        names = f"SELECT {name} FROM {table} WHERE sha256 IS NOT sha256({value})"
        found += _listed(f"{table}: the digest does not fit the content", connection.execute(names))
    (entries, last) = connection.execute("SELECT COUNT(*), COALESCE(MAX(offset), 0) FROM journal").fetchone()
    if entries != last:
        found.append(f"journal: {last - entries} of {last} entries are missing")
    lacking = "SELECT group_id FROM groups WHERE state != 'dropped' AND group_id NOT IN (SELECT group_id FROM samples)"
    found += _listed("samples: missing", connection.execute(lacking))
    return tuple(found)


def _schema_of(connection: sqlite3.Connection) -> list[tuple[str, str]]:
    return connection.execute("SELECT name, sql FROM sqlite_schema WHERE sql IS NOT NULL ORDER BY name").fetchall()


def _expected_schema() -> list[tuple[str, str]]:
    with contextlib.closing(sqlite3.connect(":memory:")) as fresh:
        fresh.executescript(f"{_SCHEMA} {_triggers()}")
        return _schema_of(fresh)


def _listed(what: str, rows: sqlite3.Cursor) -> list[str]:
    names = [str(name) for (name,) in rows]
    if not names:
        return []
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return [f"{what}: {', '.join(names[:_LISTED])}{more}"]


def open_database(path: Path, *, create: bool, busy_timeout_s: float) -> sqlite3.Connection:
    """Open (and where allowed make) the store's database, ready for several processes.

    Raises:
        RunDirectoryError: if it is missing, unwritable, not a store, or of another schema version.
    """
    _check_place(path, create=create)
    with translated(path):
        connection = sqlite3.connect(path, timeout=busy_timeout_s, isolation_level=None, check_same_thread=False)
        try:
            connection.create_function("seal", -1, seal, deterministic=True)
            connection.create_function("sha256", 1, lambda data: hashlib.sha256(data).digest(), deterministic=True)
            with _directory_lock(path.parent):
                _prepare(connection, path, create=create)
        except BaseException:
            connection.close()
            raise
    return connection


def _check_place(path: Path, *, create: bool) -> None:
    if not create and not path.exists():
        raise RunDirectoryError(
            f"there is no sample store at {path}. Resume needs the run directory of an earlier run; start a new run "
            "without --resume."
        )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunDirectoryError(
            f"the folder {path.parent} cannot be made: {error.strerror}. Choose another run.directory."
        ) from error
    target = path if path.exists() else path.parent
    if not os.access(target, os.W_OK):
        raise RunDirectoryError(
            f"{target} is not writable for this user (uid {os.getuid()}). Change its permissions or choose another "
            "run.directory."
        )


@contextlib.contextmanager
def _directory_lock(directory: Path) -> Iterator[None]:
    """Keep two processes from preparing one file at once; the kernel frees the lock if its holder dies."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        if not take_lock(handle, limit_s=PREPARE_LIMIT_S):
            raise StoreError(
                f"another process has been opening the sample store in {directory} for {PREPARE_LIMIT_S:g} s. Is it "
                f"stopped, or does its disk hang? See who with `fuser {directory}`; if it hangs, end it."
            )
        yield
        os.fsync(handle)  # the new file's name is durable too
    finally:
        os.close(handle)


def _prepare(connection: sqlite3.Connection, path: Path, *, create: bool) -> None:
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    (tables,) = connection.execute("SELECT COUNT(*) FROM sqlite_schema").fetchone()
    if not tables and not create:
        raise RunDirectoryError(
            f"{path} is empty: its beginning was cut off, or the run was killed before its first event. Restore the "
            "file from a copy, or start a new run."
        )
    if tables and application != _APPLICATION_ID:
        raise RunDirectoryError(
            f"{path} is a SQLite database of another program. Choose another run.directory; nothing was changed."
        )
    if tables and version != SCHEMA_VERSION:
        raise RunDirectoryError(
            f"{path} has schema version {version}, this Rollmill reads version {SCHEMA_VERSION}. Resume with the "
            "Rollmill that wrote it, or start a new run."
        )
    (mode,) = connection.execute("PRAGMA journal_mode = WAL").fetchone()
    if mode != "wal":
        raise RunDirectoryError(
            f"{path}: this file system has no shared memory for SQLite's write-ahead log (mode {mode!r}). Put the "
            "run directory on a local disk."
        )
    connection.execute("PRAGMA synchronous = FULL")
    if not tables:
        connection.executescript(
            f"BEGIN IMMEDIATE; {_SCHEMA} {_triggers()} PRAGMA application_id = {_APPLICATION_ID}; "
            f"PRAGMA user_version = {SCHEMA_VERSION}; COMMIT;"
        )


@contextlib.contextmanager
def translated(path: Path) -> Iterator[None]:
    """Raise SQLite's errors as ours, with the next action."""
    try:
        yield
    except sqlite3.Error as error:
        raise translate(error, path=path) from error
    except UnicodeDecodeError as error:
        # Text in the file, or in SQLite's own message about it, is no UTF-8 any more.
        raise StoreError(f"{path}: {error}. The file is damaged. {WHAT_TO_DO}") from error


def translate(error: sqlite3.Error, *, path: Path) -> RollmillError:
    """Return our error for one of SQLite's."""
    name = getattr(error, "sqlite_errorname", "") or type(error).__name__
    said = f"{path}: {error} ({name})"
    if name.startswith("SQLITE_NOTADB"):
        return RunDirectoryError(
            f"{said}. The file is not a sample store, or its beginning was overwritten. Choose another run.directory, "
            "or restore the file."
        )
    if name.startswith(("SQLITE_READONLY", "SQLITE_CANTOPEN", "SQLITE_PERM")):
        return RunDirectoryError(
            f"{said}. The run directory cannot be written. Change its permissions, remount it writable, or choose "
            "another run.directory."
        )
    if name.startswith("SQLITE_FULL"):
        free = shutil.disk_usage(path.parent).free
        return StoreError(
            f"{said}. The disk is full ({free} bytes free); the change was undone. Free some space and resume."
        )
    if name.startswith("SQLITE_BUSY"):
        return StoreError(
            f"{said}. Another process has held the store's write lock for longer than the busy timeout. Look for a "
            "stopped or swapped-out process of this run; the change was undone."
        )
    if name.startswith("SQLITE_CORRUPT"):
        return StoreError(f"{said}. The file is damaged. {WHAT_TO_DO}")
    return StoreError(f"{said}. The change was undone. Check the disk and the kernel's log, then resume.")
