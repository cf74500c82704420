"""Blocks of KV: references, what is hit and what is not, and what it means for requests of the embedded engine."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from generator_builders import SteppedEngine, prompt_of, random_model, reference_logprobs, request
from rollmill.generator.engines.embedded.blocks import BlockStore, BlockTable
from rollmill.types import SamplingParams, Turn

MODEL = random_model(seed=1)


@pytest.fixture
def engine(tmp_path) -> SteppedEngine:
    return SteppedEngine(tmp_path, MODEL)


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, dtype=np.int64)


def known(store: BlockStore, tokens: np.ndarray) -> BlockTable:
    """Blocks that hold these tokens, registered and released: idle."""
    table = BlockTable(blocks=store.allocate(store.needed(len(tokens))), epoch=store.epoch)
    store.register(table, tokens, partial=True)
    store.release(table.blocks)
    return table


def assert_exact(turn: Turn) -> None:
    np.testing.assert_allclose(turn.behavior_logprobs, reference_logprobs(MODEL, turn, SamplingParams()), atol=1e-4)


def test_a_prompt_finds_whole_blocks_and_the_beginning_of_one_more():
    store = BlockStore(blocks=8, size=3)
    table = known(store, ids(1, 2, 3, 4, 5, 6, 7, 8))
    match = store.match(ids(1, 2, 3, 4, 5, 9, 9), limit=6)
    assert (match.tokens, match.blocks, match.tail) == (5, (table.blocks[0],), table.blocks[1])
    assert store.match(ids(1, 2, 3, 4, 5, 6, 7, 8), limit=7).tokens == 7
    assert store.match(ids(1, 2, 3), limit=2).tokens == 2
    assert store.match(ids(2, 2, 3), limit=2).tokens == 0
    # The same three tokens behind another beginning are other KV.
    assert store.match(ids(9, 9, 9, 4, 5, 6, 7), limit=6).tokens == 0


def test_the_end_of_what_is_least_recently_used_is_given_up_first():
    store = BlockStore(blocks=4, size=2)
    old, new = known(store, ids(1, 2, 3, 4)), known(store, ids(5, 6, 7, 8))
    assert store.available == 4
    assert store.allocate(1) == [old.blocks[1]]
    assert store.match(ids(1, 2, 3, 4, 0), limit=4).tokens == 2
    assert store.match(ids(5, 6, 7, 8, 0), limit=4).blocks == tuple(new.blocks)


def test_a_block_in_use_is_never_given_up():
    store = BlockStore(blocks=2, size=2)
    table = known(store, ids(1, 2, 3, 4))
    store.share(table.blocks[:1])
    assert store.available == 1
    assert store.allocate(1) == [table.blocks[1]]
    with pytest.raises(AssertionError, match="1 blocks were asked for and 0 are available"):
        store.allocate(1)


def test_behind_a_flush_nothing_is_hit_not_even_what_is_made_known_later_by_an_old_sequence():
    store = BlockStore(blocks=4, size=2)
    old = BlockTable(blocks=store.allocate(2), epoch=store.epoch)
    known(store, ids(1, 2, 3))
    store.flush()
    assert store.match(ids(1, 2, 3), limit=2).tokens == 0
    store.register(old, ids(1, 2, 3, 4), partial=True)
    assert store.match(ids(1, 2, 3, 4), limit=4).tokens == 0
    store.release(old.blocks)
    assert (store.used, store.idle, store.available) == (0, 0, 4)


def test_no_more_is_kept_than_may_be():
    store = BlockStore(blocks=9, size=1, idle_limit=2)
    known(store, ids(1, 2, 3, 4))
    assert (store.idle, store.available) == (2, 9)
    assert store.match(ids(1, 2, 3, 4), limit=4).tokens == 2


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_whatever_happens_blocks_are_conserved_and_a_hit_holds_the_tokens_that_were_asked_for(data):
    store = BlockStore(blocks=7, size=2, first=3, idle_limit=data.draw(st.sampled_from([None, 3])))
    holds: dict[int, tuple[int, tuple[int, ...]]] = {}  # block -> (epoch, all tokens up to its end)
    living: list[tuple[BlockTable, np.ndarray]] = []
    few = st.lists(st.integers(0, 1), min_size=1, max_size=7)
    for _ in range(data.draw(st.integers(1, 25))):
        what = data.draw(st.sampled_from(["begin", "begin", "end", "flush"]))
        if what == "begin":
            tokens = np.array(data.draw(few), dtype=np.int64)
            match = store.match(tokens, limit=len(tokens))
            whole = store.match(tokens, limit=len(tokens) // 2 * 2)
            hit: list[int] = [*match.blocks, *([match.tail] if match.tail >= 0 else [])]
            for index, block in enumerate(hit):
                end = min(match.tokens, 2 * index + 2)
                assert holds[block][0] == store.epoch
                assert holds[block][1][:end] == tuple(tokens[:end])
            store.share(whole.blocks)
            missing = store.needed(len(tokens)) - len(whole.blocks)
            if missing > store.available:
                store.release(list(whole.blocks))
                continue
            table = BlockTable([*whole.blocks, *store.allocate(missing)], list(whole.chain), store.epoch)
            for index in range(len(whole.blocks), len(table.blocks)):
                assert 3 <= table.blocks[index] < 10
                holds[table.blocks[index]] = (store.epoch, tuple(tokens[: 2 * index + 2]))
            store.register(table, tokens, partial=True)
            living.append((table, tokens))
        elif what == "end" and living:
            table, _ = living.pop(data.draw(st.integers(0, len(living) - 1)))
            store.release(table.blocks)
        elif what == "flush":
            store.flush()
        assert store.used == len({block for table, _ in living for block in table.blocks})
        assert store.used + store.available == 7
    for table, _ in living:
        store.release(table.blocks)
    assert (store.used, store.available) == (0, 7)


def test_siblings_share_the_blocks_of_their_prompt_and_part_where_they_write(engine):
    for sibling in range(4):
        engine.submit(request(f"s{sibling}", prompt_of(40), group_key="g", seed=sibling, max_new_tokens=20))
    engine.steps(1)
    tables = [engine.core.kv.blocks_of(sequence) for sequence in engine.core.running]
    # 40 tokens are two whole blocks of 16, and 8 tokens in a block that each goes on writing
    assert len({tuple(table[:2]) for table in tables}) == 1
    assert len({table[2] for table in tables}) == 4
    assert engine.core.kv_used_tokens == (2 + 4) * 16
    engine.finish()
    assert engine.core.kv_used_tokens == 0
    assert len({engine.turn(f"s{sibling}").output_ids.tobytes() for sibling in range(4)}) == 4
    for sibling in range(4):
        assert_exact(engine.turn(f"s{sibling}"))


@pytest.mark.parametrize("length", [31, 32, 33])
def test_a_group_is_exact_wherever_its_prompt_ends_in_a_block(engine, length):
    for sibling in range(3):
        engine.submit(request(f"s{sibling}", prompt_of(length), group_key="g", seed=sibling, max_new_tokens=35))
    engine.steps(3)
    engine.submit(request("late", prompt_of(length), group_key="g", seed=9))
    engine.finish()
    assert engine.turn("late").cached_tokens == length - 1
    for name in ("s0", "s1", "s2", "late"):
        assert_exact(engine.turn(name))


def test_the_next_turn_of_a_session_finds_everything_that_was_computed_in_the_last(engine):
    engine.submit(request("one", prompt_of(21), max_new_tokens=14))
    engine.finish()
    first = engine.turn("one")
    engine.submit(request("two", [*first.prompt_ids.tolist(), *first.output_ids.tolist(), 5, 6, 7]))
    engine.finish()
    # The newest token of the first turn was never fed, so its KV is missing.
    assert engine.turn("two").cached_tokens == 21 + 14 - 1
    assert_exact(engine.turn("two"))


def test_two_sessions_may_go_on_from_one_turn(engine):
    engine.submit(request("one", prompt_of(21), max_new_tokens=14))
    engine.finish()
    first = engine.turn("one")
    start = [*first.prompt_ids.tolist(), *first.output_ids.tolist()]
    for number in range(3):
        engine.submit(request(f"two-{number}", [*start, number, number], seed=number, max_new_tokens=20))
    engine.finish()
    for number in range(3):
        assert engine.turn(f"two-{number}").cached_tokens >= 34
        assert_exact(engine.turn(f"two-{number}"))
