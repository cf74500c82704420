"""Many requests over one call: each has its own answer or its own failure, and the end of one is not that of others."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from exchange_builders import Pair, plan
from rollmill.clock import VirtualClock
from rollmill.errors import DataError
from rollmill.generator.exchange.asking import CallFailed
from rollmill.generator.exchange.frames import FRAME_BYTES
from rollmill.generator.proto import policy_inference_pb2 as pb
from rollmill.testing.virtual_loop import run_virtual


def run(test: Any) -> None:
    clock = VirtualClock()
    run_virtual(test(clock), clock=clock)


def test_requests_side_by_side_get_their_own_answers_over_one_call():
    async def test(clock):
        pair = Pair(clock)
        answers = await asyncio.gather(
            pair.reply("a", seconds=3.0), pair.events("b", seconds=2.0, events=3), pair.reply("c", seconds=1.0)
        )
        assert answers == [b"reply to a", [b"b 0", b"b 1", b"b 2"], b"reply to c"]
        assert pair.answering.ended == ["c", "b", "a"]
        assert pair.wire.opened == 1
        assert pair.wire.asked == [3]
        await pair.asking.close()

    run(test)


def test_a_failure_is_that_of_its_request_with_status_details_and_metadata():
    async def test(clock):
        pair = Pair(clock)
        good = asyncio.ensure_future(pair.reply("good", seconds=2.0))
        with pytest.raises(CallFailed) as failed:
            await pair.events("bad", seconds=1.0, events=2, error="NotServing")
        assert (failed.value.status, failed.value.details) == ("UNAVAILABLE", "as was asked for")
        assert failed.value.metadata == {"rollmill-code": "not_serving"}
        assert await good == b"reply to good"
        await pair.asking.close()

    run(test)


def test_bytes_that_are_no_request_fail_alone():
    async def test(clock):
        pair = Pair(clock)
        good = asyncio.ensure_future(pair.reply("good", seconds=2.0))
        with pytest.raises(CallFailed, match="no GenerateRequest") as failed:
            await pair.asking.reply(b"\xff\xff", timeout_s=10.0)
        assert failed.value.status == "INVALID_ARGUMENT"
        assert await good == b"reply to good"
        await pair.asking.close()

    run(test)


def test_a_fault_of_the_service_in_one_request_fails_that_one_and_is_logged(caplog):
    async def test(clock):
        pair = Pair(clock)
        good = asyncio.ensure_future(pair.reply("good", seconds=2.0))
        with pytest.raises(CallFailed) as failed:
            await pair.reply("bad", error="ValueError")
        assert failed.value.status == "UNKNOWN"
        assert await good == b"reply to good"
        await pair.asking.close()

    run(test)
    assert "request 1 of an exchange failed" in caplog.text


def test_who_leaves_cancels_that_request_there():
    async def test(clock):
        pair = Pair(clock)
        leaving = asyncio.ensure_future(pair.reply("leaving", seconds=100.0))
        staying = asyncio.ensure_future(pair.reply("staying", seconds=5.0))
        await asyncio.sleep(1.0)
        leaving.cancel()
        assert await staying == b"reply to staying"
        assert (pair.answering.cancelled, clock.now_s()) == (["leaving"], 5.0)
        await pair.asking.close()

    run(test)


def test_a_request_that_is_not_answered_in_time_ends_so_and_is_cancelled_there():
    async def test(clock):
        pair = Pair(clock)
        with pytest.raises(CallFailed, match="no answer within 3 s") as failed:
            await pair.reply("late", seconds=100.0, timeout_s=3.0)
        assert failed.value.status == "DEADLINE_EXCEEDED"
        await asyncio.sleep(1.0)
        assert pair.answering.cancelled == ["late"]
        await pair.asking.close()

    run(test)


@pytest.mark.parametrize("timeout_s", [float("inf"), float("nan"), 1e300])
def test_a_timeout_without_end_is_a_long_one(timeout_s):
    async def test(clock):
        pair = Pair(clock)
        assert await pair.reply("a", seconds=5.0, timeout_s=timeout_s) == b"reply to a"
        await pair.asking.close()

    run(test)


def test_what_a_listener_raises_is_what_its_request_ends_with():
    async def test(clock):
        pair = Pair(clock)

        def hear(event: bytes) -> None:
            raise DataError(event.decode())

        with pytest.raises(DataError, match="a 0"):
            await pair.asking.events(plan("a", seconds=4.0, events=4), hear=hear, timeout_s=60.0)
        assert await pair.events("b", events=2) == [b"b 0", b"b 1"]
        assert pair.answering.cancelled == ["a"]
        await pair.asking.close()

    run(test)


def test_a_request_that_fits_into_no_frame_has_a_call_of_its_own():
    async def test(clock):
        pair = Pair(clock)
        assert await pair.reply("large", padding=FRAME_BYTES) == b"reply to large"
        assert await pair.events("larger", padding=FRAME_BYTES, events=2) == [b"larger 0", b"larger 1"]
        assert await pair.reply("small") == b"reply to small"
        assert pair.answering.began == ["large", "larger", "small"]
        assert (len(pair.wire.alone), pair.asking.alone, sum(pair.wire.asked)) == (2, 2, 1)
        narrow = Pair(clock, max_body_bytes=1024)
        assert await narrow.reply("large", padding=1000) == b"reply to large"
        answers = await asyncio.gather(*(narrow.reply(f"r{index}", padding=300) for index in range(9)))
        assert answers == [f"reply to r{index}".encode() for index in range(9)]
        assert max(narrow.wire.asked) * 300 <= 1024
        assert narrow.asking.alone == 1
        await pair.asking.close()
        await narrow.asking.close()

    run(test)


def test_a_service_without_exchanges_is_asked_for_one_again_after_a_while():
    async def test(clock):
        pair = Pair(clock)
        pair.wire.none_there = True
        for name in ("a", "b"):
            assert await pair.reply(name, seconds=10.0) == f"reply to {name}".encode()
        assert (pair.wire.opened, pair.asking.alone) == (1, 2)
        pair.wire.none_there = False
        await asyncio.sleep(39.0)
        assert await pair.reply("c") == b"reply to c"
        assert (pair.wire.opened, pair.asking.alone) == (1, 3)
        await asyncio.sleep(1.0)
        assert await pair.reply("d") == b"reply to d"
        assert (pair.wire.opened, pair.asking.alone) == (2, 3)
        await pair.asking.close()

    run(test)


def test_a_call_of_its_own_has_the_time_that_is_left_and_ends_with_it():
    async def test(clock):
        pair = Pair(clock)
        pair.wire.none_there = True
        opened = asyncio.Event()
        pair.wire.gate = opened
        asked = asyncio.ensure_future(pair.reply("a", seconds=100.0, timeout_s=10.0))
        await asyncio.sleep(4.0)
        opened.set()
        with pytest.raises(CallFailed, match="no answer within 10 s") as failed:
            await asked
        assert (failed.value.status, clock.now_s(), pair.wire.alone) == ("DEADLINE_EXCEEDED", 10.0, [6.0])
        assert pair.answering.cancelled == ["a"]
        await pair.asking.close()

    run(test)


def test_a_lost_connection_ends_its_requests_and_the_next_one_opens_another():
    async def test(clock):
        pair = Pair(clock)
        asked = [asyncio.ensure_future(pair.reply(f"r{index}", seconds=50.0)) for index in range(3)]
        await asyncio.sleep(1.0)
        pair.wire.cut()
        for one in asked:
            with pytest.raises(CallFailed, match="connection lost") as failed:
                await one
            assert failed.value.status == "UNAVAILABLE"
        assert sorted(pair.answering.cancelled) == ["r0", "r1", "r2"]
        assert await pair.reply("again") == b"reply to again"
        assert pair.wire.opened == 2
        await pair.asking.close()

    run(test)


def test_a_service_that_ends_its_exchanges_answers_what_runs_and_takes_nothing_more():
    async def test(clock):
        pair = Pair(clock)
        running = asyncio.ensure_future(pair.reply("running", seconds=5.0))
        await asyncio.sleep(1.0)
        pair.exchanges.end()
        with pytest.raises(CallFailed, match="ended the exchange") as failed:
            await pair.reply("late")
        assert failed.value.status == "UNAVAILABLE"
        assert await running == b"reply to running"
        assert clock.now_s() == 5.0
        with pytest.raises(CallFailed, match="ended the exchange"):
            await pair.reply("later")
        assert pair.answering.began == ["running"]

    run(test)


def test_closing_ends_all_requests_as_cancelled():
    async def test(clock):
        pair = Pair(clock)
        asked = asyncio.ensure_future(pair.reply("a", seconds=50.0))
        await asyncio.sleep(1.0)
        await pair.asking.close()
        with pytest.raises(CallFailed) as failed:
            await asked
        assert failed.value.status == "CANCELLED"
        await asyncio.sleep(0)
        assert pair.answering.cancelled == ["a"]

    run(test)


def test_more_requests_at_once_than_one_exchange_may_have_are_refused_with_a_time_to_ask_again():
    async def test(clock):
        pair = Pair(clock, calls=2)
        running = [asyncio.ensure_future(pair.reply(name, seconds=5.0)) for name in "ab"]
        await asyncio.sleep(1.0)
        with pytest.raises(CallFailed, match="2 requests of this exchange wait or run") as failed:
            await pair.reply("c")
        assert (failed.value.status, failed.value.metadata["retry-after"]) == ("RESOURCE_EXHAUSTED", "1.000")
        assert await asyncio.gather(*running) == [b"reply to a", b"reply to b"]
        assert await pair.reply("d") == b"reply to d"
        await pair.asking.close()

    run(test)


def test_a_reader_that_falls_behind_loses_its_requests_but_not_the_exchange():
    async def test(clock):
        pair = Pair(clock, stream_events=16)
        pair.wire.reading.clear()
        asked = asyncio.ensure_future(pair.events("a", seconds=40.0, events=40))
        await asyncio.sleep(30.0)
        assert pair.answering.cancelled == ["a"]
        pair.wire.reading.set()
        with pytest.raises(CallFailed, match="16 events behind") as failed:
            await asked
        assert failed.value.status == "RESOURCE_EXHAUSTED"
        assert await pair.reply("b") == b"reply to b"
        assert pair.wire.opened == 1
        await pair.asking.close()

    run(test)


def test_a_reader_that_stands_still_loses_the_exchange():
    async def test(clock):
        pair = Pair(clock, stream_stall_s=20.0)
        pair.wire.reading.clear()
        asked = [
            asyncio.ensure_future(pair.reply(name, seconds=seconds)) for name, seconds in (("a", 1.0), ("b", 99.0))
        ]
        for one in asked:
            with pytest.raises(CallFailed, match="took no frame for 20 s"):
                await one
        assert clock.now_s() == pytest.approx(21.0)
        assert pair.answering.cancelled == ["b"]

    run(test)


def test_a_number_that_was_used_ends_the_exchange_of_whoever_broke_the_rule():
    async def test(clock):
        pair = Pair(clock)

        async def frames():
            yield pb.AskFrame(asks=[pb.Ask(call=2, generate=plan("a", seconds=9.0))])
            yield pb.AskFrame(asks=[pb.Ask(call=2, generate=plan("b"))])

        async def write(frame: pb.AnswerFrame) -> None:
            raise AssertionError("nothing is answered")

        with pytest.raises(DataError, match="ask 2 of an exchange came after ask 2"):
            await pair.exchanges.serve(frames(), write=write)
        assert pair.answering.cancelled == ["a"]

    run(test)


def test_an_ask_of_a_newer_kind_fails_alone():
    async def test(clock):
        pair, answers = Pair(clock), []

        async def frames():
            yield pb.AskFrame(asks=[pb.Ask(call=1), pb.Ask(call=2, generate=plan("a"))])

        async def write(frame: pb.AnswerFrame) -> None:
            answers.extend(frame.answers)

        await pair.exchanges.serve(frames(), write=write)
        found = {answer.call: answer for answer in answers}
        assert found[1].failure.status == "INVALID_ARGUMENT"
        assert found[2].reply == b"reply to a"

    run(test)
