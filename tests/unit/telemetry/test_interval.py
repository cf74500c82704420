"""The Wilson score interval, against numbers by hand."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmill.telemetry.interval import proportion, wilson


def test_half_of_ten():
    # z^2 = 3.841459; centre = (0.5 + 3.841459/20) / (1 + 0.3841459) = 0.5
    # half = 1.959964 / 1.3841459 * sqrt(0.025 + 3.841459/400) = 1.4160097 * 0.1860206 = 0.263407
    low, high = wilson(5, 10)
    assert low == pytest.approx(0.236593, abs=2e-6)
    assert high == pytest.approx(0.763407, abs=2e-6)


def test_none_of_ten_starts_at_zero_exactly():
    # high = z^2 / n / (1 + z^2 / n) = 0.38415 / 1.38415 = 0.277533
    assert wilson(0, 10) == (0.0, pytest.approx(0.277533, abs=2e-6))


def test_all_of_ten_ends_at_one_exactly():
    assert wilson(10, 10) == (pytest.approx(1 - 0.277533, abs=2e-6), 1.0)


def test_a_held_out_set_of_384_gives_an_interval_of_about_nine_points():
    # share 0.25: half = z / (1 + z^2/384) * sqrt(0.1875/384 + z^2/(4*384^2)) = 1.940552 * 0.022243 = 0.043164
    entry = proportion(96, 384)
    assert (entry.accuracy, entry.n) == (0.25, 384)
    assert entry.high - entry.low == pytest.approx(2 * 0.043164, abs=1e-5)


@pytest.mark.parametrize(("successes", "n"), [(0, 0), (-1, 10), (11, 10)])
def test_an_impossible_count_is_refused_with_both_numbers(successes, n):
    with pytest.raises(ValueError, match=f"got {successes} of {n}"):
        wilson(successes, n)


@given(st.integers(1, 5000).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_the_interval_holds_the_share_and_stays_inside_zero_and_one(counts):
    successes, n = counts
    low, high = wilson(successes, n)
    assert 0.0 <= low <= successes / n <= high <= 1.0
    assert not math.isclose(low, high)


def test_plain_data_has_exactly_the_four_numbers_of_the_interface():
    assert set(proportion(1, 2).as_dict()) == {"accuracy", "low", "high", "n"}
