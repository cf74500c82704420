"""What a step has to tell is handed over once per loop, in order, and one listener's fault is not the others'."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from rollmill.generator.engines.embedded.letters import Letters
from rollmill.types import TokenChunk


def chunk(token: int) -> TokenChunk:
    return TokenChunk(
        start_token=token,
        output_ids=np.array([token], dtype=np.int32),
        behavior_logprobs=np.zeros(1, dtype=np.float32),
        policy_version=1,
    )


async def test_all_of_a_step_wakes_the_loop_once_and_comes_in_order(monkeypatch):
    loop, letters, heard = asyncio.get_running_loop(), Letters(), []
    woken = []
    threadsafe = loop.call_soon_threadsafe
    monkeypatch.setattr(loop, "call_soon_threadsafe", lambda *args: (woken.append(1), threadsafe(*args))[1])
    writers = [letters.to(loop, lambda told, who=who: heard.append((who, told.start_token))) for who in range(3)]

    def step() -> None:
        for token in range(2):
            for write in writers:
                write(chunk(token))
        letters.send()
        letters.send()  # nothing was written since

    await asyncio.to_thread(step)
    steps = len(woken)
    await asyncio.sleep(0)
    assert heard == [(who, token) for token in range(2) for who in range(3)]
    assert steps <= 2  # one of them is the thread's own end


async def test_tokens_are_heard_before_what_is_handed_over_after_them():
    loop, letters, heard = asyncio.get_running_loop(), Letters(), []
    over: asyncio.Future[None] = loop.create_future()

    def step() -> None:
        letters.to(loop, lambda told: heard.append(told.start_token))(chunk(7))
        letters.send()
        loop.call_soon_threadsafe(over.set_result, None)

    await asyncio.to_thread(step)
    await over
    assert heard == [7]


async def test_a_listener_that_raises_does_not_keep_the_others_from_theirs():
    loop, letters, heard, raised = asyncio.get_running_loop(), Letters(), [], []
    loop.set_exception_handler(lambda _, context: raised.append(str(context["exception"])))

    def fails(_: TokenChunk) -> None:
        raise ValueError("mine")

    letters.to(loop, fails)(chunk(1))
    letters.to(loop, lambda told: heard.append(told.start_token))(chunk(2))
    letters.send()
    for _ in range(3):
        await asyncio.sleep(0)
    assert (heard, raised) == ([2], ["mine"])


@pytest.mark.filterwarnings("error")
def test_a_loop_that_was_closed_hears_nothing_and_nobody_minds():
    loop, letters = asyncio.new_event_loop(), Letters()
    letters.to(loop, lambda _: None)(chunk(1))
    loop.close()
    letters.send()
