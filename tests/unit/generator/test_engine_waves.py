"""Waves in the embedded engine: held until whole, run alone, in order; bits depend on the wave and nothing else."""

from __future__ import annotations

import random

import msgspec
import pytest

from generator_builders import SteppedEngine, prompt_of, random_model, request
from rollmill.errors import EngineError
from rollmill.types import GenerateRequest, StopReason, Turn, Wave

MODEL, NEWER = random_model(seed=1), random_model(seed=2)
SYSTEM = prompt_of(10, seed=50)


@pytest.fixture
def engine(tmp_path) -> SteppedEngine:
    return SteppedEngine(tmp_path, MODEL, max_num_seqs=6)


def wave(wave_id: str = "w1", *, groups: int = 3, siblings: int = 3, deadline_s: float = 60.0) -> list[GenerateRequest]:
    """Groups of siblings behind one system prompt: nine requests for six slots."""
    size = groups * siblings
    return [
        msgspec.structs.replace(
            request(
                f"{wave_id}/{index}",
                prompt_of(14 + index // siblings, seed=index // siblings, start=SYSTEM),
                group_key=f"{wave_id}-{index // siblings}",
                max_new_tokens=4 + index,
                seed=index,
                deadline_s=deadline_s,
            ),
            wave=Wave(wave_id=wave_id, size=size, index=index),
        )
        for index in range(size)
    ]


def bits(engine: SteppedEngine, wave_id: str = "w1") -> list[bytes]:
    """What was sampled, token by token and bit by bit, in order of the wave."""
    turns = [engine.turn(f"{wave_id}/{index}") for index in range(9)]
    return [turn.output_ids.tobytes() + turn.behavior_logprobs.tobytes() for turn in turns]


def test_nothing_of_a_wave_starts_before_its_last_request_has_come(engine):
    asked = wave()
    for one in asked[:-1]:
        engine.submit(one)
    assert not engine.core.has_work()
    assert len(engine.core.gate.held) == 8
    engine.submit(asked[-1])
    assert engine.core.has_work()
    engine.finish()
    assert all(isinstance(engine.results[one.request_id], Turn) for one in asked)


def test_a_wave_runs_in_its_own_order_whatever_order_it_came_in(engine):
    asked = wave()
    for one in reversed(asked):
        engine.submit(one)
    engine.steps(1)
    running = [sequence.request.request_id for sequence in engine.core.running]
    assert running == [f"w1/{index}" for index in range(6)]


def test_the_bits_of_a_wave_do_not_depend_on_what_ran_before_or_came_meanwhile(tmp_path):
    (tmp_path / "a").mkdir()
    alone = SteppedEngine(tmp_path / "a", MODEL, max_num_seqs=6)
    for one in wave():
        alone.submit(one)
    alone.finish()

    (tmp_path / "b").mkdir()
    busy = SteppedEngine(tmp_path / "b", MODEL, max_num_seqs=6)
    # Another wave and single requests fill slots, stale KV and the prefix cache, with prompts that the wave shares.
    for number in range(4):
        busy.submit(
            request(f"before/{number}", prompt_of(14, seed=0, start=SYSTEM), max_new_tokens=9, seed=100 + number)
        )
    busy.steps(3)
    asked = wave()
    random.Random(3).shuffle(asked)
    for one in asked[:5]:
        busy.submit(one)
    busy.steps(2)
    for one in asked[5:]:
        busy.submit(one)
    for number in range(7):
        busy.submit(request(f"meanwhile/{number}", prompt_of(20, seed=number), max_new_tokens=5, seed=number))
        busy.steps(2)
    busy.finish()

    assert bits(busy) == bits(alone)
    assert all(busy.turn(f"meanwhile/{number}").stop_reason is StopReason.LENGTH for number in range(7))


def test_without_the_wave_the_same_requests_share_passes_with_what_comes_meanwhile(engine):
    """The control: this is what the waves keep apart."""
    asked = [msgspec.structs.replace(one, wave=None) for one in wave()]
    for one in asked[:3]:
        engine.submit(one)
    engine.submit(request("meanwhile", prompt_of(20, seed=7), max_new_tokens=5))
    engine.steps(1)
    running = {sequence.request.request_id for sequence in engine.core.running}
    assert "meanwhile" in running
    assert len(running) == 4


def test_requests_of_no_wave_wait_behind_a_whole_one_and_then_run(engine):
    for one in wave():
        engine.submit(one)
    engine.submit(request("single", prompt_of(9, seed=4), max_new_tokens=2))
    engine.steps(3)
    assert "single" not in {sequence.request.request_id for sequence in engine.core.running}
    engine.finish()
    assert engine.turn("single").stop_reason is StopReason.LENGTH


def test_two_waves_run_one_after_the_other(engine):
    first, second = wave("w1"), wave("w2")
    for one, other in zip(first, second, strict=True):
        engine.submit(other)
        engine.submit(one)
    while engine.core.has_work():
        engine.core.step()
        alive = {sequence.request.wave.wave_id for sequence in engine.core.running}  # type: ignore[union-attr]
        assert len(alive) <= 1
    assert bits(engine, "w1") == bits(engine, "w2")


def test_a_wave_after_newer_weights_has_the_bits_of_a_fresh_engine(tmp_path):
    (tmp_path / "a").mkdir()
    fresh = SteppedEngine(tmp_path / "a", NEWER, max_num_seqs=6)
    for one in wave("w2"):
        fresh.submit(one)
    fresh.finish()
    (tmp_path / "b").mkdir()
    engine = SteppedEngine(tmp_path / "b", MODEL, max_num_seqs=6)
    for one in wave("w1"):
        engine.submit(one)
    engine.finish()
    engine.swap(NEWER, policy_version=2, kv="keep")
    for one in wave("w2"):
        engine.submit(one)
    engine.finish()
    assert bits(engine, "w2") == bits(fresh, "w2")
    assert bits(engine, "w1") != bits(engine, "w2")


def test_a_wave_that_does_not_become_whole_in_time_fails_with_the_numbers(engine):
    for one in wave(deadline_s=5.0)[:4]:
        engine.submit(one)
    engine.clock.advance(5.0)
    engine.core.step()
    for index in range(4):
        error = engine.results[f"w1/{index}"]
        assert isinstance(error, EngineError)
        assert "4 of its 9 requests have come" in str(error)
        assert "held for 5.0 s" in str(error)
    assert engine.core.gate.held == []


@pytest.mark.parametrize("steps", [0, 3])
def test_a_wave_that_loses_a_request_fails_whole_and_the_next_one_is_unharmed(engine, steps):
    for one in wave("w1"):
        engine.submit(one)
    for one in wave("w2"):
        engine.submit(one)
    engine.steps(steps)
    assert engine.core.abort("w1/4")
    assert engine.turn("w1/4").stop_reason is StopReason.ABORT
    for index in (0, 1, 2, 3, 5, 6, 7, 8):
        assert isinstance(engine.results[f"w1/{index}"], EngineError), index
        assert "w1/4 of wave w1 was aborted" in str(engine.results[f"w1/{index}"])
    engine.finish()
    assert all(engine.turn(f"w2/{index}").stop_reason is StopReason.LENGTH for index in range(9))


@pytest.mark.parametrize(
    ("place", "words"),
    [
        (Wave(wave_id="w1", size=9, index=0), "has place 0 of 9"),
        (Wave(wave_id="w1", size=8, index=5), "has place 0 of 9"),
        (Wave(wave_id="w9", size=2, index=2), "places count from 0"),
    ],
)
def test_a_request_that_contradicts_its_wave_is_refused(engine, place, words):
    engine.submit(wave()[0])
    with pytest.raises(EngineError, match=words):
        engine.submit(msgspec.structs.replace(request("odd", prompt_of(9)), wave=place))


def test_a_request_to_a_wave_that_runs_already_is_refused(engine):
    for one in wave():
        engine.submit(one)
    with pytest.raises(EngineError, match="runs already"):
        engine.submit(msgspec.structs.replace(wave()[0], request_id="again"))


def test_ending_everything_ends_what_is_held_too(engine):
    for one in wave()[:3]:
        engine.submit(one)
    engine.core.abort_all()
    assert [engine.turn(f"w1/{index}").stop_reason for index in range(3)] == [StopReason.ABORT] * 3
    assert all(len(engine.turn(f"w1/{index}").output_ids) == 0 for index in range(3))
