"""Memory of a set of processes, shared pages counted once."""

import os
import subprocess
import sys

import psutil
import pytest

from rollmill.telemetry import memory
from rollmill.telemetry.memory import memory_of, tree_of

GONE = 2**22 + 1  # above the largest pid of Linux


def test_the_sum_is_that_of_the_processes():
    use = memory_of([os.getpid()])
    assert use.measure == "pss"
    assert use.total_bytes == sum(use.per_process.values())
    assert use.per_process[os.getpid()] > 1_000_000
    assert use.missing == ()


def test_a_pid_that_is_named_twice_counts_once():
    assert list(memory_of([os.getpid(), os.getpid()]).per_process) == [os.getpid()]


def test_a_process_that_ended_does_not_count_and_is_named():
    use = memory_of([GONE])
    assert (use.total_bytes, use.missing) == (0, (GONE,))


def test_where_pss_is_not_told_rss_is_taken_for_all_and_said(monkeypatch):
    def refuse(self):
        raise psutil.AccessDenied(self.pid)

    monkeypatch.setattr(psutil.Process, "memory_full_info", refuse)
    use = memory_of([os.getpid()])
    assert use.measure == "rss"
    assert use.per_process[os.getpid()] > 1_000_000


def test_a_tree_holds_the_children():
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        assert {os.getpid(), child.pid} <= set(tree_of())
    finally:
        child.communicate(b"\n")
    assert child.pid not in tree_of()


def test_the_tree_of_a_process_that_ended_is_empty():
    assert tree_of(GONE) == ()


def test_pages_that_processes_share_are_counted_once():
    size = 64 * 2**20
    code = (
        "import mmap, os, sys\n"
        f"m = mmap.mmap(-1, {size})\n"
        f"for at in range(0, {size}, 4096): m[at] = 1\n"
        "child = os.fork()\n"
        f"for at in range(0, {size}, 4096): m[at]\n"
        "print(os.getpid(), flush=True)\n"
        "sys.stdin.readline()\n"
        "if child: os.waitpid(child, 0)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    pids = [int(process.stdout.readline()) for _ in range(2)]
    try:
        use = memory_of(pids)
        resident = sum(memory._read(pid, measure="rss") for pid in pids)
    finally:
        process.communicate("\n\n")
    if use.measure != "pss":
        pytest.skip("this kernel does not tell the PSS")
    assert resident > 2 * size
    assert size < use.total_bytes < 1.5 * size
