"""Carries out what the law orders: creations, kills, preparations, and the news to those who wait."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from typing import Any

import msgspec

from rollmill.errors import ConfigError, DeadlineExceeded, RollmillError, SandboxError
from rollmill.sandboxes.admission.law import AdmissionLaw
from rollmill.sandboxes.admission.making import Make, make_or_adopt
from rollmill.sandboxes.admission.outcomes import Left, Outcome, outcome_of
from rollmill.sandboxes.admission.records import Give, How, Order, Place, Prepare, Refuse, Remove, Start
from rollmill.sandboxes.admission.removal import Remover
from rollmill.sandboxes.admission.settings import PoolSettings
from rollmill.sandboxes.protocol import Provider, Sandbox
from rollmill.sandboxes.records import DeathReason, Lease, SandboxSpec

LABEL = "rollmill.pool"
_KILLED_TOGETHER = 50

Note = Callable[[str], Awaitable[None]]


class Caller:
    """What the shell knows of one caller.

    Attributes:
        given: comes with the order to give it a sandbox, or with its refusal.
        holds: the sandbox that it was given and has not accepted.
        left: done when it has gone.
    """

    __slots__ = ("before", "given", "holds", "labels", "lease", "left", "make")

    def __init__(
        self,
        *,
        lease: Lease | None = None,
        labels: Mapping[str, str] | None = None,
        make: Make | None = None,
        before: Note | None = None,
    ) -> None:
        self.lease, self.labels, self.make, self.before = lease, labels, make, before
        self.given: asyncio.Future[Give] | None = None
        self.left: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.holds = ""


class Hands:
    """The effects of one pool.

    Args:
        provider: whose sandboxes.
        settings: of the pool.
        law: gets every outcome.
        group: owns the tasks.
        longest_s: longest life that the provider gives.

    Attributes:
        callers: those who wait, by the number of their ask.
        sandboxes: those that answer.
        adopted: creations that were cut off and whose sandbox was found.
        last_failure: what was wrong the last time that nobody else was told.
        news: set after every order; whoever waits for news clears it.
    """

    def __init__(
        self,
        provider: Provider,
        *,
        settings: PoolSettings,
        law: AdmissionLaw,
        group: asyncio.TaskGroup,
        longest_s: float = math.inf,
    ) -> None:
        self._provider, self._settings, self.law, self._group = provider, settings, law, group
        self.remover = Remover(provider, kill_s=settings.kill_s)
        self.callers: dict[int, Caller] = {}
        self.sandboxes: dict[str, Sandbox] = {}
        self.removals: dict[str, asyncio.Task[None]] = {}
        self.adopted = 0
        self.last_failure = ""
        self.news = asyncio.Event()
        self._longest_s = longest_s
        self._loop: asyncio.AbstractEventLoop | None = None
        self._starts: set[asyncio.Task[None]] = set()
        self._preparations: set[asyncio.Task[None]] = set()

    def run(self, orders: Iterable[Order], *, reason: DeathReason = DeathReason.RELEASED) -> None:
        """Carry out orders, and those that follow from them; what is to be killed is killed together.

        Args:
            orders: of the law.
            reason: of the end of a sandbox that somebody had; idle ones are released.
        """
        pending, doomed = deque(orders), list[Remove]()
        while pending:
            pending.extend(self._carry_out(pending.popleft(), doomed))
        for one in doomed:
            if not one.idle:
                self._remove([one.sandbox_id], reason=reason)
        idle = [one.sandbox_id for one in doomed if one.idle]
        for begin in range(0, len(idle), _KILLED_TOGETHER):
            self._remove(idle[begin : begin + _KILLED_TOGETHER], reason=DeathReason.RELEASED)
        self.news.set()

    def now_s(self) -> float:
        """Return the loop's time."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
        return self._loop.time()

    def _carry_out(self, order: Order, doomed: list[Remove]) -> list[Order]:
        match order:
            case Start():
                self._spawn(self._start(order), into=self._starts)
            case Give(sandbox_id=sandbox_id, ask=number):
                caller = self.callers.get(number)
                if caller is None or caller.given is None or caller.given.done():
                    return self.law.untaken(sandbox_id, now_s=self.now_s())
                caller.given.set_result(order)
            case Refuse(ask=number, error=error):
                caller = self.callers.get(number)
                if caller is not None and caller.given is not None and not caller.given.done():
                    caller.given.set_exception(error)
            case Remove():
                doomed.append(order)
            case Prepare():
                self._spawn(self._prepare(order.spec), into=self._preparations)
        return []

    def _spawn(self, work: Coroutine[Any, Any, None], *, into: set[asyncio.Task[None]] | None = None) -> None:
        try:
            task = self._group.create_task(work)
        except RuntimeError:
            work.close()  # a bug has ended the group; `close` kills what is in the books
            return
        if into is not None:
            into.add(task)
            task.add_done_callback(into.discard)

    # -- creations ---------------------------------------------------------------------------------------------------

    async def _start(self, order: Start) -> None:
        loop = asyncio.get_running_loop()
        caller = None if order.ask is None else self.callers.get(order.ask)
        if order.ask is not None and caller is None:
            gone = SandboxError(f"nobody waits for sandbox {order.sandbox_id} any more")
            self._failed(order, gone, Outcome(how=How.CUT, left=Left.NOTHING))
            return
        began_s, begun = loop.time(), False
        limit = asyncio.timeout_at(order.expires_s)
        try:
            async with limit:
                if caller is not None and caller.before is not None:
                    await caller.before(order.sandbox_id)
                begun = True
                sandbox, adopted = await self._made(order, caller)
        except Exception as error:
            cut = isinstance(error, TimeoutError) and limit.expired()
            if not begun:
                self._failed(order, error, Outcome(how=How.CUT if cut else How.REQUEST, left=Left.NOTHING))
            elif cut:
                self._cut_off(order, error, took_s=loop.time() - began_s)
            else:
                self._failed(order, error, outcome_of(error))
            return
        self.adopted += adopted
        self.sandboxes[order.sandbox_id] = sandbox
        self.run(self.law.started(order.sandbox_id, now_s=loop.time()))

    async def _made(self, order: Start, caller: Caller | None) -> tuple[Sandbox, bool]:
        make = caller.make if caller is not None and caller.make is not None else self._creation(order, caller)
        settings = self._settings
        sandbox, adopted = await make_or_adopt(
            self._provider, make, sandbox_id=order.sandbox_id, check_s=settings.check_s, adopt_s=settings.adopt_s
        )
        if sandbox.id != order.sandbox_id:
            await self.remover.kill([sandbox.id], reason=DeathReason.START_FAILED)
            raise ConfigError(
                f"`make` was to make sandbox {order.sandbox_id} and made {sandbox.id}, which was killed: the pool "
                "counts by ids. Let it use the id that it is given."
            )
        return sandbox, adopted

    def _creation(self, order: Start, caller: Caller | None) -> Make:
        settings, spec = self._settings, order.spec
        labels = {LABEL: settings.name}
        if caller is None or caller.lease is None:
            lease = Lease(owner=settings.name, ttl_s=settings.max_age_s + settings.admission.start_s)
            # As much more as it may wait here, within what the provider gives at all.
            wall_s = max(spec.limits.wall_s, min(spec.limits.wall_s + settings.max_age_s, self._longest_s))
            spec = msgspec.structs.replace(spec, limits=msgspec.structs.replace(spec.limits, wall_s=wall_s))
        else:
            lease, labels = caller.lease, {**labels, **(caller.labels or {})}

        async def create(sandbox_id: str) -> Sandbox:
            return await self._provider.create(spec, id=sandbox_id, labels=labels, lease=lease)

        return create

    def _cut_off(self, order: Start, error: Exception, *, took_s: float) -> None:
        """Note a creation that was cut off; only one that had all of `start_s` says something about the provider."""
        limit_s = self._settings.admission.start_s
        how = How.FAILED if took_s >= limit_s * 0.999 else How.CUT
        slow = DeadlineExceeded(
            f"sandbox {order.sandbox_id} did not start within {limit_s:g} s (admission.start_s), and was cut off. The "
            "provider hangs or is overloaded."
        )
        slow.__cause__ = error
        self._failed(order, slow, Outcome(how=how, left=Left.UNKNOWN))

    def _failed(self, order: Start, error: Exception, outcome: Outcome) -> None:
        now_s = self.now_s()
        if order.ask is None:
            self.last_failure = f"filling with {order.sandbox_id}: {type(error).__name__}: {error}"
        if outcome.left is Left.UNKNOWN:
            self.remover.unresolved[order.sandbox_id] = now_s + self._settings.unknown_s
        left = outcome.left is not Left.NOTHING
        orders = self.law.failed(
            order.sandbox_id, outcome.how, error=error, after_s=outcome.after_s, left=left, now_s=now_s
        )
        if left:
            self._remove([order.sandbox_id], reason=DeathReason.START_FAILED)
        self.run(orders)

    async def _prepare(self, spec: SandboxSpec) -> None:
        done = False
        try:
            async with asyncio.timeout(self._settings.prepare_s):
                await self._provider.prepare(spec.image)
            done = True
        except (RollmillError, OSError) as error:
            self.last_failure = f"preparing {spec.image}: {type(error).__name__}: {error}"
        self.run(self.law.prepared(spec, done=done, now_s=self.now_s()))

    # -- kills -------------------------------------------------------------------------------------------------------

    def _remove(self, ids: list[str], *, reason: DeathReason) -> None:
        tasks: set[asyncio.Task[None]] = set()
        self._spawn(self._removed(ids, reason=reason), into=tasks)
        for task in tasks:
            self.removals.update(dict.fromkeys(ids, task))

    async def _removed(self, ids: list[str], *, reason: DeathReason) -> None:
        if len(ids) > 1 and not await self.remover.killed_for_good(ids, reason=reason, limit_s=self._settings.check_s):
            for one in ids:
                self._remove([one], reason=reason)  # one that does not go must not hold up the others
            return
        if len(ids) == 1:
            await self.remover.remove(ids, reason=reason)
        for one in ids:
            self.removals.pop(one, None)
            self.sandboxes.pop(one, None)
            self.run(self.law.gone(one, now_s=self.now_s()))

    # -- the end -----------------------------------------------------------------------------------------------------

    async def settle(self, *, limit_s: float) -> None:
        """Wait for starts and kills under way and for callers on their way out; then cut off what is left."""
        until_s = self.now_s() + limit_s
        for task in self._preparations:
            task.cancel()
        while (busy := self._busy()) and (left_s := until_s - self.now_s()) > 0:
            await asyncio.wait(busy, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
        cut = {*self._starts, *self.removals.values()}
        for task in cut:
            task.cancel()
        if cut:
            await asyncio.wait(cut, timeout=self._settings.check_s)
        await self._kill_the_rest()

    def _busy(self) -> set[asyncio.Future[None]]:
        waits = (*self._starts, *self.removals.values(), *(one.left for one in self.callers.values()))
        return {one for one in waits if not one.done()}

    async def _kill_the_rest(self) -> None:
        """Kill once more what the books still show and nobody has."""
        claims = self.law.books.claims.values()
        starting = [one.sandbox_id for one in claims if one.place is Place.STARTING and not one.stopping]
        left = [*starting, *(one.sandbox_id for one in claims if one.stopping or one.place is Place.POOLED)]
        if not left:
            return
        self.remover.unresolved.update(dict.fromkeys(starting, math.inf))  # they were cut off just now
        if not await self.remover.killed_for_good(left, reason=DeathReason.RELEASED):
            why = self.remover.last_failure or "Their creations were cut off"
            raise SandboxError(
                f"the pool is closed and may have left {len(left)} sandboxes: {', '.join(left[:10])}. {why}. "
                f"Their leases end them; or kill them by the label {LABEL}={self._settings.name}."
            )
        for one in left:
            self.law.ended(one, now_s=self.now_s())
            self.law.gone(one, now_s=self.now_s())
