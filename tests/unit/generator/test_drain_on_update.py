"""`kv_on_update = "drain"`: requests in flight finish under the old version, for a bounded time."""

from __future__ import annotations

import asyncio
import logging
import threading
from typing import Any

import numpy as np
import pytest

from generator_builders import embedded, prompt_of, reference_logprobs, request
from replica_builders import fake_engine, repository_of, started, two_models, why_refused
from rollmill.clock import VirtualClock
from rollmill.errors import DeadlineExceeded, EngineError
from rollmill.generator.drain import cut_text, kv_of, patience_s
from rollmill.generator.engines.fake import FakeEngine, FakeFaults, FakeLatency
from rollmill.generator.engines.protocol import Engine
from rollmill.testing import run_virtual
from rollmill.types import SamplingParams, StopReason, Turn

DRAIN: dict[str, Any] = {"kv_policy": "drain"}


@pytest.mark.parametrize(
    ("policy", "left_s", "expected"),
    [
        ("drain", 60.0, 10.0),
        ("drain", 15.0, 7.5),  # half of what is left is for the swap and its proof
        ("drain", -1.0, 0.0),
        ("keep", 60.0, 0.0),
        ("recompute", 60.0, 0.0),
    ],
)
def test_requests_are_waited_for_as_long_as_setting_and_deadline_allow(policy, left_s, expected):
    assert patience_s(policy, drain_on_update_s=10.0, left_s=left_s) == expected


def test_what_is_left_after_a_drain_is_computed_anew():
    assert [kv_of(policy) for policy in ("keep", "recompute", "drain")] == ["keep", "recompute", "recompute"]


def test_what_is_said_of_requests_that_did_not_finish_names_the_bound_that_ended_the_wait():
    full = cut_text("policy version 2", 3, waited_s=10.0, drain_on_update_s=10.0)
    short = cut_text("policy version 2", 3, waited_s=4.0, drain_on_update_s=10.0)
    assert "3 requests in flight had not finished after 10.0 s (generator.drain_on_update_s)" in full
    assert "4.0 s (less than generator.drain_on_update_s 10, because half of what is left of" in short


def spans(turn: Turn) -> list[tuple[int, int]]:
    return [(span.end_token - span.start_token, span.policy_version) for span in turn.version_spans]


async def begun(engine: Engine, name: str, *, tokens: int) -> asyncio.Task[Turn]:
    """Start a request and return once it has a token or more."""
    heard = asyncio.Event()
    asked = request(name, prompt_of(5), max_new_tokens=tokens, seed=3)
    task = asyncio.ensure_future(engine.generate(asked, on_tokens=lambda _: heard.set()))
    async with asyncio.timeout(20):
        await heard.wait()
    return task


@pytest.mark.parametrize("kind", ["embedded", "fake"])
async def test_requests_in_flight_finish_under_the_old_version_and_later_ones_wait_for_the_new_one(tmp_path, kind):
    old, new = two_models()
    repository = repository_of(old, new)
    digest = repository.manifest(1).digest
    engine: Any = embedded(tmp_path, old, digest=digest) if kind == "embedded" else fake_engine(repository)
    try:
        replica = await started(engine, repository, **DRAIN)
        running = await begun(engine, "running", tokens=140)
        loading = asyncio.ensure_future(replica.load(2))
        late: list[Turn] = []
        async with asyncio.timeout(20):
            while not loading.done():  # those that come before the engine drains are in flight, the others wait
                late.append(await engine.generate(request(f"late-{len(late)}", [1, 2])))
        report = await loading
        turn = await running
        assert (spans(turn), turn.stop_reason) == ([(140, 1)], StopReason.LENGTH)
        assert late[-1].version_spans[-1].policy_version == 2
        assert [spans(turn) in ([(8, 1)], [(8, 2)]) for turn in late] == [True] * len(late)
        assert (report.cut, report.policy_version, report.changed) == (0, 2, True)
        assert report.finish_s > 0
        assert report.pause_s == pytest.approx(report.drain_s + report.swap_s + report.prove_s + report.resume_s)
        assert why_refused(replica) is None
    finally:
        await engine.close()


async def test_what_does_not_finish_in_time_goes_on_under_the_new_version_over_new_kv_and_that_is_said(
    tmp_path, caplog
):
    old, new = two_models()
    repository = repository_of(old, new)
    slow = Slow()
    engine = embedded(tmp_path, old, digest=repository.manifest(1).digest, before_step=slow)
    try:
        replica = await started(engine, repository, drain_on_update_s=0.05, **DRAIN)
        running = await begun(engine, "running", tokens=140)
        with caplog.at_level(logging.WARNING, logger="rollmill.generator.loading"):
            report = await replica.load(2)
        slow.seconds = 0.0
        turn = await running
    finally:
        await engine.close()
    (before, _), (after, _) = spans(turn)
    assert [span.policy_version for span in turn.version_spans] == [1, 2]
    assert (before + after, turn.stop_reason) == (140, StopReason.LENGTH)
    # The reference knows no KV: it is what a fresh prefill of everything so far gives.
    expected = reference_logprobs(new, turn, SamplingParams())[before:]
    np.testing.assert_allclose(turn.behavior_logprobs[before:], expected, atol=1e-4)
    assert report.cut == 1
    assert 0.05 <= report.finish_s < 5
    assert "1 requests in flight had not finished after 0.1 s (generator.drain_on_update_s)" in caplog.text


class Slow:
    """Lets each step of an engine's thread take its time."""

    def __init__(self, seconds: float = 0.01) -> None:
        self.seconds = seconds
        self._never = threading.Event()

    def __call__(self) -> None:
        self._never.wait(self.seconds)


async def test_no_more_than_half_of_the_deadline_is_spent_waiting_so_that_the_load_succeeds():
    repository = repository_of(*two_models())
    engine = fake_engine(repository, latency=FakeLatency(step_s=0.05), max_model_len=4000)
    replica = await started(engine, repository, drain_on_update_s=60.0, load_deadline_s=0.4, **DRAIN)
    running = await begun(engine, "endless", tokens=3000)
    report = await replica.load(2)
    assert report.cut == 1
    assert report.finish_s <= 0.3
    assert why_refused(replica) is None
    await engine.abort("endless")
    assert {span.policy_version for span in (await running).version_spans} <= {1, 2}


async def test_a_load_that_fails_after_a_drain_leaves_the_old_version_serving_with_admission_open():
    repository = repository_of(*two_models())
    engine = fake_engine(repository, faults=FakeFaults(fail_buckets={2: 1}))
    replica = await started(engine, repository, **DRAIN)
    with pytest.raises(Exception, match="fail bucket 1"):
        await replica.load(2)
    assert why_refused(replica) is None
    assert spans(await engine.generate(request("after", [1, 2, 3]))) == [(8, 1)]


async def test_a_load_cut_short_while_requests_finish_changes_nothing_and_lets_new_ones_in():
    repository = repository_of(*two_models())
    engine = fake_engine(repository, latency=FakeLatency(step_s=0.02), max_model_len=4000)
    replica = await started(engine, repository, drain_on_update_s=10.0, **DRAIN)
    running = await begun(engine, "long", tokens=3000)
    loading = asyncio.ensure_future(replica.load(2))
    late = asyncio.ensure_future(engine.generate(request("late", [1, 2], max_new_tokens=2)))
    for _ in range(5):
        before = engine.load().output_tokens
        async with asyncio.timeout(20):
            while engine.load().output_tokens == before:
                await engine.abort("nobody")
                await asyncio.sleep(0)
    loading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await loading
    assert spans(await asyncio.wait_for(late, 20)) == [(2, 1)]
    assert (why_refused(replica), repository.held_versions()) == (None, [1])
    await engine.abort("long")
    assert (await running).stop_reason is StopReason.ABORT


def test_while_an_engine_drains_its_seconds_are_those_of_decoding_and_only_then_of_a_pause():
    clock = VirtualClock()
    engine = FakeEngine(clock=clock, latency=FakeLatency(step_s=1.0))

    async def drained() -> None:
        task = asyncio.ensure_future(engine.generate(request("a", [1], max_new_tokens=6)))
        await asyncio.sleep(2.5)
        await engine.pause("drain")
        await asyncio.sleep(3.0)
        await task

    run_virtual(drained(), clock=clock)
    seconds = engine.load().seconds
    assert (seconds["decode"], seconds["paused"]) == (6.0, 3.0)


@pytest.mark.parametrize("error", [EngineError("x"), DeadlineExceeded("x")])
async def test_an_error_of_the_drain_itself_is_no_time_that_ran_out(error):
    repository = repository_of(*two_models())
    engine = fake_engine(repository)
    replica = await started(Refuses(engine, error), repository, **DRAIN)  # type: ignore[arg-type]
    with pytest.raises(type(error)):
        await replica.load(2)
    assert why_refused(replica) is None


class Refuses:
    """An engine that cannot drain."""

    def __init__(self, engine: Any, error: Exception) -> None:
        self._engine, self._error = engine, error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def pause(self, mode: str) -> None:
        if mode == "drain":
            raise self._error
        await self._engine.pause(mode)
