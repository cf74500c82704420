from __future__ import annotations

import pytest

from rollmill.controller.replicas import choose
from rollmill.errors import ProducersGone


def test_siblings_follow_their_group_and_a_new_group_takes_the_idlest_replica() -> None:
    work = {"generator-0": 5, "generator-1": 2}
    assert choose("g1", homes={"g1": "generator-0"}, work=work) == "generator-0"
    assert choose("g2", homes={"g1": "generator-0"}, work=work) == "generator-1"


def test_a_group_whose_replica_left_moves() -> None:
    assert choose("g1", homes={"g1": "generator-9"}, work={"generator-0": 3}) == "generator-0"


def test_without_a_replica_the_error_says_so() -> None:
    with pytest.raises(ProducersGone, match="0 replicas"):
        choose("g1", homes={}, work={})
