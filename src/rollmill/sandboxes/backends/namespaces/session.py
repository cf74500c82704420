"""A shell that stays, as its owner holds it."""

from __future__ import annotations

import asyncio
import signal
from typing import TYPE_CHECKING, Any

from rollmill.errors import SandboxBusy, SandboxError
from rollmill.sandboxes.backends.namespaces.channel import RunningJob
from rollmill.sandboxes.protocol import DEFAULT_OUTPUT_CAP_BYTES, check_line
from rollmill.sandboxes.records import ExecResult

if TYPE_CHECKING:
    from rollmill.sandboxes.backends.namespaces.sandbox import NamespaceSandbox

# What the agent gives the shell to go on after its line was killed, and to die if it does not.
_AFTER_S = 5.0


class NamespaceSession:
    """One session.

    Args:
        sandbox: whose.
        number: what its agent calls it.
    """

    def __init__(self, sandbox: NamespaceSandbox, number: int) -> None:
        self._sandbox = sandbox
        self._channel = sandbox.channel
        self._number = number
        self._alive = True
        self._running: RunningJob | None = None

    @property
    def alive(self) -> bool:
        """Return whether its shell goes on, as far as the last line told."""
        return self._alive and self._channel is self._sandbox.channel and self._sandbox.death is None

    async def run(
        self, line: str, *, timeout_s: float | None = None, output_cap_bytes: int = DEFAULT_OUTPUT_CAP_BYTES
    ) -> ExecResult:
        """Run a line."""
        limits = self._sandbox.spec.limits
        timeout_s = limits.exec_s if timeout_s is None else timeout_s
        check_line(line, timeout_s=timeout_s, output_cap_bytes=output_cap_bytes)
        await self._sandbox.awake()
        if not self.alive:
            raise SandboxError("the session has ended: its shell is gone, or was; open another session")
        if self._running is not None:
            raise SandboxBusy("a line of this session runs already; a session runs one at a time, so open another one")
        head: dict[str, Any] = {
            "op": "line",
            "session": self._number,
            "timeout_s": timeout_s,
            "cap": output_cap_bytes,
            "hard_cap": limits.output_bytes,
        }
        job = self._running = self._channel.begin(head, line.encode("utf-8", "surrogateescape"))
        job.ended.add_done_callback(lambda _: self._over(job))
        try:
            return await self._sandbox.answered(asyncio.shield(job.ended), also_s=timeout_s + _AFTER_S)
        except asyncio.CancelledError:
            self._channel.tell(job, {"op": "signal", "signal": int(signal.SIGKILL)})
            raise

    def _over(self, job: RunningJob) -> None:
        self._running = None
        if job.ended.cancelled() or job.ended.exception() is not None or not job.goes_on:
            self._alive = False

    async def interrupt(self) -> None:
        """Send SIGINT to what the running line has started."""
        if self._running is not None:
            self._channel.tell(self._running, {"op": "signal", "signal": int(signal.SIGINT)})

    async def close(self) -> None:
        """End the shell and what its lines have started."""
        if self.alive:
            await self._sandbox.awake()
        if self.alive:
            await self._sandbox.answered(self._channel.ask({"op": "close", "session": self._number}))
        self._alive = False
