"""What groups count, of version 1 and of version 2, under the names of the watchdog's samples."""

from __future__ import annotations

from pathlib import Path

from rollmill.sandboxes.backends.namespaces.counters import Counters
from rollmill.sandboxes.guest.cgroups import Groups


def write(directory: Path, **files: str) -> tuple[int, str]:
    directory.mkdir()
    for name, text in files.items():
        (directory / name.replace("__", ".")).write_text(text)
    return (2 if directory.name == "unified" else 1, str(directory))


STALLS = "some avg10=0.00 avg60=0.00 avg300=0.00 total=9\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=2500000\n"


def test_version_1_side_by_side_with_a_version_2_that_controls_nothing(tmp_path: Path):
    groups = Groups(
        [
            write(tmp_path / "pids", pids__current="41\n", pids__events="max 7\n"),
            write(
                tmp_path / "memory",
                memory__usage_in_bytes="4096\n",
                memory__oom_control="oom_kill_disable 0\nunder_oom 0\noom_kill 3\n",
            ),
            write(tmp_path / "cpu", cpu__stat="nr_periods 1\nnr_throttled 0\nthrottled_time 0\n"),
            write(tmp_path / "cpuacct", cpuacct__usage="1500000000\n"),
            write(tmp_path / "unified", cpu__stat="usage_usec 1499999\nuser_usec 1\n", memory__pressure=STALLS),
        ]
    )
    counters = Counters.of(groups)
    assert counters.read() == {
        "pids": 40,
        "refused_forks": 7,
        "memory_bytes": 4096,
        "oom_kills": 3,
        "cpu_s": 1.5,
        "memory_stall_s": 2.5,
    }
    assert counters.cpu_path == str(tmp_path / "cpuacct" / "cpuacct.usage")


def test_version_2_alone(tmp_path: Path):
    group = write(
        tmp_path / "unified",
        pids__current="1\n",
        pids__events="max 0\n",
        memory__current="8192\n",
        memory__events="low 0\nhigh 0\nmax 5\noom 1\noom_kill 1\noom_group_kill 0\n",
        memory__pressure=STALLS,
        cpu__stat="usage_usec 250000\nuser_usec 1\nsystem_usec 1\n",
    )
    counters = Counters.of(Groups([group]))
    assert counters.read() == {
        "pids": 0,
        "refused_forks": 0,
        "memory_bytes": 8192,
        "oom_kills": 1,
        "cpu_s": 0.25,
        "memory_stall_s": 2.5,
    }
    assert counters.cpu_path == str(tmp_path / "unified" / "cpu.stat")


def test_without_groups_nothing_is_counted_and_what_is_gone_is_left_out(tmp_path: Path):
    assert (Counters.of(Groups([])).read(), Counters.of(Groups([])).cpu_path) == ({}, "")
    group = write(tmp_path / "pids", pids__current="3\n", pids__events="max 0\n")
    counters = Counters.of(Groups([group]))
    (tmp_path / "pids" / "pids.current").unlink()
    assert counters.read() == {"refused_forks": 0}
