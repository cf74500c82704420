"""One sandbox of a fake provider: files in a dictionary, programs that are functions, time from the loop."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterable, AsyncIterator, Mapping, Sequence
from typing import TYPE_CHECKING

from rollmill.errors import (
    SandboxBusy,
    SandboxError,
    SandboxExhausted,
    SandboxFileError,
    SandboxIdInUse,
    SandboxUnsupported,
)
from rollmill.sandboxes.capable import unsupported
from rollmill.sandboxes.disk_records import check_id
from rollmill.sandboxes.isolation import IsolationLevel, level_of
from rollmill.sandboxes.lifecycle import dead_error, death
from rollmill.sandboxes.protocol import (
    DEFAULT_OUTPUT_CAP_BYTES,
    DEFAULT_READ_BYTES,
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
    FileInfo,
    Lease,
    SandboxSpec,
    SandboxState,
    SandboxStatus,
    SnapshotRef,
    Usage,
)
from rollmill.testing.sandbox_files import FakeFiles
from rollmill.testing.sandbox_programs import FakeCall, FakeProcess, unknown
from rollmill.testing.sandbox_sessions import FakeSession

if TYPE_CHECKING:
    from rollmill.testing.sandboxes import FakeSandboxProvider

_HOME = "/root"
_PIECE_BYTES = 64 * 1024


class FakeSandbox:
    """One sandbox of a `FakeSandboxProvider`."""

    def __init__(
        self,
        provider: FakeSandboxProvider,
        sandbox_id: str,
        spec: SandboxSpec,
        labels: Mapping[str, str],
        *,
        files: FakeFiles | None = None,
        origin: str = "",
    ) -> None:
        self._provider = provider
        self._id = sandbox_id
        self.spec = spec
        self.labels = dict(labels)
        self.origin = origin
        self.tree = FakeFiles(spec.limits, like=files)
        self._sessions: list[FakeSession] = []
        self._state = SandboxState.STARTING
        self.sleeps = False
        self._death: Death | None = None
        self._pids = itertools.count(2)
        self._running: set[FakeProcess] = set()
        self._loop = asyncio.get_running_loop()
        self._created_s = self._loop.time()
        self._lease = Lease(owner="")
        self._lease_timer: asyncio.TimerHandle | None = None
        self._wall_timer = self._loop.call_later(spec.limits.wall_s, self.end, DeathReason.POLICY_WALL)

    @property
    def id(self) -> str:
        """Return the id that its creator chose."""
        return self._id

    @property
    def files(self) -> dict[str, bytes]:
        """Return its files, by absolute path."""
        return self.tree.content

    @property
    def state(self) -> SandboxState:
        """Return where it is in its life."""
        if self._state is SandboxState.READY and self._running:
            return SandboxState.BUSY
        return self._state

    @property
    def death(self) -> Death | None:
        """Return how it ended."""
        return self._death

    @property
    def isolation(self) -> IsolationLevel:
        """Return the level that its provider was told to claim."""
        return level_of(self._provider.protections)

    def status(self) -> SandboxStatus:
        """Return it as lists show it."""
        now = self._loop.time()
        return SandboxStatus(
            sandbox_id=self._id,
            state=self.state,
            labels=self.labels,
            lease=self._lease,
            lease_left_s=0.0 if self._lease_timer is None else max(0.0, self._lease_timer.when() - now),
            protections=tuple(sorted(one.value for one in self._provider.protections)),
            isolation=self.isolation.name.lower(),
            death=self._death,
            age_s=now - self._created_s,
        )

    def ready(self) -> None:
        """Note that it answers."""
        if self._state is SandboxState.STARTING:
            self._state = SandboxState.READY

    def end(self, reason: DeathReason, *, detail: str = "") -> Death:
        """End it now; the first reason stands."""
        if self._death is None:
            self._death = death(reason, detail=detail)
            self._state = SandboxState.LOST if reason is DeathReason.PROVIDER_LOST else SandboxState.DEAD
            for timer in (self._lease_timer, self._wall_timer):
                if timer is not None:
                    timer.cancel()
            for process in list(self._running):
                process.fail(dead_error(self._id, self._death))
            self._provider.ended(self)
        return self._death

    def check(self) -> None:
        """Refuse a call while it cannot be answered."""
        if self._death is not None:
            raise dead_error(self._id, self._death)
        if self._state is SandboxState.PAUSED:
            raise SandboxError(f"sandbox {self._id} is paused and answers nothing; resume it first")

    async def begin(
        self,
        argv: Sequence[str],
        *,
        cwd: str | None,
        env: Mapping[str, str] | None,
        user: str | None,
        timeout_s: float | None,
        cap_bytes: int,
        terminal: tuple[int, int] | None = None,
    ) -> FakeProcess:
        """Start a program."""
        await self._provider.faults.reach("exec")
        self.check()
        check_call(argv, env=env, timeout_s=timeout_s, output_cap_bytes=cap_bytes)
        if user not in (None, "root"):
            raise SandboxUnsupported(f"a fake sandbox has one user, root, not {user!r}", capability="users")
        if len(self._running) >= self.spec.limits.pids:
            raise SandboxExhausted(f"the sandbox runs {len(self._running)} processes, as many as its limit")

        async def nothing() -> bytes:
            return b""

        call = FakeCall(
            argv=tuple(argv),
            env={"PATH": "/usr/bin:/bin", "HOME": _HOME, **(env or {})},
            cwd=cwd or _HOME,
            stdin=nothing,
            write=lambda stream, data: None,
            files=self.files,
        )
        hard_cap_bytes = self.spec.limits.output_bytes
        process = FakeProcess(
            next(self._pids),
            call,
            cap_bytes=cap_bytes,
            hard_cap_bytes=hard_cap_bytes,
            timeout_s=timeout_s,
            terminal=terminal,
        )
        self._running.add(process)
        process.ended.add_done_callback(lambda _: self._running.discard(process))
        process.run(self._provider.programs.get(argv[0], unknown))
        return process

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
        process = await self.begin(argv, cwd=cwd, env=env, user=user, timeout_s=timeout_s, cap_bytes=output_cap_bytes)
        await process.write_stdin(stdin)
        await process.close_stdin()
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
    ) -> FakeProcess:
        """Start a program and let it run."""
        check_terminal(pty)
        return await self.begin(
            argv, cwd=cwd, env=env, user=user, timeout_s=timeout_s, cap_bytes=output_cap_bytes, terminal=pty
        )

    async def open_session(
        self,
        *,
        shell: str | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
    ) -> FakeSession:
        """Start a shell of a few words."""
        self.check()
        check_call([shell or "sh"], env=env, timeout_s=None, output_cap_bytes=0)
        if shell not in (None, "sh", "bash"):
            raise SandboxUnsupported(f"a fake sandbox has no shell {shell!r} that could stay", capability="sessions")
        variables = {"PATH": "/usr/bin:/bin", "HOME": _HOME, **(env or {})}
        session = FakeSession(self, cwd=cwd or _HOME, env=variables, user=user)
        self._sessions.append(session)
        return session

    def closed(self, session: FakeSession) -> None:
        """Note that a session was closed."""
        if session in self._sessions:
            self._sessions.remove(session)

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
        """Run the program `python` that the test gave, with the code as its second argument."""
        if "python" not in self._provider.programs:
            raise SandboxUnsupported("this fake has no program `python`", capability="fast_python")
        return await self.exec(
            ["python", code, *args],
            cwd=cwd,
            env=env,
            user=user,
            timeout_s=timeout_s,
            stdin=stdin,
            output_cap_bytes=output_cap_bytes,
        )

    async def read(self, path: str, *, max_bytes: int = DEFAULT_READ_BYTES) -> bytes:
        """Return a file's content."""
        await self._provider.faults.reach("read")
        self.check()
        data = self.tree.read(path)
        if len(data) > max_bytes:
            raise SandboxFileError(f"{path} holds more than {max_bytes} bytes")
        return data

    async def read_stream(self, path: str, *, offset: int = 0) -> AsyncIterator[bytes]:
        """Yield a file's content in pieces."""
        if offset < 0:
            raise SandboxFileError(f"a file cannot be read from offset {offset}; the first byte is at 0")
        while data := (await self.read(path))[offset : offset + _PIECE_BYTES]:
            yield data
            offset += len(data)

    async def write(self, path: str, data: bytes, *, mode: int = 0o644, user: str | None = None) -> None:
        """Write a file, and make the directories above it."""
        await self._provider.faults.reach("write")
        self.check()
        self.tree.write(path, bytes(data), mode=mode)

    async def write_stream(
        self, path: str, pieces: AsyncIterable[bytes], *, mode: int = 0o644, user: str | None = None
    ) -> int:
        """Write a file from pieces as they come."""
        whole = b""
        await self.write(path, whole, mode=mode, user=user)
        async for piece in pieces:
            whole += piece
            await self.write(path, whole, mode=mode, user=user)
        return len(whole)

    async def list_dir(self, path: str) -> tuple[FileInfo, ...]:
        """Return a directory's entries by name."""
        self.check()
        return self.tree.list_dir(path)

    async def stat(self, path: str) -> FileInfo:
        """Return what is at a path."""
        self.check()
        return self.tree.stat(path)

    async def make_dir(self, path: str, *, mode: int = 0o755, user: str | None = None) -> bool:
        """Make a directory and those above it; `False` if it is there already."""
        self.check()
        return self.tree.make_dir(path, mode=mode)

    async def set_attributes(self, path: str, group: str, words: Mapping[str, str], *, user: str | None = None) -> None:
        """Put words on a file."""
        self.check()
        self.tree.set_attributes(path, group, words)

    async def rename(self, path: str, target: str, *, user: str | None = None) -> None:
        """Give something another name."""
        self.check()
        self.tree.rename(path, target)

    async def remove(self, path: str, *, recursive: bool = False) -> None:
        """Remove a file or a directory."""
        self.check()
        self.tree.remove(path, recursive=recursive)

    async def snapshot(
        self, *, id: str, stop_processes: bool = False, end: bool = False, full: bool = False
    ) -> SnapshotRef:
        """Keep its files as they are now."""
        check_kept(full=full, stop_processes=stop_processes)
        if full:
            raise unsupported("a fake sandbox is kept as files", capability="full_snapshot")
        await self._provider.faults.reach("snapshot")
        self.check()
        check_id(id)
        self._stop_all(stop_processes)
        ref = self._provider.keep(self, id=id)
        if end:
            self.end(DeathReason.RELEASED)
        return ref

    def _stop_all(self, stop_processes: bool) -> None:
        running = [*self._running, *(one for one in self._sessions if one.alive)]
        if running and not stop_processes:
            raise SandboxBusy(f"{len(running)} processes or sessions run; have them stopped (stop_processes)")
        for one in self._running:
            one.kill("owner")
        for one in self._sessions:
            one.end()
        self._sessions.clear()

    async def fork(
        self,
        ids: Sequence[str],
        *,
        lease: Lease,
        labels: Mapping[str, str] | None = None,
        stop_processes: bool = False,
        full: bool = False,
    ) -> tuple[FakeSandbox, ...]:
        """Make sandboxes with its files: all of them, or none."""
        check_kept(full=full, stop_processes=stop_processes)
        if full:
            raise unsupported("a fake sandbox is forked as files", capability="live_fork")
        if len(set(ids)) != len(ids):
            raise SandboxIdInUse(f"the ids of a fork are not all different: {list(ids)}")
        ref = await self.snapshot(id=self._provider.fork_id(), stop_processes=stop_processes)
        restore = self._provider.restore
        made = [asyncio.ensure_future(restore(ref, id=one, labels=labels, lease=lease)) for one in ids]
        try:
            return tuple(await asyncio.gather(*made))
        except BaseException:
            for one in made:
                one.cancel()
            for found in await asyncio.gather(*made, return_exceptions=True):
                if isinstance(found, FakeSandbox):
                    found.end(DeathReason.START_FAILED)
            raise
        finally:
            await self._provider.delete_snapshots([ref.snapshot_id])

    async def renew(self, lease: Lease) -> None:
        """Renew the lease."""
        if self._death is not None:
            raise dead_error(self._id, self._death)
        if self._lease_timer is not None:
            self._lease_timer.cancel()
        self._lease = lease
        self._lease_timer = self._loop.call_later(lease.ttl_s, self.end, DeathReason.LEASE_EXPIRED)

    async def usage(self) -> Usage:
        """Return what its files and programs take."""
        if self._death is not None:
            raise dead_error(self._id, self._death)
        return Usage(
            disk_bytes=self.tree.disk_bytes,
            inodes=self.tree.inodes,
            processes=len(self._running) + 1,
        )

    async def pause(self, *, keep_memory: bool = True) -> None:
        """Answer nothing from now on; without memory, what runs is ended."""
        if not keep_memory and self.sleeps:
            return
        self.check()
        if not keep_memory:
            self._stop_all(True)
        self.sleeps, self._state = not keep_memory, SandboxState.PAUSED

    async def expose(self, port: int) -> Address:
        """Refuse: nothing listens inside."""
        check_port(port)
        raise unsupported("nothing listens in a fake sandbox", capability="expose")

    async def resume(self) -> None:
        """Answer again."""
        if self._death is not None:
            raise dead_error(self._id, self._death)
        if self._state is SandboxState.PAUSED:
            self.sleeps, self._state = False, SandboxState.READY

    async def kill(self, reason: DeathReason = DeathReason.RELEASED) -> Death:
        """End it."""
        await self._provider.faults.reach("kill")
        return self.end(reason)
