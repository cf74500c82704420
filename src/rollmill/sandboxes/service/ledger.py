"""What a service has promised its callers, in SQLite: what a restarted one adopts or ends.

One row for each sandbox, written before anything is made for it, and one for each snapshot that is a template. Changes
are made one after the other in a thread of their own. Only what is to outlive a power cut waits for the disk: nothing
else of a sandbox does. Decides nothing; `adoption` does.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import fcntl
import os
import secrets
import sqlite3
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

import msgspec

from rollmill.errors import ConfigError, SandboxError
from rollmill.sandboxes.records import Record, SandboxSpec, SnapshotRef
from rollmill.sandboxes.service.law import Standing
from rollmill.sandboxes.service.served import Order
from rollmill.sandboxes.service.shelf import Kept

T = TypeVar("T")
_APPLICATION_ID = 0x524D5356  # "RMSV": tells this file from any other SQLite database
_VERSION = 1
_SCHEMA = """
CREATE TABLE sandboxes (sandbox_id TEXT PRIMARY KEY, row TEXT NOT NULL) STRICT;
CREATE TABLE templates (snapshot_id TEXT PRIMARY KEY, row TEXT NOT NULL) STRICT;
CREATE TABLE about (salt TEXT NOT NULL) STRICT;
"""


class SandboxRow(Record, frozen=True, kw_only=True):
    """One sandbox of the service.

    Attributes:
        sandbox_id: as its callers know it.
        order: what its creator wants.
        spec: what it is made of.
        envs: environment of its commands.
        token: opens it.
        standing: as its callers see it.
        started_wall_s: when it was made.
        end_wall_s: when its timeout ends.
        lives: how often it was started.
        backend_id: what the provider may have of it.
        snapshot: name under which its files may be kept; empty for none.
        files: these, once they are.
    """

    sandbox_id: str
    order: Order
    spec: SandboxSpec
    envs: Mapping[str, str]
    token: str
    standing: Standing
    started_wall_s: float
    end_wall_s: float
    lives: int
    backend_id: str
    snapshot: str = ""
    files: SnapshotRef | None = None


class Ledger:
    """The rows in one file, which one service has at a time.

    Args:
        path: made if missing, for this user alone: tokens are in it.
        busy_s: longest wait for the file.
        in_thread: whether changes run beside the loop, as they wait for the disk.

    Raises:
        ConfigError: if another service has it, or it is no ledger.

    Attributes:
        salt: part of the names of this service's snapshots, so that it sweeps no others.
    """

    salt: str

    def __init__(self, path: Path, *, busy_s: float = 10.0, in_thread: bool = True) -> None:
        self._path, self._in_thread = path, in_thread
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
            # A file of its own: SQLite's locks go when any descriptor of its file is closed.
            self._file = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(
                f"the leases of a service cannot be kept in {path}: {error}. Name another file."
            ) from error
        self._thread = concurrent.futures.ThreadPoolExecutor(max_workers=1, thread_name_prefix="ledger")
        try:
            self._take()
            self._connection = sqlite3.connect(path, timeout=busy_s, isolation_level=None, check_same_thread=False)
            self.salt = self._prepare()
        except BaseException as error:
            self._thread.shutdown()
            os.close(self._file)
            if isinstance(error, sqlite3.Error):
                raise ConfigError(f"{path} is no ledger of a service: {error}. Name another file.") from error
            raise

    def _take(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"another service has its leases in {self._path}; each needs a file of its own (--leases)"
            ) from None

    def _prepare(self) -> str:
        connection = self._connection
        connection.execute("PRAGMA journal_mode = WAL")
        (tables,) = connection.execute("SELECT COUNT(*) FROM sqlite_schema").fetchone()
        if not tables:
            script = f"{_SCHEMA} PRAGMA application_id = {_APPLICATION_ID}; PRAGMA user_version = {_VERSION};"
            connection.executescript(f"BEGIN; {script} INSERT INTO about VALUES ('{secrets.token_hex(4)}'); COMMIT;")
        application = connection.execute("PRAGMA application_id").fetchone()[0]
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        if (application, version) != (_APPLICATION_ID, _VERSION):
            connection.close()
            raise ConfigError(
                f"{self._path} is no ledger of a service of version {_VERSION} (application {application:#x}, version "
                f"{version}); name another file. Nothing was changed in it"
            )
        return connection.execute("SELECT salt FROM about").fetchone()[0]

    def close(self) -> None:
        """Wait for the changes that were asked for, and let the file go."""
        self._thread.shutdown()
        self._connection.close()
        os.close(self._file)

    # -- rows --------------------------------------------------------------------------------------------------------

    def sandboxes(self) -> tuple[SandboxRow, ...]:
        """Return the rows of sandboxes, in order of their making. Blocks."""
        return self._read("sandboxes", SandboxRow)

    def templates(self) -> tuple[Kept, ...]:
        """Return the snapshots that are templates, in order of their making. Blocks."""
        return self._read("templates", Kept)

    def _read(self, table: str, kind: type[T]) -> tuple[T, ...]:
        found = self._connection.execute(f"SELECT row FROM {table} ORDER BY rowid").fetchall()
        try:
            return tuple(msgspec.json.decode(row, type=kind) for (row,) in found)
        except msgspec.MsgspecError as error:
            raise ConfigError(
                f"{self._path} holds a row of {table} that this version does not understand: {error}. Use the version "
                "that wrote it, or name another file; nothing was changed in it"
            ) from error

    def put(self, row: SandboxRow) -> asyncio.Future[None]:
        """Write a sandbox's row; whoever need not know when it stands need not wait."""
        durable = row.snapshot != ""
        return self._put("sandboxes", "sandbox_id", row.sandbox_id, row, durable=durable)

    def remove(self, sandbox_id: str) -> asyncio.Future[None]:
        """Remove a sandbox's row."""
        return self._remove("sandboxes", "sandbox_id", sandbox_id)

    def put_template(self, kept: Kept) -> asyncio.Future[None]:
        """Write a template's row."""
        return self._put("templates", "snapshot_id", kept.id, kept, durable=True)

    def remove_template(self, snapshot_id: str) -> asyncio.Future[None]:
        """Remove a template's row."""
        return self._remove("templates", "snapshot_id", snapshot_id)

    def _put(self, table: str, key: str, name: str, row: Record, *, durable: bool) -> asyncio.Future[None]:
        text = msgspec.json.encode(row).decode()
        statement = f"INSERT INTO {table} VALUES (?, ?) ON CONFLICT ({key}) DO UPDATE SET row = excluded.row"
        return self._later(lambda: self._change(statement, (name, text), durable=durable))

    def _remove(self, table: str, key: str, name: str) -> asyncio.Future[None]:
        return self._later(lambda: self._change(f"DELETE FROM {table} WHERE {key} = ?", (name,), durable=False))

    async def read(self) -> tuple[tuple[SandboxRow, ...], tuple[Kept, ...]]:
        """Return the rows of sandboxes and of templates.

        Raises:
            ConfigError: if this version does not understand one.
        """
        return await self._later(lambda: (self.sandboxes(), self.templates()))

    def _later(self, work: Callable[[], T]) -> asyncio.Future[T]:
        if not self._in_thread:
            now = asyncio.get_running_loop().create_future()
            now.set_result(work())
            return now
        future = asyncio.wrap_future(self._thread.submit(work))
        future.add_done_callback(lambda done: done.cancelled() or done.exception())
        return future

    def _change(self, statement: str, values: tuple[str, ...], *, durable: bool) -> None:
        try:
            self._connection.execute(f"PRAGMA synchronous = {'FULL' if durable else 'NORMAL'}")
            self._connection.execute(statement, values)
        except sqlite3.Error as error:
            raise SandboxError(
                f"the ledger {self._path} cannot be written: {error}. Nothing was made that it does not know; check "
                "the disk (full?)"
            ) from error
