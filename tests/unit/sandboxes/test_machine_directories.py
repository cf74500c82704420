"""Directories of machines beside their records: a sweep takes those that nobody's record names."""

from __future__ import annotations

import os

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
