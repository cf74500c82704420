"""What is particular to the store on SQLite: durability, damage, two processes' handles, the file itself."""

from __future__ import annotations

import sqlite3
import threading

import pytest

from buffer_builders import a_group, a_step, assign, commit_at, put
from rollmill.buffer import SqliteStore, Transition
from rollmill.buffer.sqlite_file import SCHEMA_VERSION
from rollmill.errors import LeaseLost, RunDirectoryError, StoreError


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run" / "store.sqlite"


@pytest.fixture
def store(path):
    made = SqliteStore(path)
    yield made
    made.close()


@pytest.fixture
def other(path, store):
    """The same store as a second process opens it."""
    made = SqliteStore(path, create=False)
    yield made
    made.close()


def raw(path, statement: str, *arguments: object) -> list[tuple]:
    connection = sqlite3.connect(path, isolation_level=None)
    try:
        return connection.execute(statement, arguments).fetchall()
    finally:
        connection.close()


def test_every_commit_is_flushed_to_a_write_ahead_log(store):
    read = store._connection.execute
    assert read("PRAGMA journal_mode").fetchone() == ("wal",)
    assert read("PRAGMA synchronous").fetchone() == (2,)  # FULL


def test_everything_is_there_after_reopening(path):
    first = SqliteStore(path)
    first.apply(put("a", "b", journal=(b"e1", b"e2")))
    first.apply(assign(0, "a", step=0))
    first.set_note("phase", "running")
    first.close()
    again = SqliteStore(path, create=False)
    assert list(again.journal()) == [(1, b"e1"), (2, b"e2")]
    assert again.note("phase") == "running"
    batch = again.lease_batch(optimizer_step=0, owner="t", now_s=0.0, lease_s=1.0)
    assert [group.group_id for group in batch.groups] == ["a"]
    again.close()


def test_a_second_handle_sees_each_commit_at_once(store, other):
    store.apply(put("a", journal=(b"e",)))
    store.apply(assign(0, "a", step=0))
    batch = other.lease_batch(optimizer_step=0, owner="trainer", now_s=0.0, lease_s=10.0)
    assert batch.batch_id == 0
    assert list(store.leased_batches()) == [0]
    other.record_step(a_step(0, "a", step=1))
    assert [record.optimizer_step for _, record in store.steps()] == [1]


def test_a_handle_that_did_not_lease_cannot_record(store, other):
    store.apply(put("a"))
    store.apply(assign(0, "a", step=0))
    store.lease_batch(optimizer_step=0, owner="t1", now_s=0.0, lease_s=10.0)
    with pytest.raises(StoreError, match="this store handle has not leased it"):
        other.record_step(a_step(0, "a", step=1))


def test_a_handle_whose_lease_was_taken_is_told(store, other):
    store.apply(put("a"))
    store.apply(assign(0, "a", step=0))
    store.lease_batch(optimizer_step=0, owner="t1", now_s=0.0, lease_s=10.0)
    other.lease_batch(optimizer_step=0, owner="t2", now_s=11.0, lease_s=10.0)
    with pytest.raises(LeaseLost, match="'t2' leased it"):
        store.record_step(a_step(0, "a", step=1))
    other.record_step(a_step(0, "a", step=1))


def test_a_lease_from_before_a_reconciliation_records_nothing(store, other):
    store.apply(put("a"))
    store.apply(assign(0, "a", step=0))
    store.lease_batch(optimizer_step=0, owner="t1", now_s=0.0, lease_s=10.0)
    other.reconcile(commit_at(0, version=1))
    with pytest.raises(StoreError, match="no such batch"):
        store.record_step(a_step(0, "a", step=1))


@pytest.mark.parametrize("table", ["samples", "journal", "steps"])
def test_a_flipped_byte_is_found_and_its_place_named(path, store, table):
    store.apply(put("group-7", journal=(b"entry",)))
    store.apply(assign(0, "group-7", step=0))
    store.lease_batch(optimizer_step=0, owner="t1", now_s=0.0, lease_s=10.0)
    store.record_step(a_step(0, "group-7", step=1))
    column = {"samples": "blob", "journal": "entry", "steps": "record"}[table]
    ((blob,),) = raw(path, f"SELECT {column} FROM {table}")
    flipped = bytearray(blob)
    flipped[len(flipped) // 2] ^= 1
    raw(path, f"UPDATE {table} SET {column} = ?", bytes(flipped))
    reads = {
        "samples": (lambda: store.group("group-7"), "group 'group-7' in"),
        "journal": (lambda: list(store.journal()), "journal entry 1 in"),
        "steps": (lambda: store.steps(), "step record 1 in"),
    }
    read, named = reads[table]
    with pytest.raises(StoreError, match=f"{named} .* is damaged"):
        read()


def test_a_damaged_group_leases_nothing(path, store):
    store.apply(put("a", "b"))
    store.apply(assign(0, "a", "b", step=0))
    raw(path, "UPDATE samples SET blob = zeroblob(10) WHERE group_id = 'b'")
    with pytest.raises(StoreError, match="group 'b'"):
        store.lease_batch(optimizer_step=0, owner="t1", now_s=0.0, lease_s=10.0)
    assert list(store.leased_batches()) == []


def test_a_full_disk_is_told_with_the_free_bytes_and_undoes_the_transition(store):
    store.apply(put("a", journal=(b"e",)))
    (pages,) = store._connection.execute("PRAGMA page_count").fetchone()
    store._connection.execute(f"PRAGMA max_page_count = {pages}")  # SQLite then answers as on a full disk
    with pytest.raises(StoreError, match=r"disk is full \(\d+ bytes free\)"):
        store.apply(Transition(journal=tuple(b"x" * 4096 for _ in range(8)), puts=(a_group("b"),)))
    store._connection.execute("PRAGMA max_page_count = 1000000")
    assert list(store.journal()) == [(1, b"e")]
    assert list(store.waiting_groups()) == ["a"]
    assert store.apply(put("b", journal=(b"f",))) == 2


def test_a_read_only_database_is_told_as_such(store):
    store._connection.execute("PRAGMA query_only = 1")
    with pytest.raises(RunDirectoryError, match="cannot be written"):
        store.set_note("a", 1)


def test_a_lock_held_too_long_is_told_as_such(path, store):
    impatient = SqliteStore(path, busy_timeout_s=0.01)
    with store._transaction(), pytest.raises(StoreError, match="write lock for longer than the busy timeout"):
        impatient.apply(put("a"))
    impatient.apply(put("a"))
    impatient.close()


def test_a_missing_store_is_not_made_on_resume(path):
    with pytest.raises(RunDirectoryError, match="there is no sample store"):
        SqliteStore(path, create=False)
    assert not path.exists()


def test_a_file_that_is_no_database_is_refused_and_left_alone(tmp_path):
    path = tmp_path / "store.sqlite"
    path.write_bytes(b"certainly no database, but long enough to be looked at" * 30)
    before = path.read_bytes()
    with pytest.raises(RunDirectoryError, match="not a sample store"):
        SqliteStore(path)
    assert path.read_bytes() == before


def test_a_database_of_another_program_is_refused_and_left_alone(tmp_path):
    path = tmp_path / "store.sqlite"
    raw(path, "CREATE TABLE theirs (x)")
    with pytest.raises(RunDirectoryError, match="of another program"):
        SqliteStore(path)
    assert raw(path, "SELECT name FROM sqlite_schema") == [("theirs",)]


def test_another_schema_version_is_refused_with_both_numbers(path):
    SqliteStore(path).close()
    raw(path, f"PRAGMA user_version = {SCHEMA_VERSION + 1}")
    with pytest.raises(
        RunDirectoryError, match=f"version {SCHEMA_VERSION + 1}, this Rollmill reads .* {SCHEMA_VERSION}"
    ):
        SqliteStore(path)


def test_a_folder_that_cannot_be_made_is_told(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunDirectoryError, match="cannot be made"):
        SqliteStore(tmp_path / "file" / "store.sqlite")


def test_threads_take_turns_on_one_handle(store):
    def work(name: str) -> None:
        for number in range(10):
            store.apply(put(f"{name}{number}", journal=(name.encode(),)))

    threads = [threading.Thread(target=work, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert store.statistics().buffered_groups == 30
    entries = [entry for _, entry in store.journal()]
    assert sorted(entries) == [b"a"] * 10 + [b"b"] * 10 + [b"c"] * 10


def test_a_slow_reader_of_the_journal_sees_what_is_appended_meanwhile(store):
    store.apply(Transition(journal=tuple(str(n).encode() for n in range(1000))))
    reader = store.journal()
    assert next(reader) == (1, b"0")
    store.apply(Transition(journal=(b"late",)))
    assert list(reader)[-1] == (1001, b"late")


def test_the_file_keeps_no_samples_of_dropped_groups(path, store):
    store.apply(put("a"))
    store.apply(Transition(drops=(("a", "stale"),)))
    assert raw(path, "SELECT COUNT(*) FROM samples") == [(0,)]
    assert raw(path, "SELECT group_id, state, reason FROM groups") == [("a", "dropped", "stale")]
