"""The file of a table of leases: what it leaves alone, what its errors say, and what it forgets."""

from __future__ import annotations

import contextlib
import sqlite3
import threading
from pathlib import Path

import pytest

from rollmill.errors import ConfigError, SandboxError
from rollmill.sandboxes.leases import LeaseTable, Phase, Row

ROW = Row(sandbox_id="s", rollout_id="r", generation=1, provider="p", owner="o", phase=Phase.RUNNING)


def test_a_database_of_somebody_else_is_refused_and_not_a_byte_of_it_is_changed(tmp_path):
    path = tmp_path / "other.sqlite"
    with contextlib.closing(sqlite3.connect(path)) as other:
        other.execute("CREATE TABLE things (name TEXT)")
        other.commit()
    before = path.read_bytes()
    with pytest.raises(ConfigError, match="Nothing was changed in it"):
        LeaseTable(path)
    assert (path.read_bytes(), [one.name for one in tmp_path.iterdir()]) == (before, ["other.sqlite"])


def test_a_change_that_sqlite_itself_undid_fails_with_its_own_reason(tmp_path):
    table = LeaseTable(tmp_path / "leases.sqlite")

    def fails_as_a_broken_disk_does(table: LeaseTable) -> None:
        with table.change():
            table.put(ROW)
            table._connection.execute("ROLLBACK")  # what SQLite does by itself at an I/O error or a full disk
            raise sqlite3.OperationalError("disk I/O error")

    with pytest.raises(SandboxError, match="disk I/O error"):
        fails_as_a_broken_disk_does(table)
    with table.change():
        table.put(ROW)
    assert table.rows() == (ROW,)
    table.close()


def test_a_table_is_closed_after_the_change_that_another_thread_makes(tmp_path: Path):
    table, begun, go_on = LeaseTable(tmp_path / "leases.sqlite"), threading.Event(), threading.Event()
    failures: list[BaseException] = []

    def change() -> None:
        try:
            with table.change():
                table.put(ROW)
                begun.set()
                go_on.wait(10.0)
        except SandboxError as error:
            failures.append(error)

    changing = threading.Thread(target=change)
    changing.start()
    assert begun.wait(10.0)
    closing = threading.Thread(target=table.close)
    closing.start()
    closing.join(0.05)  # it cannot end yet; if it did, the change would fail
    go_on.set()
    for one in (changing, closing):
        one.join(10.0)
    assert failures == []
    again = LeaseTable(tmp_path / "leases.sqlite")
    assert again.rows() == (ROW,)
    again.close()


def test_a_count_of_generations_outlives_its_rows_until_it_is_forgotten(tmp_path):
    table = LeaseTable(tmp_path / "leases.sqlite")

    def next_one() -> int:
        with table.change():
            return table.next_generation("r")

    assert [next_one(), next_one()] == [1, 2]
    with table.change():
        table.put(ROW)
    table.forget("r")
    assert next_one() == 3  # it has a row
    table.edit("s", lambda _: None)
    table.forget("r")
    assert next_one() == 1
    table.close()
