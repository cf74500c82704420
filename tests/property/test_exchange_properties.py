"""Requests of any kind over exchanges that are cut at any moment: each has one end, its own, and nothing is left."""

from __future__ import annotations

import asyncio
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from exchange_builders import Pair
from rollmill.clock import VirtualClock
from rollmill.generator.exchange.asking import CallFailed
from rollmill.testing.virtual_loop import run_virtual

TIMES = st.sampled_from([0.0, 0.001, 0.002, 0.5, 1.0, 2.5])
REQUESTS = st.lists(
    st.fixed_dictionaries(
        {
            "at_s": TIMES,
            "seconds": TIMES,
            "events": st.sampled_from([0, 1, 2, 7]),
            "error": st.sampled_from(["", "", "", "DataError", "EngineDead"]),
            "leaves_s": st.sampled_from([None, None, None, 0.0, 0.001, 0.7]),
            "timeout_s": st.sampled_from([60.0, 60.0, 0.8]),
        }
    ),
    max_size=12,
)
STATUSES = {"DataError": "INVALID_ARGUMENT", "EngineDead": "UNAVAILABLE"}


async def call(pair: Pair, name: str, plan: dict[str, Any]) -> Any:
    """Return what a request ended with."""
    await asyncio.sleep(plan["at_s"])
    how = {"seconds": plan["seconds"], "error": plan["error"], "timeout_s": plan["timeout_s"]}
    asking = pair.events(name, events=plan["events"], **how) if plan["events"] else pair.reply(name, **how)
    try:
        async with asyncio.timeout(plan["leaves_s"]):
            return await asking
    except TimeoutError:
        return "left"
    except CallFailed as failure:
        return failure.status


def expected(name: str, plan: dict[str, Any]) -> Any:
    if plan["error"]:
        return STATUSES[plan["error"]]
    return [f"{name} {index}".encode() for index in range(plan["events"])] or f"reply to {name}".encode()


@given(requests=REQUESTS, cuts_s=st.lists(TIMES, max_size=2))
def test_every_request_has_its_own_end_and_nothing_is_left(requests, cuts_s):
    async def main(clock: VirtualClock) -> None:
        pair = Pair(clock)

        async def cut(at_s: float) -> None:
            await asyncio.sleep(at_s)
            pair.wire.cut()

        named = {f"r{index}": plan for index, plan in enumerate(requests)}
        ends = asyncio.gather(*(call(pair, name, plan) for name, plan in named.items()))
        await asyncio.gather(*map(cut, cuts_s))
        for (name, plan), end in zip(named.items(), await ends, strict=True):
            allowed = [expected(name, plan)]
            allowed += ["left"] if plan["leaves_s"] is not None else []
            allowed += ["DEADLINE_EXCEEDED"] if plan["timeout_s"] < 1.0 < plan["seconds"] + 0.3 else []
            allowed += ["UNAVAILABLE"] if cuts_s else []
            assert end in allowed, (name, plan, end)
        await asyncio.sleep(1.0)
        assert sorted(pair.answering.began) == sorted(pair.answering.ended)
        assert len(pair.answering.began) == len(set(pair.answering.began))
        assert pair.wire.opened <= 1 + len(cuts_s)
        await pair.asking.close()
        await asyncio.sleep(1.0)
        assert len(asyncio.all_tasks()) == 1

    clock = VirtualClock()
    run_virtual(main(clock), clock=clock)
