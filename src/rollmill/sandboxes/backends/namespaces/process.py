"""A program that runs in the background of a namespace sandbox, as its owner holds it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from rollmill.sandboxes.backends.namespaces.channel import RunningJob
from rollmill.sandboxes.guest.frames import CHUNK_BYTES
from rollmill.sandboxes.protocol import check_terminal
from rollmill.sandboxes.records import ExecResult

if TYPE_CHECKING:
    from rollmill.sandboxes.backends.namespaces.sandbox import NamespaceSandbox


class NamespaceProcess:
    """A program that runs in the background of a sandbox."""

    def __init__(self, sandbox: NamespaceSandbox, job: RunningJob) -> None:
        self._sandbox = sandbox
        self._job = job

    @property
    def pid(self) -> int:
        """Return its process id inside."""
        return self._job.pid

    async def output(self) -> AsyncIterator[tuple[str, bytes]]:
        """Yield (`stdout` or `stderr`, bytes) as it writes, until its end or the end of its sandbox."""
        while True:
            while self._job.chunks:
                stream, data = self._job.chunks.pop(0)
                yield ("stdout" if stream == 1 else "stderr"), data
            if self._job.ended.done():
                return
            self._job.news.clear()
            await self._job.news.wait()

    async def write_stdin(self, data: bytes) -> None:
        """Give it input."""
        for start in range(0, len(data), CHUNK_BYTES):
            self._sandbox.channel.tell(self._job, {"op": "stdin"}, data[start : start + CHUNK_BYTES])

    async def close_stdin(self) -> None:
        """End its input."""
        self._sandbox.channel.tell(self._job, {"op": "stdin", "end": True})

    async def signal(self, number: int) -> None:
        """Send a signal to its process group; SIGKILL reaches its descendants too."""
        self._sandbox.channel.tell(self._job, {"op": "signal", "signal": int(number)})

    async def resize(self, rows: int, columns: int) -> None:
        """Change the size of its terminal."""
        check_terminal((rows, columns))
        self._sandbox.channel.tell(self._job, {"op": "resize", "terminal": [rows, columns]})

    async def wait(self) -> ExecResult:
        """Wait for its end; its timeout, or the sandbox's wall limit, bounds the wait."""
        return await asyncio.shield(self._job.ended)
