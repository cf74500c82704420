"""A stream's reader may be slow, but not stand still."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from rollmill.clock import VirtualClock
from rollmill.errors import SlowReader
from rollmill.generator.proto import policy_inference_pb2 as pb
from rollmill.generator.router.writer import StreamWriter
from rollmill.testing.virtual_loop import run_virtual

STALL_S = 10.0
EVENT = pb.GenerateEvent(request_id="r")


class Reader:
    """Takes one event after the other, each in so many seconds."""

    def __init__(self, *seconds: float) -> None:
        self._seconds = list(seconds)
        self.busy = 0
        self.most = 0
        self.taken: list[bytes] = []

    async def write(self, data: bytes) -> None:
        self.busy += 1
        self.most = max(self.most, self.busy)
        await asyncio.sleep(self._seconds.pop(0))
        self.taken.append(data)
        self.busy -= 1


def run(test: Callable[[VirtualClock], Coroutine[Any, Any, None]]) -> None:
    clock = VirtualClock()
    run_virtual(test(clock), clock=clock)


async def write_all(reader: Reader, *, pauses_s: list[float]) -> None:
    writer = StreamWriter(reader.write, stall_s=STALL_S)
    with writer.watched():
        for pause_s in pauses_s:
            await writer.emit(EVENT, None)
            await asyncio.sleep(pause_s)


def test_a_slow_reader_of_a_slow_stream_is_waited_for():
    async def test(clock):
        reader = Reader(9.0, 9.0, 9.0)
        await write_all(reader, pauses_s=[50.0, 0.0, 50.0])
        assert clock.now_s() == pytest.approx(127.0)
        assert reader.taken == [EVENT.SerializeToString()] * 3

    run(test)


def test_a_reader_that_stands_still_loses_its_request():
    async def test(clock):
        with pytest.raises(SlowReader, match="request r did not take an event for 10 s"):
            await write_all(Reader(0.0, 1000.0), pauses_s=[4.0, 0.0])
        # The event waits from 4 s on; the first look at 10 s is too early, the next is due then.
        assert clock.now_s() == pytest.approx(14.0)
        task = asyncio.current_task()
        assert task is not None
        assert task.cancelling() == 0

    run(test)


def test_the_end_of_a_task_stays_its_end():
    async def test(clock):
        task = asyncio.ensure_future(write_all(Reader(1000.0), pauses_s=[0.0]))
        await asyncio.sleep(1.0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run(test)


def test_events_of_several_siblings_are_written_one_at_a_time():
    async def test(clock):
        reader = Reader(1.0, 1.0, 1.0)
        writer = StreamWriter(reader.write, stall_s=STALL_S)
        await asyncio.gather(*(writer.emit(EVENT, b"as it is") for _ in range(3)))
        assert reader.most == 1
        assert reader.taken == [b"as it is"] * 3

    run(test)
