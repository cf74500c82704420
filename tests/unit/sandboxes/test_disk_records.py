"""Records on disk, and the sweep by them: what is removed, what is left alone, and what damaged files lead to."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from rollmill.errors import ConfigError, SandboxError
from rollmill.sandboxes.disk_records import (
    DiskRecord,
    DiskRecords,
    ProcessMark,
    boot_id,
    default_directory,
    is_alive,
    mark_of,
    orphans,
)
from rollmill.sandboxes.sweep import sweep

GONE = ProcessMark(pid=2**22 - 1, started_ticks=1, boot_id="another boot")


def me() -> ProcessMark:
    mark = mark_of(os.getpid())
    assert mark is not None
    return mark


def record(name: str, owner: ProcessMark, **changes) -> DiskRecord:
    return msgspec.structs.replace(DiskRecord(sandbox_id=name, backend="namespaces", owner=owner), **changes)


def test_a_process_is_known_by_more_than_its_number():
    mine = me()
    assert is_alive(mine)
    assert not is_alive(msgspec.structs.replace(mine, started_ticks=mine.started_ticks + 1))
    assert not is_alive(msgspec.structs.replace(mine, boot_id="another boot"))
    assert mine.boot_id == boot_id()
    assert not is_alive(GONE)


def test_a_process_that_has_ended_and_is_not_waited_for_is_not_alive():
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert mark_of(pid) is None
    os.waitpid(pid, 0)


def test_records_come_back_as_they_were_written(tmp_path):
    records = DiskRecords(tmp_path / "a/b")
    whole = record("x", me(), helper=GONE, first_process=GONE, groups=((1, "/a"), (2, "/b")), labels={"l": "1"})
    records.write(whole)
    assert records.read("x") == whole
    assert records.read("y") is None
    assert records.read_all() == (whole,)
    records.note_kill("x")
    assert records.kill_noted("x")
    records.remove("x")
    assert list(records.directory.iterdir()) == []
    assert not records.kill_noted("x")


def test_a_damaged_record_is_an_error_that_names_the_file(tmp_path):
    records = DiskRecords(tmp_path)
    (tmp_path / "x.json").write_text('{"sandbox_id": 1', encoding="ascii")
    with pytest.raises(SandboxError, match=r"x\.json is damaged"):
        records.read_all()


def test_a_directory_that_cannot_be_made_or_is_somebody_elses_is_refused(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("", encoding="ascii")
    with pytest.raises(ConfigError, match="cannot be kept"):
        DiskRecords(tmp_path / "file/x")
    monkeypatch.setattr("os.geteuid", lambda: 12345)
    with pytest.raises(ConfigError, match="belongs to user"):
        DiskRecords(tmp_path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_a_directory_below_one_of_somebody_elses_is_refused(tmp_path):
    (tmp_path / "theirs/ours").mkdir(parents=True)
    os.chown(tmp_path / "theirs", 54321, 54321)
    with pytest.raises(ConfigError, match="who could exchange"):
        DiskRecords(tmp_path / "theirs/ours")


def test_records_of_plain_users_are_where_only_they_write(tmp_path, monkeypatch):
    monkeypatch.setattr("os.geteuid", lambda: 12345)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert default_directory() == tmp_path / "rollmill/sandboxes"
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert default_directory() == Path("/tmp/rollmill-12345/sandboxes")
    monkeypatch.setattr("os.geteuid", lambda: 0)
    assert default_directory() == Path("/run/rollmill/sandboxes")


def test_only_records_whose_owner_has_ended_are_orphans():
    assert [one.sandbox_id for one in orphans([record("a", me()), record("b", GONE)])] == ["b"]


def test_a_sweep_ends_what_an_orphan_left_and_nothing_else(tmp_path):
    records = DiskRecords(tmp_path / "records")
    (tmp_path / "group").mkdir()
    children = [
        subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"], start_new_session=True) for _ in "ab"
    ]
    marks = [mark_of(child.pid) for child in children]
    records.write(record("mine", me(), first_process=marks[0]))
    records.write(record("left", GONE, first_process=marks[1], groups=((1, str(tmp_path / "group")),)))
    records.write(record("empty", GONE, helper=GONE))
    report = sweep(records, limit_s=0.05)
    # Killed, and still to be waited for by this test: that counts as ended.
    assert (sorted(report.removed), report.left) == (["empty", "left"], ())
    assert children[1].wait(10) == -9
    assert children[0].poll() is None
    assert [one.sandbox_id for one in records.read_all()] == ["mine"]
    assert not (tmp_path / "group").exists()
    children[0].kill()
    children[0].wait(10)


def test_a_process_that_took_over_a_recorded_number_is_not_killed(tmp_path):
    records = DiskRecords(tmp_path)
    child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    mark = mark_of(child.pid)
    assert mark is not None
    other = msgspec.structs.replace(mark, started_ticks=mark.started_ticks - 1)
    records.write(record("old", GONE, first_process=other))
    assert sweep(records).removed == ("old",)
    assert child.poll() is None
    child.kill()
    child.wait(10)


def test_what_does_not_go_keeps_its_record_for_the_next_sweep(tmp_path, monkeypatch):
    records = DiskRecords(tmp_path / "records")
    (tmp_path / "group").mkdir()
    records.write(record("stuck", GONE, groups=((1, str(tmp_path / "group")),)))

    def busy(path):
        raise OSError(errno.EBUSY, "busy")

    with monkeypatch.context() as patch:
        patch.setattr("os.rmdir", busy)
        report = sweep(records, limit_s=0.03)
    assert (report.removed, report.left) == ((), ("stuck",))
    assert records.read("stuck") is not None
    assert sweep(records).removed == ("stuck",)


def test_half_written_records_and_old_notes_go(tmp_path):
    records = DiskRecords(tmp_path)
    (tmp_path / "x.tmp4194303").write_text("", encoding="ascii")
    (tmp_path / f"x.tmp{os.getpid()}").write_text("", encoding="ascii")
    (tmp_path / "x.kill").write_text("", encoding="ascii")
    sweep(records)
    assert [one.name for one in tmp_path.iterdir()] == [f"x.tmp{os.getpid()}"]
