"""Tokens of a stream that are held back to go together."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rollmill.generator.chunks import ChunkJoiner
from rollmill.types import TokenChunk


def chunk(start: int, *, tokens: int = 1, version: int = 1) -> TokenChunk:
    ids = np.arange(start, start + tokens, dtype=np.int32)
    return TokenChunk(
        start_token=start, output_ids=ids, behavior_logprobs=-ids.astype(np.float32), policy_version=version
    )


def ids(chunks: list[TokenChunk]) -> list[list[int]]:
    return [one.output_ids.tolist() for one in chunks]


def test_the_first_token_goes_at_once_and_the_others_together():
    joiner = ChunkJoiner(3)
    sent = [ids(joiner.add(0, chunk(start))) for start in range(6)]
    assert sent == [[[0]], [], [], [[1, 2, 3]], [], []]
    assert ids(joiner.flush(0)) == [[4, 5]]
    assert joiner.flush(0) == []


def test_a_chunk_spans_one_version():
    joiner = ChunkJoiner(4)
    joiner.add(0, chunk(1))
    joiner.add(0, chunk(2))
    (sent,) = joiner.add(0, chunk(3, version=2))
    assert (sent.output_ids.tolist(), sent.policy_version) == ([1, 2], 1)
    (rest,) = joiner.flush(0)
    assert (rest.output_ids.tolist(), rest.policy_version) == ([3], 2)


def test_one_by_one_nothing_is_held_back():
    joiner = ChunkJoiner(1)
    assert [ids(joiner.add(0, chunk(start))) for start in (5, 6)] == [[[5]], [[6]]]
    assert joiner.flush_all() == []


@given(
    size=st.integers(1, 5),
    steps=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 3), st.booleans()), max_size=40),
)
def test_what_goes_out_is_what_came_in(size, steps):
    joiner = ChunkJoiner(size)
    count, version = {0: 0, 1: 0, 2: 0}, 1
    came: dict[int, list[tuple[int, float, int]]] = {0: [], 1: [], 2: []}
    out: dict[int, list[tuple[int, float, int]]] = {0: [], 1: [], 2: []}

    def note(books: dict[int, list[tuple[int, float, int]]], index: int, one: TokenChunk) -> None:
        assert one.start_token == len(books[index])
        pairs = zip(one.output_ids.tolist(), one.behavior_logprobs.tolist(), strict=True)
        books[index] += [(token, logprob, one.policy_version) for token, logprob in pairs]

    for index, tokens, new_version in steps:
        version += new_version
        one = chunk(count[index], tokens=tokens, version=version)
        count[index] += tokens
        note(came, index, one)
        for sent in joiner.add(index, one):
            note(out, index, sent)
    for index, sent in joiner.flush_all():
        note(out, index, sent)
    assert out == came
