"""Text grows out of ids without ever being taken back, and stop strings cut it where they are complete first."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollmill.generator.http.text import Detokenizer, ReplyText, StopFinder, StopMatch


def bytes_decode(ids: Sequence[int]) -> str:
    """The ids are bytes of UTF-8; those above 255 are special tokens without text."""
    return bytes(token for token in ids if token < 256).decode("utf-8", errors="replace")


def ids_of(text: str) -> list[int]:
    return list(text.encode())


def chunked(ids: list[int], cuts: Sequence[int]) -> list[list[int]]:
    at = sorted({min(cut, len(ids)) for cut in cuts} | {0, len(ids)})
    return [ids[start:end] for start, end in itertools.pairwise(at)]


def reply(ids: list[int], *, stops: Sequence[str] = (), cuts: Sequence[int] = ()) -> tuple[str, StopMatch | None]:
    grown = ReplyText(bytes_decode, stops=stops)
    text = "".join([grown.push(chunk) for chunk in chunked(ids, cuts)]) + grown.finish()
    return text, grown.match


def first_end(text: str, stops: Sequence[str]) -> tuple[int, int] | None:
    """Where the stop string that is complete first begins and ends, written the slow way."""
    for end in range(1, len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return min(starts), end
    return None


def test_a_character_of_four_tokens_comes_with_its_last_one():
    text = Detokenizer(bytes_decode)
    rocket = ids_of("\U0001f680")
    assert [text.push([byte]) for byte in [*rocket, ord("!")]] == ["", "", "", "\U0001f680", "!"]


def test_half_a_character_comes_broken_at_the_end_and_not_before():
    text = Detokenizer(bytes_decode)
    assert text.push(ids_of("a\u00fc")[:2]) == "a"
    assert text.finish() == "\N{REPLACEMENT CHARACTER}"


@settings(max_examples=20, deadline=None)
@given(
    ids=st.one_of(
        st.lists(st.integers(0, 300), max_size=80),
        st.text(max_size=60).map(ids_of),
        st.lists(st.sampled_from([0x80, 0xF0, 0x9F, 0x9A, 0x41, 299]), max_size=90),
    ),
    cuts=st.lists(st.integers(0, 90), max_size=90),
)
def test_what_was_handed_out_adds_up_to_the_text_of_all_ids_however_they_came(ids, cuts):
    grown = Detokenizer(bytes_decode)
    pieces = [grown.push(chunk) for chunk in chunked(ids, cuts)]
    assert "".join(pieces) + grown.finish() == bytes_decode(ids)


def test_the_window_that_is_decoded_again_stays_short():
    longest = 0

    def decode(ids: Sequence[int]) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return bytes_decode(ids)

    grown = Detokenizer(decode)
    for _ in range(2_000):
        grown.push([0x80])  # never a whole character
    assert longest <= 25


def test_text_that_may_become_a_stop_string_is_kept_back_until_it_cannot():
    finder = StopFinder(["END"])
    assert [finder.push(piece) for piece in ("a", "E", "N", "e", "EN")] == ["a", "", "", "ENe", ""]
    assert finder.finish() == "EN"


@pytest.mark.parametrize(
    ("stops", "text", "kept", "found"),
    [
        (["b"], "abc", "a", "b"),
        (["abcd", "c"], "abcd", "ab", "c"),  # complete first
        (["bc", "abc"], "xabc", "x", "abc"),  # both complete at once: the longer one
        (["aab"], "aaab", "a", "aab"),  # begins inside what was kept back
        (["x"], "abc", "abc", None),
        (["\n\n"], "a\n\n\nb", "a", "\n\n"),
    ],
)
def test_the_stop_string_that_is_complete_first_cuts(stops, text, kept, found):
    got, match = reply(ids_of(text), stops=stops, cuts=range(len(text)))
    assert (got, None if match is None else match.text) == (kept, found)


def test_the_match_says_which_tokens_hold_the_stop_string():
    grown = ReplyText(
        lambda ids: "".join({1: "so ", 2: "t", 3: "he E", 4: "N", 5: "D. More"}[i] for i in ids), stops=["END"]
    )
    assert grown.push([1, 2, 3, 4, 5, 1]) == "so the "
    assert grown.match == StopMatch(text="END", start_token=2, end_token=5)
    assert grown.finish() == ""


def test_a_stop_string_can_end_in_a_character_that_is_broken_off():
    text, match = reply([*ids_of("ab"), 0xF0], stops=["b\N{REPLACEMENT CHARACTER}"])
    assert text == "a"
    assert match == StopMatch(text="b\N{REPLACEMENT CHARACTER}", start_token=1, end_token=3)


@settings(max_examples=20, deadline=None)
@given(
    text=st.text(alphabet="ab\u00fc", max_size=30),
    stops=st.lists(st.text(alphabet="ab\u00fc", min_size=1, max_size=4), min_size=1, max_size=3),
    cuts=st.lists(st.integers(0, 60), max_size=60),
)
def test_a_stop_string_cuts_at_the_same_place_however_the_tokens_came(text, stops, cuts):
    got, match = reply(ids_of(text), stops=stops, cuts=cuts)
    expected = first_end(text, stops)
    if expected is None:
        assert (got, match) == (text, None)
        return
    start, end = expected
    assert got == text[:start]
    assert match == StopMatch(
        text=text[start:end], start_token=len(ids_of(text[:start])), end_token=len(ids_of(text[:end]))
    )
