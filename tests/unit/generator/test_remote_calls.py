"""HTTP calls to a server that dies under them."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable

import httpx2 as httpx
import pytest

from rollmill.errors import DeadlineExceeded, EngineDead, EngineError
from rollmill.generator.engines.remote.calls import Calls, Refused
from rollmill.generator.engines.remote.watch import ServerWatch

LOST = httpx.ReadError("reset by peer")


def calls_over(answer: Callable[[httpx.Request], httpx.Response], *, look: Callable[[], None] = lambda: None) -> Calls:
    return Calls(
        product="Scripted",
        deadline_setting="generator.scripted.control_deadline_s",
        client=httpx.AsyncClient(transport=httpx.MockTransport(answer), base_url="http://server", timeout=None),
        look=look,
        read_error=lambda content: content.decode(),
    )


def lose(_: httpx.Request) -> httpx.Response:
    raise LOST


async def test_a_call_whose_connection_is_lost_waits_for_the_cause_of_the_death():
    looked = asyncio.Event()
    calls = calls_over(lose, look=looked.set)
    asking = [asyncio.ensure_future(calls.ask("GET", "/x", deadline_s=5.0)) for _ in range(2)]
    await looked.wait()
    await asyncio.sleep(0)
    calls.end_all(EngineDead("it died of a test"))
    for call in asking:
        with pytest.raises(EngineDead, match="died of a test"):
            await call
    await calls.close()


async def test_a_refusal_has_its_status_and_message():
    calls = calls_over(lambda _: httpx.Response(400, content=b"no such thing"))
    with pytest.raises(Refused, match="answered /x with 400: no such thing") as refused:
        await calls.ask("POST", "/x", body={}, deadline_s=5.0)
    assert refused.value.status == 400
    await calls.close()


async def test_a_call_that_is_not_answered_names_the_setting_of_its_deadline():
    async def never(_: httpx.Request) -> httpx.Response:
        await asyncio.Event().wait()
        raise AssertionError

    calls = calls_over(never)  # type: ignore[arg-type]
    with pytest.raises(DeadlineExceeded, match=r"/x within 0\.01 s\. Raise generator\.scripted\.control_deadline_s"):
        await calls.ask("GET", "/x", deadline_s=0.01)
    waiting = asyncio.ensure_future(calls.ask("GET", "/x", deadline_s=60.0))
    await asyncio.sleep(0)
    calls.end_all(EngineDead("gone"))
    with pytest.raises(EngineDead, match="gone"):
        await waiting
    with pytest.raises(EngineError, match="gone"):
        await calls.ask("GET", "/x", deadline_s=1.0)
    await calls.close()


class Process:
    """A process as its watch sees it; ends when told to."""

    def __init__(self) -> None:
        self.ends, self._end = os.pipe()
        self.exit_code: int | None = None

    def last_words(self) -> str:
        return "runs no more" if self.exit_code is None else f"was killed by signal {-self.exit_code}"

    def die(self) -> None:
        self.exit_code = -9
        os.close(self._end)


def test_a_death_is_told_by_how_the_process_ended_also_where_its_connection_was_lost_first():
    process, died, told = Process(), threading.Event(), []

    def probe() -> None:
        threading.Timer(0.05, process.die).start()  # the kernel tells of the end a little later
        raise EngineDead(f"{process.last_words()} (connection reset)")

    def hear(cause: EngineDead) -> None:
        told.append(str(cause))
        died.set()

    watch = ServerWatch(process, probe=probe, every_s=60.0, on_death=hear, name="watch")
    watch.start()
    assert died.wait(5)
    assert told == ["was killed by signal 9"]
    watch.stop()
    os.close(process.ends)
