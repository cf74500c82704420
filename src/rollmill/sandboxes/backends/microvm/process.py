"""The process of one machine: started only when its record is on disk, and seen to its end."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

from rollmill.errors import SandboxError
from rollmill.sandboxes.disk_records import ProcessMark, mark_of

_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class MachineProcess:
    """One process.

    Args:
        words: how it is started, with a launcher that waits for a line on its input.
        inherited: descriptors that it keeps.
        directory: where it runs.
        on_started: called with it before it does anything.
        on_ended: called on the loop when it has ended, with its exit code.

    Raises:
        SandboxError: if no process can be started.
    """

    def __init__(
        self,
        words: Sequence[str],
        *,
        inherited: Sequence[int],
        directory: Path = Path("/"),
        on_started: Callable[[ProcessMark], None],
        on_ended: Callable[[int], None],
    ) -> None:
        # Started from this thread, which is the loop's: the process dies with the thread that starts it.
        try:
            self._process = subprocess.Popen(
                list(words), pass_fds=tuple(inherited), stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL, cwd=directory, env={"LANG": "C.UTF-8", "PATH": _PATH},
            )  # fmt: skip
        except OSError as error:
            raise SandboxError(f"{words[0]} could not be started: {error}") from error
        self._on_ended = on_ended
        self._ended = False
        self._handle = os.pidfd_open(self._process.pid)
        asyncio.get_running_loop().add_reader(self._handle, self._on_end)
        try:
            self._begin(on_started)
        except BaseException:
            self.kill()
            raise

    def _begin(self, on_started: Callable[[ProcessMark], None]) -> None:
        mark = mark_of(self._process.pid)
        if mark is None:
            raise SandboxError("the process of a machine ended as soon as it was started; is there a /bin/sh?")
        on_started(mark)
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(b"go\n")
            self._process.stdin.close()
        except BrokenPipeError as error:
            raise SandboxError("the process of a machine ended before it was told to begin") from error

    def kill(self) -> None:
        """Kill it, without waiting."""
        if not self._ended:
            self._process.kill()

    def _on_end(self) -> None:
        asyncio.get_running_loop().remove_reader(self._handle)
        os.close(self._handle)
        self._ended = True
        self._on_ended(self._process.wait())
