"""The controller's end of one scoring process.

Decides nothing: starts the process, sends a job, reads the answer, kills. Deadlines are the pool's.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
from typing import Any, Protocol

import msgspec

from rollmill.environments.frames import HEADER_BYTES, Job, Reply, body_bytes, frame
from rollmill.environments.gym_pool import child_environment
from rollmill.environments.scoring import ScorerSpec
from rollmill.errors import ScoringFault

_OUTPUT_KEPT_BYTES = 64 * 1024
_REAP_LIMIT_S = 5.0


class ScorerRefused(ScoringFault):
    """The scorer cannot be built: it is not there, or raised at once."""


class Judge(Protocol):
    """One slot's scorer, as the pool sees it."""

    async def ready(self) -> None:
        """Return when the scorer is built.

        Raises:
            ScorerRefused: if it cannot be built.
            ScoringFault: kind `died`, if the process ended.
        """
        ...

    async def ask(self, text: str, *, reference: dict[str, Any]) -> float | None:
        """Return the score, `None` where the scorer returned no number.

        Raises:
            ScoringFault: kind `raised` or `died`.

        Cancellation:
            leaves the judge in the middle of a job; it must be killed.
        """
        ...

    async def kill(self) -> None:
        """End the judge and whatever it started; idempotent.

        Raises:
            ScoringFault: kind `died`, if the process does not end.
        """
        ...

    def alive(self) -> bool:
        """Return whether it can still answer."""
        ...


class ScoreProcess:
    """A scoring process with its socket.

    It leads its own process group: Ctrl-C in the terminal does not reach it, and killing the group also ends what a
    scorer started. Made by the constructor without waiting, so that a cancelled caller cannot lose a process.
    """

    def __init__(self, spec: ScorerSpec) -> None:
        self._link, child = socket.socketpair()
        self._link.setblocking(False)
        # Append mode, so that truncating it also moves the child's end. Open for the life of the process.
        self._output = tempfile.TemporaryFile("a+b")  # noqa: SIM115
        try:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-P",
                    "-m",
                    "rollmill.environments.score_worker",
                    str(child.fileno()),
                    str(os.getpid()),
                ],
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=self._output,
                pass_fds=(child.fileno(),),
                start_new_session=True,
                env={**os.environ, **child_environment()},
            )
        except OSError:
            self._link.close()
            self._output.close()
            raise
        finally:
            child.close()
        self._spec = spec
        self._jobs = 0
        self._is_ready = False
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    @property
    def pid(self) -> int:
        """Process id, also after its death."""
        return self._process.pid

    def alive(self) -> bool:
        """Return whether the process runs."""
        return self._process.poll() is None

    async def ready(self) -> None:
        """Return when the scorer is built; see `Judge.ready`."""
        if self._is_ready:
            return
        reply = await self._exchange(frame(self._spec))
        if reply.kind != "ready":
            raise ScorerRefused(f"the scorer {self._spec.name!r} cannot be built: {reply.text}", kind="died")
        self._is_ready = True

    async def ask(self, text: str, *, reference: dict[str, Any]) -> float | None:
        """Return the score; see `Judge.ask`."""
        self._jobs += 1
        reply = await self._exchange(frame(Job(number=self._jobs, text=text, reference=reference)))
        if reply.number != self._jobs:
            raise ScoringFault(
                f"job {self._jobs} was answered with {reply.number}; the stream is out of step", kind="died"
            )
        self._trim_output()
        if reply.kind == "raised":
            raise ScoringFault(reply.text, kind="raised")
        return reply.value

    async def kill(self) -> None:
        """Kill the process group and reap the process."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):  # it may have died by itself just now
                os.killpg(self._process.pid, signal.SIGKILL)
        self._close_files()
        try:
            await asyncio.to_thread(self._process.wait, _REAP_LIMIT_S)
        except subprocess.TimeoutExpired as error:
            message = f"scoring process {self.pid} is still there {_REAP_LIMIT_S:g} s after it was killed"
            raise ScoringFault(message, kind="died") from error

    def _close_files(self) -> None:
        if self._streams is not None:
            self._streams[1].transport.abort()
            self._streams = None
        self._link.close()
        self._output.close()

    async def _exchange(self, data: bytes) -> Reply:
        try:
            if self._streams is None:
                self._streams = await asyncio.open_connection(sock=self._link)
            reader, writer = self._streams
            writer.write(data)
            await writer.drain()
            header = await reader.readexactly(HEADER_BYTES)
            return msgspec.msgpack.decode(await reader.readexactly(body_bytes(header)), type=Reply)
        except (OSError, EOFError, ValueError) as error:
            raise ScoringFault(f"the scoring process ended{self._last_words()}", kind="died") from error

    def _last_words(self) -> str:
        if self._output.closed:
            return ""
        size = os.fstat(self._output.fileno()).st_size
        tail = os.pread(self._output.fileno(), 1000, max(0, size - 1000)).decode(errors="replace").strip()
        return f"; its last output was: {tail}" if tail else " without a word"

    def _trim_output(self) -> None:
        if os.fstat(self._output.fileno()).st_size > _OUTPUT_KEPT_BYTES:
            os.ftruncate(self._output.fileno(), 0)
