"""What becomes of a request when replicas break, drain, refuse or are slow; nobody is answered twice or not at all."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import pytest

from rollmill.clock import VirtualClock
from rollmill.errors import (
    DataError,
    DeadlineExceeded,
    EngineDead,
    EngineError,
    ModelError,
    NotServing,
    Overloaded,
    RequestIdInUse,
)
from rollmill.generator.proto import policy_inference_pb2 as pb
from rollmill.generator.router.records import Ended, Seen
from rollmill.generator.router.upstream import UpstreamError
from rollmill.testing.virtual_loop import run_virtual
from router_builders import Fixture, joined, message, report


def run(test: Callable[[VirtualClock], Coroutine[Any, Any, None]]) -> None:
    clock = VirtualClock()
    run_virtual(test(clock), clock=clock)


async def unbroken(clock: VirtualClock, asked: pb.GenerateRequest) -> pb.GenerateReply:
    """What a request gets that nothing disturbs."""
    return await Fixture("calm", clock=clock).generate(asked)


def same_samples(one: pb.GenerateReply, other: pb.GenerateReply) -> bool:
    return [(s.output_ids, s.behavior_logprobs, s.version_spans, s.stop_reason) for s in one.samples] == [
        (s.output_ids, s.behavior_logprobs, s.version_spans, s.stop_reason) for s in other.samples
    ]


# -- when all is well


def test_a_reply_is_passed_on_as_it_is():
    async def test(clock):
        fleet = Fixture("a", "b", clock=clock)
        asked = message("r", siblings=2)
        assert await fleet.generate(asked) == await unbroken(clock, asked)
        assert [len(replica.seen) for replica in fleet.replicas.values()] == [1, 0]
        fleet.check_all_is_given_back()

    run(test)


def test_a_stream_is_passed_on_event_by_event():
    async def test(clock):
        fleet = Fixture("a", clock=clock)
        asked = message("r", siblings=2, tokens=5)
        events = await fleet.stream(asked)
        calm = await unbroken(clock, asked)
        for index in range(2):
            ids, logprobs = joined(events, index=index)
            assert ids == calm.samples[index].output_ids
            assert logprobs == calm.samples[index].behavior_logprobs
        assert sum(event.HasField("finished") for event in events) == 2
        fleet.check_all_is_given_back()

    run(test)


def test_a_request_that_waited_here_has_the_rest_of_its_deadline_there():
    async def test(clock):
        fleet = Fixture("a", clock=clock)
        fleet.law.report("a", report(slots=1, digest="same"), now_s=0.0)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(fleet.generate(message("first", tokens=10)))
            await asyncio.sleep(0)
            second = tasks.create_task(fleet.generate(message("second", tokens=30, deadline_s=25.0)))
        # 10 s here, 15 there at a token per second.
        assert fleet.replicas["a"].seen[1].deadline_s == pytest.approx(15.0)
        assert second.result().samples[0].stop_reason == "abort"
        assert len(second.result().samples[0].output_ids) == 14

    run(test)


def test_a_replica_is_asked_for_chunks_where_nobody_reads_along():
    async def test(clock):
        kept = Fixture("a", clock=clock, keep_tokens=True, chunk_tokens=8)
        await kept.generate(message("r"))
        await kept.stream(message("s"))
        plain = Fixture("b", clock=clock)
        await plain.generate(message("r"))
        asked = [one.chunk_tokens for one in (*kept.replicas["a"].seen, *plain.replicas["b"].seen)]
        assert asked == [8, 0, 0]

    run(test)


# -- when a replica is lost


@pytest.mark.parametrize("killed_after_s", [0.0, 3.5, 8.5])
@pytest.mark.parametrize("siblings", [1, 3])
def test_a_reply_goes_on_elsewhere_with_its_tokens_and_is_the_same_to_the_bit(killed_after_s, siblings):
    async def test(clock):
        fleet = Fixture("a", "b", clock=clock, keep_tokens=True)
        asked = message("r", siblings=siblings)
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(fleet.generate(asked))
            await asyncio.sleep(killed_after_s)
            fleet.replicas["a"].kill()
        assert same_samples(task.result(), await unbroken(clock, asked))
        prompts = [len(one.prompt_ids) for one in fleet.replicas["b"].seen]
        # A token per second: what came before the kill is not sampled again.
        assert prompts == [3 + int(killed_after_s)] * (siblings if killed_after_s else 1)
        assert fleet.troubles == ["a"]
        fleet.check_all_is_given_back()

    run(test)


def test_without_keeping_tokens_a_reply_starts_again_and_is_the_same_to_the_bit():
    async def test(clock):
        fleet = Fixture("a", "b", clock=clock)
        asked = message("r", siblings=3)
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(fleet.generate(asked))
            await asyncio.sleep(5.5)
            fleet.replicas["a"].kill()
        assert same_samples(task.result(), await unbroken(clock, asked))
        assert [one.siblings for one in fleet.replicas["b"].seen] == [3]
        assert clock.now_s() >= 15.5
        fleet.check_all_is_given_back()

    run(test)


@pytest.mark.parametrize("siblings", [1, 2])
def test_a_stream_goes_on_elsewhere_without_a_gap(siblings):
    async def test(clock):
        fleet = Fixture("a", "b", "c", clock=clock)
        asked = message("r", siblings=siblings)
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(fleet.stream(asked))
            await asyncio.sleep(3.5)
            fleet.replicas["a"].kill()
            await asyncio.sleep(3.0)
            fleet.replicas["b"].kill()
        calm = await unbroken(clock, asked)
        for index in range(siblings):
            assert joined(task.result(), index=index)[0] == calm.samples[index].output_ids
        ends = [event.finished for event in task.result() if event.HasField("finished")]
        assert [(end.output_tokens, end.stop_reason) for end in ends] == [(10, "length")] * siblings
        assert {event.request_id for event in task.result()} == {"r"}
        fleet.check_all_is_given_back()

    run(test)


def test_spans_and_log_probs_of_both_replicas_are_joined():
    async def test(clock):
        fleet = Fixture("a", "b", clock=clock, keep_tokens=True)
        other = fleet.replicas["b"].engine
        await other.pause("keep")
        await other.update({}, policy_version=2, digest="new", kv="keep")
        await other.resume()
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(fleet.generate(message("r")))
            await asyncio.sleep(4.5)
            fleet.replicas["a"].kill()
        (sample,) = task.result().samples
        spans = [(span.start_token, span.end_token, span.policy_version) for span in sample.version_spans]
        assert spans == [(0, 4, 1), (4, 10, 2)]
        before = [3, *sample.output_ids[:-1]]
        policies = [fleet.replicas["a"].engine] * 4 + [other] * 6
        for position, (engine, token) in enumerate(zip(policies, sample.output_ids, strict=True)):
            expected = np.float32(engine.logprobs(before[position])[token])
            assert sample.behavior_logprobs[position] == expected

    run(test)


def test_configured_so_a_request_with_tokens_fails_with_a_typed_error():
    async def test(clock):
        fleet = Fixture("a", "b", clock=clock, keep_tokens=True, on_loss="fail")
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(_error(fleet.generate(message("r"))))
            await asyncio.sleep(3.5)
            fleet.replicas["a"].kill()
        assert isinstance(task.result(), EngineDead)
        assert fleet.replicas["b"].seen == []
        fleet.check_all_is_given_back()

    run(test)


def test_configured_so_a_request_without_tokens_still_goes_elsewhere():
    async def test(clock):
        fleet = Fixture("a", "b", clock=clock, keep_tokens=True, on_loss="fail")
        fleet.replicas["a"].kill()
        assert len((await fleet.generate(message("r"))).samples[0].output_ids) == 10

    run(test)


def test_a_request_whose_last_token_came_ends_without_another_replica():
    async def test(clock):
        fleet = Fixture("a", "b", clock=clock)
        # 10 chunks came, their end did not.
        fleet.replicas["a"].cut_streams_after = 10
        asked = message("r")
        events = await fleet.stream(asked)
        assert joined(events)[0] == (await unbroken(clock, asked)).samples[0].output_ids
        assert events[-1].finished.stop_reason == "length"
        assert fleet.replicas["b"].seen == []

    run(test)


def test_a_stream_that_ends_without_its_finish_goes_on_elsewhere():
    async def test(clock):
        fleet = Fixture("a", "b", clock=clock)
        fleet.replicas["a"].cut_streams_after = 6
        asked = message("r")
        events = await fleet.stream(asked)
        assert joined(events)[0] == (await unbroken(clock, asked)).samples[0].output_ids
        assert len(fleet.replicas["b"].seen[0].prompt_ids) == 9

    run(test)


@pytest.mark.parametrize("keep_tokens", [True, False])
def test_a_replica_that_answers_with_nonsense_has_failed_and_another_one_answers(keep_tokens):
    async def test(clock):
        fleet = Fixture("a", "b", clock=clock, keep_tokens=keep_tokens)

        async def generate(data: bytes, *, timeout_s: float) -> bytes:
            return b"\xff\xff"

        async def stream(data: bytes, *, timeout_s: float) -> Any:
            yield b"\xff\xff"

        fleet.replicas["a"].generate, fleet.replicas["a"].stream = generate, stream
        reply = await fleet.generate(message("r"))
        assert len(reply.samples[0].output_ids) == 10
        assert fleet.forwarder.retried == 1

    run(test)


def test_a_deadline_without_end_is_no_reason_to_fail():
    async def test(clock):
        fleet = Fixture("a", clock=clock)
        assert len((await fleet.generate(message("r", deadline_s=float("inf")))).samples[0].output_ids) == 10
        assert isinstance(await _error(fleet.generate(message("r", deadline_s=float("nan")))), DataError)
        assert isinstance(await _error(fleet.generate(message("r", deadline_s=-1.0))), DataError)

    run(test)


def test_all_replicas_lost_is_a_typed_error_with_the_whole_story():
    async def test(clock):
        fleet = Fixture("a", "b", clock=clock, queue_wait_s=5.0)
        for replica in fleet.replicas.values():
            replica.kill()
        error = await _error(fleet.generate(message("r")))
        assert isinstance(error, NotServing)
        assert "waited 5.0 s in the router" in str(error)
        assert "a: a is not reachable" in str(error)
        assert "b: b is not reachable" in str(error)
        fleet.check_all_is_given_back()

    run(test)


def test_a_request_waits_for_a_replica_that_comes_back():
    async def test(clock):
        fleet = Fixture("a", clock=clock)
        fleet.law.table.silent("a", reason="restarting", dead=True)
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(fleet.generate(message("r")))
            await asyncio.sleep(20.0)
            fleet.forwarder.obey(fleet.law.report("a", report(slots=8, digest="same"), now_s=clock.now_s()))
        assert len(task.result().samples[0].output_ids) == 10

    run(test)


def test_attempts_are_bounded():
    async def test(clock):
        fleet = Fixture(*"abcde", clock=clock, max_attempts=3)
        broken = UpstreamError(EngineError("told to fail"), Ended.FAILED)
        for replica in fleet.replicas.values():
            replica.fail_with = broken
        error = await _error(fleet.generate(message("r")))
        assert isinstance(error, EngineError)
        assert str(error).count("told to fail") == 3
        assert sum(len(replica.seen) for replica in fleet.replicas.values()) == 3
        assert len({name for name, replica in fleet.replicas.items() if replica.seen}) == 3

    run(test)


def test_each_sibling_has_its_own_attempts():
    async def test(clock):
        # Both siblings go on alone after the first loss; the replica of one of them is lost as well.
        fleet = Fixture(*"abcd", clock=clock, max_attempts=3, keep_tokens=True)
        asked = message("r", siblings=2, tokens=20)
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(fleet.generate(asked))
            for _ in range(2):
                await asyncio.sleep(4.5)
                at = [name for name, one in fleet.replicas.items() if one.engine._live and not one.dead]
                fleet.replicas[at[0]].kill()
        assert same_samples(task.result(), await unbroken(clock, asked))
        fleet.check_all_is_given_back()

    run(test)


def test_at_the_deadline_a_call_ends_with_the_tokens_that_it_has():
    async def test(clock):
        fleet = Fixture("a", clock=clock, keep_tokens=True, queue_wait_s=2.0)
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(fleet.generate(message("r", deadline_s=12.0, tokens=30)))
            await asyncio.sleep(4.5)
            fleet.replicas["a"].kill()
        (sample,) = task.result().samples
        assert sample.stop_reason == "abort"
        assert len(sample.output_ids) == 4
        assert clock.now_s() == pytest.approx(12.0, abs=0.5)
        fleet.check_all_is_given_back()

    run(test)


def test_what_a_small_message_asks_too_much_of_is_refused_before_anything_is_made_of_it():
    async def test(clock):
        fleet = Fixture("a", clock=clock)
        for changes, words in (
            ({"siblings": 2**31 - 1}, "router.max_siblings is 256"),
            ({"session_id": "x" * 10_000}, "max_request_id_chars"),
        ):
            error = await _error(fleet.generate(message("r", **changes)))
            assert isinstance(error, DataError)
            assert words in str(error)
        assert isinstance(await _error(fleet.generate(message(""))), DataError)
        assert fleet.replicas["a"].seen == []
        fleet.check_all_is_given_back()

    run(test)


def test_a_bad_request_is_refused_once_and_with_the_replicas_own_words():
    async def test(clock):
        fleet = Fixture("a", "b", clock=clock)
        error = await _error(fleet.generate(message("r", prompt_ids=[1, 5000])))
        assert isinstance(error, DataError)
        assert sum(len(replica.seen) for replica in fleet.replicas.values()) == 1
        assert fleet.law.table["a"].seen is Seen.SERVING

    run(test)


def test_the_members_of_a_wave_are_not_moved():
    async def test(clock):
        fleet = Fixture("a", "b", clock=clock, keep_tokens=True)
        wave = pb.Wave(wave_id="w", size=2, index=0)
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(_error(fleet.generate(message("r", wave=wave))))
            await asyncio.sleep(3.5)
            fleet.replicas["a"].kill()
        assert isinstance(task.result(), EngineDead)
        assert fleet.replicas["b"].seen == []

    run(test)


# -- when a replica drains


@pytest.mark.parametrize("keep_tokens", [True, False])
@pytest.mark.parametrize("siblings", [1, 3])
def test_what_a_draining_replica_cuts_short_goes_on_elsewhere(keep_tokens, siblings):
    async def test(clock):
        fleet = Fixture("a", "b", clock=clock, keep_tokens=keep_tokens)
        asked = message("r", siblings=siblings)
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(fleet.generate(asked))
            await asyncio.sleep(4.5)
            fleet.replicas["a"].state = "draining"
            await fleet.replicas["a"].engine.pause("abort")
        assert same_samples(task.result(), await unbroken(clock, asked))
        assert [len(one.prompt_ids) for one in fleet.replicas["b"].seen] == [7] * siblings
        fleet.check_all_is_given_back()

    run(test)


def test_a_replica_that_refuses_is_passed_over():
    async def test(clock):
        fleet = Fixture("a", "b", clock=clock)
        fleet.replicas["a"].state = "draining"
        assert len((await fleet.generate(message("r"))).samples[0].output_ids) == 10
        assert fleet.law.table["a"].seen is Seen.UNKNOWN
        assert fleet.troubles == ["a"]

    run(test)


# -- callers that leave, abort, or come late


def test_a_caller_that_leaves_ends_its_request_everywhere():
    async def test(clock):
        fleet = Fixture("a", clock=clock)
        task = asyncio.ensure_future(fleet.generate(message("r", tokens=300)))
        await asyncio.sleep(2.5)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert fleet.replicas["a"].engine.load().running == 0
        fleet.check_all_is_given_back()

    run(test)


@pytest.mark.parametrize("keep_tokens", [True, False])
def test_an_aborted_request_ends_with_what_it_has_and_is_not_moved(keep_tokens):
    async def test(clock):
        fleet = Fixture("a", "b", clock=clock, keep_tokens=keep_tokens)
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(fleet.generate(message("r")))
            await asyncio.sleep(4.5)
            assert await fleet.forwarder.abort("r")
            assert not await fleet.forwarder.abort("nobody")
        (sample,) = task.result().samples
        assert (sample.stop_reason, len(sample.output_ids)) == ("abort", 4)
        assert fleet.replicas["b"].seen == []

    run(test)


def test_one_sibling_can_be_aborted_alone():
    async def test(clock):
        fleet = Fixture("a", "b", clock=clock)
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(fleet.generate(message("r", siblings=3)))
            await asyncio.sleep(4.5)
            assert await fleet.forwarder.abort("r#1")
        reasons = [(one.stop_reason, len(one.output_ids)) for one in task.result().samples]
        assert reasons == [("length", 10), ("abort", 4), ("length", 10)]
        assert fleet.troubles == []
        assert fleet.replicas["b"].seen == []

    run(test)


def test_a_request_that_is_aborted_while_it_waits_ends_without_tokens():
    async def test(clock):
        fleet = Fixture("a", clock=clock)
        fleet.law.table.silent("a", reason="gone")
        async with asyncio.TaskGroup() as tasks:
            reply = tasks.create_task(fleet.generate(message("r", siblings=2)))
            events = tasks.create_task(fleet.stream(message("s")))
            await asyncio.sleep(1.0)
            assert await fleet.forwarder.abort("r")
            assert await fleet.forwarder.abort("s")
        assert [(one.stop_reason, len(one.output_ids)) for one in reply.result().samples] == [("abort", 0)] * 2
        assert [event.finished.stop_reason for event in events.result()] == ["abort"]
        fleet.check_all_is_given_back()

    run(test)


def test_a_wait_for_room_ends_with_the_time_to_ask_again():
    async def test(clock):
        fleet = Fixture("a", clock=clock, queue_wait_s=5.0)
        fleet.law.report("a", report(slots=1, digest="same"), now_s=0.0)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(fleet.generate(message("first", tokens=20)))
            await asyncio.sleep(0)
            second = tasks.create_task(_error(fleet.generate(message("second"))))
        assert isinstance(second.result(), Overloaded)
        assert "1 of 1 places of 1 replicas are taken" in str(second.result())

    run(test)


def test_a_deadline_that_passes_while_a_request_waits_is_named():
    async def test(clock):
        fleet = Fixture("a", clock=clock)
        fleet.law.report("a", report(slots=1, digest="same"), now_s=0.0)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(fleet.generate(message("first", tokens=20)))
            await asyncio.sleep(0)
            second = tasks.create_task(_error(fleet.generate(message("second", deadline_s=3.0))))
        assert isinstance(second.result(), DeadlineExceeded)
        assert clock.now_s() >= 20.0

    run(test)


def test_an_id_in_use_is_refused_and_the_first_goes_on():
    async def test(clock):
        fleet = Fixture("a", clock=clock)
        async with asyncio.TaskGroup() as tasks:
            first = tasks.create_task(fleet.generate(message("r")))
            await asyncio.sleep(2.5)
            assert isinstance(await _error(fleet.generate(message("r"))), RequestIdInUse)
            # A sibling that goes on alone has this id at its replica.
            assert isinstance(await _error(fleet.generate(message("r#0"))), RequestIdInUse)
        await fleet.generate(message("r#0"))
        assert len(first.result().samples[0].output_ids) == 10

    run(test)


def test_a_draining_router_finishes_what_runs_and_aborts_the_rest():
    async def test(clock):
        fleet = Fixture("a", clock=clock)
        async with asyncio.TaskGroup() as tasks:
            short = tasks.create_task(fleet.generate(message("short", tokens=5)))
            long = tasks.create_task(fleet.generate(message("long", tokens=300)))
            await asyncio.sleep(2.5)
            assert await fleet.forwarder.drain(10.0, reason="told to stop") == 1
            assert isinstance(await _error(fleet.generate(message("late"))), NotServing)
        assert short.result().samples[0].stop_reason == "length"
        assert long.result().samples[0].stop_reason == "abort"

    run(test)


# -- text


def test_a_reply_to_text_starts_again_where_the_router_has_no_tokenizer():
    async def test(clock):
        fleet = Fixture("a", "b", clock=clock, keep_tokens=True)
        asked = message("r", prompt_ids=[], text="hello")
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(fleet.generate(asked))
            await asyncio.sleep(4.5)
            fleet.replicas["a"].kill()
        assert fleet.replicas["b"].seen[0].text == "hello"
        assert list(task.result().prompt_ids) == [7, 8, 9]
        assert len(task.result().samples[0].output_ids) == 10

    run(test)


def test_a_stream_of_text_cannot_go_on_without_a_tokenizer_and_says_so():
    async def test(clock):
        fleet = Fixture("a", "b", clock=clock)
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(_error(fleet.stream(message("r", prompt_ids=[], text="hello"))))
            await asyncio.sleep(4.5)
            fleet.replicas["a"].kill()
        assert isinstance(task.result(), EngineDead)
        assert "after 4 tokens were sent on" in str(task.result())
        assert "start the router with --model" in str(task.result())

    run(test)


class Words:
    """A tokenizer of the test: the text of ids is the ids."""

    stop_token_ids = (127,)

    def render(self, messages):
        raise AssertionError("prompts are rendered by replicas")

    def encode(self, text):
        raise AssertionError("prompts are rendered by replicas")

    def decode(self, ids):
        return " ".join(map(str, ids))


def test_with_a_tokenizer_text_goes_on_elsewhere_and_is_decoded_as_a_whole():
    async def test(clock):
        fleet = Fixture("a", "b", clock=clock, codec=Words())
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(fleet.stream(message("r", prompt_ids=[], text="hello")))
            await asyncio.sleep(4.5)
            fleet.replicas["a"].kill()
        ids = joined(task.result())[0]
        assert task.result()[-1].finished.text == " ".join(map(str, ids))
        asked = fleet.replicas["b"].seen[0]
        assert list(asked.prompt_ids) == [7, 8, 9, *ids[:4]]
        assert list(asked.sampling.stop_token_ids) == [127]
        assert not asked.HasField("text")

    run(test)


# -- hedging


def _learn(fleet: Fixture, *, first_token_s: float) -> None:
    for _ in range(20):
        fleet.law.hedges.first_token(first_token_s)
        fleet.law.hedges.request()


def test_a_late_first_token_sends_the_request_to_a_second_replica_and_the_first_is_cancelled():
    async def test(clock):
        fleet = Fixture("a", "b", clock=clock, hedge_budget=1.0)
        _learn(fleet, first_token_s=2.0)
        await fleet.replicas["a"].engine.pause("keep")
        asked = message("r")
        reply = await fleet.generate(asked)
        assert same_samples(reply, await unbroken(clock, asked))
        assert [len(replica.seen) for replica in fleet.replicas.values()] == [1, 1]
        assert fleet.replicas["a"].engine._live == {}
        assert fleet.forwarder.hedged == 1
        fleet.check_all_is_given_back()

    run(test)


def test_after_its_first_token_a_request_is_not_hedged_however_slow():
    async def test(clock):
        fleet = Fixture("a", "b", clock=clock, hedge_budget=1.0, step_s=3.0)
        _learn(fleet, first_token_s=4.0)
        await fleet.generate(message("r"))
        assert fleet.replicas["b"].seen == []

    run(test)


def test_the_first_of_two_wins_even_if_the_hedge_is_lost():
    async def test(clock):
        fleet = Fixture("a", "b", clock=clock, hedge_budget=1.0, step_s=3.0)
        _learn(fleet, first_token_s=2.0)
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(fleet.generate(message("r")))
            await asyncio.sleep(2.5)
            assert len(fleet.replicas["b"].seen) == 1
            fleet.replicas["b"].kill()
        assert len(task.result().samples[0].output_ids) == 10
        assert fleet.forwarder.retried == 0
        fleet.check_all_is_given_back()

    run(test)


def test_if_both_are_lost_before_a_token_the_request_goes_on_at_a_third():
    async def test(clock):
        fleet = Fixture("a", "b", "c", clock=clock, hedge_budget=1.0, step_s=3.0)
        _learn(fleet, first_token_s=2.0)
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(fleet.generate(message("r")))
            await asyncio.sleep(2.5)
            fleet.replicas["a"].kill()
            fleet.replicas["b"].kill()
        assert len(task.result().samples[0].output_ids) == 10
        assert len(fleet.replicas["c"].seen) == 1
        fleet.check_all_is_given_back()

    run(test)


async def _error(work: Coroutine[Any, Any, Any]) -> BaseException:
    try:
        found = await work
    except Exception as error:
        return error
    raise AssertionError(f"it was answered: {found}")


@pytest.mark.parametrize("streamed", [False, True])
def test_a_replica_that_lost_an_adapter_is_looked_at_and_the_request_goes_to_another_that_has_it(streamed):
    async def test(clock: VirtualClock) -> None:
        fixture = Fixture("a", "b", "c", clock=clock)
        for name in ("a", "b"):
            fixture.law.report(name, report(slots=8, digest="same", adapters={"maths": 1}), now_s=0.0)
        fixture.replicas["a"].fail_with = UpstreamError(ModelError("adapter 'maths' is unknown here"), Ended.INVALID)
        asked = message("r", adapter="maths")
        if streamed:
            assert len(joined(await fixture.stream(asked))[0]) == 10
        else:
            assert len((await fixture.generate(asked)).samples) == 1
        assert [len(replica.seen) for replica in fixture.replicas.values()] == [1, 1, 0]
        assert fixture.troubles == ["a"]
        assert fixture.law.table["a"].seen is Seen.SERVING
        fixture.replicas["b"].fail_with = fixture.replicas["a"].fail_with
        with pytest.raises(ModelError, match=r"failed; it was tried at .*a: adapter 'maths' is unknown here"):
            await fixture.generate(message("s", adapter="maths"))
        fixture.check_all_is_given_back()

    run(test)
