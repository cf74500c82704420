"""The fake engine: latency on a virtual clock, scripts and faults."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from rollmill.clock import VirtualClock
from rollmill.errors import EngineDead, EngineError, WeightError
from rollmill.generator.engines.fake import FakeEngine, FakeFaults, FakeLatency
from rollmill.testing import run_virtual
from rollmill.types import GenerateRequest, SamplingParams, StopReason


def request(request_id: str, *, tokens: int = 4, prompt: int = 3, deadline_s: float = 1e6) -> GenerateRequest:
    return GenerateRequest(
        request_id=request_id,
        prompt_ids=np.arange(1, prompt + 1),
        sampling=SamplingParams(max_new_tokens=tokens, seed=1),
        deadline_s=deadline_s,
    )


def test_latency_grows_with_the_batch_and_the_prompt():
    clock = VirtualClock()
    engine = FakeEngine(clock=clock, latency=FakeLatency(step_s=1.0, per_sequence_s=0.5, per_prompt_token_s=10.0))
    turn = run_virtual(engine.generate(request("a")), clock=clock)
    # 3 prompt tokens at 10 s, then 4 steps of 1 + 0.5 * 1 s
    assert clock.now_s() == pytest.approx(36.0)
    assert (turn.timings.prefill_s, turn.timings.queued_s) == (30.0, 0.0)

    async def two():
        return await asyncio.gather(engine.generate(request("b")), engine.generate(request("c")))

    before = clock.now_s()
    run_virtual(two(), clock=clock)
    # in company a step costs 1 + 0.5 * 2 s
    assert clock.now_s() - before == pytest.approx(30 + 4 * 2.0)
    wall_s, seconds = engine.load().wall_s, engine.load().seconds
    assert sum(seconds.values()) == pytest.approx(wall_s)
    assert seconds["decode"] == pytest.approx(wall_s)


def test_requests_wait_for_a_slot_in_order():
    clock = VirtualClock()
    engine = FakeEngine(clock=clock, max_num_seqs=1, latency=FakeLatency(step_s=1.0))

    async def three():
        turns = await asyncio.gather(*(engine.generate(request(name)) for name in "abc"))
        return [turn.timings.queued_s for turn in turns]

    assert run_virtual(three(), clock=clock) == [0.0, 4.0, 8.0]


def test_scripted_tokens_come_back_with_the_policys_log_probs():
    clock = VirtualClock()
    engine = FakeEngine(clock=clock, script=lambda asked: [7, 9, 2] if asked.request_id == "a" else None)
    turn = run_virtual(engine.generate(request("a", tokens=30)), clock=clock)
    assert (turn.output_ids.tolist(), turn.stop_reason) == ([7, 9, 2], StopReason.STOP)
    scored = run_virtual(engine.score(np.array([3, 7, 9, 2])), clock=clock)
    np.testing.assert_allclose(turn.behavior_logprobs, scored)
    cut = run_virtual(engine.generate(request("a", tokens=2)), clock=clock)
    assert (cut.output_ids.tolist(), cut.stop_reason) == ([7, 9], StopReason.LENGTH)
    assert len(run_virtual(engine.generate(request("b")), clock=clock).output_ids) == 4


def test_the_policy_is_a_distribution_and_follows_the_digest():
    one, same, other = (FakeEngine(clock=VirtualClock(), digest=digest) for digest in ("x", "x", "y"))
    assert np.exp(one.logprobs(5)).sum() == pytest.approx(1.0)
    np.testing.assert_array_equal(one.logprobs(5), same.logprobs(5))
    assert np.abs(one.logprobs(5) - other.logprobs(5)).max() > 0.1
    assert np.abs(one.logprobs(5) - one.logprobs(6)).max() > 0.1


def test_it_dies_at_the_chosen_request_and_takes_the_others_with_it():
    clock = VirtualClock()
    engine = FakeEngine(clock=clock, faults=FakeFaults(die_at_request=2), latency=FakeLatency(step_s=1.0))

    async def main():
        first = asyncio.ensure_future(engine.generate(request("a", tokens=50)))
        await asyncio.sleep(3)
        results = await asyncio.gather(first, engine.generate(request("b")), return_exceptions=True)
        return [type(result) for result in results]

    assert run_virtual(main(), clock=clock) == [EngineDead, EngineDead]
    assert not engine.healthy()


def test_a_hung_request_ends_at_its_deadline_and_holds_nobody_up():
    clock = VirtualClock()
    engine = FakeEngine(clock=clock, faults=FakeFaults(hang_requests=frozenset({1})), latency=FakeLatency(step_s=1.0))

    async def main():
        hung = asyncio.ensure_future(engine.generate(request("a", deadline_s=100.0)))
        await asyncio.sleep(0)
        turn = await engine.generate(request("b"))
        return turn, clock.now_s(), await hung

    turn, at, hung = run_virtual(main(), clock=clock)
    assert (len(turn.output_ids), at) == (4, 4.0)
    assert (hung.stop_reason, len(hung.output_ids), clock.now_s()) == (StopReason.ABORT, 0, 100.0)


def test_updates_are_refused_or_spoiled_as_told():
    engine = FakeEngine(
        clock=VirtualClock(), faults=FakeFaults(refuse_updates=frozenset({2}), spoil_updates=frozenset({3}))
    )

    async def main():
        await engine.pause("keep")
        with pytest.raises(WeightError, match="refuse policy version 2"):
            await engine.update({}, policy_version=2, digest="d2", kv="keep")
        assert engine.healthy()
        with pytest.raises(EngineError, match="spoil"):
            await engine.update({}, policy_version=3, digest="d3", kv="keep")
        assert not engine.healthy()
        with pytest.raises(EngineError, match="dirty"):
            await engine.generate(request("a"))
        await engine.update({}, policy_version=4, digest="d4", kv="keep")
        await engine.resume()
        return await engine.generate(request("b"))

    assert run_virtual(main()).version_spans[0].policy_version == 4
    assert engine.healthy()
