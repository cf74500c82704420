"""Threads are borrowed from idle cores and given back when the machine is busy."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmill.clock import VirtualClock
from rollmill.generator.cores import LOOK_EVERY_S, CoreBorrower, threads_now


@pytest.mark.parametrize(
    ("present", "idle_cores", "threads"),
    [
        (1, 1.0, 2),  # the trainer waits
        (1, 0.7, 2),
        (1, 0.69, 1),
        (2, 0.3, 2),  # two threads leave some of their cores' time unused
        (2, 0.14, 1),  # the trainer computes again
        (1, 3.8, 4),  # of a machine with more cores all three
        (2, 9.0, 4),
        (4, 0.0, 1),
    ],
)
def test_a_thread_is_taken_for_each_idle_core_and_all_are_given_back_at_once(present, idle_cores, threads):
    assert threads_now(present, own=1, borrow=3, idle_cores=idle_cores) == threads


@given(st.integers(1, 8), st.integers(0, 8), st.integers(0, 8), st.floats(0, 16))
def test_never_fewer_than_its_own_nor_more_than_it_may(own, borrow, extra, idle_cores):
    present = own + min(extra, borrow)
    assert own <= threads_now(present, own=own, borrow=borrow, idle_cores=idle_cores) <= own + borrow


class Machine:
    """Cores whose idle time is set by hand."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.idle_s = 100.0
        self.told: list[int] = []
        self.borrower = CoreBorrower(
            own=1, borrow=1, set_threads=self.told.append, now_s=self.clock.now_s, idle_s=lambda: self.idle_s
        )

    def passes(self, seconds: float, *, idle_cores: float) -> None:
        self.clock.advance(seconds)
        self.idle_s += seconds * idle_cores
        self.borrower()


def test_threads_follow_the_idle_time_since_the_last_look():
    machine = Machine()
    machine.passes(1.0, idle_cores=1.0)
    machine.passes(1.0, idle_cores=0.4)
    machine.passes(1.0, idle_cores=0.0)
    machine.passes(1.0, idle_cores=0.0)
    assert machine.told == [2, 1]


def test_nothing_is_looked_at_between_two_looks():
    machine = Machine()
    machine.passes(LOOK_EVERY_S / 2, idle_cores=1.0)
    assert machine.told == []
    machine.passes(LOOK_EVERY_S / 2, idle_cores=1.0)
    assert machine.told == [2]
