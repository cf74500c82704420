"""How the memory of a sandbox is added up, from texts of the kernel; and one real reading."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).parents[3] / "benchmarks" / "sandboxes"
ROLLUP = """\
563f7f084000-7fff48e71000 ---p 00000000 00:00 0                          [rollup]
Rss:                1508 kB
Pss:                 189 kB
Pss_Dirty:            96 kB
Pss_Anon:             96 kB
Pss_File:             90 kB
Pss_Shmem:             3 kB
"""
VERSION_1 = "cache 10\nshmem 1\nhierarchical_memory_limit 9223372036854771712\ntotal_cache 500\ntotal_shmem 300\n"
VERSION_2 = "anon 100\nfile 50\nkernel 7000\nshmem 400\nslab 2000\n"
MEMINFO = """\
Slab:             30 kB
SReclaimable:     10 kB
SUnreclaim:       20 kB
KernelStack:       3 kB
PageTables:        4 kB
Percpu:            5 kB
HugePages_Total:   0
"""


@pytest.fixture
def footprint(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.delitem(sys.modules, "footprint", raising=False)
    module = importlib.import_module("footprint")
    monkeypatch.delitem(sys.modules, "footprint")
    return module


def look(
    footprint: ModuleType,
    *,
    processes: int = 0,
    shares: tuple[int, int, int] = (0, 0, 0),
    owner: int = 1000,
    charges: tuple[int, int, int] | None = None,
    machine: int = 0,
) -> object:
    return footprint.Look(
        processes=processes,
        shares=footprint.Shares(*shares),
        owner_anon=owner,
        charges=None if charges is None else footprint.Charges(*charges),
        machine_kernel=machine,
    )


def test_a_process_holds_its_proportional_shares_by_kind(footprint):
    assert footprint.shares_of(ROLLUP) == footprint.Shares(anon=96 * 1024, file=90 * 1024, shmem=3 * 1024)


def test_shares_of_several_processes_add_up(footprint):
    assert footprint.Shares(1, 2, 3) + footprint.Shares(10, 20, 30) == footprint.Shares(11, 22, 33)


def test_charges_of_version_1_are_those_of_the_groups_below_too(footprint):
    found = footprint.charges_of(VERSION_1, usage="900\n", kernel="80\n")
    assert found == footprint.Charges(shmem=300, kernel=80, usage=900)


def test_version_2_tells_the_kernels_memory_among_the_rest(footprint):
    assert footprint.charges_of(VERSION_2, usage="900\n") == footprint.Charges(shmem=400, kernel=7000, usage=900)


def test_of_the_machines_kernel_what_can_be_let_go_of_is_not_counted(footprint):
    assert footprint.machine_kernel_of(MEMINFO) == (20 + 3 + 4 + 5) * 1024


def test_one_takes_its_shares_and_what_is_charged_and_mapped_memory_files_count_once(footprint):
    before = look(footprint, owner=1000, charges=(50, 500, 3000), machine=9000)
    after = look(footprint, processes=20, shares=(4000, 600, 77), owner=1100, charges=(250, 1500, 9000), machine=12000)
    # 4000 + 600 + (250 - 50) + (1100 - 1000) + (1500 - 500) = 5900, of ten; the mapped 77 are among the 200
    assert footprint.each(before, after, count=10) == {
        "bytes_each": 590.0,
        "processes_each": 2.0,
        "anon_bytes_each": 400.0,
        "file_bytes_each": 60.0,
        "shmem_bytes_each": 20.0,
        "owner_bytes_each": 10.0,
        "kernel_bytes_each": 100.0,
        "usage_bytes_each": 600.0,
        "machine_kernel_bytes_each": 300.0,
    }


def test_without_a_group_mapped_memory_files_count_and_the_kernels_memory_is_unknown(footprint):
    after = look(footprint, processes=10, shares=(4000, 600, 70))
    found = footprint.each(look(footprint), after, count=10)
    assert found["bytes_each"] == 467.0
    assert found["shmem_bytes_each"] == 7.0
    assert found["kernel_bytes_each"] is None
    assert found["usage_bytes_each"] is None


def test_repeats_give_the_median_of_each_kind_and_the_extremes_of_the_sum(footprint):
    readings = [
        {"bytes_each": 5.0, "kernel_bytes_each": 1.0, "usage_bytes_each": 3.0},
        {"bytes_each": 9.0, "kernel_bytes_each": 2.0, "usage_bytes_each": None},
        {"bytes_each": 6.0, "kernel_bytes_each": 4.0, "usage_bytes_each": 1.0},
    ]
    assert footprint.medians(readings) == {
        "bytes_each": 6.0,
        "kernel_bytes_each": 2.0,
        "usage_bytes_each": None,  # a median of those that could be read would be of something else
        "least_bytes_each": 5.0,
        "most_bytes_each": 9.0,
        "repeats": 3,
    }


def test_a_process_in_another_group_is_told_also_where_its_name_begins_alike(footprint):
    groups = {1: "a/bench-7", 2: "a/bench-7/leaf/x", 3: "a/bench-77", 4: ""}
    assert footprint.strangers(groups, group="a/bench-7") == [3, 4]


@pytest.mark.slow
@pytest.mark.integration
@pytest.mark.skipif(os.geteuid() != 0, reason="a plain user may not read what the processes of a sandbox hold")
def test_a_real_reading_counts_the_zygote_its_template_and_every_agent_and_leaves_no_group_behind():
    done = subprocess.run(
        [sys.executable, str(FOLDER / "footprint_of.py"), "rollmill", "4"], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""  # such as of a group that could not be removed
    found = json.loads(done.stdout)
    assert found["processes_each"] == 6 / 4  # the zygote and its template
    summed = [found[f"{kind}_bytes_each"] or 0 for kind in ("anon", "file", "shmem", "owner", "kernel")]
    assert found["bytes_each"] == pytest.approx(sum(summed))
    assert 200_000 < found["anon_bytes_each"] < 20_000_000  # an interpreter each, most of it shared


@pytest.mark.slow
@pytest.mark.integration
@pytest.mark.skipif(os.geteuid() != 0, reason="a plain user owns no device")
@pytest.mark.parametrize("peer", ["runc", "crun"])
def test_peers_give_nothing_of_this_machine_away(peer):
    if shutil.which(peer) is None:
        pytest.skip(f"{peer} is not installed")
    before = os.stat(os.devnull)
    subprocess.run(
        [sys.executable, str(FOLDER / "footprint_of.py"), peer, "1"], capture_output=True, timeout=100, check=True
    )
    after = os.stat(os.devnull)
    assert (after.st_uid, after.st_gid, after.st_ctime_ns) == (before.st_uid, before.st_gid, before.st_ctime_ns)
