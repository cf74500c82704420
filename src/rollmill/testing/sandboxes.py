"""A sandbox provider without processes: files in a dictionary, a few programs, time from the loop, failures by script.

It keeps the rules of `rollmill.sandboxes.protocol` (the contract suite runs against it). Its sandboxes isolate nothing:
they run nothing but functions that a test gave.
"""

from __future__ import annotations

import asyncio
import itertools
import os.path
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence

import msgspec

from rollmill.errors import (
    CreateUnknown,
    ImageError,
    SandboxDead,
    SandboxError,
    SandboxExhausted,
    SandboxFileError,
    SandboxIdInUse,
    SandboxUnsupported,
)
from rollmill.sandboxes.disk_records import check_id
from rollmill.sandboxes.isolation import IsolationLevel, Protection, level_of, require
from rollmill.sandboxes.lifecycle import dead_error, death
from rollmill.sandboxes.protocol import DEFAULT_OUTPUT_CAP_BYTES, DEFAULT_READ_BYTES, check_call
from rollmill.sandboxes.records import (
    Capabilities,
    Death,
    DeathReason,
    DirectoryImage,
    ExecResult,
    FileInfo,
    Image,
    Lease,
    SandboxSpec,
    SandboxState,
    SandboxStatus,
    Usage,
)
from rollmill.testing.faults import FaultInjector

_HOME = "/root"
_DEFAULT_PROTECTIONS = frozenset(Protection) - {Protection.OWN_KERNEL, Protection.VIRTUAL_MACHINE}


class FakeCall(msgspec.Struct, frozen=True, kw_only=True):
    """What a program of a fake sandbox gets.

    Attributes:
        argv: program and arguments.
        env: whole environment.
        cwd: directory.
        stdin: reads the next piece of input, empty at its end.
        write: writes to `stdout` or `stderr`.
        files: the sandbox's files, by absolute path.
    """

    argv: tuple[str, ...]
    env: dict[str, str]
    cwd: str
    stdin: Callable[[], Awaitable[bytes]]
    write: Callable[[str, bytes], None]
    files: dict[str, bytes]


FakeProgram = Callable[[FakeCall], Awaitable[int]]


async def _true(_: FakeCall) -> int:
    return 0


async def _false(_: FakeCall) -> int:
    return 1


async def _echo(call: FakeCall) -> int:
    call.write("stdout", " ".join(call.argv[1:]).encode() + b"\n")
    return 0


async def _cat(call: FakeCall) -> int:
    for path in call.argv[1:]:
        if path not in call.files:
            call.write("stderr", f"cat: {path}: No such file or directory\n".encode())
            return 1
        call.write("stdout", call.files[path])
    while len(call.argv) == 1 and (data := await call.stdin()):
        call.write("stdout", data)
    return 0


async def _sleep(call: FakeCall) -> int:
    await asyncio.sleep(float(call.argv[1]))
    return 0


async def _env(call: FakeCall) -> int:
    call.write("stdout", "".join(f"{name}={value}\n" for name, value in call.env.items()).encode())
    return 0


async def _pwd(call: FakeCall) -> int:
    call.write("stdout", call.cwd.encode() + b"\n")
    return 0


async def _yes(call: FakeCall) -> int:
    while True:
        call.write("stdout", b"y\n" * 4096)
        await asyncio.sleep(0)


PROGRAMS: Mapping[str, FakeProgram] = {
    "true": _true,
    "false": _false,
    "echo": _echo,
    "cat": _cat,
    "sleep": _sleep,
    "env": _env,
    "pwd": _pwd,
    "yes": _yes,
}


class FakeProcess:
    """A program of a fake sandbox, as a task."""

    def __init__(
        self, pid: int, call: FakeCall, *, cap_bytes: int, hard_cap_bytes: int, timeout_s: float | None
    ) -> None:
        self.pid = pid
        self._kept = {"stdout": bytearray(), "stderr": bytearray()}
        self._produced = {"stdout": 0, "stderr": 0}
        self._chunks: list[tuple[str, bytes]] = []
        self._news = asyncio.Event()
        self._cap_bytes, self._hard_cap_bytes = cap_bytes, hard_cap_bytes
        self._input: asyncio.Queue[bytes] = asyncio.Queue()
        self._call = msgspec.structs.replace(call, stdin=self._input.get, write=self._write)
        self._killed_by, self._signal = "", 0
        self._task: asyncio.Task[int] | None = None
        self._loop = asyncio.get_running_loop()
        self._started_s = self._loop.time()
        self._timer = None if timeout_s is None else self._loop.call_later(timeout_s, self.kill, "timeout")
        self.ended: asyncio.Future[ExecResult] = self._loop.create_future()
        self.ended.add_done_callback(lambda future: None if future.cancelled() else future.exception())

    def run(self, program: FakeProgram) -> None:
        """Begin."""
        self._task = asyncio.ensure_future(program(self._call))
        self._task.add_done_callback(self._done)

    def _write(self, stream: str, data: bytes) -> None:
        self._produced[stream] += len(data)
        kept = self._kept[stream]
        data = data[: max(0, self._cap_bytes - len(kept))]
        kept += data
        if data:
            self._chunks.append((stream, data))
            self._news.set()
        if sum(self._produced.values()) > self._hard_cap_bytes:
            self.kill("output")

    def kill(self, reason: str, *, signal: int = 9) -> None:
        """End it by a signal; the first one stands."""
        if self._task is not None and not self._task.done() and not self._signal:
            self._killed_by, self._signal = reason, signal
            self._task.cancel()

    def fail(self, error: Exception) -> None:
        """End it with its sandbox."""
        if not self.ended.done():
            self.ended.set_exception(error)
        self.kill("owner")
        self._news.set()

    def _done(self, task: asyncio.Task[int]) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self.ended.done():
            return
        if not task.cancelled() and (error := task.exception()) is not None:
            self.ended.set_exception(error)
        else:
            self.ended.set_result(
                ExecResult(
                    exit_code=-self._signal if task.cancelled() else task.result(),
                    stdout=bytes(self._kept["stdout"]),
                    stderr=bytes(self._kept["stderr"]),
                    killed_by=self._killed_by,
                    stdout_bytes=self._produced["stdout"],
                    stderr_bytes=self._produced["stderr"],
                    wall_s=self._loop.time() - self._started_s,
                )
            )
        self._news.set()

    async def output(self) -> AsyncIterator[tuple[str, bytes]]:
        """Yield output until its end."""
        while True:
            while self._chunks:
                yield self._chunks.pop(0)
            if self.ended.done():
                return
            self._news.clear()
            await self._news.wait()

    async def write_stdin(self, data: bytes) -> None:
        """Give it input."""
        if data:
            self._input.put_nowait(data)

    async def close_stdin(self) -> None:
        """End its input."""
        self._input.put_nowait(b"")

    async def signal(self, number: int) -> None:
        """End it by a signal: programs here catch none."""
        self.kill("owner" if number == 9 else "", signal=number)

    async def wait(self) -> ExecResult:
        """Wait for its end."""
        return await asyncio.shield(self.ended)


class FakeSandbox:
    """One sandbox of a `FakeSandboxProvider`."""

    def __init__(
        self, provider: FakeSandboxProvider, sandbox_id: str, spec: SandboxSpec, labels: Mapping[str, str]
    ) -> None:
        self._provider = provider
        self._id = sandbox_id
        self.spec = spec
        self.labels = dict(labels)
        self.files: dict[str, bytes] = {}
        self._modes: dict[str, int] = {}
        self._directories = {"/", "/tmp", "/root", "/workspace"}
        self._state = SandboxState.STARTING
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

    def _check(self) -> None:
        if self._death is not None:
            raise dead_error(self._id, self._death)
        if self._state is SandboxState.PAUSED:
            raise SandboxError(f"sandbox {self._id} is paused and answers nothing; resume it first")

    async def _begin(
        self,
        argv: Sequence[str],
        *,
        cwd: str | None,
        env: Mapping[str, str] | None,
        user: str | None,
        timeout_s: float | None,
        cap_bytes: int,
    ) -> FakeProcess:
        await self._provider.faults.reach("exec")
        self._check()
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
            next(self._pids), call, cap_bytes=cap_bytes, hard_cap_bytes=hard_cap_bytes, timeout_s=timeout_s
        )
        self._running.add(process)
        process.ended.add_done_callback(lambda _: self._running.discard(process))
        process.run(self._provider.programs.get(argv[0], _unknown))
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
        process = await self._begin(argv, cwd=cwd, env=env, user=user, timeout_s=timeout_s, cap_bytes=output_cap_bytes)
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
    ) -> FakeProcess:
        """Start a program and let it run."""
        return await self._begin(argv, cwd=cwd, env=env, user=user, timeout_s=timeout_s, cap_bytes=output_cap_bytes)

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
        _absolute(path)
        self._check()
        if path not in self.files:
            found = "is a directory" if path in self._directories else "is missing"
            raise SandboxFileError(f"{path} {found}")
        if len(self.files[path]) > max_bytes:
            raise SandboxFileError(f"{path} holds more than {max_bytes} bytes")
        return self.files[path]

    async def write(self, path: str, data: bytes, *, mode: int = 0o644, user: str | None = None) -> None:
        """Write a file, and make the directories above it."""
        await self._provider.faults.reach("write")
        _absolute(path)
        self._check()
        if path in self._directories:
            raise SandboxFileError(f"{path} is a directory")
        parents = {parent for parent in _parents(path) if parent not in self._directories}
        inodes = len(self.files) + len(self._directories | parents) + (path not in self.files)
        size = sum(map(len, self.files.values())) - len(self.files.get(path, b"")) + len(data)
        limits = self.spec.limits
        if inodes > limits.inodes or size > limits.disk_bytes:
            raise SandboxExhausted(
                f"no room for {path}: {inodes} of {limits.inodes} inodes, {size} of {limits.disk_bytes} bytes"
            )
        self._directories |= parents
        self.files[path] = data
        self._modes[path] = mode

    async def list_dir(self, path: str) -> tuple[FileInfo, ...]:
        """Return a directory's entries by name."""
        _absolute(path)
        self._check()
        if path not in self._directories:
            raise SandboxFileError(f"{path} is missing or no directory")
        kinds = {**dict.fromkeys(self._directories - {"/"}, "directory"), **dict.fromkeys(self.files, "file")}
        inside = {one: kind for one, kind in kinds.items() if os.path.dirname(one) == path}
        return tuple(
            FileInfo(
                name=os.path.basename(one),
                kind=kind,
                size_bytes=len(self.files.get(one, b"")),
                mode=self._modes.get(one, 0o755),
                modified_s=0.0,
            )
            for one, kind in sorted(inside.items())
        )

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
            disk_bytes=sum(map(len, self.files.values())),
            inodes=len(self.files) + len(self._directories),
            processes=len(self._running) + 1,
        )

    async def pause(self) -> None:
        """Answer nothing from now on."""
        self._check()
        self._state = SandboxState.PAUSED

    async def resume(self) -> None:
        """Answer again."""
        if self._death is not None:
            raise dead_error(self._id, self._death)
        if self._state is SandboxState.PAUSED:
            self._state = SandboxState.READY

    async def kill(self, reason: DeathReason = DeathReason.RELEASED) -> Death:
        """End it."""
        await self._provider.faults.reach("kill")
        return self.end(reason)


async def _unknown(call: FakeCall) -> int:
    call.write("stderr", f"{call.argv[0]}: no such program\n".encode())
    return 127


def _absolute(path: str) -> None:
    if not path.startswith("/") or "\0" in path:
        raise SandboxFileError(f"{path!r} is no absolute path inside the sandbox")


def _parents(path: str) -> list[str]:
    found = []
    while path != "/":
        path = os.path.dirname(path)
        found.append(path)
    return found


class FakeSandboxProvider:
    """A provider for tests.

    Args:
        programs: added to a few that a sandbox has: true, false, echo, cat, sleep, env, pwd, yes.
        start_s: of the loop's time, from `create` until a sandbox answers.
        protections: what its sandboxes claim to have.
        minimum_isolation: below it `create` refuses.
        faults: strikes `create`, `exec`, `read`, `write` and `kill`. A `create` that is struck by `CreateUnknown` has
            made its sandbox, as it happens to real ones.

    Example:
        >>> from rollmill.testing import run_virtual
        >>> async def hello() -> bytes:
        ...     provider = FakeSandboxProvider(start_s=600.0)
        ...     sandbox = await provider.create(SandboxSpec(), id="a", lease=Lease(owner="me", ttl_s=7200.0))
        ...     return (await sandbox.exec(["echo", "hello"])).stdout
        >>> run_virtual(hello())
        b'hello\\n'
    """

    def __init__(
        self,
        *,
        programs: Mapping[str, FakeProgram] | None = None,
        start_s: float = 0.0,
        protections: frozenset[Protection] = _DEFAULT_PROTECTIONS,
        minimum_isolation: IsolationLevel = IsolationLevel.NONE,
        faults: FaultInjector | None = None,
    ) -> None:
        self.programs = {**PROGRAMS, **(programs or {})}
        self.protections = protections
        self.faults = FaultInjector({}) if faults is None else faults
        self._start_s = start_s
        self._minimum = minimum_isolation
        self._alive: dict[str, FakeSandbox] = {}
        self._ends: dict[str, SandboxStatus] = {}
        self._closed = False

    def ended(self, sandbox: FakeSandbox) -> None:
        """Note an end."""
        self._alive.pop(sandbox.id, None)
        self._ends[sandbox.id] = sandbox.status()

    async def capabilities(self) -> Capabilities:
        """Return what fakes can do."""
        return Capabilities(
            pause=True,
            extend_ttl=True,
            labels=True,
            idempotent_create=True,
            batch_status=True,
            fast_python="python" in self.programs,
        )

    async def prepare(self, image: Image) -> None:
        """Check an image: directories are taken for made up unless their paths are absolute."""
        if isinstance(image, DirectoryImage) and not (
            image.layers and all(one.startswith("/") for one in image.layers)
        ):
            raise ImageError(f"the layers {list(image.layers)} are no absolute paths of directories")

    async def create(
        self, spec: SandboxSpec, *, id: str, labels: Mapping[str, str] | None = None, lease: Lease
    ) -> FakeSandbox:
        """Start a sandbox."""
        check_id(id)
        if self._closed:
            raise SandboxError("this provider is closed; open another one")
        if (known := self._alive.get(id)) is not None:
            if known.spec != spec:
                raise SandboxIdInUse(f"sandbox {id} lives and has another spec")
            return known
        if id in self._ends:
            raise SandboxIdInUse(f"sandbox {id} has ended; an id names one sandbox for good")
        await self.prepare(spec.image)
        require(self._minimum, self.protections)
        sandbox = FakeSandbox(self, id, spec, labels or {})
        self._alive[id] = sandbox
        await sandbox.renew(lease)
        try:
            await self.faults.reach("create")
            await asyncio.sleep(self._start_s)
        except CreateUnknown:
            sandbox.ready()
            raise
        except BaseException:
            sandbox.end(DeathReason.START_FAILED)
            raise
        if sandbox.death is not None:
            raise dead_error(id, sandbox.death)
        sandbox.ready()
        return sandbox

    async def attach(self, id: str) -> FakeSandbox:
        """Return a sandbox that lives."""
        if (sandbox := self._alive.get(id)) is not None:
            return sandbox
        end = self._ends[id].death if id in self._ends else None
        if end is not None:
            raise dead_error(id, end)
        reason = DeathReason.PROVIDER_LOST.value
        raise SandboxDead(f"sandbox {id} is not known to this provider", reason=reason, fault="infrastructure")

    async def list(
        self, *, labels: Mapping[str, str] | None = None, state: SandboxState | None = None
    ) -> tuple[SandboxStatus, ...]:
        """Return those that live, and ends."""
        wanted = dict(labels or {}).items()
        found = (*self._ends.values(), *(one.status() for one in self._alive.values()))
        return tuple(one for one in found if wanted <= dict(one.labels).items() and state in (None, one.state))

    async def status(self, ids: Sequence[str]) -> dict[str, SandboxStatus]:
        """Return what is known."""
        found = {one.sandbox_id: one for one in await self.list()}
        return {one: found[one] for one in ids if one in found}

    async def kill(self, ids: Sequence[str], *, reason: DeathReason = DeathReason.RELEASED) -> None:
        """End these."""
        for one in ids:
            if one in self._alive:
                await self._alive[one].kill(reason)

    def lose(self, *, detail: str = "the provider is gone") -> None:
        """Lose every sandbox at once, as when a node fails."""
        for sandbox in list(self._alive.values()):
            sandbox.end(DeathReason.PROVIDER_LOST, detail=detail)

    async def close(self) -> None:
        """End every sandbox."""
        self._closed = True
        await self.kill(list(self._alive))
