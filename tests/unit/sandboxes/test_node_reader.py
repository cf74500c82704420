"""What a node has left, read from files as Linux writes them, and what is read of processes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rollmill.sandboxes.watchdog import NodeReader, Pressure, processes
from rollmill.sandboxes.watchdog.processes import ProcessRow, descendants, trees

GIB = 1024**3


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def stalls(some: str, full: str) -> str:
    return f"some avg10={some} avg60=2.00 avg300=1.00 total=1\nfull avg10={full} avg60=0.00 avg300=0.00 total=0\n"


PRESSURE = {
    "proc/pressure/cpu": stalls("12.50", "0.00"),
    "proc/pressure/memory": stalls("20.00", "10.00"),
    "proc/pressure/io": stalls("100.00", "50.00"),
}


def test_pressure_is_read_as_shares(tmp_path: Path):
    reader = NodeReader(root=write(tmp_path, PRESSURE))
    assert reader.pressure() == Pressure(cpu_some=0.125, memory_some=0.2, memory_full=0.1, io_some=1.0, io_full=0.5)


def test_what_a_kernel_does_not_tell_is_not_known(tmp_path: Path):
    found = NodeReader(root=tmp_path, paths=[tmp_path / "missing"]).read()
    assert (found.pressure, found.memory_free, found.disk_free, found.pids_free) == (None, None, None, None)


def test_memory_and_process_ids_are_shares_of_what_the_machine_has(tmp_path: Path):
    files = {
        "proc/meminfo": "MemTotal:       1000 kB\nMemFree:         100 kB\nMemAvailable:    250 kB\n",
        "proc/sys/kernel/pid_max": "32768\n",
        "proc/sys/kernel/threads-max": "2000\n",
        "proc/loadavg": "1.00 0.88 0.61 1/500 21605\n",
    }
    found = NodeReader(root=write(tmp_path, files)).read()
    assert (found.memory_free, found.pids_free) == (0.25, 0.75)


@pytest.mark.parametrize("version", [1, 2])
def test_the_group_of_this_process_counts_with_those_above_it_and_cache_that_can_be_dropped_is_free(
    tmp_path: Path, version: int
):
    point = tmp_path / "groups"
    if version == 1:
        limit, used, cache, mount = (
            "memory.limit_in_bytes",
            "memory.usage_in_bytes",
            "total_inactive_file",
            "cgroup memory rw,memory",
        )
        own, none = "4:memory:/a/b\n", str(2**63 - 4096)
    else:
        limit, used, cache, mount = "memory.max", "memory.current", "inactive_file", "cgroup2 cgroup rw"
        own, none = "0::/a/b\n", "max"
    write(
        tmp_path,
        {
            "proc/self/cgroup": own,
            "proc/self/mountinfo": f"30 20 0:26 / {point} rw - {mount}\n",
            "proc/meminfo": "MemTotal: 1000 kB\nMemAvailable: 900 kB\n",
            "groups/cgroup.procs": "",
            "groups/cgroup.controllers": "memory\n",
            "groups/a/cgroup.procs": "",
            f"groups/a/{limit}": f"{2 * GIB}\n",
            f"groups/a/{used}": f"{GIB + GIB // 2}\n",
            "groups/a/memory.stat": f"{cache} {GIB // 2}\n",
            "groups/a/b/cgroup.procs": "",
            "groups/a/b/cgroup.controllers": "memory\n",
            f"groups/a/b/{limit}": f"{none}\n",
            f"groups/a/b/{used}": f"{GIB}\n",
        },
    )
    assert NodeReader(root=tmp_path).read().memory_free == 0.5  # 1 of 2 GiB once the cache is dropped


def test_disks_are_those_of_the_named_paths(tmp_path: Path):
    found, status = NodeReader([tmp_path]).read(), os.statvfs(tmp_path)
    assert found.disk_free == pytest.approx(status.f_bavail / status.f_blocks, abs=0.01)
    assert found.inodes_free is not None
    assert 0 <= found.inodes_free <= 1


# -- processes -------------------------------------------------------------------------------------------------------


def test_a_process_is_read_as_it_is(tmp_path: Path):
    row = processes.read_row(os.getpid())
    assert row is not None
    assert (row.pid, row.parent, row.state in "RSD") == (os.getpid(), os.getppid(), True)
    assert row.threads >= 1
    assert row.resident_bytes > 1024**2
    assert 0 <= processes.shared_bytes(os.getpid()) < row.resident_bytes
    assert (processes.proportional_bytes(os.getpid()) or 0) > 1024**2
    assert "python" in processes.command_line(os.getpid(), most_bytes=4096)
    assert len(processes.command_line(os.getpid(), most_bytes=5)) <= 5


def test_a_process_that_is_gone_is_nothing():
    gone = 2**22 + 1  # beyond any process id
    assert processes.read_row(gone) is None
    assert (processes.shared_bytes(gone), processes.proportional_bytes(gone)) == (0, None)
    assert processes.command_line(gone, most_bytes=10) == ""


def row(pid: int, parent: int) -> ProcessRow:
    return ProcessRow(pid, parent, "x", "S", 1, 0.0, 0, 0)


def test_descendants_are_found_at_any_depth_and_nobody_elses():
    children = trees([row(10, 1), row(11, 10), row(12, 11), row(13, 12), row(20, 1), row(21, 20)])
    assert sorted(one.pid for one in descendants(10, children=children)) == [11, 12, 13]
    assert descendants(13, children=children) == []
