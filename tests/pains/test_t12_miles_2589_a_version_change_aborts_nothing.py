"""T12: a change of version aborts nothing, loses no token, and the work is back at once.

Reported elsewhere: the call that sets the version aborts all running requests (miles 2589); the first token after
resume is lost (vLLM 42042); after the pause only one group is scheduled (prime-rl 1372); a sync grows from seconds to
25 minutes and nobody can say where they went (verl 4896).
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from generator_builders import SteppedEngine, embedded, llama, prompt_of, random_model, request
from replica_builders import fake_engine, in_flight, repository_of, started, two_models
from rollmill.clock import VirtualClock
from rollmill.types import StopReason

MODEL = random_model(llama(num_hidden_layers=1), seed=0)
SIX = [f"r{number}" for number in range(6)]


async def test_six_requests_in_flight_survive_a_version_change_with_the_tokens_they_would_have_had():
    repository = repository_of(*two_models())
    undisturbed = fake_engine(repository, max_num_seqs=32)
    expected = await in_flight(undisturbed, SIX)
    await undisturbed.resume()

    engine = fake_engine(repository, max_num_seqs=32)
    resumed = CountsAtResume(engine)
    replica = await started(resumed, repository)  # type: ignore[arg-type]
    running = await in_flight(engine, SIX)
    await replica.load(repository.republish(1))  # equal weights under a new number
    assert resumed.running == [6]
    turns = await asyncio.gather(*running)
    assert [turn.stop_reason for turn in turns] == [StopReason.LENGTH] * 6
    assert [turn.output_ids.tolist() for turn in turns] == [
        turn.output_ids.tolist() for turn in await gathered(expected)
    ]
    assert all([span.policy_version for span in turn.version_spans] == [1, 3] for turn in turns)


class CountsAtResume:
    """Notes how many requests run when an engine is told to go on."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.running: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def resume(self) -> None:
        self.running.append(self._inner.load().running)
        await self._inner.resume()


async def gathered(tasks: list[Any]) -> list[Any]:
    return list(await asyncio.gather(*tasks))


@pytest.mark.parametrize("kv", ["keep", "recompute"])
def test_with_equal_weights_a_pause_costs_no_token_and_changes_none(tmp_path, kv):
    sampled = []
    for swapped in (False, True):
        engine = SteppedEngine(tmp_path, MODEL)
        for number, name in enumerate(SIX):
            engine.submit(request(name, prompt_of(5, seed=number), max_new_tokens=20, seed=number))
        engine.steps(7)
        if swapped:
            engine.swap(MODEL, policy_version=2, kv=kv)
        engine.finish()
        sampled.append([engine.turn(name).output_ids.tolist() for name in SIX])
        assert {engine.turn(name).stop_reason for name in SIX} == {StopReason.LENGTH}
    assert sampled[0] == sampled[1]


def test_in_flight_is_back_at_the_cap_within_a_step(tmp_path):
    engine = SteppedEngine(tmp_path, MODEL, max_num_seqs=32)
    for number in range(40):
        engine.submit(request(f"r{number}", prompt_of(4, seed=number), max_new_tokens=30, seed=number))
    engine.steps(3)
    assert len(engine.core.running) == 32
    engine.swap(random_model(llama(num_hidden_layers=1), seed=1), policy_version=2, kv="keep")
    engine.steps(1)
    assert len(engine.core.running) == 32
    engine.finish()
    assert {engine.turn(f"r{number}").stop_reason for number in range(40)} == {StopReason.LENGTH}


class Timed:
    """Lets each part of a load take its own number of seconds."""

    def __init__(self, inner: Any, clock: VirtualClock, **seconds: float) -> None:
        self._inner = inner
        self._clock = clock
        self._seconds = seconds

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._inner, name)
        if name not in self._seconds:
            return attribute

        def timed(*args: Any, **kwargs: Any) -> Any:
            self._clock.advance(self._seconds[name])
            return attribute(*args, **kwargs)

        return timed


async def test_a_load_says_how_long_each_of_its_parts_took(tmp_path):
    clock, (old, new) = VirtualClock(), two_models()
    repository = repository_of(old, new)
    engine = embedded(tmp_path, old, digest=repository.manifest(1).digest)
    try:
        timed = Timed(engine, clock, stage=4.0, pause=3.0, update=5.0, score=7.0, resume=1.0)
        replica = await started(timed, Timed(repository, clock, load=2.0), clock=clock)  # type: ignore[arg-type]
        report = await replica.load(2)
    finally:
        await engine.close()
    assert (report.pull_s, report.drain_s, report.swap_s, report.prove_s, report.resume_s) == (2, 3, 5, 7, 1)
    assert (report.stage_s, report.pause_s) == (4, 16)
    assert sum(report.seconds().values()) == 22
