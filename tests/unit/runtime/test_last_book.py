"""The last book of a replica: what came after its engine closed its own."""

import doctest

import pytest

from rollmill.runtime import ahead, generator_process
from rollmill.runtime.generator_process import closed
from rollmill.runtime.incarnation import ProcessSeconds


def book(**seconds: float) -> ProcessSeconds:
    """A book that begins at 10."""
    return ProcessSeconds(
        process="generator-0",
        incarnation=1,
        spawned_at_s=10.0,
        closed_at_s=10.0 + sum(seconds.values()),
        seconds=seconds,
        closed=False,
    )


@pytest.mark.parametrize("open_book", [book(decode=4.0, idle=1.0), book(decode=4.0, shutdown=0.25)])
def test_the_causes_of_a_closed_book_sum_to_the_life_of_its_process(open_book):
    last = closed(open_book, at_s=16.0)
    assert last.closed
    assert last.closed_at_s == 16.0
    assert sum(last.seconds.values()) == pytest.approx(16.0 - 10.0)
    assert last.seconds["decode"] == 4.0
    assert not open_book.closed, "the open book stays what it was"


@pytest.mark.parametrize("module", [ahead, generator_process])
def test_the_examples_in_the_docstrings_hold(module):
    results = doctest.testmod(module)
    assert (results.attempted > 0, results.failed) == (True, 0)
