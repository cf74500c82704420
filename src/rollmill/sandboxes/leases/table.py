"""The rows of leases in SQLite: each change one transaction, durable before it returns.

Decides nothing. Several processes may have the same file open; each change reads and writes under the write lock, so
that of two owners one comes first.
"""

from __future__ import annotations

import contextlib
import secrets
import sqlite3
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from rollmill.errors import ConfigError, SandboxError
from rollmill.sandboxes.leases.law import Phase, Row
from rollmill.sandboxes.records import SnapshotRef

_APPLICATION_ID = 0x524D4C53  # "RMLS": tells this file from any other SQLite database
_SCHEMA_VERSION = 2
_SCHEMA = """
CREATE TABLE leases (
    sandbox_id TEXT PRIMARY KEY,
    rollout_id TEXT NOT NULL,
    generation INTEGER NOT NULL,
    provider TEXT NOT NULL,
    owner TEXT NOT NULL,
    phase TEXT NOT NULL CHECK (phase IN ('creating', 'running', 'suspended', 'ending')),
    snapshots TEXT NOT NULL,
    refs TEXT NOT NULL DEFAULT '[]',
    expires_s REAL NOT NULL,
    policy_version INTEGER NOT NULL,
    asked_s REAL NOT NULL,
    attempts INTEGER NOT NULL,
    retry_s REAL NOT NULL,
    note TEXT NOT NULL
) STRICT;
CREATE UNIQUE INDEX one_that_is_not_ending ON leases(rollout_id) WHERE phase != 'ending';
CREATE TABLE generations (rollout_id TEXT PRIMARY KEY, last INTEGER NOT NULL) STRICT;
CREATE TABLE about (salt TEXT NOT NULL) STRICT;
"""
_FROM_1 = "ALTER TABLE leases ADD COLUMN refs TEXT NOT NULL DEFAULT '[]'"
_COLUMNS = Row.__struct_fields__
_PUT = (
    f"INSERT INTO leases ({', '.join(_COLUMNS)}) VALUES ({', '.join('?' * len(_COLUMNS))}) ON CONFLICT (sandbox_id) DO "
    f"UPDATE SET {', '.join(f'{name} = excluded.{name}' for name in _COLUMNS[1:])}"
)
_SELECT = f"SELECT {', '.join(_COLUMNS)} FROM leases"


class LeaseTable:
    """The table in one file.

    Args:
        path: made if missing.
        busy_s: longest wait for another process's change.

    Attributes:
        salt: part of every sandbox's id: a table that was deleted and made again gives no id a second time.
    """

    salt: str

    def __init__(self, path: Path, *, busy_s: float = 10.0) -> None:
        self._path = path
        self._lock = threading.RLock()
        with self._translated():
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._connection = sqlite3.connect(path, timeout=busy_s, isolation_level=None, check_same_thread=False)
            try:
                self._prepare()
            except BaseException:
                self._connection.close()
                raise

    def _prepare(self) -> None:
        connection = self._connection
        self._check_whose()  # before anything is changed, and the mode of the journal is
        (mode,) = connection.execute("PRAGMA journal_mode = WAL").fetchone()
        if mode != "wal":
            raise ConfigError(
                f"{self._path}: this file system has no shared memory for SQLite's write-ahead log (mode {mode!r}); "
                "put the table on a local disk"
            )
        connection.execute("PRAGMA synchronous = FULL")
        with self.change():
            (tables,) = connection.execute("SELECT COUNT(*) FROM sqlite_schema").fetchone()
            if not tables:
                for statement in (*_SCHEMA.split(";")[:-1], f"PRAGMA application_id = {_APPLICATION_ID}"):
                    connection.execute(statement)
                connection.execute(f"PRAGMA user_version = {_SCHEMA_VERSION}")
                connection.execute("INSERT INTO about VALUES (?)", (secrets.token_hex(4),))
            if self._check_whose() == 1:
                connection.execute(_FROM_1)
                connection.execute(f"PRAGMA user_version = {_SCHEMA_VERSION}")
        (self.salt,) = connection.execute("SELECT salt FROM about").fetchone()

    def _check_whose(self) -> int:
        """Return the version of the table, 0 for a file without any; refuse what is not ours, or newer."""
        (tables,) = self._connection.execute("SELECT COUNT(*) FROM sqlite_schema").fetchone()
        (application,) = self._connection.execute("PRAGMA application_id").fetchone()
        (version,) = self._connection.execute("PRAGMA user_version").fetchone()
        if tables and (application != _APPLICATION_ID or version not in (1, _SCHEMA_VERSION)):
            raise ConfigError(
                f"{self._path} is no table of leases of version {_SCHEMA_VERSION} (application {application:#x}, "
                f"version {version}); name another file. Nothing was changed in it"
            )
        return version

    def close(self) -> None:
        """Close the file, after a change that another thread makes."""
        with self._lock:
            self._connection.close()

    @contextlib.contextmanager
    def change(self) -> Iterator[None]:
        """Make what happens within one transaction: all of it, or on an error nothing.

        Raises:
            SandboxError: if the disk is full or damaged, or another process holds the lock for too long.
        """
        with self._lock, self._translated():
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._connection.execute("COMMIT")
            except BaseException:
                if self._connection.in_transaction:  # SQLite undoes some changes that fail by itself
                    self._connection.execute("ROLLBACK")
                raise

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            raise SandboxError(
                f"the table of leases {self._path} cannot be used: {error}. The change was undone, and no sandbox was "
                "asked for that it does not know. Check the disk (full?), its owner, and for a stopped process that "
                "holds it"
            ) from error

    # -- rows --------------------------------------------------------------------------------------------------------

    def rows(self, *, provider: str | None = None) -> tuple[Row, ...]:
        """Return all rows, in order of their creation."""
        where, values = ("", ()) if provider is None else (" WHERE provider = ?", (provider,))
        with self._lock, self._translated():
            found = self._connection.execute(f"{_SELECT}{where} ORDER BY rowid", values).fetchall()
        return tuple(map(_row, found))

    def find(self, sandbox_id: str) -> Row | None:
        """Return the row of a sandbox."""
        return self._one("sandbox_id = ?", sandbox_id)

    def current(self, rollout_id: str) -> Row | None:
        """Return the row of a rollout that is not ending."""
        return self._one("rollout_id = ? AND phase != 'ending'", rollout_id)

    def _one(self, where: str, value: str) -> Row | None:
        with self._lock, self._translated():
            found = self._connection.execute(f"{_SELECT} WHERE {where}", (value,)).fetchone()
        return None if found is None else _row(found)

    def put(self, row: Row) -> None:
        """Write a row, within `change`."""
        self._connection.execute(_PUT, _values(row))

    def remove(self, sandbox_id: str) -> None:
        """Remove a row, within `change`."""
        self._connection.execute("DELETE FROM leases WHERE sandbox_id = ?", (sandbox_id,))

    def next_generation(self, rollout_id: str) -> int:
        """Count a rollout's generation up, within `change`; it outlives the rows, so that no old owner fits again."""
        self._connection.execute(
            "INSERT INTO generations VALUES (?, 1) ON CONFLICT (rollout_id) DO UPDATE SET last = last + 1",
            (rollout_id,),
        )
        return self._connection.execute("SELECT last FROM generations WHERE rollout_id = ?", (rollout_id,)).fetchone()[
            0
        ]

    def forget(self, rollout_id: str) -> None:
        """Forget the generations of a rollout that is over for good and has no row.

        A table keeps one number for every rollout that it ever had, until this is called. A rollout of the same name
        that is started afterwards would begin with an id that was given before.
        """
        with self.change():
            self._connection.execute(
                "DELETE FROM generations WHERE rollout_id = ?1 AND NOT EXISTS "
                "(SELECT 1 FROM leases WHERE leases.rollout_id = ?1)",
                (rollout_id,),
            )

    def edit(self, sandbox_id: str, change: Callable[[Row], Row | None]) -> Row | None:
        """Change the row of a sandbox, or with `None` remove it; return what it is now, `None` if there is none."""
        with self.change():
            row = self.find(sandbox_id)
            if row is None:
                return None
            after = change(row)
            if after is None:
                self.remove(sandbox_id)
            elif after != row:
                self.put(after)
        return after

    def swap(self, row: Row, after: Row | None) -> bool:
        """Put a row in place of one, with `None` remove it, if nobody has changed that; return whether so."""
        with self.change():
            is_same = self.find(row.sandbox_id) == row
            if is_same and after is None:
                self.remove(row.sandbox_id)
            elif is_same and after is not None:
                self.put(after)
        return is_same


def _values(row: Row) -> tuple[object, ...]:
    found = {name: getattr(row, name) for name in _COLUMNS}
    found["phase"] = row.phase.value
    for name in ("snapshots", "refs"):
        found[name] = msgspec.json.encode(getattr(row, name)).decode()
    return tuple(found.values())


def _row(values: tuple[object, ...]) -> Row:
    found = dict(zip(_COLUMNS, values, strict=True))
    found["phase"] = Phase(found["phase"])
    found["snapshots"] = msgspec.json.decode(str(found["snapshots"]), type=tuple[str, ...])
    found["refs"] = msgspec.json.decode(str(found["refs"]), type=tuple[SnapshotRef, ...])
    return Row(**found)  # pyright: ignore[reportArgumentType]
