"""The sandboxes of one node as callers of the service know them, and their ends.

| who | waits for | until |
|---|---|---|
| `create` | the provider | its own start deadline |
| a pause, a resume, a kill | the one before it on the same sandbox, then the provider | `transition_s` |
| each sandbox | its timeout | it is ended or paused, as its creator chose |
| a move to disk | as those, for the sandbox's files to be written | `transition_s`; carried through |

What is due and what follows is `law`'s to say. Without a ledger tokens and metadata are in memory only, and sandboxes
end with this service. With one those that are paused as files outlive it, if their snapshots do; the next service with
the same ledger takes them on, and ends whatever else it names.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping
from types import TracebackType
from typing import Any

import msgspec

from rollmill.clock import Clock, SystemClock
from rollmill.errors import DeadlineExceeded, ImageError, RollmillError, SandboxDead, SandboxRetryable
from rollmill.sandboxes.protocol import Provider, Sandbox
from rollmill.sandboxes.records import DeathReason, Lease, SandboxSpec, SnapshotRef
from rollmill.sandboxes.service.background import guarded, lives, looked_at
from rollmill.sandboxes.service.books import Books, served_of
from rollmill.sandboxes.service.law import (
    Fate,
    HttpProblem,
    PausedInMemory,
    Standing,
    end_after_connect,
    fate,
)
from rollmill.sandboxes.service.ledger import Ledger
from rollmill.sandboxes.service.problems import gone
from rollmill.sandboxes.service.refusals import (
    MOVED,
    PAUSED_AS_FILES,
    RETRY_S,
    check_room,
    check_timeout,
    unknown_template,
)
from rollmill.sandboxes.service.served import Order, Served
from rollmill.sandboxes.service.settings import ServiceSettings
from rollmill.sandboxes.service.shelf import Kept, Shelf
from rollmill.sandboxes.service.stock import Stock
from rollmill.sandboxes.service.templates import Template


class Node:
    """The sandboxes of this node. Use it as an asynchronous context manager.

    Args:
        provider: runs them; closed by whoever opened it.
        settings: how.
        templates: what callers may ask for.
        stock: where sandboxes come from; `None`: from the provider, each as it is asked for.
        clock: of the times that callers see.
        ledger: what outlives this service; closed by whoever opened it, after the node.
    """

    def __init__(
        self,
        provider: Provider,
        *,
        settings: ServiceSettings | None = None,
        templates: Mapping[str, Template],
        stock: Stock | None = None,
        clock: Clock | None = None,
        ledger: Ledger | None = None,
    ) -> None:
        self.settings = ServiceSettings() if settings is None else settings
        self.templates = templates
        self.default_user = "root"
        self.shelf = Shelf()
        self._provider = provider
        self._stock = Stock(provider) if stock is None else stock
        self._clock = SystemClock() if clock is None else clock
        self._served: dict[str, Served] = {}
        self._starting = 0
        self._by_key: dict[str, tuple[Order, asyncio.Task[Served]]] = {}
        self._can_pause = self._can_keep_files = self._can_keep_programs = self.files_carry_words = False
        self._running: set[asyncio.Task[None]] = set()
        self._storing: set[asyncio.Future[SnapshotRef]] = set()
        self._books = Books(ledger, provider=provider)

    async def __aenter__(self) -> Node:
        """Ask the provider what it can, and begin."""
        capabilities = await self._provider.capabilities()
        self._can_pause, self._can_keep_files = capabilities.pause, capabilities.files_snapshot
        self._can_keep_programs = capabilities.full_snapshot
        self.files_carry_words = capabilities.attributes
        self.default_user = self.settings.default_user or ("user" if capabilities.users else "root")
        self._loop = asyncio.get_running_loop()
        await self._take_on()
        return self

    async def _take_on(self) -> None:
        """Go on with what an earlier service left in the ledger."""
        found = await self._books.found(
            now_wall_s=self._clock.wall_s(), paused_ttl_s=self.settings.paused_ttl_s, limit_s=self.settings.transition_s
        )
        for kept in found.templates:
            self.shelf.put(kept)
        for row in found.adopted:
            served = served_of(row, stall_s=self.settings.stream_stall_s)
            self._served[served.id] = served
            served.end_wall_s = row.end_wall_s
            served.end_s = self._loop.time() + max(0.0, row.end_wall_s - self._clock.wall_s())
            served.timer = self._loop.call_at(served.end_s, self._due, served)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End every sandbox that was made here."""
        try:
            for one in self._served.values():
                self._disarm(one)
            if self._storing:  # what is half written belongs to nobody yet
                await asyncio.wait(self._storing, timeout=self.settings.transition_s)
            alive = [one.sandbox.id for one in self._served.values() if one.files is None]
            kept = [one.files for one in self._served.values() if one.files is not None]
            await self._provider.kill(alive, reason=DeathReason.RELEASED)
            gone = self._books.not_outliving([*kept, *self.shelf.refs()])
            if gone:
                await self._provider.delete_snapshots(gone)
            await self._books.ended(
                [one.id for one in self._served.values() if one.files is None or one.files.snapshot_id in gone], gone
            )
            self._served.clear()
        finally:
            for task in self._running:
                task.cancel()
            await asyncio.gather(*self._running, return_exceptions=True)

    def run(self, work: Coroutine[Any, Any, None], *, name: str) -> None:
        """Run something that belongs to no call; its error is logged and ends nothing else."""
        task = asyncio.get_running_loop().create_task(guarded(work, name), name=name)
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    @property
    def starting(self) -> int:
        """Return how many are being made."""
        return self._starting

    # -- what there is -----------------------------------------------------------------------------------------------

    def all(self) -> dict[str, Served]:
        """Return the sandboxes that live, by id."""
        for one in list(self._served.values()):
            self._alive(one)
        return dict(self._served)

    def get(self, sandbox_id: str) -> Served | None:
        """Return a sandbox that lives, `None` if there is none."""
        served = self._served.get(sandbox_id)
        return served if served is not None and self._alive(served) else None

    def find(self, sandbox_id: str) -> Served:
        """Return a sandbox that lives.

        Raises:
            HttpProblem: 404 if there is none.
        """
        served = self.get(sandbox_id)
        if served is None:
            raise HttpProblem(404, f"sandbox {sandbox_id!r} is not here: it was never made, has ended, or is another's")
        return served

    def _alive(self, served: Served) -> bool:
        if served.storing or served.files is not None or served.sandbox.death is None:
            return True
        self._stock.ended(served.sandbox)
        self._forget(served)
        return False

    async def check_runs(self, sandbox_id: str) -> None:
        """Refuse to call a sandbox running that is not; a paused one stays so.

        Raises:
            HttpProblem: 502, in the words that the public SDK looks for.
        """
        served = self.get(sandbox_id)
        if served is None or served.standing is not Standing.RUNNING:
            raise gone(sandbox_id, "it is paused" if served is not None else "it was never made here, or has ended")

    async def for_traffic(self, sandbox_id: str) -> Served:
        """Return a sandbox that answers; a paused one is resumed if its creator chose so.

        Raises:
            HttpProblem: 502, in the words that the public SDK looks for, if it does not.
        """
        served = self._served.get(sandbox_id)
        if served is None:
            raise gone(sandbox_id, "it was never made here, or has ended")
        if not self._alive(served):
            end = served.sandbox.death
            raise gone(sandbox_id, "it has ended" if end is None else f"it has ended ({end.reason.value}) {end.detail}")
        if served.standing is Standing.PAUSED:
            if not served.order.plan.auto_resume:
                raise gone(sandbox_id, "it is paused; connect to it, which resumes it")
            await self.connect(sandbox_id, timeout_s=served.order.timeout_s)
        return served

    def end_wall_s(self, served: Served) -> float:
        """Return when a sandbox's timeout ends, since the epoch."""
        return served.end_wall_s

    def wall_s(self) -> float:
        """Return the time since the epoch."""
        return self._clock.wall_s()

    # -- creation ----------------------------------------------------------------------------------------------------

    async def create(self, order: Order) -> Served:
        """Make a sandbox; a call with the key of an earlier one returns what that one made.

        Raises:
            HttpProblem: 404 for an unknown template, 409 if the key was used for something else, 429 if there are too
                many, 501 if it is to be paused and that cannot be done here.
        """
        if not order.key:
            return await self._create(order)
        known = self._by_key.get(order.key)
        if known is not None and known[0] != order:
            raise HttpProblem(
                409,
                f"the idempotency key {order.key!r} was used for another sandbox; choose another key",
                word="idempotency_request_mismatch",
            )
        if known is None or (known[1].done() and not lives(known[1])):
            known = order, looked_at(asyncio.ensure_future(self._create(order)))
            self._by_key[order.key] = known
        try:
            return await asyncio.shield(known[1])
        except RollmillError:
            if self._by_key.get(order.key) == known:
                del self._by_key[order.key]
            raise

    async def _create(self, order: Order) -> Served:
        self._check(order)
        kept = self.shelf.find(order.template)
        template = self.templates.get(order.template) or Template(image=order.template)
        spec = template.spec(wall_s=self.settings.max_lifetime_s) if kept is None else kept.ref.spec
        envs = template.envs if kept is None else kept.envs
        with self._room(1):
            return await self._start(order, spec=spec, envs=envs, files=None if kept is None else kept.ref)

    async def _start(
        self, order: Order, *, spec: SandboxSpec, envs: Mapping[str, str], files: SnapshotRef | None
    ) -> Served:
        sandbox_id = f"sbx{secrets.token_hex(9)}"
        own = {"E2B_SANDBOX": "true", "E2B_SANDBOX_ID": sandbox_id, "E2B_TEMPLATE_ID": order.template}
        served = Served(sandbox_id, order, spec=spec, envs={**envs, **own, **order.envs})
        await self._books.note(served)  # before anything is made for it
        try:
            sandbox = await self._made(served, files, left_s=order.timeout_s)
        except BaseException:
            self._books.forget(served)
            raise
        served.began(sandbox, stall_s=self.settings.stream_stall_s)
        served.started_wall_s = round(self._clock.wall_s(), 6)  # as it is told to callers, who ask by it
        self._served[sandbox_id] = served
        self._set_end(served, self._loop.time() + order.timeout_s)
        return served

    def _check(self, order: Order) -> None:
        named = order.template in self.templates or self.shelf.find(order.template) is not None
        if not named and not (self.settings.image_names and order.template):
            raise unknown_template(order.template, known=self.templates)
        able = self._can_pause if order.plan.keep_memory else self._can_keep_files
        if order.plan.pause and not able:
            what = "with its memory" if order.plan.keep_memory else "as files"
            raise HttpProblem(501, f"it is to be paused {what} at its timeout, and the backend cannot do that here")
        check_timeout(order.timeout_s, most_s=self.settings.max_timeout_s)

    @contextlib.contextmanager
    def _room(self, count: int) -> Iterator[None]:
        """Set room aside for sandboxes while they start."""
        check_room(len(self.all()) + self._starting, count=count, most=self.settings.max_sandboxes)
        self._starting += count
        try:
            yield
        finally:
            self._starting -= count

    async def _made(self, served: Served, files: SnapshotRef | None, *, left_s: float) -> Sandbox:
        """Start a sandbox, from files that were kept if there are some."""
        labels = {**served.order.metadata, "service": self.settings.owner, "template": served.order.template}
        lease, backend_id = self._lease(left_s), served.backend_id()
        try:
            if files is not None:
                return await self._stock.restore(files, id=backend_id, labels=labels, lease=lease)
            return await self._stock.create(served.spec, id=backend_id, labels=labels, lease=lease)
        except ImageError as error:
            if served.order.template in self.templates or files is not None:
                raise
            why = f". As the name of an image: {error}"
            raise unknown_template(served.order.template, known=self.templates, why=why) from error
        except SandboxDead as error:  # before it answered once
            raise SandboxRetryable(f"the sandbox ended while it started: {error}", after_s=RETRY_S) from error

    def _lease(self, left_s: float) -> Lease:
        return Lease(owner=self.settings.owner, ttl_s=left_s + self.settings.grace_s)

    # -- a life ------------------------------------------------------------------------------------------------------

    async def set_timeout(self, sandbox_id: str, *, timeout_s: float) -> None:
        """Let a running sandbox end so long from now."""
        served = self.find(sandbox_id)
        check_timeout(timeout_s, most_s=self.settings.max_timeout_s)
        async with self._turn(served, "new timeout"):
            if served.standing is not Standing.RUNNING:
                raise HttpProblem(404, f"sandbox {sandbox_id} is paused and has no timeout; connect to it to resume it")
            await served.sandbox.renew(self._lease(timeout_s))
            self._set_end(served, self._loop.time() + timeout_s)

    async def connect(self, sandbox_id: str, *, timeout_s: float) -> tuple[Served, bool]:
        """Return a sandbox that runs, and whether it was resumed for this."""
        served = self.find(sandbox_id)
        check_timeout(timeout_s, most_s=self.settings.max_timeout_s)
        async with self._turn(served, "resume"):
            resumed = served.standing is Standing.PAUSED
            now_s = self._loop.time()
            end_s = end_after_connect(now_s=now_s, end_s=served.end_s, timeout_s=timeout_s, resumed=resumed)
            if resumed:
                await self._resume(served, end_s - now_s)
            else:
                await served.sandbox.renew(self._lease(end_s - now_s))
            self._set_end(served, end_s)
        return served, resumed

    async def _resume(self, served: Served, left_s: float) -> None:
        if served.files is None:
            await served.sandbox.renew(self._lease(left_s))
            await self._stock.resume(served.sandbox)
        else:
            kept = served.files
            await self._books.note(served)
            served.began(await self._made(served, kept, left_s=left_s), stall_s=self.settings.stream_stall_s)
            served.standing = Standing.RUNNING
            await self._books.note(served)  # before what it was made of goes
            await self._provider.delete_snapshots([kept.snapshot_id])
        served.standing = Standing.RUNNING

    async def pause(self, sandbox_id: str, *, keep_memory: bool = True) -> None:
        """Stop every program of a sandbox and keep it; or end them, and keep its files alone.

        Raises:
            HttpProblem: 409 if it is paused.
            SandboxUnsupported: if it cannot be done here.
        """
        served = self.find(sandbox_id)
        async with self._turn(served, "pause"):
            if served.standing is Standing.PAUSED:
                raise HttpProblem(409, f"sandbox {sandbox_id} is paused already")
            await self._pause(served, keep_memory=keep_memory)

    async def _pause(self, served: Served, *, keep_memory: bool) -> None:
        if not keep_memory:
            await self._store(served)
            return
        await self._stock.pause(served.sandbox)
        await served.sandbox.renew(self._lease(self.settings.paused_ttl_s))
        self._paused(served)

    async def _store(self, served: Served) -> None:
        """Keep a sandbox's files and end it; carried through if whoever asked has no more time."""
        name = self._books.named(f"{served.id}-files-{served.lives}")
        served.snapshot = name
        await self._books.note(served)  # before it is made
        storing = asyncio.ensure_future(self._files_of(served, name=name))
        served.storing = True
        self._storing.add(storing)

        def stored(done: asyncio.Future[SnapshotRef]) -> None:
            served.storing = False
            self._storing.discard(done)
            if done.cancelled() or done.exception() is not None:
                served.snapshot = ""
                self._books.noted(served)
                return
            self._stock.ended(served.sandbox)
            if served.id not in self._served:  # ended meanwhile
                self.run(self._provider.delete_snapshots([name]), name=f"end of {name}")
                return
            served.files = done.result()
            if served.standing is Standing.PAUSED:
                served.lost = MOVED
                return  # its time counts from its pause
            served.lost = PAUSED_AS_FILES
            self._paused(served)

        storing.add_done_callback(stored)
        await asyncio.shield(storing)

    async def _files_of(self, served: Served, *, name: str) -> SnapshotRef:
        """Keep the files of a sandbox, and end it; one that was paused is paused again if that fails.

        What is frozen hands nothing out, so it goes on for the moment in which its programs are ended.
        """
        sandbox, was_paused = served.sandbox, served.standing is Standing.PAUSED
        if was_paused:
            await sandbox.resume()
        try:
            return await sandbox.snapshot(id=name, stop_processes=True, end=True)
        except BaseException:
            if was_paused and sandbox.death is None:
                await sandbox.pause()
            raise

    def _paused(self, served: Served) -> None:
        served.standing, served.paused_s = Standing.PAUSED, self._loop.time()
        self._set_end(served, served.paused_s + self.settings.paused_ttl_s)

    def paused_in_memory(self) -> tuple[PausedInMemory, ...]:
        """Return the paused sandboxes that could be moved to disk."""
        return tuple(
            PausedInMemory(sandbox_id=one.id, paused_s=one.paused_s, programs=len(one.programs.infos()))
            for one in self.all().values()
            if one.standing is Standing.PAUSED and one.files is None and not one.storing
        )

    async def to_disk(self, sandbox_id: str) -> bool:
        """Keep of a paused sandbox its files alone, and give its memory and processes back; a resume restores it.

        Its programs end by this, which its callers are told: it is paused as `filesystem` from then on. Its timeout
        stays.

        Returns:
            Whether it was moved; not if it was not paused in memory any more.

        Raises:
            SandboxError: if it could not be; it stays paused, and its programs may have ended.

        Cancellation: it is carried through.
        """
        served = self.find(sandbox_id)
        async with self._turn(served, "move to disk"):
            if served.standing is not Standing.PAUSED or served.files is not None or served.storing:
                return False
            await self._store(served)
            return served.files is not None

    async def kill(self, sandbox_id: str) -> None:
        """End a sandbox, and wait until nothing of it is left."""
        served = self.find(sandbox_id)
        async with self._turn(served, "kill"):
            await self._kill(served, DeathReason.RELEASED)

    async def _kill(self, served: Served, reason: DeathReason) -> None:
        self._disarm(served)
        if served.files is None:
            await self._stock.kill(served.sandbox, reason)
        else:
            await self._provider.delete_snapshots([served.files.snapshot_id])
        self._forget(served)

    @contextlib.asynccontextmanager
    async def _turn(self, served: Served, what: str) -> AsyncIterator[None]:
        """Let one pause, resume or kill of a sandbox follow the other."""
        limit_s = self.settings.transition_s
        try:
            async with asyncio.timeout(limit_s), served.turn:
                if served.id not in self._served:
                    raise HttpProblem(404, f"sandbox {served.id} has ended while this call waited for its turn")
                yield
        except TimeoutError:
            raise DeadlineExceeded(
                f"the {what} of sandbox {served.id} did not end within {limit_s:g} s (transition_s); the machine is "
                "overloaded, or the kernel still releases what the sandbox held. Ask for its state, then try again"
            ) from None

    def _forget(self, served: Served) -> None:
        self._disarm(served)
        served.standing = Standing.ENDED
        self._served.pop(served.id, None)
        self._books.forget(served)
        if served.order.key and self._by_key.get(served.order.key, (None,))[0] == served.order:
            del self._by_key[served.order.key]

    # -- snapshots ---------------------------------------------------------------------------------------------------

    async def snapshot(self, sandbox_id: str, *, name: str, full: bool = False) -> Kept:
        """Keep a sandbox's files, with `full` also what runs in it, as a template for others; it goes on.

        Raises:
            HttpProblem: 409 if it is paused, 501 if what runs cannot be kept here.
            SandboxBusy: if something runs in it that is not kept.
            SandboxUnsupported: if the backend keeps none.
        """
        served = self.find(sandbox_id)
        if full and not self._can_keep_programs:
            raise HttpProblem(501, "a snapshot keeps files here, not memory; ask for one with mode='filesystem'")
        ref = await self._take(served, "snapshot", name=self._books.named(f"snp{secrets.token_hex(9)}"), full=full)
        kept = Kept(ref=ref, name=name, sandbox_id=sandbox_id, envs=served.order.envs)
        replaced = self.shelf.put(kept)
        await self._books.keep(kept)
        if replaced is not None:
            self._books.let_go(replaced.id)
            await self._provider.delete_snapshots([replaced.ref.snapshot_id])
        return kept

    async def fork(self, sandbox_id: str, *, count: int, timeout_s: float) -> tuple[Served | RollmillError, ...]:
        """Make sandboxes with a sandbox's files, words and plan; each starts, or fails, on its own. It goes on.

        What runs in it goes on in each where the backend can. Elsewhere nothing may run, so that there is nothing in
        its memory that a fork would miss.

        Raises:
            HttpProblem: 400 for a count below 1, 409 if it is paused, 429 if there is no room for all.
            SandboxBusy: if something runs in it.
            SandboxUnsupported: if the backend keeps no files.
        """
        served = self.find(sandbox_id)
        check_timeout(timeout_s, most_s=self.settings.max_timeout_s)
        if count < 1:
            raise HttpProblem(400, f"{count} forks cannot be made; ask for 1 or more")
        order = msgspec.structs.replace(served.order, timeout_s=timeout_s, key="")
        own = {name: value for name, value in served.envs.items() if not name.startswith("E2B_")}
        full = self._can_keep_programs and bool(served.programs.infos())
        with self._room(count):
            ref = await self._take(served, "fork", name=self._books.named(f"frk{secrets.token_hex(9)}"), full=full)
            try:
                starts = (self._start(order, spec=ref.spec, envs=own, files=ref) for _ in range(count))
                results = await asyncio.gather(*starts, return_exceptions=True)
            finally:
                await self._provider.delete_snapshots([ref.snapshot_id])
        for one in results:
            if isinstance(one, BaseException) and not isinstance(one, RollmillError):
                raise one
        return tuple(one for one in results if isinstance(one, Served | RollmillError))

    async def _take(self, served: Served, what: str, *, name: str, full: bool) -> SnapshotRef:
        """Keep a running sandbox; if whoever asked has left when that is done, let them go again."""
        async with self._turn(served, what):
            if served.standing is not Standing.RUNNING:
                raise HttpProblem(409, f"sandbox {served.id} is paused; connect to it first")
            taking = looked_at(asyncio.ensure_future(served.sandbox.snapshot(id=name, full=full)))
            try:
                return await asyncio.shield(taking)
            except asyncio.CancelledError:
                taking.add_done_callback(lambda _: self._drop(name))
                raise

    def _drop(self, name: str) -> None:
        self.run(self._provider.delete_snapshots([name]), name=f"end of {name}")

    async def delete_snapshot(self, name: str) -> bool:
        """Let a snapshot go, by its id or name; `False` if there is none."""
        kept = self.shelf.take(name)
        if kept is None:
            return False
        self._books.let_go(kept.id)
        await self._provider.delete_snapshots([kept.ref.snapshot_id])
        return True

    # -- ends --------------------------------------------------------------------------------------------------------

    def _set_end(self, served: Served, end_s: float) -> None:
        self._disarm(served)
        if end_s != served.end_s:
            served.end_s = end_s
            served.end_wall_s = self._clock.wall_s() + end_s - self._loop.time()
            self._books.noted(served)
        served.timer = self._loop.call_at(end_s, self._due, served)

    def _disarm(self, served: Served) -> None:
        if served.timer is not None:
            served.timer.cancel()
            served.timer = None

    def _due(self, served: Served) -> None:
        self.run(self._end(served), name=f"end of sandbox {served.id}")

    async def _end(self, served: Served) -> None:
        if served.id not in self._served:
            return
        async with self._turn(served, "end"):
            now_s = self._loop.time()
            match fate(served.standing, plan=served.order.plan, now_s=now_s, end_s=served.end_s):
                case Fate.PAUSE:
                    await self._pause(served, keep_memory=served.order.plan.keep_memory)
                case Fate.KILL:
                    await self._kill(served, DeathReason.LEASE_EXPIRED)
                case Fate.WAIT:
                    return  # it was given more time while this waited for its turn
