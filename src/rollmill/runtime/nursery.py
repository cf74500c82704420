"""A process that imports torch and the model classes once; trainer and replicas are forked from it. The parent's side.

    waits for                             woken by    gives up after
    which processes to start (nursery)    its socket  - (it dies with the supervisor)
    the processes started (supervisor)    its socket  NURSERY_DEADLINE_S, then it starts them itself

It lives only while a run starts: it is there before the configuration is read, forks once it has imported and knows
whom, and ends. What it forked is a child of the supervisor like any other, with its own session, log and command line,
and dies with the supervisor; a process that is started again later is not forked. Decides nothing about the run, and
imports little, because everything waits for it. Its other side is `rollmill.runtime.nursery_process`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import IO

import msgspec

from rollmill.runtime.handles import Forked
from rollmill.runtime.parent import PARENT_VARIABLE, adopt_orphans
from rollmill.runtime.threads import process_environment

NURSERY_DEADLINE_S = 60.0
"""Longest wait for the forks; imports take 2 s, on a machine with much other work some times that."""
TITLE_BYTES = 1024
"""Room for the command line of a forked process; a longer one is cut."""


class Birth(msgspec.Struct, frozen=True, kw_only=True):
    """A process to be forked.

    Attributes:
        command: what `ps` shall show.
        arguments: of `rollmill.runtime.process`.
        environment: variables that differ from the nursery's.
        log: file that its output goes to.
        threads: of torch.
    """

    name: str
    command: list[str]
    arguments: list[str]
    environment: dict[str, str]
    log: str
    threads: int


class Nursery:
    """The supervisor's side: start it first, ask it once, take what it forked."""

    def __init__(self, process: subprocess.Popen[bytes], *, channel: socket.socket, output: IO[bytes]) -> None:
        self._process = process
        self._channel = channel
        self._output = output
        self._received = b""

    @classmethod
    def start(cls) -> Nursery:
        """Start importing in a process of its own."""
        ours, theirs = socket.socketpair()
        output = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the nursery
        environment = process_environment(threads=1)
        environment[PARENT_VARIABLE] = str(os.getpid())
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-m", "rollmill.runtime.nursery_process", str(theirs.fileno()), "-" * TITLE_BYTES],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=(theirs.fileno(),),
                # A session of its own, so that a terminal's Ctrl-C reaches the supervisor alone.
                start_new_session=True,
            )
        return cls(process, channel=ours, output=output)

    def __enter__(self) -> Nursery:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def fileno(self) -> int:
        """Readable once the processes are forked, or the nursery has ended."""
        return self._channel.fileno()

    @property
    def pid(self) -> int:
        """Its process, which is there until it has forked."""
        return self._process.pid

    def ask(self, births: Sequence[Birth]) -> None:
        """Have these processes forked as soon as it has imported."""
        # What it forks loses its parent at once and falls to this process.
        adopt_orphans(True)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it has died: `born` says so
            self._channel.sendall(msgspec.json.encode(births) + b"\n")

    def born(self) -> Mapping[str, Forked] | None:
        """Return the processes by name; empty if it failed, `None` if it is not done yet. Never waits."""
        ended = False
        while not ended and not self._received.endswith(b"\n"):
            try:
                part = self._channel.recv(65536, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return None
            except ConnectionResetError:
                part = b""
            self._received += part
            ended = not part
        if not self._received.endswith(b"\n"):
            return {}
        pids = msgspec.json.decode(self._received, type=dict[str, int])
        self._received = b""
        return {name: Forked(pid) for name, pid in pids.items()}

    def output(self) -> str:
        """Return what it wrote: why it failed."""
        self._output.seek(0)
        return self._output.read().decode(errors="replace")

    def close(self, *, grace_s: float = 0.0) -> None:
        """End it, and what it forked if nobody has taken that.

        Args:
            grace_s: time for it to end by itself, once it has forked.
        """
        if self._channel.fileno() < 0:
            return
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(grace_s)
        self._process.kill()
        self._process.wait()
        for forked in (self.born() or {}).values():
            forked.send_signal(signal.SIGKILL)
            forked.wait()
        adopt_orphans(False)
        self._channel.close()
        self._output.close()
