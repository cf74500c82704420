"""One namespace sandbox, as its owner holds it: calls to its agent, each with a deadline, and its end."""

from __future__ import annotations

import asyncio
import signal as signals
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import msgspec

from rollmill.errors import DeadlineExceeded, SandboxBusy, SandboxError, SandboxUnsupported
from rollmill.sandboxes.backends.namespaces.channel import AgentChannel, Message
from rollmill.sandboxes.backends.namespaces.file_calls import FileCalls
from rollmill.sandboxes.backends.namespaces.process import NamespaceProcess
from rollmill.sandboxes.backends.namespaces.session import NamespaceSession
from rollmill.sandboxes.capable import unsupported
from rollmill.sandboxes.disk_records import DiskRecord
from rollmill.sandboxes.guest.cgroups import Groups
from rollmill.sandboxes.isolation import IsolationLevel, known, level_of
from rollmill.sandboxes.lifecycle import dead_error
from rollmill.sandboxes.ports import Ports
from rollmill.sandboxes.protocol import DEFAULT_OUTPUT_CAP_BYTES, check_call, check_kept, check_terminal
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
    Usage,
)

T = TypeVar("T")

MOST_STDIN_BYTES = 12 * 1024 * 1024
MOST_CODE_BYTES = 4 * 1024 * 1024
_NEVER_S = 10 * 365 * 86400.0


class SnapshotHome(Protocol):
    """Where snapshots are taken: the provider."""

    async def snapshot_of(self, sandbox: NamespaceSandbox, *, id: str, stop_processes: bool, end: bool) -> SnapshotRef:
        """Take one."""
        ...

    async def fork_of(
        self,
        sandbox: NamespaceSandbox,
        ids: Sequence[str],
        *,
        lease: Lease,
        labels: Mapping[str, str] | None,
        stop_processes: bool,
    ) -> tuple[NamespaceSandbox, ...]:
        """Take one for a moment, and restore it."""
        ...

    async def put_to_sleep(self, sandbox: NamespaceSandbox) -> None:
        """Keep its files alone."""
        ...

    async def wake(self, sandbox: NamespaceSandbox) -> None:
        """Start it anew with them."""
        ...


class NamespaceSandbox(FileCalls):
    """One sandbox.

    Args:
        sandbox_id: its id.
        spec: what it was made of.
        labels: as given.
        lease: the first one.
        groups: its cgroups.
        start_s: how long it may take to answer again after a snapshot.
        answer_s: how late its agent may be.
        end_s: how long its end may take.
        order_kill: asks the zygote to kill it.
        record: what is on disk.
        home: takes snapshots.
        chain: layers below what it writes, the uppermost first.
        layer_counts: bytes and inodes of these.
        id_base: first of its ids on the host.
        origin: the snapshot that it was restored from, empty if none.
    """

    _groups_count_processes = True

    def __init__(
        self,
        sandbox_id: str,
        *,
        spec: SandboxSpec,
        labels: Mapping[str, str],
        lease: Lease,
        groups: Groups,
        start_s: float,
        answer_s: float,
        end_s: float,
        order_kill: Callable[[str], None],
        record: DiskRecord,
        home: SnapshotHome,
        chain: tuple[str, ...] = (),
        layer_counts: tuple[int, int] = (0, 0),
        id_base: int | None = None,
        origin: str = "",
    ) -> None:
        self._id = sandbox_id
        self.spec = spec
        self.labels = dict(labels)
        self._lease = lease
        self.groups = groups
        self.record = record
        self.first_process_s: float | None = None
        self._home = home
        self.chain = chain
        self.layer_counts = layer_counts
        self.id_base = id_base
        self.origin = origin
        self.rested: asyncio.Future[None] | None = None
        self.sleeps = self._forks = False
        self._still: asyncio.Future[None] | None = None
        self._start_s = start_s
        self._answer_s = answer_s
        self._end_s = end_s
        self._order_kill = order_kill
        self._loop = asyncio.get_running_loop()
        self._created_s = self._begun_s = self._loop.time()
        self._state = SandboxState.STARTING
        self._death: Death | None = None
        self.ordered: DeathReason | None = None
        self.protections: tuple[str, ...] = ()
        self.complaint = ""
        self.channel = self._new_channel()
        self.gone: asyncio.Future[Death] = self._loop.create_future()
        self._ports = Ports(self, spec=spec)
        self._lease_timer = self._loop.call_later(lease.ttl_s, self._lease_expired)
        self._wall_timer = self._loop.call_later(spec.limits.wall_s, self.order_end, DeathReason.POLICY_WALL)

    def _new_channel(self) -> AgentChannel:
        return AgentChannel(on_nonsense=self.distrust)

    # -- its life ----------------------------------------------------------------------------------------------------

    @property
    def id(self) -> str:
        """Return the id that its creator chose."""
        return self._id

    @property
    def state(self) -> SandboxState:
        """Return where it is in its life."""
        if self._state is SandboxState.READY and self.channel.busy:
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
        return level_of(known(self.protections))

    def status(self) -> SandboxStatus:
        """Return it as its provider's lists show it."""
        now = self._loop.time()
        return SandboxStatus(
            sandbox_id=self._id,
            state=self.state,
            labels=self.labels,
            lease=self._lease,
            lease_left_s=max(0.0, self._lease_timer.when() - now),
            protections=self.protections,
            isolation=self.isolation.name.lower(),
            death=self._death,
            age_s=now - self._created_s,
        )

    def start_phases(self) -> tuple[float, float]:
        """Return, now that it answers, how long its first process took to run, and from then its agent to answer."""
        first_s = self._begun_s if self.first_process_s is None else self.first_process_s
        return first_s - self._begun_s, self._loop.time() - first_s

    def became_ready(self, protections: tuple[str, ...]) -> None:
        """Note that its agent answers."""
        self.protections = protections
        if self._state in (SandboxState.STARTING, SandboxState.SNAPSHOTTING):
            self._state = SandboxState.READY
            self._tell_awake()

    def distrust(self, complaint: str, reason: DeathReason = DeathReason.EXITED) -> None:
        """Give it up for what its agent did, or for what could not be done around it."""
        self.complaint = complaint
        self.order_end(reason)

    def _lease_expired(self) -> None:
        self.order_end(DeathReason.LEASE_EXPIRED)

    def order_end(self, reason: DeathReason) -> None:
        """Order its end without waiting; the first reason stands."""
        if self._death is not None or self.ordered is not None:
            return
        self.ordered = reason
        self._state = SandboxState.STOPPING
        self._tell_awake()
        self._order_kill(self._id)

    def ended(self, end: Death) -> None:
        """Note that nothing of it is left, and tell everybody who waits."""
        if self._death is not None:
            return
        self._death = end
        self._state = SandboxState.LOST if end.reason is DeathReason.PROVIDER_LOST else SandboxState.DEAD
        self._tell_awake()
        self._lease_timer.cancel()
        self._wall_timer.cancel()
        self._ports.close()
        self.channel.fail_all(dead_error(self._id, end))
        if self.rested is not None and not self.rested.done():
            self.rested.set_exception(dead_error(self._id, end))
        self.gone.set_result(end)

    async def kill(self, reason: DeathReason = DeathReason.RELEASED) -> Death:
        """End it, and wait until nothing of it is left.

        Raises:
            DeadlineExceeded: if the kernel takes longer than `end_s`; the order stands, and the zygote goes on waiting.
        """
        self.order_end(reason)
        try:
            async with asyncio.timeout(self._end_s):
                return await asyncio.shield(self.gone)
        except TimeoutError:
            raise DeadlineExceeded(
                f"sandbox {self._id} was killed and is not gone after {self._end_s:g} s; the kernel still releases "
                "what it held, many files or much memory. It goes on; lower limits.inodes if this happens often."
            ) from None

    async def renew(self, lease: Lease) -> None:
        """Renew the lease: its `ttl_s` counts from now."""
        self._check_alive()
        self._lease = lease
        self._lease_timer.cancel()
        self._lease_timer = self._loop.call_later(lease.ttl_s, self._lease_expired)

    async def pause(self, *, keep_memory: bool = True) -> None:
        """Stop every process at once; or end them all, and keep the files alone.

        Raises:
            SandboxUnsupported: to keep memory, without a cgroup v2 hierarchy that this user may write to.
        """
        if not keep_memory:
            if not self.sleeps:
                await self._home.put_to_sleep(self)
            return
        await self.awake_or_paused()
        if self._state is SandboxState.READY:
            self._freeze(True)
            self._state = SandboxState.PAUSED

    async def resume(self) -> None:
        """Let every process go on; one that sleeps starts anew with its files."""
        self._check_alive()
        if self.sleeps:
            await self._home.wake(self)
        elif self._state is SandboxState.PAUSED:
            self._freeze(False)
            self._state = SandboxState.READY

    def fell_asleep(self) -> None:
        """Note that its files are all that there is of it now."""
        self.sleeps, self._state = True, SandboxState.PAUSED
        self.record = msgspec.structs.replace(self.record, first_process=None)
        self._tell_awake()

    def wakes_up(self) -> None:
        """Answer nothing until it has started anew."""
        self.sleeps, self._forks, self._state = False, False, SandboxState.SNAPSHOTTING

    async def expose(self, port: int) -> Address:
        """Return where on this machine's loopback a port inside is reached."""
        await self.awake()
        return await self._ports.expose(port)

    def _freeze(self, frozen: bool) -> None:
        if not self.groups.freeze(frozen):
            raise unsupported(
                "a sandbox is paused with its memory by a cgroup v2 hierarchy that may be written to, and there is "
                "none here (see `rollmill sandbox doctor`); keep_memory=False keeps its files",
                capability="pause",
            )

    def _check_alive(self) -> None:
        if self._death is not None:
            raise dead_error(self._id, self._death)

    def check_running(self) -> None:
        """Refuse a call while it cannot be answered."""
        self._check_alive()
        if self._state is SandboxState.PAUSED:
            raise SandboxError(f"sandbox {self._id} is paused and answers nothing; resume it first")

    async def awake(self) -> None:
        """Wait until a snapshot that is being taken is done, then refuse a call that cannot be answered.

        Raises:
            DeadlineExceeded: if that takes longer than a start may.
        """
        while self._state is SandboxState.SNAPSHOTTING and self._death is None:
            if self._still is None or self._still.done():
                self._still = self._loop.create_future()
            try:
                async with asyncio.timeout(self._start_s):
                    await asyncio.shield(self._still)
            except TimeoutError:
                raise DeadlineExceeded(
                    f"a snapshot of sandbox {self._id} was not done after {self._start_s:g} s; storing or merging many "
                    "files takes long (snapshot_directory, snapshot_depth), or the machine is overloaded"
                ) from None
        self.check_running()

    async def awake_or_paused(self) -> None:
        """Wait as `awake` does; a paused one is as good."""
        self._check_alive()
        if self._state is not SandboxState.PAUSED:
            await self.awake()

    def _tell_awake(self) -> None:
        if self._still is not None and not self._still.done():
            self._still.set_result(None)

    # -- snapshots ---------------------------------------------------------------------------------------------------

    async def snapshot(
        self, *, id: str, stop_processes: bool = False, end: bool = False, full: bool = False
    ) -> SnapshotRef:
        """Keep its files as they are now."""
        check_kept(full=full, stop_processes=stop_processes)
        if full:
            raise unsupported("namespace sandboxes are kept as files, without what runs", capability="full_snapshot")
        return await self._home.snapshot_of(self, id=id, stop_processes=stop_processes, end=end)

    async def fork(
        self,
        ids: Sequence[str],
        *,
        lease: Lease,
        labels: Mapping[str, str] | None = None,
        stop_processes: bool = False,
        full: bool = False,
    ) -> tuple[NamespaceSandbox, ...]:
        """Make sandboxes with its files: all of them, or none."""
        check_kept(full=full, stop_processes=stop_processes)
        if full:
            raise unsupported("namespace sandboxes are forked as files, without what runs", capability="live_fork")
        return await self._home.fork_of(self, ids, lease=lease, labels=labels, stop_processes=stop_processes)

    def begin_snapshot(self, *, forks: bool = False) -> None:
        """Answer nothing else until `end_snapshot`, or until it has started anew; `forks` says what it is for."""
        self.check_running()
        if self._state is not SandboxState.READY:
            raise SandboxBusy(f"sandbox {self._id} is {self._state.value}; a snapshot is taken of one that is ready")
        self._forks, self._state = forks, SandboxState.SNAPSHOTTING

    def end_snapshot(self) -> None:
        """Answer again."""
        if self._state is SandboxState.SNAPSHOTTING:
            self._state = SandboxState.READY
            self._tell_awake()

    async def hand_layer_out(self, *, force: bool) -> tuple[int, int]:
        """Have the agent end its helpers and hand out what was written; return bytes and inodes of it."""
        message, _ = await self.answered(self.channel.ask({"op": "layer", "force": force}))
        return message.disk_bytes, message.inodes

    async def end_first_process(self) -> None:
        """End the first process, to start another in its place: nobody waits on the old one after this."""
        self._check_alive()  # it may have been ended meanwhile, and then nobody tells that again
        self.rested = self._loop.create_future()
        self.rested.add_done_callback(lambda future: future.cancelled() or future.exception())
        self._order_kill(self._id)
        try:
            async with asyncio.timeout(self._end_s):
                await asyncio.shield(self.rested)
        except TimeoutError:
            raise DeadlineExceeded(
                f"the first process of sandbox {self._id} did not end within {self._end_s:g} s"
            ) from None
        finally:
            self.rested = None
        self._begun_s = self._loop.time()
        self._replace_channel()

    def _replace_channel(self) -> None:
        self.channel.fail_all(SandboxBusy(f"sandbox {self._id} was started anew after a snapshot, meanwhile"))
        self.channel = self._new_channel()

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
        head = self._head("exec", argv, cwd=cwd, env=env, user=user, timeout_s=timeout_s, cap=output_cap_bytes)
        return await self._run(head, _bounded(stdin, MOST_STDIN_BYTES, "stdin"), timeout_s=timeout_s)

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
    ) -> NamespaceProcess:
        """Start a program and let it run."""
        check_terminal(pty)
        head = self._head("exec", argv, cwd=cwd, env=env, user=user, timeout_s=timeout_s, cap=output_cap_bytes)
        await self.awake()
        job = self.channel.begin({**head, "stdin_open": True, "terminal": pty})
        await self.answered(asyncio.shield(job.started))
        return NamespaceProcess(self, job)

    async def open_session(
        self,
        *,
        shell: str | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
    ) -> NamespaceSession:
        """Start a shell that stays."""
        check_call([shell or "sh"], env=env, timeout_s=None, output_cap_bytes=0)
        head = {"op": "open", "shell": shell, "cwd": cwd, "env": dict(env or {}), "user": user}
        message, _ = await self._ask(head)
        session = NamespaceSession(self, message.n)
        try:
            result = await session.run(":", timeout_s=self._answer_s)
            why = f"it ended with {result.exit_code}: {result.stderr[-200:].decode('utf-8', 'replace').strip()}"
        except SandboxError as error:
            if type(error) is not SandboxError:
                raise
            why = str(error)  # its shell had ended before the line came
        if not session.alive:
            what = f"the sandbox has no shell {shell or 'bash or sh'} that could stay"
            raise SandboxUnsupported(f"{what}; {why}", capability="sessions")
        return session

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
        """Run a piece of Python in a fork of a warm interpreter inside, each time a fresh one."""
        timeout_s = self.spec.limits.exec_s if timeout_s is None else timeout_s
        argv = ["-c", *args]
        head = self._head("python", argv, cwd=cwd, env=env, user=user, timeout_s=timeout_s, cap=output_cap_bytes)
        source = _bounded(code.encode(), MOST_CODE_BYTES, "code")
        payload = source + _bounded(stdin, MOST_STDIN_BYTES, "stdin")
        return await self._run({**head, "code_bytes": len(source)}, payload, timeout_s=timeout_s)

    def _head(
        self,
        op: str,
        argv: Sequence[str],
        *,
        cwd: str | None,
        env: Mapping[str, str] | None,
        user: str | None,
        timeout_s: float | None,
        cap: int,
    ) -> dict[str, Any]:
        check_call(argv, env=env, timeout_s=timeout_s, output_cap_bytes=cap)
        return {
            "op": op,
            "argv": list(argv),
            "cwd": cwd,
            "env": dict(env or {}),
            "user": user,
            "timeout_s": timeout_s,
            "cap": cap,
            "hard_cap": self.spec.limits.output_bytes,
        }

    async def _run(self, head: dict[str, Any], payload: bytes, *, timeout_s: float) -> ExecResult:
        await self.awake()
        job = self.channel.begin(head, payload)
        try:
            return await self.answered(asyncio.shield(job.ended), also_s=timeout_s)
        except asyncio.CancelledError:
            self.channel.tell(job, {"op": "signal", "signal": int(signals.SIGKILL)})
            raise

    async def answered(self, answer: Coroutine[Any, Any, T] | asyncio.Future[T], *, also_s: float = 0.0) -> T:
        """Wait for the agent; one that does not answer is given up, and its sandbox with it."""
        limit_s = min(also_s + self._answer_s, _NEVER_S)
        try:
            async with asyncio.timeout(limit_s):
                return await answer
        except TimeoutError:
            self.order_end(DeathReason.EXITED)
            raise DeadlineExceeded(
                f"the agent of sandbox {self._id} did not answer within {limit_s:g} s, and the sandbox is ended. Its "
                "processor share may be too small for what runs in it (limits.cpus), or the machine is overloaded."
            ) from None

    # -- files and counts --------------------------------------------------------------------------------------------

    async def _ask(self, head: dict[str, Any], payload: bytes | memoryview = b"") -> tuple[Message, bytes]:
        await self.awake()
        return await self.answered(self.channel.ask(head, payload))

    async def usage(self) -> Usage:
        """Return what it uses now; a paused one shows what its cgroups count."""
        await self.awake_or_paused()
        if self.sleeps:
            disk_bytes, inodes = self.layer_counts
            return Usage(disk_bytes=disk_bytes, inodes=inodes, processes=0)
        counts = self.groups.usage()
        cpu_us = counts.get("cpu_us")
        found = Usage(
            processes=counts.get("pids") if self._groups_count_processes else None,
            memory_bytes=counts.get("memory_bytes"),
            peak_memory_bytes=counts.get("peak_memory_bytes"),
            cpu_s=None if cpu_us is None else cpu_us / 1e6,
            oom_kills=counts.get("oom_kills"),
        )
        if self._state is SandboxState.PAUSED:
            return found
        inside, _ = await self.answered(self.channel.ask({"op": "usage"}))
        processes = inside.processes if found.processes is None else found.processes
        disk_bytes, inodes = inside.disk_bytes + self.layer_counts[0], inside.inodes + self.layer_counts[1]
        return msgspec.structs.replace(found, disk_bytes=disk_bytes, inodes=inodes, processes=processes)


def _bounded(data: bytes, most: int, name: str) -> bytes:
    if len(data) > most:
        raise SandboxError(f"{name} has {len(data)} bytes, {most} at most; write a file first, or stream to a process")
    return data
