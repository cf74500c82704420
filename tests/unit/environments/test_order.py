from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollmill.environments.order import EpochOrder


@given(size=st.integers(1, 60), seed=st.integers(0, 2**40), epoch=st.integers(0, 20))
@settings(max_examples=40)
def test_every_task_comes_once_per_epoch(size: int, seed: int, epoch: int) -> None:
    order = EpochOrder(size=size, run_seed=seed)
    draws = [order.position(epoch * size + offset) for offset in range(size)]
    assert sorted(draws) == list(range(size))


@given(indices=st.lists(st.integers(0, 400), max_size=10))
@settings(max_examples=20)
def test_a_draw_is_a_function_of_seed_and_index_and_not_of_what_was_drawn_before(indices: list[int]) -> None:
    used = EpochOrder(size=13, run_seed=5)
    for index in indices:
        assert used.position(index) == EpochOrder(size=13, run_seed=5).position(index)


def test_epochs_and_seeds_differ() -> None:
    first = EpochOrder(size=50, run_seed=0)
    other = EpochOrder(size=50, run_seed=1)
    epoch_0 = [first.position(i) for i in range(50)]
    assert epoch_0 != [first.position(50 + i) for i in range(50)]
    assert epoch_0 != [other.position(i) for i in range(50)]


def test_a_negative_draw_and_an_empty_order_are_refused() -> None:
    with pytest.raises(ValueError, match="counted from 0"):
        EpochOrder(size=3, run_seed=0).position(-1)
    with pytest.raises(ValueError, match="0 tasks"):
        EpochOrder(size=0, run_seed=0)
