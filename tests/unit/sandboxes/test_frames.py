"""Frames between owner and agent: what goes in comes out, in whatever pieces, and what is too large is refused."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmill.sandboxes.guest.frames import BadFrame, Parser, encode

HEADS = st.dictionaries(st.text(max_size=5), st.one_of(st.integers(), st.text(max_size=8), st.none()), max_size=4)


@given(
    frames=st.lists(st.tuples(HEADS, st.binary(max_size=50)), max_size=6),
    cuts=st.lists(st.integers(min_value=1, max_value=17), min_size=1, max_size=20),
)
def test_frames_come_out_whole_in_order_however_the_stream_is_cut(frames, cuts):
    stream = b"".join(encode(head, payload) for head, payload in frames)
    parser, found, at, turn = Parser(), [], 0, 0
    while at < len(stream):
        size = cuts[turn % len(cuts)]
        found += parser.feed(stream[at : at + size])
        at, turn = at + size, turn + 1
    assert found == frames


@pytest.mark.parametrize("lengths", [(101, 0), (0, 201), (2**32 - 1, 2**32 - 1)])
def test_a_frame_that_announces_too_much_is_refused_before_it_is_read(lengths):
    parser = Parser(most_head_bytes=100, most_payload_bytes=200)
    with pytest.raises(BadFrame, match="announces"):
        list(parser.feed(struct.pack("<II", *lengths)))


@pytest.mark.parametrize("head", [b"", b"{", b"[1]", b"\xff", b"1" * 10, b"[" * 100_000])
def test_a_head_that_is_no_object_is_refused(head):
    with pytest.raises(BadFrame):
        list(Parser().feed(struct.pack("<II", len(head), 0) + head))
