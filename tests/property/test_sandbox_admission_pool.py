"""Whole pools on the fake provider, in virtual time, with callers that come, go and give up while starts fail.

Whatever happens: budgets hold at the provider itself, every caller ends by its deadline, equals are served in their
order, and after the end nothing lives but what callers hold.
"""

from __future__ import annotations

import asyncio
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from pool_builders import LEASE, SharedCores, pool_of
from rollmill.errors import CreateUnknown, RollmillError, SandboxError, SandboxRetryable
from rollmill.sandboxes import DirectoryImage, SandboxSpec
from rollmill.sandboxes.admission import SandboxPool
from rollmill.testing import run_virtual
from rollmill.testing.faults import Delay, FaultAction, FaultInjector, Hang, Raise

SPECS = (SandboxSpec(), SandboxSpec(image=DirectoryImage(layers=("/b",))))
MAX_RUNNING, MAX_STARTING = 5, 3
FAULTS: tuple[FaultAction | None, ...] = (
    None,
    None,
    None,
    Raise(lambda: SandboxError("broke")),
    Raise(lambda: SandboxRetryable("full", after_s=2.0)),
    Raise(lambda: CreateUnknown("cut", sandbox_id="?")),
    Delay(4.0),
    Hang(),
)
ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("acquire"), st.integers(0, 1), st.sampled_from([0.5, 3.0, 30.0])),
        st.tuples(st.just("demand"), st.integers(0, 1), st.integers(0, 4)),
        st.tuples(st.just("wait"), st.sampled_from([0.0, 0.1, 1.0, 7.0])),
        st.tuples(st.just("release"), st.integers(0, 9)),
        st.tuples(st.just("cancel"), st.integers(0, 9)),
        st.tuples(st.just("kill"), st.integers(0, 9)),
        st.tuples(st.just("lose")),
        st.tuples(st.just("kills fail"), st.integers(1, 2)),
    ),
    max_size=25,
)


class Story:
    """Plays one list of actions, and checks what always holds."""

    def __init__(self, provider: SharedCores, pool: SandboxPool) -> None:
        self.provider, self.pool = provider, pool
        self.callers: list[asyncio.Task[None]] = []
        self.held: list[Any] = []

    async def play(self, actions: list[tuple]) -> None:
        for name, *values in actions:
            await getattr(self, name.replace(" ", "_"))(*values)
            self.check()
        for _ in range(100):  # every caller ends by itself
            if not [one for one in self.callers if not one.done()]:
                break
            await asyncio.sleep(1.0)
            self.check()
        assert all(one.done() for one in self.callers)
        for one in self.callers:
            if not one.cancelled() and (error := one.exception()) is not None:
                raise error

    def check(self) -> None:
        assert self.provider.most_alive <= MAX_RUNNING
        assert self.provider.most_starting <= MAX_STARTING
        statistics = self.pool.statistics()
        assert sum(statistics.places.values()) <= MAX_RUNNING

    async def acquire(self, spec: int, deadline_s: float) -> None:
        self.callers.append(asyncio.ensure_future(self._caller(SPECS[spec], deadline_s)))
        await asyncio.sleep(0)

    async def _caller(self, spec: SandboxSpec, deadline_s: float) -> None:
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        try:
            sandbox = await self.pool.acquire(spec, lease=LEASE, deadline_s=deadline_s)
        except RollmillError:
            pass  # refused, late, or failed too often: each is an end
        else:
            self.held.append(sandbox)
        assert loop.time() - began_s <= deadline_s + 1e-6

    async def demand(self, spec: int, count: int) -> None:
        self.pool.demand(SPECS[spec], count)

    async def wait(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def release(self, number: int) -> None:
        if self.held:
            await self.pool.release(self.held.pop(number % len(self.held)))

    async def cancel(self, number: int) -> None:
        if self.callers:
            self.callers[number % len(self.callers)].cancel()

    async def kill(self, number: int) -> None:
        if self.held:
            await self.held.pop(number % len(self.held)).kill()

    async def lose(self) -> None:
        self.provider.lose()
        self.held.clear()

    async def kills_fail(self, count: int) -> None:
        self.provider.refuse_kill = [SandboxError("busy")] * count


@settings(max_examples=80, deadline=None)
@given(actions=ACTIONS, plan=st.lists(st.sampled_from(FAULTS), max_size=12), core_s=st.sampled_from([0.0, 0.5]))
def test_whatever_happens_budgets_hold_callers_end_in_time_and_nothing_is_left(actions, plan, core_s):
    def struck(operation: str, call: int) -> FaultAction | None:
        return plan[call - 1] if operation == "create" and call <= len(plan) else None

    async def body() -> None:
        provider = SharedCores(core_s=core_s, faults=FaultInjector(struck))
        options = {"max_running": MAX_RUNNING, "max_starting": MAX_STARTING, "start_s": 10.0, "breaker_open_s": 2.0}
        async with pool_of(provider, pool={"unknown_s": 5.0}, **options) as pool:
            story = Story(provider, pool)
            await story.play(actions)
        assert sorted(await provider.alive()) == sorted(one.id for one in story.held if one.death is None)

    run_virtual(body())


@settings(max_examples=30, deadline=None)
@given(specs=st.lists(st.integers(0, 1), min_size=1, max_size=12), core_s=st.sampled_from([0.1, 1.0]))
def test_equals_are_served_in_the_order_in_which_they_came(specs, core_s):
    async def body() -> list[str]:
        provider = SharedCores(core_s=core_s)
        async with pool_of(provider, max_running=MAX_RUNNING, max_starting=MAX_STARTING) as pool:

            async def caller(number: int, spec: int) -> None:
                async with pool.sandbox(SPECS[spec], lease=LEASE, id=f"c{number}", deadline_s=1000.0):
                    await asyncio.sleep(5.0)

            async with asyncio.TaskGroup() as group:
                for number, spec in enumerate(specs):
                    group.create_task(caller(number, spec))
        return provider.created

    assert run_virtual(body()) == [f"c{number}" for number in range(len(specs))]
