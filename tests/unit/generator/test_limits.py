"""What one caller may ask for, and how much all of them at once."""

from __future__ import annotations

import numpy as np
import pytest

from rollmill.config.serving import LimitSettings
from rollmill.errors import DataError, Overloaded
from rollmill.generator.limits import Places, check_limits
from rollmill.types import GenerateRequest, SamplingParams, StopReason, Turn, TurnTimings

LIMITS = LimitSettings(max_requests=4, max_siblings=3, max_prompt_tokens=5, max_new_tokens=7, max_request_id_chars=16)


def asked(request_id: str = "a", *, prompt_tokens: int = 5, max_new_tokens: int = 7, **fields: str) -> GenerateRequest:
    return GenerateRequest(
        request_id=request_id,
        prompt_ids=np.ones(prompt_tokens, dtype=np.int64),
        sampling=SamplingParams(max_new_tokens=max_new_tokens),
        **fields,  # pyright: ignore[reportArgumentType]
    )


def turn(queued_s: float, prefill_s: float, decode_s: float) -> Turn:
    return Turn(
        request_id="a",
        prompt_ids=np.ones(1, dtype=np.int32),
        output_ids=np.empty(0, dtype=np.int32),
        behavior_logprobs=np.empty(0, dtype=np.float32),
        version_spans=(),
        stop_reason=StopReason.STOP,
        timings=TurnTimings(queued_s=queued_s, prefill_s=prefill_s, decode_s=decode_s),
    )


def test_what_is_exactly_at_every_limit_is_taken():
    check_limits(asked("a" * 16), siblings=3, limits=LIMITS)


@pytest.mark.parametrize(
    ("request_", "siblings", "message"),
    [
        (asked(""), 1, "no request_id"),
        (asked("a" * 17), 1, "17 characters in request_id, and generator.limits.max_request_id_chars is 16"),
        (asked(session_id="s" * 17), 1, "17 characters in session_id"),
        (asked(adapter="a" * 17), 1, "17 characters in adapter"),
        (asked(group_key="g" * 17), 1, "17 characters in group_key"),
        (asked(job="j" * 17), 1, "17 characters in job"),
        (asked(), 0, "0 samples were asked for"),
        (asked(), 4, "4 samples of one call, and generator.limits.max_siblings is 3"),
        (asked(prompt_tokens=6), 1, "6 prompt tokens, and generator.limits.max_prompt_tokens is 5"),
        (asked(max_new_tokens=8), 1, "8 new tokens, and generator.limits.max_new_tokens is 7"),
    ],
)
def test_what_is_over_a_limit_is_refused_with_both_numbers(request_, siblings, message):
    with pytest.raises(DataError, match=message):
        check_limits(request_, siblings=siblings, limits=LIMITS)


def test_a_refusal_names_every_limit_and_shows_no_more_of_an_id_than_an_id_may_have():
    with pytest.raises(DataError) as refused:
        check_limits(asked("x" * 1000, prompt_tokens=6), siblings=4, limits=LIMITS)
    assert str(refused.value).count("generator.limits.") == 3
    assert "x" * 17 not in str(refused.value)


def test_without_limits_of_their_own_prompt_and_output_are_the_engines_to_judge():
    check_limits(asked(prompt_tokens=10_000, max_new_tokens=2**31 - 1), siblings=1, limits=LimitSettings())


def test_places_are_counted_by_sample_and_come_back():
    places = Places(LIMITS)
    places.take(3, request_id="a")
    with pytest.raises(Overloaded, match="3 samples run or wait, 2 more were asked for"):
        places.take(2, request_id="b")
    places.take(1, request_id="c")
    places.give_back(3)
    places.take(2, request_id="b")
    assert places.taken == 3


def test_more_samples_than_an_idle_replica_has_places_for_can_never_be_taken():
    with pytest.raises(DataError, match=r"5 samples at once, and generator\.limits\.max_requests is 4"):
        Places(LIMITS).take(5, request_id="a")


def test_the_time_to_ask_again_follows_from_how_long_samples_hold_their_places():
    places = Places(LIMITS)
    places.take(4, request_id="a")
    assert places.retry_after_s(1) == 1.0  # nothing has ended yet
    places.learn(turn(1.0, 0.5, 6.5))
    assert places.retry_after_s(1) == pytest.approx(2.0)  # 8 s each, 4 at once: one ends every 2 s
    assert places.retry_after_s(3) == pytest.approx(6.0)
    places.learn(turn(0.0, 0.0, 3.0))
    assert places.retry_after_s(1) == pytest.approx(1.75)  # mean 0.8 * 8 + 0.2 * 3 = 7 s


@pytest.mark.parametrize(("took_s", "wait_s"), [(1e-4, 0.1), (1e4, 60.0)])
def test_the_time_to_ask_again_is_neither_a_busy_loop_nor_for_ever(took_s, wait_s):
    places = Places(LIMITS)
    places.take(4, request_id="a")
    places.learn(turn(0.0, 0.0, took_s))
    assert places.retry_after_s(1) == wait_s
