"""Directories of machines beside their records: a sweep takes those that nobody's record names."""

from __future__ import annotations

import os

from rollmill.sandboxes.backends.microvm.scratch import scratch, tidy
from rollmill.sandboxes.disk_records import MACHINE_SUFFIX, DiskRecord, DiskRecords, mark_of
from rollmill.sandboxes.sweep import sweep


def test_a_sweep_removes_the_directory_of_a_machine_without_a_record_and_no_other(tmp_path):
    records = DiskRecords(tmp_path)
    owner = mark_of(os.getpid())
    assert owner is not None
    records.write(DiskRecord(sandbox_id="a.b", backend="firecracker", owner=owner))
    for name in ("a.b", "gone"):
        (tmp_path / f"{name}{MACHINE_SUFFIX}").mkdir()
        (tmp_path / f"{name}{MACHINE_SUFFIX}" / "api.sock").touch()
    assert sweep(records).removed == ()
    assert sorted(one.name for one in tmp_path.iterdir()) == ["a.b.json", "a.b.machine"]


def test_what_a_killed_maker_of_disks_left_goes_and_what_is_in_use_stays(tmp_path):
    owner = mark_of(os.getpid())
    assert owner is not None
    gone = f"rollmill-machine-{owner.pid}-{owner.started_ticks - 1}-x"  # an older process with the same number
    (tmp_path / gone).mkdir()
    (tmp_path / gone / "disk").write_bytes(b"x")
    (tmp_path / "rollmill-machine-notes").mkdir()
    (tmp_path / f"rollmill-machine-{owner.pid}-1-link").symlink_to(tmp_path)
    with scratch(tmp_path) as used:
        assert tidy(tmp_path) == (gone,)
        assert used.is_dir()
    assert not used.exists()
    assert sorted(one.name for one in tmp_path.iterdir()) == [
        f"rollmill-machine-{owner.pid}-1-link", "rollmill-machine-notes"
    ]  # fmt: skip
