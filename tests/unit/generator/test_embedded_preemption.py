"""Few blocks: who waits, who gives up its KV, and that nobody's tokens depend on it."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from generator_builders import SteppedEngine, embedded, prompt_of, random_model, reference_logprobs, request
from rollmill.generator.engines.embedded.linears import choose_kernels
from rollmill.types import GenerateRequest, SamplingParams, StopReason, Turn, Wave

MODEL, NEW = random_model(seed=1), random_model(seed=2)
FEWEST = 10
"""Blocks of one sequence of 160 tokens, the greatest length."""


def few(folder, *, kv_blocks: int = FEWEST + 2, **changes) -> SteppedEngine:
    return SteppedEngine(folder, MODEL, kv_blocks=kv_blocks, **changes)


def four(*, new: int = 50) -> list[GenerateRequest]:
    """Four requests that need 5 blocks of 16 each by their end, of 12."""
    return [request(f"r{n}", prompt_of(20, seed=n), max_new_tokens=new, seed=n) for n in range(4)]


def assert_exact(turn: Turn, model=MODEL) -> None:
    np.testing.assert_allclose(turn.behavior_logprobs, reference_logprobs(model, turn, SamplingParams()), atol=1e-4)


def test_the_youngest_gives_up_its_kv_and_goes_on_from_its_tokens(tmp_path):
    engine = few(tmp_path)
    for number, asked in enumerate(four()):
        engine.submit(asked)
        engine.clock.advance(1.0)
        engine.steps(1)
        assert len(engine.core.running) == number + 1
    begun = list(engine.core.running)
    while not engine.core.preemptions:
        engine.steps(1)
    assert [s.request.request_id for s in engine.core.waiting] == ["r3"]
    kept = begun[3].turn(StopReason.ABORT, now_s=0.0).output_ids
    assert len(kept) > 10
    engine.finish()
    assert engine.core.preemptions >= 2
    assert engine.core.kv_used_tokens == 0
    for number in range(4):
        turn = engine.turn(f"r{number}")
        assert (turn.stop_reason, len(turn.output_ids)) == (StopReason.LENGTH, 50)
        assert_exact(turn)
    np.testing.assert_array_equal(engine.turn("r3").output_ids[: len(kept)], kept)


@pytest.mark.parametrize("max_num_batched_tokens", [8, 24, 512])
def test_the_same_seeds_give_the_same_tokens_with_few_blocks_as_with_many(tmp_path, max_num_batched_tokens):
    engines = [
        few(tmp_path, max_num_batched_tokens=max_num_batched_tokens),
        SteppedEngine(tmp_path, MODEL),
    ]
    for engine in engines:
        for asked in four():
            engine.submit(asked)
            engine.steps(2)
        engine.finish()
    assert engines[0].core.preemptions > 0
    assert engines[1].core.preemptions == 0
    for number in range(4):
        one, other = (engine.turn(f"r{number}") for engine in engines)
        np.testing.assert_array_equal(one.output_ids, other.output_ids)
        np.testing.assert_allclose(one.behavior_logprobs, other.behavior_logprobs, atol=1e-5)


def test_a_request_waits_while_blocks_are_short_and_the_older_one_is_not_disturbed(tmp_path):
    engine = few(tmp_path, kv_blocks=FEWEST)
    engine.submit(request("long", prompt_of(130), max_new_tokens=20))
    engine.steps(1)
    engine.submit(request("next", prompt_of(20, seed=1), max_new_tokens=3))
    engine.steps(5)
    # 130 tokens are 9 blocks, the tenth is promised to the same sequence.
    assert [s.request.request_id for s in engine.core.running] == ["long"]
    engine.finish()
    assert engine.core.preemptions == 0
    assert_exact(engine.turn("next"))


def test_siblings_for_which_there_are_no_blocks_come_later_and_still_share(tmp_path):
    engine = few(tmp_path)
    for sibling in range(8):
        engine.submit(request(f"s{sibling}", prompt_of(40), group_key="g", seed=sibling, max_new_tokens=30))
    engine.steps(1)
    # 2 blocks are shared; each sibling has one of its own and is promised another
    assert len(engine.core.running) == 5
    engine.finish()
    for sibling in range(8):
        assert_exact(engine.turn(f"s{sibling}"))
    assert all(engine.turn(f"s{sibling}").cached_tokens >= 32 for sibling in range(1, 8))


def test_the_spans_of_a_preempted_request_say_what_each_token_was_sampled_from(tmp_path):
    engine = few(tmp_path)
    for asked in four():
        engine.submit(asked)
    while not engine.core.preemptions:
        engine.steps(1)
    had = engine.core.waiting[0].count
    name = engine.core.waiting[0].request.request_id
    engine.swap(NEW, policy_version=2, kv="keep")
    engine.finish()
    turn = engine.turn(name)
    assert [(s.start_token, s.end_token, s.policy_version) for s in turn.version_spans] == [(0, had, 1), (had, 50, 2)]
    # Its KV was made anew, so the rest is the new policy's own.
    whole = reference_logprobs(NEW, turn, SamplingParams())
    np.testing.assert_allclose(turn.behavior_logprobs[had:], whole[had:], atol=1e-4)


def test_a_drain_waits_for_those_who_gave_up_their_kv(tmp_path):
    engine = few(tmp_path)
    for asked in four():
        engine.submit(asked)
    while not engine.core.preemptions:
        engine.steps(1)
    engine.submit(request("new", prompt_of(5, seed=9)))
    engine.core.admission_open = False
    while engine.core.busy:
        engine.steps(1)
    assert sorted(engine.results) == ["r0", "r1", "r2", "r3"]
    assert [s.request.request_id for s in engine.core.waiting] == ["new"]
    assert not engine.core.has_work()


def test_whoever_gave_up_its_kv_can_be_aborted_and_keeps_its_tokens(tmp_path):
    engine = few(tmp_path)
    for asked in four():
        engine.submit(asked)
    while not engine.core.preemptions:
        engine.steps(1)
    sequence = engine.core.waiting[0]
    had = sequence.count
    assert engine.core.abort(sequence.request.request_id)
    turn = engine.turn(sequence.request.request_id)
    assert (turn.stop_reason, len(turn.output_ids)) == (StopReason.ABORT, had)
    engine.finish()


def test_a_wave_is_never_preempted_and_its_bits_do_not_depend_on_how_many_fit(tmp_path):
    bits = []
    for kv_blocks in (FEWEST + 2, FEWEST + 2, None):
        engine = SteppedEngine(tmp_path, MODEL, kv_blocks=kv_blocks)
        if bits:  # what ran before must not matter
            engine.submit(request("before", prompt_of(30, seed=7), max_new_tokens=9))
            engine.finish()
        for index, asked in enumerate(four()):
            engine.submit(msgspec.structs.replace(asked, wave=Wave(wave_id="w", size=4, index=index)))
        engine.steps(1)
        # 69 tokens are 5 blocks to the end: two of four fit into 12.
        assert len(engine.core.running) == (2 if kv_blocks else 4)
        engine.finish()
        assert engine.core.preemptions == 0
        turns = [engine.turn(f"r{number}") for number in range(4)]
        bits.append([turn.output_ids.tobytes() + turn.behavior_logprobs.tobytes() for turn in turns])
    assert bits[0] == bits[1]
    if choose_kernels("auto") is not None:  # whose rows do not depend on each other
        assert [one[: 50 * 4] for one in bits[0]] == [one[: 50 * 4] for one in bits[2]]


def test_the_beginning_of_a_long_prompt_gives_way_to_those_who_run(tmp_path):
    engine = few(tmp_path, kv_blocks=FEWEST, max_num_seqs=2, max_num_batched_tokens=20)
    engine.submit(request("runs", prompt_of(60), max_new_tokens=90))
    engine.steps(5)
    engine.submit(request("long", prompt_of(120, seed=1), max_new_tokens=4))
    engine.finish()
    assert engine.core.preemptions == 0
    for name in ("runs", "long"):
        assert_exact(engine.turn(name))


@pytest.mark.parametrize("end", ["abort", "deadline"])
def test_the_beginning_of_a_prompt_that_nobody_waits_for_any_more_is_given_back(tmp_path, end):
    engine = few(tmp_path, max_num_seqs=2, max_num_batched_tokens=20)
    engine.submit(request("long", prompt_of(100), deadline_s=5.0))
    engine.steps(2)
    assert engine.core.kv_used_tokens == 48  # 40 tokens are computed
    if end == "abort":
        engine.core.abort("long")
    else:
        engine.clock.advance(5.0)
        engine.steps(1)
    assert engine.core.kv_used_tokens == 0
    engine.submit(request("again", prompt_of(100), max_new_tokens=2))
    engine.finish()
    # 40 tokens of it were found, and 60 computed in three chunks of its own.
    assert (engine.turn("again").cached_tokens, engine.core.prefill_tokens) == (40, 100)
    assert_exact(engine.turn("again"))


def test_a_full_prompt_of_the_greatest_length_starts_also_behind_what_lies_about(tmp_path):
    engine = few(tmp_path, kv_blocks=FEWEST)
    longest = prompt_of(159)
    for number in range(3):
        engine.submit(request(f"r{number}", longest, max_new_tokens=1))
        engine.finish()
        assert_exact(engine.turn(f"r{number}"))
    engine.submit(request("other", prompt_of(159, seed=3), max_new_tokens=1))
    engine.finish()
    assert_exact(engine.turn("other"))


@pytest.mark.parametrize("seed", range(3))
def test_any_mixture_ends_exactly_and_gives_all_blocks_back(tmp_path, seed):
    rng = np.random.default_rng(seed)
    engine = few(tmp_path, kv_blocks=FEWEST + seed, max_num_batched_tokens=24)
    names = []
    for number in range(14):
        names.append(f"r{number}")
        engine.submit(
            request(
                names[-1],
                [*prompt_of(40)[: int(rng.integers(1, 40))], *prompt_of(int(rng.integers(1, 50)), seed=number % 3)],
                group_key="g" if rng.random() < 0.3 else "",
                max_new_tokens=int(rng.integers(1, 60)),
                seed=number,
            )
        )
        engine.clock.advance(0.5)
        engine.steps(int(rng.integers(0, 6)))
        if rng.random() < 0.15:
            engine.core.abort(names[int(rng.integers(len(names)))])
    engine.finish()
    for name in names:
        assert_exact(engine.turn(name))
    assert engine.core.kv_used_tokens == 0
    assert engine.core.kv.store.available == FEWEST + seed


def test_an_idle_engine_holds_the_first_request_for_company_and_no_longer(tmp_path):
    engine = SteppedEngine(tmp_path, MODEL, max_num_seqs=3, max_wait_s=0.02)
    engine.submit(request("a", prompt_of(5), max_new_tokens=4))
    engine.clock.advance(0.015)
    engine.submit(request("b", prompt_of(6), max_new_tokens=4))
    assert not engine.core.has_work()
    assert engine.core.seconds_to_wake() == pytest.approx(0.005)
    engine.steps(1)
    assert engine.core.running == []
    engine.clock.advance(0.005)
    engine.steps(1)
    assert len(engine.core.running) == 2
    # Who comes to a running batch enters at once.
    engine.submit(request("c", prompt_of(7), max_new_tokens=4))
    engine.steps(1)
    assert len(engine.core.running) == 3


def test_a_full_batch_is_not_held(tmp_path):
    engine = SteppedEngine(tmp_path, MODEL, max_num_seqs=2, max_wait_s=5.0)
    for name in "ab":
        engine.submit(request(name, prompt_of(5)))
    assert engine.core.has_work()


async def test_a_lone_request_is_answered_once_the_hold_is_over(tmp_path):
    engine = embedded(tmp_path, MODEL, max_wait_ms=20.0)
    try:
        turn = await engine.generate(request("lone", prompt_of(5), max_new_tokens=2))
        assert turn.timings.queued_s >= 0.02
        assert_exact(turn)
    finally:
        await engine.close()
