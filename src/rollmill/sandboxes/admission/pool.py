"""The pool: hands out sandboxes of one provider, ready ones where there are some, and never more than it may.

    what waits                                 who wakes it, and until when
    a caller, for its turn and its creation    the law, its deadline
    a creation                                 the provider, its caller's deadline or `start_s`
    a look at a sandbox before it is given     the sandbox, `check_s`
    a kill                                     the provider, `kill_s`; tried again until it succeeds
    the alarm                                  the time that the law names, or news
    the watch                                  `watch_s`

All decisions are in `law`. It is called between waits and never across one, so there is no lock.
"""

from __future__ import annotations

import asyncio
import math
import os
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any

import msgspec

from rollmill.errors import ConfigError, DeadlineExceeded, Fault, SandboxError
from rollmill.sandboxes.admission.hands import Caller, Hands, Note
from rollmill.sandboxes.admission.law import AdmissionLaw
from rollmill.sandboxes.admission.making import Make, check_alive
from rollmill.sandboxes.admission.queueing import Ask
from rollmill.sandboxes.admission.records import Acquired, Give, Kind, Place, PoolStatistics, Remove
from rollmill.sandboxes.admission.settings import PoolSettings
from rollmill.sandboxes.admission.statistics import statistics_of
from rollmill.sandboxes.admission.watching import Sample, Watch
from rollmill.sandboxes.disk_records import check_id
from rollmill.sandboxes.lifecycle import dead_error
from rollmill.sandboxes.protocol import Provider, Sandbox
from rollmill.sandboxes.records import DeathReason, Lease, SandboxSpec
from rollmill.sandboxes.watchdog.guard_law import Evictable

_AGE_OF_LIFE = 0.1


class SandboxPool:
    """Admission and pools over one provider, which stays its caller's. Use it as an asynchronous context manager.

    Args:
        provider: any backend.
        settings: budgets, caps, pools.
        pressure: samples the node, `NodePressure().sample` for sandboxes of this machine; `None`: never slowed by it.
        observe: gets a record of each hand-out, for histograms.
        suspend_to_disk: moves so many suspended sandboxes to disk for the node guard, says `ended` of each, and returns
            how many went; `None`: nothing of that kind.

    Example:
        >>> from rollmill.testing import FakeSandboxProvider, run_virtual
        >>> async def hello() -> tuple[bytes, int]:
        ...     async with SandboxPool(FakeSandboxProvider(start_s=0.02)) as pool:
        ...         spec = SandboxSpec()
        ...         pool.demand(spec, 2)
        ...         await asyncio.sleep(0.1)
        ...         async with pool.sandbox(spec, lease=Lease(owner="me")) as sandbox:
        ...             return (await sandbox.exec(["echo", "hello"])).stdout, pool.statistics().hits
        >>> run_virtual(hello())
        (b'hello\\n', 1)
    """

    def __init__(
        self,
        provider: Provider,
        *,
        settings: PoolSettings | None = None,
        pressure: Sample | None = None,
        observe: Callable[[Acquired], None] | None = None,
        suspend_to_disk: Callable[[int], Awaitable[int]] | None = None,
    ) -> None:
        self._provider = provider
        self._settings = PoolSettings() if settings is None else settings
        self._pressure, self._observe, self._suspend_to_disk = pressure, observe, suspend_to_disk
        self._group = asyncio.TaskGroup()
        self._loops: list[asyncio.Task[None]] = []
        self._open = False
        self._outfit(pooling=True, longest_s=math.inf)

    async def __aenter__(self) -> SandboxPool:
        """Ask the provider what it can do, and begin to fill and to watch."""
        try:
            async with asyncio.timeout(self._settings.admission.start_s):
                capabilities = await self._provider.capabilities()
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"the provider did not say what it can do within {self._settings.admission.start_s:g} s; is it alive?"
            ) from error
        life_s = math.inf if capabilities.max_lifetime_s is None else capabilities.max_lifetime_s
        # An idle one spends a life that cannot be made longer.
        max_age_s = min(self._settings.max_age_s, _AGE_OF_LIFE * life_s)
        self._settings = msgspec.structs.replace(self._settings, max_age_s=max_age_s)
        self._outfit(pooling=capabilities.extend_ttl, longest_s=life_s)
        watch = Watch(
            self._provider,
            hands=self._hands,
            settings=self._settings,
            pressure=self._pressure,
            batch_status=capabilities.batch_status,
        )
        await self._group.__aenter__()
        self._loops = [self._group.create_task(watch.alarm()), self._group.create_task(watch.watch())]
        self._open = True
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close."""
        cancelled = isinstance(error, asyncio.CancelledError)
        try:
            await self.close()
        finally:
            # The group would wrap the body's own error; of a cancellation it must know whether it was its own.
            await self._group.__aexit__(*((kind, error, trace) if cancelled else (None, None, None)))

    def _outfit(self, *, pooling: bool, longest_s: float) -> None:
        settings = self._settings
        prefix = check_id(f"{settings.name}-{uuid.uuid4().hex[:8]}")
        self._law = AdmissionLaw(settings, prefix=prefix, cores=len(os.sched_getaffinity(0)), pooling=pooling)
        self._hands = Hands(self._provider, settings=settings, law=self._law, group=self._group, longest_s=longest_s)

    # -- callers -----------------------------------------------------------------------------------------------------

    async def acquire(
        self,
        spec: SandboxSpec,
        *,
        lease: Lease,
        id: str | None = None,
        labels: Mapping[str, str] | None = None,
        deadline_s: float | None = None,
        resumes: bool = False,
        make: Make | None = None,
        before: Note | None = None,
    ) -> Sandbox:
        """Return a sandbox that answers: a ready one, or a fresh one in its turn.

        Its id is the sandbox's own and what the caller must record: `id` for a fresh one at the first try, another one
        if that start failed, the pool's for a ready one.

        Args:
            spec: what it is made of; ready ones of an equal spec will do.
            lease: it is handed out under this one.
            id: for a fresh one; the pool's choice if `None`.
            labels: for a fresh one. With labels no ready one will do, because labels cannot be changed.
            deadline_s: for queue, creation and check together; `admission.deadline_s` if `None`.
            resumes: it goes on with work that was suspended, so it goes before those that begin.
            make: makes a fresh one under an id, such as a restored snapshot; `Provider.create` if `None`.
            before: called with the id before the sandbox is made, or before a ready one is handed out; for whoever
                records ids ahead.

        Raises:
            SandboxNotAdmitted: none became ready by the deadline, or none can.
            SandboxError: what the provider said, after as many tries as it may have.
            ImageError: the image cannot be used.
            ConfigError: the spec does not fit into the budgets at all.

        Cancellation: nothing is left; what was being made is removed when it is there.
        """
        self._check_open()
        if id is not None:
            check_id(id)
        ask = self._law.ask(
            spec,
            sandbox_id=id or "",
            poolable=make is None and not labels,
            kind=Kind.RESUME if resumes else Kind.START,
            now_s=self._now_s(),
            expires_s=self._expiry_s(deadline_s),
        )
        return await self._serve(ask, Caller(lease=lease, labels=labels, make=make, before=before), self._take)

    @asynccontextmanager
    async def sandbox(self, spec: SandboxSpec, *, lease: Lease, **options: Any) -> AsyncIterator[Sandbox]:
        """Acquire a sandbox, and release it at the end; `options` are those of `acquire`."""
        sandbox = await self.acquire(spec, lease=lease, **options)
        try:
            yield sandbox
        finally:
            await self.release(sandbox)

    async def release(self, sandbox: Sandbox, *, reason: DeathReason = DeathReason.RELEASED) -> None:
        """End a sandbox and wait until it is gone, `kill_s` at most; a kill that fails is tried again meanwhile.

        Cancellation: the kill goes on.
        """
        if sandbox.id not in self._law.books.claims:
            return  # gone already
        self._hands.run(self._law.ended(sandbox.id, now_s=self._now_s()), reason=reason)
        task = self._hands.removals.get(sandbox.id)
        if task is not None:
            await asyncio.wait({task}, timeout=self._settings.kill_s)
        elif await self._hands.remover.kill([sandbox.id], reason=reason):
            self._law.gone(sandbox.id, now_s=self._now_s())
        else:  # the pool is closed, so nobody tries again
            why = self._hands.remover.last_failure
            raise SandboxError(f"sandbox {sandbox.id} may live until its lease ends: {why}")

    def ended(self, sandbox: Sandbox) -> None:
        """Note that a sandbox ended, of itself or with its snapshot: it gives its place back before the next look."""
        claim = self._law.books.claims.get(sandbox.id)
        if self._open and claim is not None and claim.ask is None:  # whoever is being given it finds out by itself
            self._hands.run(self._law.ended(sandbox.id, now_s=self._now_s()))

    async def suspend(self, sandbox: Sandbox, *, keep_memory: bool = True) -> None:
        """Pause a sandbox and count it as suspended, so that others may run.

        Args:
            sandbox: which.
            keep_memory: as with `Sandbox.pause`.

        Raises:
            SandboxNotAdmitted: if as many are suspended as may be.
            SandboxUnsupported: if this backend cannot.
        """
        self._law.may_pause(sandbox.id)
        done = False
        try:
            pausing = sandbox.pause() if keep_memory else sandbox.pause(keep_memory=False)
            await self._bounded(pausing, what=f"sandbox {sandbox.id} was not paused, and counts as running,")
            done = True
        finally:
            self._hands.run(self._law.paused(sandbox.id, done=done, now_s=self._now_s()))

    async def resume(self, sandbox: Sandbox, *, deadline_s: float | None = None) -> None:
        """Let a suspended sandbox go on, before all that begin.

        Raises:
            SandboxNotAdmitted: if there was no room by the deadline; it stays suspended.
            SandboxDead: if it ended meanwhile.
        """
        self._check_open()
        if sandbox.death is not None:
            raise dead_error(sandbox.id, sandbox.death)
        claim = self._law.books.claims.get(sandbox.id)
        if claim is None or claim.place is not Place.SUSPENDED:
            await self._bounded(sandbox.resume(), what=f"sandbox {sandbox.id} was not resumed")
            return
        now_s = self._now_s()
        expires_s = self._expiry_s(deadline_s)
        ask = self._law.ask(claim.spec, thaws=sandbox.id, kind=Kind.RESUME, now_s=now_s, expires_s=expires_s)
        try:
            await self._serve(ask, Caller(), self._thaw)
        except SandboxError as error:
            if sandbox.death is not None:
                raise dead_error(sandbox.id, sandbox.death) from error
            raise

    def demand(self, spec: SandboxSpec, count: int) -> None:
        """Say how many sandboxes of a template are wanted in all: rollouts in flight, and those about to start.

        The pool follows at once, up and down; 0 ends it.
        """
        self._check_open()
        self._hands.run(self._law.demand(spec, count, now_s=self._now_s()))

    def statistics(self) -> PoolStatistics:
        """Return what is known now."""
        remover = self._hands.remover
        return statistics_of(
            self._law,
            adopted=self._hands.adopted,
            unresolved=tuple(remover.unresolved),
            kill_failures=remover.failures,
            last_failure=self._hands.last_failure or remover.last_failure,
            now_s=self._now_s(),
        )

    # -- the node guard's gate ---------------------------------------------------------------------------------------

    def stop_admission(self, why: str) -> None:
        """Start and resume nothing until `resume_admission`; idle sandboxes are given still."""
        self._hands.run(self._law.stop(why, now_s=self._now_s()))

    def resume_admission(self) -> None:
        """Start sandboxes again."""
        if self._open:
            self._hands.run(self._law.stop("", now_s=self._now_s()))

    def evictable(self) -> Evictable:
        """Return how many could go."""
        counts = self._law.books.count
        suspended = 0 if self._suspend_to_disk is None else counts[Place.SUSPENDED]
        return Evictable(pooled=sum(len(one.idle) for one in self._law.templates), suspended=suspended)

    async def evict_pooled(self, count: int) -> int:
        """End this many idle sandboxes; return how many are gone within `kill_s`."""
        orders = self._law.evict(count, now_s=self._now_s())
        self._hands.run(orders)
        ids = [one.sandbox_id for one in orders if isinstance(one, Remove)]
        if tasks := {self._hands.removals[one] for one in ids if one in self._hands.removals}:
            await asyncio.wait(tasks, timeout=self._settings.kill_s)
        return sum(one not in self._law.books.claims for one in ids)

    async def evict_suspended(self, count: int) -> int:
        """Let this many suspended sandboxes be moved to disk; return how many were."""
        return 0 if self._suspend_to_disk is None else await self._suspend_to_disk(count)

    # -- one caller's way --------------------------------------------------------------------------------------------

    async def _serve(
        self, ask: Ask, caller: Caller, take: Callable[[Give, Caller, Sandbox], Awaitable[bool]]
    ) -> Sandbox:
        """Wait until the law gives this caller a sandbox that it can take."""
        loop = asyncio.get_running_loop()
        self._hands.callers[ask.number] = caller
        limit = asyncio.timeout_at(ask.expires_s)
        try:
            async with limit:
                while True:
                    caller.given = loop.create_future()
                    self._hands.run(self._law.submit(ask, now_s=loop.time()))
                    give = await caller.given
                    caller.holds = give.sandbox_id
                    sandbox = self._hands.sandboxes[give.sandbox_id]
                    if await take(give, caller, sandbox):
                        self._hands.run(self._law.accepted(give.sandbox_id, now_s=loop.time()))
                        caller.holds = ""
                        self._tell(ask, give)
                        return sandbox
                    caller.holds = ""
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise self._law.late(ask, now_s=loop.time()) from error
        finally:
            self._leave(ask, caller)

    async def _take(self, give: Give, caller: Caller, sandbox: Sandbox) -> bool:
        """Hand over a sandbox; return whether it lives."""
        if give.fresh or caller.lease is None:
            return True
        if not await self._lives(sandbox, check_alive(sandbox, limit_s=self._settings.check_s)):
            return False
        if caller.before is not None:
            await caller.before(sandbox.id)
        return await self._lives(sandbox, sandbox.renew(caller.lease))

    async def _lives(self, sandbox: Sandbox, proof: Awaitable[None]) -> bool:
        try:
            await proof
        except (Fault, OSError) as error:
            self._hands.last_failure = f"{sandbox.id} at its hand-out: {type(error).__name__}: {error}"
            self._hands.run(self._law.dead_at_hand_out(sandbox.id, now_s=self._now_s()))
            return False
        return True

    async def _thaw(self, give: Give, caller: Caller, sandbox: Sandbox) -> bool:
        await sandbox.resume()
        return True

    def _tell(self, ask: Ask, give: Give) -> None:
        if self._observe is None or ask.thaws:
            return
        rest_s = max(0.0, self._now_s() - ask.arrived_s - give.waited_s)
        create_s, check_s = (rest_s, 0.0) if give.fresh else (0.0, rest_s)
        self._observe(
            Acquired(
                sandbox_id=give.sandbox_id,
                hit=not give.fresh,
                queue_s=give.waited_s,
                create_s=create_s,
                check_s=check_s,
            )
        )

    def _leave(self, ask: Ask, caller: Caller) -> None:
        """Let nothing of a caller be left that goes, whichever way."""
        del self._hands.callers[ask.number]
        caller.left.set_result(None)
        given = caller.given
        now_s = self._now_s()
        if caller.holds and ask.thaws:
            self._hands.run(self._law.untaken(caller.holds, now_s=now_s))
        elif caller.holds:
            # Its lease may be the caller's already, so it cannot go back.
            self._hands.run(self._law.ended(caller.holds, now_s=now_s))
        elif given is not None and given.done() and not given.cancelled() and given.exception() is None:
            claim = self._law.books.claims.get(given.result().sandbox_id)
            if claim is not None and claim.ask == ask.number:
                self._hands.run(self._law.untaken(claim.sandbox_id, now_s=now_s))
        self._hands.run(self._law.withdraw(ask.number, now_s=now_s))

    # -- the end -----------------------------------------------------------------------------------------------------

    async def close(self) -> None:
        """Refuse who waits, and end what nobody has; sandboxes that were handed out stay their callers'.

        Raises:
            SandboxError: if something may be left after `close_s`; its ids are in the message.
        """
        if not self._open:
            return
        self._open = False
        self._hands.run(self._law.close(now_s=self._now_s()))
        for task in self._loops:
            task.cancel()
        await self._hands.settle(limit_s=self._settings.close_s)

    async def _bounded(self, call: Awaitable[None], *, what: str) -> None:
        try:
            async with asyncio.timeout(self._settings.check_s):
                await call
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"{what} within {self._settings.check_s:g} s (check_s); is its node alive?"
            ) from error

    def _check_open(self) -> None:
        if not self._open:
            raise SandboxError("this pool is not open: use it inside `async with SandboxPool(...)`")

    def _now_s(self) -> float:
        return self._hands.now_s()

    def _expiry_s(self, deadline_s: float | None) -> float:
        deadline_s = self._settings.admission.deadline_s if deadline_s is None else deadline_s
        if not 0 < deadline_s < math.inf:
            raise ConfigError(f"deadline_s is {deadline_s}; it must be above 0 and finite: every wait ends")
        return self._now_s() + deadline_s
