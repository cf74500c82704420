"""Programs of fake sandboxes: functions of a test, and a few that every sandbox has."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping

import msgspec

from rollmill.sandboxes.protocol import check_terminal
from rollmill.sandboxes.records import ExecResult


class FakeCall(msgspec.Struct, frozen=True, kw_only=True):
    """What a program of a fake sandbox gets.

    Attributes:
        argv: program and arguments.
        env: whole environment.
        cwd: directory.
        stdin: reads the next piece of input, empty at its end.
        write: writes to `stdout` or `stderr`.
        files: the sandbox's files, by absolute path.
        terminal: returns rows and columns of its terminal, `None` if it has none.
    """

    argv: tuple[str, ...]
    env: dict[str, str]
    cwd: str
    stdin: Callable[[], Awaitable[bytes]]
    write: Callable[[str, bytes], None]
    files: dict[str, bytes]
    terminal: Callable[[], tuple[int, int] | None] = lambda: None


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


async def _stty(call: FakeCall) -> int:
    if (size := call.terminal()) is None:
        call.write("stderr", b"stty: standard input is no terminal\n")
        return 1
    call.write("stdout", f"{size[0]} {size[1]}\n".encode())
    return 0


async def unknown(call: FakeCall) -> int:
    """Stand for a program that is not there."""
    call.write("stderr", f"{call.argv[0]}: no such program\n".encode())
    return 127


PROGRAMS: Mapping[str, FakeProgram] = {
    "true": _true,
    "false": _false,
    "echo": _echo,
    "cat": _cat,
    "sleep": _sleep,
    "env": _env,
    "pwd": _pwd,
    "yes": _yes,
    "stty": _stty,
}


class FakeProcess:
    """A program of a fake sandbox, as a task."""

    def __init__(
        self,
        pid: int,
        call: FakeCall,
        *,
        cap_bytes: int,
        hard_cap_bytes: int,
        timeout_s: float | None,
        terminal: tuple[int, int] | None = None,
    ) -> None:
        self.pid = pid
        self._kept = {"stdout": bytearray(), "stderr": bytearray()}
        self._produced = {"stdout": 0, "stderr": 0}
        self._chunks: list[tuple[str, bytes]] = []
        self._news = asyncio.Event()
        self._cap_bytes, self._hard_cap_bytes = cap_bytes, hard_cap_bytes
        self._input: asyncio.Queue[bytes] = asyncio.Queue()
        self._terminal = terminal
        self._call = msgspec.structs.replace(
            call, stdin=self._input.get, write=self._write, terminal=lambda: self._terminal
        )
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
        if self._terminal is not None:
            stream, data = "stdout", data.replace(b"\n", b"\r\n")
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

    async def resize(self, rows: int, columns: int) -> None:
        """Change the size of its terminal."""
        check_terminal((rows, columns))
        if self._terminal is not None:
            self._terminal = rows, columns

    async def wait(self) -> ExecResult:
        """Wait for its end."""
        return await asyncio.shield(self.ended)
