"""The second tier of KV: what comes back is what went there, or nothing, and no token depends on it."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from generator_builders import SteppedEngine, all_ids, embedded, prompt_of, random_model, reference_logprobs, request
from rollmill.clock import VirtualClock
from rollmill.config import load_config
from rollmill.errors import ConfigError
from rollmill.generator.engines.embedded.blocks import BlockStore, BlockTable
from rollmill.generator.engines.embedded.host_law import Cost, MoveCosts
from rollmill.generator.engines.embedded.host_tier import HostTier
from rollmill.generator.engines.embedded.prefixes import Entry, digest_of
from rollmill.types import GenerateRequest, SamplingParams, Turn, Wave

MODEL, NEW = random_model(seed=1), random_model(seed=2)
ROOT = b"root"
TOKENS, TOKEN_BYTES = 4, 8
FEWEST = 10
"""Blocks of one sequence of 160 tokens, the greatest length."""


@contextmanager
def tier(folder: Path, *, blocks: int = 3, spare_bytes: int = 0) -> Iterator[HostTier]:
    size = TOKENS * TOKEN_BYTES
    made = HostTier(
        folder, nbytes=blocks * size + spare_bytes, block_bytes=size, block_tokens=TOKENS, clock=VirtualClock()
    )
    try:
        yield made
    finally:
        made.close()


def entry(*tokens: int, parent: bytes = ROOT, space: bytes = b"") -> Entry:
    ids = np.array(tokens, dtype=np.int64)
    return Entry(parent, ids, digest_of(parent, ids) if len(ids) == TOKENS else None, space)


def content_of(what: Entry) -> np.ndarray:
    """Bytes that no other entry has."""
    seed = int.from_bytes(digest_of(what.parent, what.tokens)[:8], "little")
    return np.random.default_rng(seed).integers(0, 256, len(what.tokens) * TOKEN_BYTES).astype(np.uint8)


def put(host: HostTier, what: Entry) -> None:
    host.put(what, lambda: content_of(what))


def slot_of(host: HostTier, what: Entry) -> int | None:
    slot, common = host.known.longest_below(what.parent, what.tokens)
    return slot if common == len(what.tokens) else None


def get(host: HostTier, what: Entry) -> np.ndarray | None:
    slot = slot_of(host, what)
    if slot is None:
        return None
    there = host.known.entry(slot)
    assert there is not None
    content = host.get(slot, there)
    return None if content is None else content[: len(what.tokens) * TOKEN_BYTES]


def open_file(folder: Path) -> int:
    """The file of a tier, found where the kernel shows the files that a process has open."""
    for link in Path("/proc/self/fd").iterdir():
        if link.is_symlink() and os.readlink(link).startswith(str(folder / "rollmill-host-kv-")):
            return os.open(link, os.O_RDWR)
    raise AssertionError("no tier is open")


# -- the tier alone


def test_what_is_read_is_what_was_written(tmp_path):
    with tier(tmp_path) as host:
        whole, part = entry(1, 2, 3, 4), entry(5, 6, parent=b"below")
        put(host, whole)
        put(host, part)
        np.testing.assert_array_equal(get(host, whole), content_of(whole))
        np.testing.assert_array_equal(get(host, part), content_of(part))
        assert get(host, entry(1, 2, 9, 4)) is None
        # 4 + 2 tokens of 8 bytes, in two of three places of 32 bytes
        assert (host.counts.stored_bytes, host.counts.restored_bytes, host.used_bytes) == (48, 48, 64)


def test_what_is_there_is_not_written_again_and_the_least_recently_used_goes_first(tmp_path):
    with tier(tmp_path) as host:
        pieces = [entry(n, n, n, n) for n in range(4)]
        for piece in pieces[:3]:
            put(host, piece)
        put(host, pieces[0])
        assert host.counts.stored_bytes == 3 * 32
        put(host, pieces[3])
        assert [slot_of(host, piece) is not None for piece in pieces] == [True, False, True, True]
        assert host.counts.evictions == 1


def test_more_tokens_of_the_same_block_take_the_place_of_fewer(tmp_path):
    with tier(tmp_path) as host:
        put(host, entry(1, 2))
        put(host, entry(1, 2, 3))
        put(host, entry(1, 2))
        assert (host.used_bytes, host.counts.stored_bytes) == (32, 2 * 8 + 3 * 8)
        np.testing.assert_array_equal(get(host, entry(1, 2, 3)), content_of(entry(1, 2, 3)))


@pytest.mark.parametrize("damage", ["changed", "cut"])
def test_a_damaged_file_is_a_miss_and_never_wrong_kv(tmp_path, damage, caplog):
    with tier(tmp_path) as host:
        first, second = entry(1, 2, 3, 4), entry(5, 6, 7, 8)
        put(host, first)
        put(host, second)
        handle = open_file(tmp_path)
        try:
            if damage == "changed":
                os.pwrite(handle, bytes([content_of(second)[0] ^ 1]), 32)
            else:
                os.ftruncate(handle, 63)
        finally:
            os.close(handle)
        with caplog.at_level(logging.WARNING):
            assert get(host, second) is None
        assert "computed again" in caplog.text
        assert (host.counts.damaged, slot_of(host, second), host.used_bytes) == (1, None, 32)
        np.testing.assert_array_equal(get(host, first), content_of(first))


def test_a_piece_that_was_pushed_out_meanwhile_is_not_read_from_the_place_that_it_had(tmp_path):
    with tier(tmp_path, blocks=1) as host:
        first = entry(1, 2, 3, 4)
        put(host, first)
        slot = slot_of(host, first)
        assert slot is not None
        put(host, entry(5, 6, 7, 8))
        assert host.get(slot, first) is None
        assert host.counts.damaged == 0


def test_no_file_has_a_name_and_names_that_a_crash_left_are_swept_away(tmp_path):
    left, other = tmp_path / "rollmill-host-kv-1-abcd", tmp_path / "notes.txt"
    left.write_bytes(b"x")
    other.write_bytes(b"x")
    with tier(tmp_path) as host:
        put(host, entry(1, 2, 3, 4))
        assert list(tmp_path.iterdir()) == [other]
        with tier(tmp_path) as second:
            put(second, entry(1, 2, 3, 4))
        np.testing.assert_array_equal(get(host, entry(1, 2, 3, 4)), content_of(entry(1, 2, 3, 4)))


def test_a_killed_process_leaves_nothing_behind(tmp_path):
    child = os.fork()
    if child == 0:
        with tier(tmp_path) as host:
            put(host, entry(1, 2, 3, 4))
            os.kill(os.getpid(), signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert list(tmp_path.iterdir()) == []


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_whatever_happens_the_budget_holds_and_a_hit_is_what_was_put(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("tier")
    blocks = data.draw(st.integers(1, 4))
    with tier(folder, blocks=blocks, spare_bytes=data.draw(st.integers(0, 31))) as host:
        handle = open_file(folder)
        try:
            for _ in range(data.draw(st.integers(1, 30))):
                tokens = data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=TOKENS))
                piece = entry(*tokens, space=data.draw(st.sampled_from([b"", b"a"])))
                what = data.draw(st.sampled_from(["put", "put", "put", "get", "clear", "forget"]))
                if what == "put":
                    put(host, piece)
                    assert slot_of(host, piece) is not None
                elif what == "clear":
                    host.clear()
                    assert host.used_bytes == 0
                elif what == "forget":
                    host.forget_space(piece.space)
                    assert host.known.of_space(piece.space) == []
                slot = slot_of(host, piece)
                if slot is not None:
                    there = host.known.entry(slot)
                    assert there is not None
                    np.testing.assert_array_equal(host.get(slot, there), content_of(there))
                assert host.used_bytes <= host.capacity_bytes == blocks * 32
                assert os.fstat(handle).st_size <= blocks * 32
            assert host.counts.damaged == 0
        finally:
            os.close(handle)


@pytest.mark.parametrize(
    ("nbytes", "folder", "message"),
    [
        (31, "tier", "host_kv_bytes is 31, and one block of 4 tokens takes 32 bytes"),
        (1 << 60, "tier", "where [0-9]+ are free"),
        (64, "file/tier", "host_kv_directory .*/file/tier cannot be used: Not a directory"),
    ],
)
def test_a_tier_that_cannot_be_is_refused_with_the_numbers(tmp_path, nbytes, folder, message):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ConfigError, match=message):
        HostTier(tmp_path / folder, nbytes=nbytes, block_bytes=32, block_tokens=4, clock=VirtualClock())


# -- the law


def test_moving_is_measured_against_computing_and_what_does_not_pay_is_tried_now_and_then():
    costs = MoveCosts(prefill=Cost(1.0), store=Cost(0.1), load=Cost(0.2))
    # 16 tokens take 16 s; 80 bytes are read in 16 s, 53 are written and read in 15.9
    assert costs.decide_load(nbytes=80, tokens=16)
    assert costs.decide_store(nbytes=53, tokens=16)
    assert not costs.decide_store(nbytes=54, tokens=16)
    tries = [costs.decide_load(nbytes=81, tokens=16) for _ in range(130)]
    assert [at for at, tried in enumerate(tries) if tried] == [64, 129]


def test_what_was_never_measured_is_tried():
    assert MoveCosts().decide_load(nbytes=1 << 40, tokens=1)
    assert MoveCosts(store=Cost(9.0)).decide_store(nbytes=1 << 40, tokens=1)
    assert not MoveCosts(prefill=Cost(0.0), store=Cost(9.0)).decide_store(nbytes=1, tokens=1)


# -- blocks that are given up


def test_only_what_is_worth_keeping_is_told_of_before_it_is_given_up():
    store, told = BlockStore(blocks=4, size=2), []
    store.on_give_up = lambda block, what: told.append((block, what.tokens.tolist()))
    for tokens, worth in (((1, 2, 3), True), ((4, 5, 6), False)):
        table = BlockTable(blocks=store.allocate(2), epoch=store.epoch)
        store.register(table, np.array(tokens), partial=True, worth_keeping=worth)
        store.release(table.blocks)
    store.release(store.allocate(4))
    assert told == [(1, [3]), (0, [1, 2])]


# -- the engine


def few(folder: Path, *, tier_blocks: int | None = 40, **changes) -> SteppedEngine:
    return SteppedEngine(folder, MODEL, **{"kv_blocks": FEWEST, **changes}, tier_blocks=tier_blocks)


def tier_of(engine: SteppedEngine) -> HostTier:
    made = engine.core.kv.tier
    assert made is not None
    return made


def in_session(asked: GenerateRequest, session_id: str = "s") -> GenerateRequest:
    return msgspec.structs.replace(asked, session_id=session_id)


def run(engine: SteppedEngine, asked: GenerateRequest) -> Turn:
    engine.submit(asked)
    engine.finish()
    return engine.turn(asked.request_id)


def first_turn(engine: SteppedEngine) -> Turn:
    return run(engine, in_session(request("first", prompt_of(50), seed=5)))


def crowd(engine: SteppedEngine) -> None:
    """Needs all ten blocks at once, so that nothing of another request stays."""
    run(engine, request("crowd", prompt_of(150, seed=9), max_new_tokens=10))


def second_turn(engine: SteppedEngine, first: Turn) -> Turn:
    return run(engine, in_session(request("second", [*all_ids(first), 7, 8, 9], seed=6)))


def two_turns(engine: SteppedEngine) -> Turn:
    first = first_turn(engine)
    crowd(engine)
    return second_turn(engine, first)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_a_second_turn_is_the_same_to_the_last_bit_whether_its_kv_stayed_or_came_back(tmp_path, dtype, kernels):
    stayed, came_back, lost = (
        two_turns(SteppedEngine(tmp_path, MODEL, dtype=dtype, kernels=kernels)),
        two_turns(few(tmp_path, dtype=dtype, kernels=kernels)),
        two_turns(few(tmp_path, dtype=dtype, kernels=kernels, tier_blocks=None)),
    )
    np.testing.assert_array_equal(came_back.output_ids, stayed.output_ids)
    np.testing.assert_array_equal(came_back.behavior_logprobs, stayed.behavior_logprobs)
    # 50 tokens and 8 sampled ones, of which the last has no KV
    assert (stayed.cached_tokens, came_back.cached_tokens, lost.cached_tokens) == (57, 57, 0)


def test_hits_and_misses_are_counted_once_for_each_prompt_that_enters(tmp_path):
    engine = few(tmp_path)
    two_turns(engine)
    counts = tier_of(engine).counts
    assert (counts.hits, counts.misses, counts.damaged) == (1, 1, 0)  # the first turn of a session finds nothing
    token_bytes = engine.core.model.block_bytes(16) // 16
    assert counts.restored_bytes == 57 * token_bytes
    assert engine.core.kv_used_tokens == 0


def test_what_came_back_and_goes_again_is_not_written_again(tmp_path):
    engine = few(tmp_path)
    first = first_turn(engine)
    for _ in range(3):
        crowd(engine)
        engine.results.pop("crowd")
        run(engine, in_session(request("same", [*all_ids(first), 7], seed=1, max_new_tokens=1)))
        engine.results.pop("same")
    token_bytes = engine.core.model.block_bytes(16) // 16
    assert tier_of(engine).counts.hits == 3
    # The turn itself, then the one token more that the last block holds after the second turn.
    assert tier_of(engine).counts.stored_bytes <= (57 + 2 * 16) * token_bytes


def test_the_kv_of_a_request_without_a_session_is_forgotten_as_before(tmp_path):
    engine = few(tmp_path)
    first = run(engine, request("first", prompt_of(50), seed=5))
    crowd(engine)
    assert tier_of(engine).counts.stored_bytes == 0
    assert second_turn(engine, first).cached_tokens == 0


@pytest.mark.parametrize("kv", ["keep", "recompute"])
def test_behind_an_update_nothing_older_comes_back(tmp_path, kv):
    engine = few(tmp_path)
    first = first_turn(engine)
    crowd(engine)
    assert tier_of(engine).used_bytes > 0
    engine.swap(NEW, policy_version=2, kv=kv)
    assert tier_of(engine).used_bytes == 0
    turn = second_turn(engine, first)
    assert (turn.cached_tokens, tier_of(engine).counts.hits) == (0, 0)
    np.testing.assert_allclose(turn.behavior_logprobs, reference_logprobs(NEW, turn, SamplingParams()), atol=1e-4)


def test_where_reading_is_slower_than_computing_kv_is_computed(tmp_path):
    engine = few(tmp_path)
    first = first_turn(engine)
    crowd(engine)
    tier_of(engine).costs.load = Cost(1.0)  # seconds per byte, and computing took no time on this clock
    turn = second_turn(engine, first)
    assert (turn.cached_tokens, tier_of(engine).counts.hits) == (0, 0)
    np.testing.assert_allclose(turn.behavior_logprobs, reference_logprobs(MODEL, turn, SamplingParams()), atol=1e-4)


def test_a_damaged_tier_costs_time_and_no_token(tmp_path):
    engine = few(tmp_path)
    first = first_turn(engine)
    crowd(engine)
    handle = open_file(tmp_path / "tier")
    os.ftruncate(handle, 0)
    os.close(handle)
    turn = second_turn(engine, first)
    assert (turn.cached_tokens, tier_of(engine).counts.damaged) == (0, 1)
    np.testing.assert_allclose(turn.behavior_logprobs, reference_logprobs(MODEL, turn, SamplingParams()), atol=1e-4)


@pytest.mark.parametrize("max_num_batched_tokens", [24, 512])
def test_suspended_sequences_get_their_kv_back_and_draw_the_same_tokens(tmp_path, max_num_batched_tokens):
    engines = [
        few(tmp_path, max_num_batched_tokens=max_num_batched_tokens, kv_blocks=12, tier_blocks=blocks)
        for blocks in (None, 40, 3)
    ]
    for engine in engines:
        for number in range(4):
            engine.submit(request(f"r{number}", prompt_of(20, seed=number), max_new_tokens=50, seed=number))
            engine.steps(2)
        engine.finish()
        assert engine.core.preemptions > 0
        assert engine.core.kv_used_tokens == 0
    without, whole, small = engines
    assert tier_of(whole).counts.hits > 0
    assert whole.core.prefill_tokens < without.core.prefill_tokens
    assert tier_of(small).counts.evictions > 0
    for number in range(4):
        expected = without.turn(f"r{number}")
        for engine in (whole, small):
            turn = engine.turn(f"r{number}")
            np.testing.assert_array_equal(turn.output_ids, expected.output_ids)
            np.testing.assert_allclose(turn.behavior_logprobs, expected.behavior_logprobs, atol=1e-5)


@pytest.mark.parametrize("tier_blocks", [2, 9])
def test_sessions_that_crowd_each_other_out_are_exact_whatever_the_tier_holds(tmp_path, tier_blocks):
    engine = few(tmp_path, tier_blocks=tier_blocks)

    @settings(max_examples=8, deadline=None)
    @given(data=st.data())
    def holds(data: st.DataObject) -> None:
        engine.core.abort_all()  # what an example left that failed
        engine.core.flush()
        talks = {name: prompt_of(data.draw(st.integers(1, 40)), seed=ord(name)) for name in "abc"}
        for number in range(data.draw(st.integers(2, 6))):
            asked = []
            for name in data.draw(st.lists(st.sampled_from("abc"), min_size=1, max_size=3, unique=True)):
                if len(talks[name]) < 120:
                    made = request(f"{name}{number}", talks[name], seed=number, max_new_tokens=12)
                    engine.submit(in_session(made, name))
                    asked.append((name, made.request_id))
            engine.finish()
            for name, request_id in asked:
                turn = engine.turn(request_id)
                reference = reference_logprobs(MODEL, turn, SamplingParams())
                np.testing.assert_allclose(turn.behavior_logprobs, reference, atol=1e-4)
                talks[name] = [*all_ids(turn).tolist(), 3, 4]
        assert engine.core.kv_used_tokens == 0

    holds()
    assert tier_of(engine).counts.damaged == 0


def test_a_wave_neither_fills_the_tier_nor_asks_it(tmp_path):
    engine = few(tmp_path)
    for number in range(2):
        for index in range(2):
            asked = in_session(request(f"w{number}-{index}", prompt_of(60, seed=index), max_new_tokens=12))
            wave = Wave(wave_id=f"w{number}", size=2, index=index)
            engine.submit(msgspec.structs.replace(asked, wave=wave))
        engine.finish()
    crowd(engine)
    counts = tier_of(engine).counts
    assert (counts.hits, counts.misses, counts.stored_bytes) == (0, 0, 0)


async def test_the_engine_says_what_its_tier_holds_and_gives_the_file_back_at_its_end(tmp_path):
    engine = embedded(tmp_path, MODEL, host_kv_bytes=100_000, host_kv_directory=tmp_path / "tier")
    try:
        assert "host_kv" in engine.info().capabilities
        assert "more on the host" in engine.info().kv_budget
        await engine.generate(in_session(request("a", prompt_of(30))))
        load = engine.load().host_kv
        assert load is not None
        assert 90_000 < load.capacity_bytes <= 100_000
        assert (load.used_bytes, load.hits, load.misses) == (0, 0, 1)
    finally:
        await engine.close()
    with pytest.raises(AssertionError, match="no tier is open"):
        open_file(tmp_path / "tier")


def test_a_size_without_a_folder_is_refused_by_the_engine(tmp_path):
    with pytest.raises(ConfigError, match=r"host_kv_bytes is 100 and generator\.host_kv_directory is not set"):
        embedded(tmp_path, MODEL, host_kv_bytes=100)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["generator.host_kv_bytes=100"], "host_kv_directory is None: the tier is a file"),
        (["generator.host_kv_directory=/kv"], "host_kv_bytes is None"),
        (
            ["generator.host_kv_bytes=9", "generator.host_kv_directory=/kv", "generator.enable_prefix_caching=false"],
            "no KV outlives its request",
        ),
        (
            ["generator.engine=vllm", "generator.host_kv_bytes=9", "generator.host_kv_directory=/kv"],
            "Engines that have it: embedded",
        ),
    ],
)
def test_settings_that_make_no_tier_are_refused(overrides, message):
    with pytest.raises(ConfigError, match=message):
        load_config(None, overrides=overrides)
