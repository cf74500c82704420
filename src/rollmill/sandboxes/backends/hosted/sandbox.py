"""One hosted sandbox: its lease, its wall limit, its end with a reason, and calls into it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from rollmill.errors import (
    DeadlineExceeded,
    RollmillError,
    SandboxBusy,
    SandboxDead,
    SandboxError,
    SandboxFileError,
    SandboxUnsupported,
)
from rollmill.sandboxes.backends.hosted.driver import Command, Driver, Found, Gone, Guest, Lost
from rollmill.sandboxes.backends.hosted.files import HostedFileCalls
from rollmill.sandboxes.backends.hosted.process import HostedProcess
from rollmill.sandboxes.backends.hosted.settings import HostedSettings
from rollmill.sandboxes.backends.hosted.snapshots import HostedSnapshots, check_still
from rollmill.sandboxes.backends.http import CutOff, Refused, Unreachable, as_retryable
from rollmill.sandboxes.capable import unsupported
from rollmill.sandboxes.isolation import IsolationLevel, Protection, level_of
from rollmill.sandboxes.lifecycle import dead_error, death
from rollmill.sandboxes.protocol import (
    DEFAULT_OUTPUT_CAP_BYTES,
    Session,
    check_call,
    check_kept,
    check_port,
    check_terminal,
)
from rollmill.sandboxes.records import (
    Address,
    Death,
    DeathReason,
    ExecResult,
    Lease,
    SandboxSpec,
    SandboxState,
    SandboxStatus,
    SnapshotRef,
)

T = TypeVar("T")

TTL_GRACE_S = 15.0
"""How much later than the lease a vendor ends a sandbox: the owner comes first, and knows the reason."""

_FILE_CALLS_AT_ONCE = 8
"""Of one sandbox: each may take a few processes inside, which its programs need too."""

_FIRST_PAUSE_S = 0.2
_LONGEST_PAUSE_S = 30.0
_log = logging.getLogger(__name__)


class HostedSandbox(HostedFileCalls):
    """One sandbox.

    Args:
        sandbox_id: its id.
        driver: its vendor's adapter.
        settings: deadlines.
        spec: what it was made of.
        labels: as given.
        lease: the first one.
        wall_left_s: until its wall limit.
        on_end: called once with it when nothing of it is left.
        snapshots: of its provider.
        held: keeps its tasks: the loop itself holds none, and a sandbox that has ended is held by nobody.
    """

    def __init__(
        self,
        sandbox_id: str,
        *,
        driver: Driver,
        settings: HostedSettings,
        spec: SandboxSpec,
        labels: Mapping[str, str],
        lease: Lease,
        wall_left_s: float,
        on_end: Callable[[HostedSandbox], None],
        held: set[asyncio.Task[Any]],
        snapshots: HostedSnapshots,
    ) -> None:
        self._id = sandbox_id
        self._driver = driver
        self._settings = settings
        self.spec = spec
        self.digest = ""
        self.labels = dict(labels)
        self._lease = lease
        self._on_end = on_end
        self._held = held
        self._snapshots = snapshots
        self._settled: asyncio.Future[None] | None = None
        self._loop = asyncio.get_running_loop()
        self._created_s = self._loop.time()
        self._ends_s = self._created_s + wall_left_s
        self._state = SandboxState.STARTING
        self._forks = False
        self._death: Death | None = None
        self.decided: asyncio.Future[Death] = self._loop.create_future()
        self.found: Found | None = None
        self._guest: Guest | None = None
        self.protections: frozenset[Protection] = frozenset()
        self._processes: set[HostedProcess] = set()
        self._calls = 0
        self._places = asyncio.Semaphore(_FILE_CALLS_AT_ONCE)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._ending: asyncio.Task[None] | None = None
        self._lease_timer = self._loop.call_later(lease.ttl_s, self.order_end, DeathReason.LEASE_EXPIRED)
        self._wall_timer = self._loop.call_later(wall_left_s, self.order_end, DeathReason.POLICY_WALL)

    # -- its life ----------------------------------------------------------------------------------------------------

    @property
    def id(self) -> str:
        """Return the id that its creator chose."""
        return self._id

    @property
    def state(self) -> SandboxState:
        """Return where it is in its life."""
        if self._state is SandboxState.READY and (self._processes or self._calls):
            return SandboxState.BUSY
        if self._state is SandboxState.SNAPSHOTTING and self._forks:
            return SandboxState.FORKING
        return self._state

    @property
    def death(self) -> Death | None:
        """Return how it ended, `None` while it lives."""
        return self._death

    @property
    def isolation(self) -> IsolationLevel:
        """Return how far it is kept from its host."""
        return level_of(self.protections)

    def status(self) -> SandboxStatus:
        """Return it as its provider's lists show it."""
        now = self._loop.time()
        return SandboxStatus(
            sandbox_id=self._id,
            state=self.state,
            labels=self.labels,
            lease=self._lease,
            lease_left_s=max(0.0, self._lease_timer.when() - now),
            protections=tuple(sorted(one.value for one in self.protections)),
            isolation=self.isolation.name.lower(),
            death=self._death,
            age_s=now - self._created_s,
        )

    def entered(self, found: Found, guest: Guest) -> None:
        """Note that it answers."""
        self.found, self._guest = found, guest
        if self._state is SandboxState.STARTING:
            self._state = SandboxState.READY if found.state is not SandboxState.PAUSED else SandboxState.PAUSED

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start a task that is held until it ends."""
        task = self._loop.create_task(work)
        for tasks in (self._tasks, self._held):
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        return task

    def order_end(self, reason: DeathReason) -> None:
        """Order its end without waiting; the first reason stands."""
        self._decide(death(reason))
        if self._state not in (SandboxState.DEAD, SandboxState.LOST) and (self._ending is None or self._ending.done()):
            self._state = SandboxState.STOPPING
            self._ending = self.spawn(self._put_down())

    def _decide(self, end: Death) -> None:
        """Note how it ends. From now on nobody can use it, whether the vendor has ended it or not yet."""
        if self._death is not None:
            return
        self._death = end
        self.decided.set_result(end)
        self._lease_timer.cancel()
        self._wall_timer.cancel()
        for process in list(self._processes):
            process.fail(dead_error(self._id, end))

    def _over(self, end: Death) -> None:
        """Note that nothing of it is left."""
        lost = end.reason is DeathReason.PROVIDER_LOST
        self._state = SandboxState.LOST if lost else SandboxState.DEAD
        self._on_end(self)

    async def _put_down(self) -> None:
        """Have the vendor end it, trying again as long as this owner lives."""
        pause_s = _FIRST_PAUSE_S
        while self.found is not None:
            try:
                await self._driver.kill(self.found)
                break
            except RollmillError as error:
                _log.warning("sandbox %s could not be ended, and is tried again in %g s: %s", self._id, pause_s, error)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        if self._death is not None:
            self._over(self._death)

    async def kill(self, reason: DeathReason = DeathReason.RELEASED) -> Death:
        """End it, and wait until the vendor says that it is gone.

        Raises:
            DeadlineExceeded: if it does not within `end_s`; the order stands and is tried again.
        """
        self.order_end(reason)
        if self._ending is not None:
            try:
                async with asyncio.timeout(self._settings.end_s):
                    await asyncio.shield(self._ending)
            except TimeoutError:
                raise DeadlineExceeded(
                    f"{self._driver.product} did not end sandbox {self._id} within {self._settings.end_s:g} s. The "
                    "order stands and is tried again; the service's own time limit ends it at last."
                ) from None
        return self._death or death(reason)

    async def let_go(self) -> None:
        """Stop all tasks: the owner ends, and what was not ended by now is left to the vendor's limit and to sweeps."""
        self._lease_timer.cancel()
        self._wall_timer.cancel()
        tasks = [task for task in self._tasks if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def renew(self, lease: Lease) -> None:
        """Renew the lease, with the vendor first: its `ttl_s` counts from now."""
        self._check_alive()
        found = self.found
        if found is not None and self._driver.capabilities.extend_ttl:
            left_s = min(lease.ttl_s, self._ends_s - self._loop.time())
            await self.ask(self._driver.set_ttl(found, max(1.0, left_s) + TTL_GRACE_S))
            self._check_alive()
        self._lease = lease
        self._lease_timer.cancel()
        self._lease_timer = self._loop.call_later(lease.ttl_s, self.order_end, DeathReason.LEASE_EXPIRED)

    async def pause(self, *, keep_memory: bool = True) -> None:
        """Stop every process at once; raises `SandboxUnsupported` where the vendor cannot."""
        self._check_alive()
        if not keep_memory:
            raise unsupported(f"{self._driver.product} pauses no sandbox as files alone", capability="pause_files")
        if not self._driver.capabilities.pause:
            raise unsupported(f"{self._driver.product} cannot pause a sandbox", capability="pause")
        if self._state is SandboxState.READY and self.found is not None:
            self._state = SandboxState.PAUSING
            try:
                await self.ask(self._driver.pause(self.found))
            except BaseException:
                self._state = SandboxState.READY if self._death is None else self._state
                raise
            self._state = SandboxState.PAUSED if self._death is None else self._state

    async def resume(self) -> None:
        """Let every process go on."""
        self._check_alive()
        if self._state is SandboxState.PAUSED and self.found is not None:
            left_s = min(self._lease_timer.when(), self._ends_s) - self._loop.time()
            guest = await self.ask(self._driver.resume(self.found, ttl_s=max(1.0, left_s) + TTL_GRACE_S))
            self._guest = self._guest if guest is None else guest
            self._state = SandboxState.READY if self._death is None else self._state

    def _check_alive(self) -> None:
        if self._death is not None:
            raise dead_error(self._id, self._death)

    async def _ready(self) -> Guest:
        """Return its inside, once no snapshot is being taken."""
        self._check_alive()
        if self._settled is not None:
            await asyncio.wait([self._settled], timeout=self._settings.start_s)
        return self._inside()

    def _inside(self) -> Guest:
        self._check_alive()
        if self._state in (SandboxState.PAUSED, SandboxState.PAUSING):
            raise SandboxError(f"sandbox {self._id} is paused and answers nothing; resume it first")
        if self._guest is None:
            raise SandboxError(f"sandbox {self._id} has not started yet")
        return self._guest

    async def ask(self, answer: Awaitable[T]) -> T:
        """Wait for the vendor; an error after the sandbox's end is that end."""
        try:
            return await answer
        except RollmillError as error:
            raise await self.explain(error) from error

    async def explain(self, error: RollmillError) -> Exception:
        """Return what an error of the vendor means to a caller: where the sandbox is gone, that, with its reason."""
        if self._death is None and isinstance(error, Gone | Lost | CutOff | Unreachable) and self.found is not None:
            try:
                end = await self._driver.explain(self.found)
            except RollmillError as second:
                _log.warning("after %s, sandbox %s could not be looked at: %s", error, self._id, second)
                end = None
            if end is None and isinstance(error, Gone):
                end = death(DeathReason.PROVIDER_LOST, detail=str(error))
            if end is not None:
                # Its vendor may keep something of it, such as a stopped container, so it is ended there too.
                self._decide(end)
                self.order_end(end.reason)
        if self._death is not None and not isinstance(error, SandboxFileError | SandboxDead):
            return dead_error(self._id, self._death)
        return as_retryable(error, product=self._driver.product, what="a call") if isinstance(error, Refused) else error

    # -- programs ----------------------------------------------------------------------------------------------------

    async def exec(
        self,
        argv: Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        timeout_s: float | None = None,
        stdin: bytes = b"",
        output_cap_bytes: int = DEFAULT_OUTPUT_CAP_BYTES,
    ) -> ExecResult:
        """Run a program to its end."""
        timeout_s = self.spec.limits.exec_s if timeout_s is None else timeout_s
        process = await self._start(
            argv, cwd=cwd, env=env, user=user, timeout_s=timeout_s, cap=output_cap_bytes, stdin=stdin
        )
        try:
            return await process.wait()
        except asyncio.CancelledError:
            process.kill("owner")
            raise

    async def start_process(
        self,
        argv: Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        timeout_s: float | None = None,
        output_cap_bytes: int = DEFAULT_OUTPUT_CAP_BYTES,
        pty: tuple[int, int] | None = None,
    ) -> HostedProcess:
        """Start a program and let it run."""
        check_terminal(pty)
        if pty is not None and not self._driver.capabilities.terminals:
            raise SandboxUnsupported(f"{self._driver.product} gives programs no terminals here", capability="terminals")
        return await self._start(
            argv, cwd=cwd, env=env, user=user, timeout_s=timeout_s, cap=output_cap_bytes, stdin=None, pty=pty
        )

    async def open_session(
        self,
        *,
        shell: str | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
    ) -> Session:
        """Refuse: a shell that stays needs a descriptor of its own for its answers, and vendors give three."""
        self._check_alive()
        raise SandboxUnsupported(
            f"{self._driver.product} keeps no shells here; run each line by `exec` with its own cwd and env",
            capability="sessions",
        )

    async def expose(self, port: int) -> Address:
        """Refuse: no address of a service is known here."""
        self._check_alive()
        check_port(port)
        raise unsupported(f"{self._driver.product} gives ports inside no address here", capability="expose")

    async def snapshot(
        self, *, id: str, stop_processes: bool = False, end: bool = False, full: bool = False
    ) -> SnapshotRef:
        """Keep its files as they are now."""
        self._check_alive()
        check_kept(full=full, stop_processes=stop_processes)
        if full:
            raise unsupported(f"{self._driver.product} keeps no processes here", capability="full_snapshot")
        return await self._snapshots.take(self, id=id, stop_processes=stop_processes, end=end)

    async def fork(
        self,
        ids: Sequence[str],
        *,
        lease: Lease,
        labels: Mapping[str, str] | None = None,
        stop_processes: bool = False,
        full: bool = False,
    ) -> tuple[HostedSandbox, ...]:
        """Make sandboxes with its files: all of them, or none and an error."""
        self._check_alive()
        check_kept(full=full, stop_processes=stop_processes)
        if full:
            raise unsupported(f"{self._driver.product} forks no processes here", capability="live_fork")
        self._forks = True
        try:
            return await self._snapshots.fork(self, ids, lease=lease, labels=labels, stop_processes=stop_processes)
        finally:
            self._forks = False

    @contextlib.asynccontextmanager
    async def still(self, *, stop_processes: bool) -> AsyncIterator[Found]:
        """Keep calls waiting while its files are kept; raises `SandboxBusy` if something runs that must not end."""
        self._check_alive()
        check_still(state=self._state, sandbox_id=self._id)
        running = list(self._processes)
        if self._settled is not None or self._calls or (running and not stop_processes):
            number = len(running) + self._calls
            what = f"{number} process{'' if number == 1 else 'es'} run in it" if number else "another snapshot is taken"
            raise SandboxBusy(f"sandbox {self._id} is not still: {what}; wait, or let them be stopped")
        settled = self._settled = self._loop.create_future()
        self._state = SandboxState.SNAPSHOTTING
        try:
            for process in running:
                process.kill("owner")
            await asyncio.gather(*(process.wait() for process in running), return_exceptions=True)
            if self.found is None:
                raise SandboxError(f"sandbox {self._id} has not started yet")
            yield self.found
        finally:
            if self._state is SandboxState.SNAPSHOTTING:
                self._state = SandboxState.READY
            self._settled = None
            settled.set_result(None)

    async def _start(
        self,
        argv: Sequence[str],
        *,
        cwd: str | None,
        env: Mapping[str, str] | None,
        user: str | None,
        timeout_s: float | None,
        cap: int,
        stdin: bytes | None,
        pty: tuple[int, int] | None = None,
    ) -> HostedProcess:
        check_call(argv, env=env, timeout_s=timeout_s, output_cap_bytes=cap)
        guest = await self._ready()
        limits = self.spec.limits
        command = Command(
            argv=tuple(argv),
            cwd=cwd or "",
            env=dict(env or {}),
            user=user or "",
            stdin=stdin,
            pty=pty,
            timeout_s=timeout_s,
            keep_bytes=cap,
            most_bytes=limits.output_bytes,
            open_files=limits.open_files,
            cpu_s=limits.cpu_s,
        )
        self._calls += 1
        starting = self.spawn(self._begin(guest, command, cap))
        try:
            return await asyncio.shield(starting)
        except asyncio.CancelledError:
            # It may have started by now, and nobody will wait for it.
            starting.add_done_callback(_kill_what_started)
            raise
        finally:
            self._calls -= 1

    async def _begin(self, guest: Guest, command: Command, cap: int) -> HostedProcess:
        started_s = self._loop.time()
        try:
            async with asyncio.timeout(self._settings.call_s):
                running = await self.ask(guest.start(command))
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"{self._driver.product} did not start {command.argv[0]} in sandbox {self._id} within "
                f"{self._settings.call_s:g} s. It may have been started; it is not started again."
            ) from error
        process = HostedProcess(
            running,
            command,
            cap_bytes=cap,
            started_s=started_s,
            answer_s=self._settings.answer_s,
            spawn=self.spawn,
            explain=self.explain,
        )
        self._processes.add(process)
        process.ended.add_done_callback(lambda _: self._processes.discard(process))
        if self._death is not None:
            process.fail(dead_error(self._id, self._death))
        return process

    async def run_python(
        self,
        code: str,
        *,
        args: Sequence[str] = (),
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        timeout_s: float | None = None,
        stdin: bytes = b"",
        output_cap_bytes: int = DEFAULT_OUTPUT_CAP_BYTES,
    ) -> ExecResult:
        """Refuse: no interpreter is kept warm in a hosted sandbox."""
        raise SandboxUnsupported(
            f"{self._driver.product} keeps no warm interpreter; run ['python3', '-c', code] by `exec`",
            capability="fast_python",
        )

    async def _bounded(self, answer: Coroutine[Any, Any, T], what: str) -> T:
        try:
            async with asyncio.timeout(self._settings.call_s), self._places:
                return await self.ask(answer)
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"{self._driver.product} did not answer within {self._settings.call_s:g} s in sandbox {self._id}: "
                f"{what}. Raise call_s for large files or a slow service."
            ) from error
        finally:
            answer.close()  # of one whose turn never came; nothing for others


def _kill_what_started(starting: asyncio.Task[HostedProcess]) -> None:
    if not starting.cancelled() and starting.exception() is None:
        starting.result().kill("owner")
