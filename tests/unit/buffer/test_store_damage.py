"""A damaged file of the sample store: found, or without consequence; never read as if nothing had happened."""

from __future__ import annotations

import resource
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from buffer_builders import a_group, a_step, assign, drop, put
from rollmill.buffer import SqliteStore, Transition
from rollmill.errors import RollmillError, StoreError
from rollmill.types import encode

TRANSACTIONS = 8


def write_some(store: SqliteStore) -> Iterator[int]:
    """A little of everything, one transaction each; yields after each."""
    yield store.apply(put("a", "b", "c", journal=(b"one", b"two")))
    yield store.apply(assign(0, "a", "b", step=0))
    store.lease_batch(optimizer_step=0, owner="trainer", now_s=0.0, lease_s=9.0)
    yield 0
    store.record_step(a_step(0, "a", "b", step=1))
    yield 0
    store.set_note("phase", "running")
    yield 0
    yield store.apply(drop("c", "stale"))
    yield store.apply(put("d", journal=(b"three",)))
    yield store.apply(assign(1, "d", step=1))


def content(store: SqliteStore) -> tuple:
    """Everything that a reader can be told."""
    with closing(sqlite3.connect(store._path)) as db:
        rows = [
            db.execute(f"SELECT * FROM {table} ORDER BY 1").fetchall()
            for table in ("groups", "batches", "steps", "notes", "samples")
        ]
    return (*map(tuple, rows), list(store.journal()), [encode(record) for _, record in store.steps()])


@pytest.fixture(scope="module")
def sound(tmp_path_factory) -> tuple[Path, tuple]:
    """A closed store, folded into its one file, and its content."""
    path = tmp_path_factory.mktemp("sound") / "store.sqlite"
    store = SqliteStore(path)
    assert len(list(write_some(store))) == TRANSACTIONS
    whole = content(store)
    store.close()
    assert not path.with_name("store.sqlite-wal").exists()
    return path, whole


@pytest.fixture(scope="module")
def killed(tmp_path_factory) -> tuple[Path, list[tuple]]:
    """The files as SIGKILL leaves them, all changes in the write-ahead log; and the content after each transaction."""
    folder = tmp_path_factory.mktemp("killed")
    store = SqliteStore(folder / "living" / "store.sqlite")
    contents = [content(store), *(content(store) for _ in write_some(store))]
    for suffix in ("", "-wal"):
        shutil.copyfile(folder / "living" / f"store.sqlite{suffix}", folder / f"store.sqlite{suffix}")
    store.close()
    return folder, contents


def read_whole(path: Path) -> tuple:
    """What a start does: open, look at everything, read."""
    store = SqliteStore(path, create=False)
    try:
        store.verify()
        return content(store)
    finally:
        store.close()


def copy_of(folder: Path, target: Path) -> Path:
    target.mkdir(exist_ok=True)
    for file in folder.glob("store.sqlite*"):
        shutil.copyfile(file, target / file.name)
    return target / "store.sqlite"


def flip(path: Path, at: int, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << bit
    path.write_bytes(bytes(data))


@settings(max_examples=40, deadline=None)
@given(where=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_a_flipped_bit_anywhere_in_the_file_is_found_or_changes_nothing(sound, tmp_path_factory, where, bit):
    source, whole = sound
    path = copy_of(source.parent, tmp_path_factory.mktemp("flipped"))
    flip(path, int(where * path.stat().st_size), bit)
    try:
        found = read_whole(path)
    except RollmillError:
        return
    assert found == whole


@settings(max_examples=40, deadline=None)
@given(where=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_a_flipped_bit_in_the_log_is_found_or_leaves_whole_transactions(killed, tmp_path_factory, where, bit):
    folder, contents = killed
    path = copy_of(folder, tmp_path_factory.mktemp("flipped"))
    log = path.with_name("store.sqlite-wal")
    flip(log, int(where * log.stat().st_size), bit)
    try:
        found = read_whole(path)
    except RollmillError:
        return
    assert found in contents


@pytest.mark.parametrize("share", [0.0, 0.003, 0.1, 0.5, 0.9, 0.9999, 1.0])
def test_a_torn_log_leaves_whole_transactions(killed, tmp_path, share):
    """SQLite's log has a checksum per frame: what was not written whole has not happened."""
    folder, contents = killed
    path = copy_of(folder, tmp_path / "torn")
    log = path.with_name("store.sqlite-wal")
    data = log.read_bytes()
    log.write_bytes(data[: int(len(data) * share)])
    try:
        found = read_whole(path)
    except RollmillError:
        assert share < 1
        return
    assert found in contents
    assert (found == contents[-1]) == (share == 1.0)


@pytest.mark.parametrize("length", [1, 99, 100, 4096, 4097, -4097, -4096, -1])
def test_a_torn_file_is_refused(sound, tmp_path, length):
    source, _ = sound
    path = copy_of(source.parent, tmp_path / "torn")
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(RollmillError):
        read_whole(path)


@pytest.mark.parametrize("bit", [0, 7])
@pytest.mark.parametrize("text", [b"CREATE TRIGGER groups_sealed_insert", b"NOT NULL UNIQUE", b"NEW.trained_step"])
def test_a_flipped_bit_in_the_schema_is_found(sound, tmp_path, text, bit):
    """Bit 7 makes the text no UTF-8 any more, which Python reports in a way of its own."""
    source, _ = sound
    path = copy_of(source.parent, tmp_path / "flipped")
    flip(path, path.read_bytes().index(text) + 2, bit)
    with pytest.raises(RollmillError):
        read_whole(path)


@pytest.mark.parametrize(
    ("statement", "named"),
    [
        ("UPDATE groups SET state = 'buffered' WHERE group_id = 'a'", "groups: the seal does not fit the row: a"),
        ("UPDATE groups SET batch_id = 7 WHERE group_id = 'd'", "groups: the seal does not fit the row: d"),
        ("UPDATE batches SET optimizer_step = 5 WHERE batch_id = 1", "batches: the seal does not fit the row: 1"),
        ("UPDATE steps SET abandoned = 1", "steps: the seal does not fit the row: 1"),
        ("UPDATE steps SET record = zeroblob(9)", "steps: the digest does not fit the content: 1"),
        ("UPDATE notes SET value = '\"stopping\"'", "notes: the seal does not fit the row: phase"),
        ("UPDATE samples SET blob = zeroblob(9) WHERE group_id = 'b'", "samples: the digest .* content: b"),
        ("UPDATE journal SET entry = x'00' WHERE offset = 2", "journal: the digest does not fit the content: 2"),
        ("DELETE FROM journal WHERE offset = 2", "journal: 1 of 3 entries are missing"),
        ("DELETE FROM samples WHERE group_id = 'd'", "samples: missing: d"),
    ],
)
def test_what_is_damaged_is_named_with_what_can_be_saved(sound, tmp_path, statement, named):
    source, _ = sound
    path = copy_of(source.parent, tmp_path / "damaged")
    with closing(sqlite3.connect(path)) as db:
        db.create_function("seal", -1, lambda *_: b"")
        triggers = db.execute("SELECT name, sql FROM sqlite_schema WHERE type = 'trigger'").fetchall()
        for name, _ in triggers:
            db.execute(f"DROP TRIGGER {name}")  # what changes the bytes behind SQLite's back fires none
        db.execute(statement)
        for _, sql in triggers:
            db.execute(sql)
        db.commit()
    store = SqliteStore(path, create=False)
    with pytest.raises(StoreError, match=f"{named}.*restore store.sqlite.*model.source"):
        store.verify()
    store.close()


def test_a_row_that_was_changed_behind_the_stores_back_is_not_used(tmp_path):
    store = SqliteStore(tmp_path / "store.sqlite")
    list(write_some(store))
    store._connection.execute("DROP TRIGGER groups_sealed_update")
    store._connection.execute("UPDATE groups SET batch_id = NULL WHERE group_id = 'd'")
    with pytest.raises(StoreError, match=r"batch 1 .* is damaged: it has 0 groups, 1 were assigned"):
        store.lease_batch(optimizer_step=1, owner="trainer", now_s=0.0, lease_s=9.0)
    with pytest.raises(StoreError, match=r"the row of group 'd' .* seal"):
        store.apply(drop("d"))
    store.close()


@contextmanager
def no_file_may_grow_beyond(nbytes: int) -> Iterator[None]:
    """What a full disk does to a write; the limit holds for this process and the block."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_write_that_the_disk_refuses_half_way_undoes_the_whole_transition(tmp_path):
    store = SqliteStore(tmp_path / "store.sqlite")
    store.apply(put("a", journal=(b"one",)))
    log_bytes = (tmp_path / "store.sqlite-wal").stat().st_size
    large = Transition(journal=tuple(bytes([n]) * 4096 for n in range(32)), puts=(a_group("b"),))
    with no_file_may_grow_beyond(log_bytes + 40_000), pytest.raises(StoreError, match="The change was undone"):
        store.apply(large)
    assert list(store.journal()) == [(1, b"one")]
    assert list(store.waiting_groups()) == ["a"]
    assert store.apply(put("b", journal=(b"two",))) == 2
    store.verify()
    store.close()
    assert read_whole(tmp_path / "store.sqlite")[5] == [(1, b"one"), (2, b"two")]
