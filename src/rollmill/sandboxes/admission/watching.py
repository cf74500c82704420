"""The two loops of a pool: an alarm at the times that the law names, and a watch over the node and the dead."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from rollmill.errors import Fault
from rollmill.sandboxes.admission.hands import Hands
from rollmill.sandboxes.admission.pressure import PressureSample, judge
from rollmill.sandboxes.admission.records import Place
from rollmill.sandboxes.admission.settings import PoolSettings
from rollmill.sandboxes.protocol import Provider
from rollmill.sandboxes.records import SandboxState

_STATUS_EVERY = 10
_STATUS_TOGETHER = 100
_GONE = (SandboxState.DEAD, SandboxState.LOST)

Sample = Callable[[], Awaitable[PressureSample]]


class Watch:
    """Watches over one pool.

    Args:
        provider: asked about its sandboxes.
        hands: carry out what follows.
        settings: of the pool.
        pressure: samples the node, if it is watched.
        batch_status: whether the provider answers for many at once.
    """

    def __init__(
        self, provider: Provider, *, hands: Hands, settings: PoolSettings, pressure: Sample | None, batch_status: bool
    ) -> None:
        self._provider, self._hands, self._law, self._settings = provider, hands, hands.law, settings
        self._pressure, self._batch_status = pressure, batch_status
        self._missing: set[str] = set()
        self._looks = 0

    async def alarm(self) -> None:
        """Tell the law when a time has come that it waits for."""
        loop = asyncio.get_running_loop()
        while True:
            self._hands.news.clear()
            try:
                async with asyncio.timeout_at(self._law.wakes_s(now_s=loop.time())):
                    await self._hands.news.wait()
            except TimeoutError:
                self._hands.run(self._law.tick(now_s=loop.time()))

    async def watch(self) -> None:
        """Look at the node, and at who has died."""
        while True:
            await asyncio.sleep(self._settings.watch_s)
            await self._look_at_the_node()
            self._look_for_dead()
            self._looks += 1
            if self._batch_status and self._looks % _STATUS_EVERY == 0:
                await self._ask_for_dead()
            self._hands.run(self._law.tick(now_s=self._hands.now_s()))

    async def _look_at_the_node(self) -> None:
        if self._pressure is None:
            return
        try:
            async with asyncio.timeout(self._settings.check_s):
                sample = await self._pressure()
        except (Fault, OSError) as error:  # what is not seen stops nothing
            self._hands.last_failure = f"a look at the node's pressure: {type(error).__name__}: {error}"
            sample = PressureSample()
        self._hands.run(
            self._law.press(judge(sample, settings=self._settings.admission.pressure), now_s=self._hands.now_s())
        )

    def _look_for_dead(self) -> None:
        for sandbox_id, sandbox in list(self._hands.sandboxes.items()):
            if sandbox.death is not None:
                self._dead(sandbox_id)

    async def _ask_for_dead(self) -> None:
        """Ask the provider about those that its own objects may not know of: other machines do not call back."""
        ids = [one for one, claim in self._law.books.claims.items() if claim.place is not Place.STARTING]
        for begin in range(0, len(ids), _STATUS_TOGETHER):
            asked = ids[begin : begin + _STATUS_TOGETHER]
            try:
                async with asyncio.timeout(self._settings.check_s):
                    known = await self._provider.status(asked)
            except (Fault, OSError) as error:
                self._hands.last_failure = f"status of {len(asked)} sandboxes: {type(error).__name__}: {error}"
                return
            for one in asked:
                missing = one not in known  # twice in a row, because lists of other machines lag
                if one in self._missing if missing else known[one].state in _GONE:
                    self._dead(one)
                (self._missing.add if missing else self._missing.discard)(one)
        self._missing &= set(ids)

    def _dead(self, sandbox_id: str) -> None:
        claim = self._law.books.claims.get(sandbox_id)
        if claim is None or claim.stopping or claim.ask is not None:
            return  # whoever is being given it finds out by itself
        now_s = self._hands.now_s()
        if claim.place is Place.POOLED:
            self._hands.run(self._law.dead_idle(sandbox_id, now_s=now_s))
        else:
            self._hands.run(self._law.ended(sandbox_id, now_s=now_s))
