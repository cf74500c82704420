from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollmill.environments.split import (
    Problem,
    check_disjoint,
    distinct,
    hash_fraction,
    make_problem,
    split_problems,
)
from rollmill.errors import DataError


def sums(count: int, *, family: str = "sums") -> list[Problem]:
    return [make_problem(family=family, question=f"{i} + 1?", answer=str(i + 1), draw=i) for i in range(count)]


def keys(problems: tuple[Problem, ...]) -> set[str]:
    return {problem.key for problem in problems}


def test_the_side_of_a_problem_depends_on_its_content_alone() -> None:
    early = make_problem(family="sums", question="1 + 1?", answer="2", mix=0, draw=0)
    late = make_problem(family="sums", question="1  + 1?", answer="2", mix=3, draw=999)
    assert (early.key, early.task_id) == (late.key, late.task_id)


def test_wording_is_not_content_where_the_family_names_the_essence() -> None:
    a = make_problem(family="sums", question="What is 1 + 2?", answer="3", essence="1 + 2")
    b = make_problem(family="sums", question="Solve 1 + 2.", answer="3", essence="1 + 2")
    assert a.key == b.key


def test_families_and_questions_tell_problems_apart() -> None:
    base = make_problem(family="sums", question="1 + 2", answer="3")
    assert base.key != make_problem(family="chains", question="1 + 2", answer="3").key
    assert base.key != make_problem(family="sums", question="2 + 1", answer="3").key


def test_a_question_with_two_answers_is_one_problem_so_it_cannot_be_on_both_sides() -> None:
    a = make_problem(family="countdown", question="reach 4", answer="2 + 2")
    b = make_problem(family="countdown", question="reach 4", answer="1 + 3")
    assert a.task_id != b.task_id
    assert distinct([a, b]) == [a]


@given(count=st.integers(50, 150), copies=st.integers(1, 3), fraction=st.floats(0.2, 0.8), data=st.data())
@settings(max_examples=12, deadline=None)
def test_no_content_is_ever_on_both_sides(count: int, copies: int, fraction: float, data: st.DataObject) -> None:
    pool = data.draw(st.permutations(sums(count) * copies))
    split = split_problems(pool, heldout_size=3, heldout_fraction=fraction)
    assert not keys(split.training) & keys(split.heldout)
    assert len(split.training) + len(split.heldout) + split.spare == count  # nothing vanishes


def test_duplicates_and_order_of_draws_do_not_move_the_split() -> None:
    pool = sums(200)
    once = split_problems(pool, heldout_size=10, heldout_fraction=0.3)
    assert split_problems([*reversed(pool), *pool], heldout_size=10, heldout_fraction=0.3).heldout == once.heldout


def test_a_larger_pool_never_moves_a_held_out_problem_to_training() -> None:
    small = split_problems(sums(200), heldout_size=10, heldout_fraction=0.3)
    large = split_problems(sums(2000), heldout_size=10, heldout_fraction=0.3)
    assert not keys(small.heldout) & keys(large.training)


def test_the_held_out_list_is_the_smallest_hashes() -> None:
    pool = sums(100)
    split = split_problems(pool, heldout_size=5, heldout_fraction=0.5)
    assert [p.key for p in split.heldout] == sorted(p.key for p in pool)[:5]
    assert all(hash_fraction(problem.key) >= 0.5 for problem in split.training)


def test_too_few_held_out_problems_name_both_numbers_and_a_fraction_that_works() -> None:
    pool = sums(100)
    with pytest.raises(DataError, match="distinct held-out problems, 40 wanted: the pool has 100") as caught:
        split_problems(pool, heldout_size=40, heldout_fraction=0.1)
    fraction = float(str(caught.value).split("heldout_fraction to ")[1].split()[0])
    assert len(split_problems(pool, heldout_size=40, heldout_fraction=fraction).heldout) == 40
    with pytest.raises(DataError):  # and it is the nearest one, to the thousandth
        split_problems(pool, heldout_size=40, heldout_fraction=fraction - 0.001)


def test_a_pool_smaller_than_the_held_out_list_says_that_no_fraction_is_enough() -> None:
    with pytest.raises(DataError, match=r"No fraction is enough: lower environment\.heldout_size below 20"):
        split_problems(sums(20), heldout_size=40, heldout_fraction=0.5)


def test_a_fraction_that_leaves_nothing_to_train_is_refused() -> None:
    with pytest.raises(DataError, match="none is left for training"):
        split_problems(sums(5), heldout_size=1, heldout_fraction=0.999999)


def test_an_overlap_is_refused_and_named() -> None:
    one, two = sums(2)
    with pytest.raises(DataError, match=one.task_id):
        check_disjoint([one, two], [one])
    with pytest.raises(DataError, match=two.task_id):
        check_disjoint([one], [two, two])
    check_disjoint([one], [two])
