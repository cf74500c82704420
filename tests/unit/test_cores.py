"""Threads are borrowed from free cores and given back when somebody else wants them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmill.clock import VirtualClock
from rollmill.cores import LOOK_EVERY_S, CoreBorrower, has_quota, threads_now


@pytest.mark.parametrize(
    ("present", "free_cores", "threads"),
    [
        (1, 2.0, 2),  # nobody else computes
        (1, 1.7, 2),
        (1, 1.69, 1),
        (2, 1.5, 2),  # somebody takes half of a core now and then
        (2, 1.49, 1),  # somebody computes again
        (1, 4.8, 4),  # of a machine with more cores all three
        (2, 9.0, 4),
        (4, 0.0, 1),
        (4, 2.6, 3),  # one and a half cores were wanted back
        (1, -3.0, 1),  # others use more than this process may
    ],
)
def test_a_thread_is_taken_for_each_free_core_and_given_back_when_it_is_wanted(present, free_cores, threads):
    assert threads_now(present, own=1, borrow=3, free_cores=free_cores) == threads


@given(st.integers(1, 8), st.integers(0, 8), st.integers(0, 8), st.floats(-4, 16))
def test_never_fewer_than_its_own_nor_more_than_it_may(own, borrow, extra, free_cores):
    present = own + min(extra, borrow)
    assert own <= threads_now(present, own=own, borrow=borrow, free_cores=free_cores) <= own + borrow


@given(st.integers(1, 8), st.integers(0, 8), st.floats(-4, 16))
def test_an_unchanged_machine_changes_nothing_twice(own, borrow, free_cores):
    once = threads_now(own, own=own, borrow=borrow, free_cores=free_cores)
    assert threads_now(once, own=own, borrow=borrow, free_cores=free_cores) == once


class Machine:
    """Two cores whose use is set by hand."""

    def __init__(self, *, cores: int = 2, rationed: bool = False) -> None:
        self.clock = VirtualClock()
        self.cores, self.idle_s, self.own_s = cores, 100.0, 50.0
        self.told: list[int] = []
        self.borrower = CoreBorrower(
            own=1,
            borrow=1,
            set_threads=self.told.append,
            now_s=self.clock.now_s,
            idle_s=lambda: self.idle_s,
            own_s=lambda: self.own_s,
            machine_cores=cores,
            usable_cores=2,
            rationed=rationed,
        )

    def passes(self, seconds: float, *, own: float, others: float) -> None:
        self.clock.advance(seconds)
        self.idle_s += seconds * (self.cores - own - others)
        self.own_s += seconds * own
        self.borrower()


def test_a_borrower_that_is_alone_keeps_what_it_took_though_no_core_stands_idle():
    machine = Machine()
    machine.passes(1.0, own=1.0, others=0.0)
    for _ in range(5):
        machine.passes(1.0, own=2.0, others=0.0)
    assert machine.told == [2]


def test_a_borrower_gives_back_when_another_process_wants_its_core():
    machine = Machine()
    machine.passes(1.0, own=1.0, others=0.0)
    machine.passes(1.0, own=1.3, others=0.7)  # three threads on two cores
    machine.passes(1.0, own=1.0, others=1.0)
    assert machine.told == [2, 1]


def test_cores_that_this_process_may_not_use_are_not_borrowed():
    machine = Machine(cores=64)
    machine.passes(1.0, own=1.0, others=1.0)
    assert machine.told == []
    machine.passes(1.0, own=1.0, others=0.0)
    assert machine.told == [2]


def test_nothing_is_looked_at_between_two_looks():
    machine = Machine()
    machine.passes(LOOK_EVERY_S / 2, own=1.0, others=0.0)
    assert machine.told == []
    machine.passes(LOOK_EVERY_S / 2, own=1.0, others=0.0)
    assert machine.told == [2]


def test_under_a_quota_nothing_is_borrowed_however_idle_the_machine_is():
    machine = Machine(cores=64, rationed=True)
    machine.passes(LOOK_EVERY_S, own=1, others=0)
    assert (machine.borrower.threads, machine.told) == (1, [])


@pytest.mark.parametrize(
    ("groups", "file", "text", "rationed"),
    [
        ("0::/", "cpu.max", "200000 100000", True),
        ("0::/", "cpu.max", "max 100000", False),
        ("0::/a/b", "a/cpu.max", "200000 100000", True),  # of a group above
        ("0::/host/path", "cpu.max", "200000 100000", True),  # in a container, whose own group is at the top
        ("1:cpu,cpuacct:/c", "cpu/c/cpu.cfs_quota_us", "50000", True),
        ("1:cpu,cpuacct:/c", "cpu/c/cpu.cfs_quota_us", "-1", False),
        ("1:memory:/c", "memory/c/cpu.cfs_quota_us", "50000", False),
        ("0::/", "", "", False),
    ],
)
def test_a_quota_is_found_in_either_version_of_cgroups(tmp_path, groups, file, text, rationed):
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(groups + "\n")
    if file:
        place = tmp_path / "sys/fs/cgroup" / file
        place.parent.mkdir(parents=True)
        place.write_text(text + "\n")
    assert has_quota(tmp_path) is rationed


def test_where_nothing_is_known_of_groups_there_is_no_quota(tmp_path):
    assert not has_quota(tmp_path)
