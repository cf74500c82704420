"""Who must not hold up others steps back, and nobody else with it."""

from __future__ import annotations

import asyncio
import os
import sys
import threading

import pytest

from rollmill.priority import NICENESS, beside

linux = pytest.mark.skipif(sys.platform != "linux", reason="threads have priorities of their own on Linux alone")


def niceness() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


@linux
async def test_work_that_is_done_beside_lets_others_go_first_and_the_caller_keeps_its_priority():
    before = niceness()
    assert await beside(niceness) == min(19, before + NICENESS)
    assert niceness() == before


@linux
async def test_threads_that_are_shared_keep_their_priority():
    await beside(niceness)
    assert await asyncio.to_thread(niceness) == niceness()


async def test_what_fails_beside_fails_for_who_waits():
    with pytest.raises(ZeroDivisionError):
        await beside(lambda: 1 // 0)


async def test_who_gives_up_does_not_wait_for_the_work():
    begun, may_end = threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        may_end.wait(20)

    task = asyncio.ensure_future(beside(work))
    await asyncio.to_thread(begun.wait, 20)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    may_end.set()
