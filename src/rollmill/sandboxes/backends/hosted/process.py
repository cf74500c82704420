"""A program in a hosted sandbox, as its caller sees it: output caps, the timeout, and what its end means.

The vendor starts it and sends its output; who kills it, when, and under which name is decided here, the same for all.
"""

from __future__ import annotations

import asyncio
import logging
import signal as signals
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any

from rollmill.errors import DeadlineExceeded, RollmillError, SandboxDead
from rollmill.sandboxes.backends.hosted.driver import Command, Exit, Lost, Running
from rollmill.sandboxes.backends.hosted.streams import feed
from rollmill.sandboxes.protocol import check_terminal
from rollmill.sandboxes.records import ExecResult

_SHELL_SIGNAL_BASE = 128
_KILLED = (-int(signals.SIGKILL), _SHELL_SIGNAL_BASE + int(signals.SIGKILL))
_log = logging.getLogger(__name__)


def exit_code_of(code: int, *, sent: int) -> int:
    """Return an exit code in the form of `ExecResult`: negative for the signal that ended a program.

    Most vendors report a signal as a shell does, by 128 and its number, which a program can also exit with by itself.
    It is taken for the signal where that one was sent.

    Args:
        code: as reported.
        sent: the last signal that was sent, 0 if none was.

    Example:
        >>> exit_code_of(137, sent=9), exit_code_of(137, sent=0), exit_code_of(-11, sent=0), exit_code_of(1, sent=9)
        (-9, 137, -11, 1)
    """
    return -sent if sent and code == _SHELL_SIGNAL_BASE + sent else code


class HostedProcess:
    """A program that runs.

    Args:
        running: as the vendor's adapter started it.
        command: what was started.
        cap_bytes: kept of each stream.
        started_s: of the loop's clock, when the vendor was asked to start it.
        answer_s: how late the vendor may be with the end of a program that was killed.
        spawn: starts a task that the sandbox holds.
        explain: returns what a lost connection or sandbox means.
    """

    def __init__(
        self,
        running: Running,
        command: Command,
        *,
        cap_bytes: int,
        started_s: float,
        answer_s: float,
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
        explain: Callable[[RollmillError], Awaitable[Exception]],
    ) -> None:
        self._running = running
        self._command = command
        self._cap_bytes = cap_bytes
        self._answer_s = answer_s
        self._spawn = spawn
        self._explain = explain
        self._loop = asyncio.get_running_loop()
        self._started_s = started_s
        self._kept = {"stdout": bytearray(), "stderr": bytearray()}
        self._produced = {"stdout": 0, "stderr": 0}
        self._chunks: list[tuple[str, bytes]] = []
        self._news = asyncio.Event()
        self._killed_by, self._sent = "", 0
        self._timers: list[asyncio.TimerHandle] = []
        self.ended: asyncio.Future[ExecResult] = self._loop.create_future()
        # Whoever does not wait for it need not hear of its failure a second time, from the loop.
        self.ended.add_done_callback(lambda future: None if future.cancelled() else future.exception())
        if command.timeout_s is not None:
            self._timers.append(self._loop.call_at(started_s + command.timeout_s, self.kill, "timeout"))
        self._pump = spawn(self._follow())
        if command.stdin is not None:
            spawn(feed(running, command.stdin))

    @property
    def pid(self) -> int:
        """Return its process id inside."""
        return self._running.pid

    async def output(self) -> AsyncIterator[tuple[str, bytes]]:
        """Yield output as it comes, until its end or that of its sandbox."""
        while True:
            while self._chunks:
                yield self._chunks.pop(0)
            if self.ended.done():
                return
            self._news.clear()
            await self._news.wait()

    async def write_stdin(self, data: bytes) -> None:
        """Give it input."""
        if data and not self.ended.done():
            await self._running.send(data)

    async def close_stdin(self) -> None:
        """End its input."""
        if not self.ended.done():
            await self._running.end_input()

    async def signal(self, number: int) -> None:
        """Send a signal to its process group."""
        if self.ended.done():
            return
        if number == signals.SIGKILL:
            self.kill("owner")
            return
        self._sent = int(number)
        await self._running.signal(int(number))

    async def resize(self, rows: int, columns: int) -> None:
        """Change the size of its terminal; nothing happens if it has none."""
        check_terminal((rows, columns))
        if self._command.pty is not None and not self.ended.done():
            await self._running.resize(rows, columns)

    async def wait(self) -> ExecResult:
        """Wait for its end; its timeout, or the sandbox's wall limit, bounds the wait."""
        return await asyncio.shield(self.ended)

    def kill(self, reason: str) -> None:
        """Kill it; the first reason stands."""
        if self._killed_by or self.ended.done():
            return
        self._killed_by, self._sent = reason, int(signals.SIGKILL)
        self._spawn(self._send_kill())
        self._timers.append(self._loop.call_later(self._answer_s, self._give_up))

    def fail(self, error: Exception) -> None:
        """End it with an error: its sandbox ended, or nobody can say how it went on."""
        if not self.ended.done():
            self.ended.set_exception(error)
        if self._pump is not asyncio.current_task():
            self._pump.cancel()
            self._spawn(self._close_after(self._pump))
        self._stop()

    async def _close_after(self, pump: asyncio.Task[None]) -> None:
        """Close the connection, also of a pump that was cancelled before it ran at all."""
        await asyncio.gather(pump, return_exceptions=True)
        await self._let_go()

    async def _send_kill(self) -> None:
        try:
            await self._running.signal(int(signals.SIGKILL))
        except RollmillError as error:
            self.fail(await self._explain(error))

    def _give_up(self) -> None:
        self.fail(
            DeadlineExceeded(
                f"{self._command.argv[0]} was killed ({self._killed_by}) and its end was not reported within "
                f"{self._answer_s:g} s. It may still run; raise answer_s if the service is slow, or end the sandbox."
            )
        )

    async def _follow(self) -> None:
        try:
            async for event in self._running.events():
                if isinstance(event, Exit):
                    if not await self._fell_with_its_sandbox(event):
                        self._finish(event)
                    return
                self._take(event.stream, event.data, event.skipped)
        except RollmillError as error:
            self.fail(await self._explain(error))
        finally:
            await self._let_go()

    async def _fell_with_its_sandbox(self, end: Exit) -> bool:
        """Return whether a program that nobody here killed was killed because its sandbox ended; then it has failed."""
        if self._killed_by or end.code not in _KILLED:
            return False
        error = await self._explain(Lost(f"{self._command.argv[0]} was killed by somebody else"))
        if isinstance(error, SandboxDead):
            self.fail(error)
        return isinstance(error, SandboxDead)

    async def _let_go(self) -> None:
        try:
            await self._running.close()
        except RollmillError as error:  # its end is known, and what is left goes with the sandbox
            _log.debug("what a program left could not be removed: %s", error)

    def _take(self, stream: str, data: bytes, skipped: int) -> None:
        self._produced[stream] += len(data) + skipped
        kept = self._kept[stream]
        data = data[: max(0, self._cap_bytes - len(kept))]
        if data:
            kept += data
            self._chunks.append((stream, data))
            self._news.set()
        if sum(self._produced.values()) > self._command.most_bytes:
            self.kill("output")

    def _finish(self, end: Exit) -> None:
        if end.flooded and not self._killed_by:
            self._killed_by, self._sent = "output", int(signals.SIGKILL)
        code = exit_code_of(end.code, sent=self._sent)
        # One that ended by itself just before the kill arrived was not killed.
        killed = code == -signals.SIGKILL or end.flooded
        if not self.ended.done():
            self.ended.set_result(
                ExecResult(
                    exit_code=-int(signals.SIGKILL) if end.flooded else code,
                    stdout=bytes(self._kept["stdout"]),
                    stderr=bytes(self._kept["stderr"]),
                    killed_by=self._killed_by if killed else "",
                    stdout_bytes=self._produced["stdout"],
                    stderr_bytes=self._produced["stderr"],
                    wall_s=self._loop.time() - self._started_s,
                )
            )
        self._stop()

    def _stop(self) -> None:
        for timer in self._timers:
            timer.cancel()
        self._news.set()
