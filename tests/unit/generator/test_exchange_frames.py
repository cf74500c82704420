"""What many requests have to say shares frames, and nobody waits for that when there is little to say."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rollmill.clock import VirtualClock
from rollmill.errors import SlowReader
from rollmill.generator.exchange.frames import ITEM_BYTES, FrameWriter
from rollmill.testing.virtual_loop import run_virtual

PACE_S = 0.5


def run(test: Any) -> None:
    clock = VirtualClock()
    run_virtual(test(clock), clock=clock)


class Reader:
    """Takes frames, each in so many seconds."""

    def __init__(self, clock: VirtualClock, *, seconds: float = 0.0) -> None:
        self._clock, self._seconds = clock, seconds
        self.taken: list[tuple[float, list[str]]] = []

    async def write(self, frame: list[str]) -> None:
        await asyncio.sleep(self._seconds)
        self.taken.append((self._clock.now_s(), frame))


async def written(reader: Reader, *puts: tuple[float, str], nbytes: int = 1, **settings: Any) -> None:
    """Put items at their times, and close."""
    writer = FrameWriter[str](reader.write, **{"stall_s": 10.0, "pace_s": PACE_S, **settings})
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(writer.run())
        began_s = asyncio.get_running_loop().time()
        for at_s, item in puts:
            if (early_s := began_s + at_s - asyncio.get_running_loop().time()) > 0:
                await asyncio.sleep(early_s)
            writer.put(item, nbytes=nbytes)
        writer.close()


def test_the_first_item_goes_at_once_and_what_comes_soon_after_it_goes_together():
    async def test(clock):
        reader = Reader(clock)
        await written(reader, (0.0, "a"), (0.1, "b"), (0.2, "c"), (0.4, "d"), (3.0, "e"))
        assert reader.taken == [(0.0, ["a"]), (0.5, ["b", "c", "d"]), (3.0, ["e"])]

    run(test)


def test_items_of_one_moment_are_one_frame():
    async def test(clock):
        reader = Reader(clock)
        await written(reader, (0.0, "a"), (0.0, "b"), (0.0, "c"))
        assert reader.taken == [(0.0, ["a", "b", "c"])]

    run(test)


def test_a_frame_is_no_larger_than_its_bound_unless_one_item_is():
    async def test(clock):
        reader = Reader(clock)
        puts = [(0.0, name) for name in "abcde"]
        await written(reader, *puts, nbytes=100, frame_bytes=2 * (100 + ITEM_BYTES), pace_s=0.0)
        assert [frame for _, frame in reader.taken] == [["a", "b"], ["c", "d"], ["e"]]
        small = Reader(clock)
        await written(small, *puts, nbytes=100, frame_bytes=50, pace_s=0.0)
        assert [frame for _, frame in small.taken] == [[name] for name in "abcde"]

    run(test)


def test_a_closed_writer_writes_what_waits():
    async def test(clock):
        reader = Reader(clock, seconds=2.0)
        await written(reader, (0.0, "a"), (1.0, "b"))
        assert [frame for _, frame in reader.taken] == [["a"], ["b"]]

    run(test)


def test_a_reader_that_stands_still_ends_the_writer_with_a_reason():
    async def test(clock):
        with pytest.RaisesGroup(pytest.RaisesExc(SlowReader, match="took no frame for 10 s, with 1 items behind it")):
            await written(Reader(clock, seconds=1000.0), (0.0, "a"), (1.0, "b"))
        assert clock.now_s() == pytest.approx(10.0)

    run(test)
