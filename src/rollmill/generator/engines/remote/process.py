"""A server as a child process: started, waited for, read of its errors, ended.

Its own process group; the kernel ends it with this process (with the thread that started it, on Linux: start it from
one that lives as long as the engine). Decides nothing about requests.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from rollmill.clock import Clock
from rollmill.errors import ConfigError, DeadlineExceeded, EngineDead
from rollmill.generator.engines.remote.logs import first_error

_LAUNCHER = Path(__file__).parent / "server_side" / "launch.py"
_LOOK_EVERY_S = 0.2
_LOG_TAIL_CHARACTERS = 1000
_TIDYING_LOOKS, _TIDYING_LOOK_S = 20, 0.05
"""Children that live on after their parent get one second."""


class ServerProcess:
    """A running server, with a folder of its own that only this user can enter.

    Args:
        product: its name in sentences.
        section: its part of the configuration, for messages, as `generator.sglang`.
        python: interpreter of its environment.
        module: that it is started by.
        arguments: of the server.
        environment: its variables, whole.
        folder: its own, made by `folders.own_folder`; removed when it is stopped.
        log: file for what it prints, readable by this user alone, since servers print the key of their callers; in its
            folder if `None`.

    Raises:
        ConfigError: if it cannot be started.
    """

    def __init__(
        self,
        *,
        product: str,
        section: str,
        python: Path,
        module: str,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        folder: Path,
        log: Path | None = None,
    ) -> None:
        self._product = product
        self._section = section
        self._folder = folder
        self.log = folder / "server.log" if log is None else log
        command = [str(python), str(_LAUNCHER), str(os.getpid()), module, *arguments]
        try:
            with _own_file(self.log) as output:
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=dict(environment),
                    process_group=0,
                )
        except OSError as error:
            raise ConfigError(
                f"the {product} server cannot be started with {python}: {error.strerror or error}. Give the "
                f"interpreter of an environment with {product} as {section}.python."
            ) from error
        self.pid = self._process.pid
        self._ends = os.pidfd_open(self.pid)
        self._stopped = False

    @property
    def ends(self) -> int:
        """A file descriptor that can be read once it has ended; closed by `stop`."""
        return self._ends

    @property
    def exit_code(self) -> int | None:
        """How it ended, or `None` while it runs."""
        return self._process.poll()

    def wait_until(self, ready: Callable[[], bool], *, deadline_s: float, clock: Clock) -> None:
        """Return when it is ready.

        Raises:
            EngineDead: if it ends before, with its first error.
            DeadlineExceeded: if it takes too long, with the end of its log.
        """
        started_s = clock.now_s()
        while not ready():
            if self.exit_code is not None:
                raise EngineDead(self.last_words())
            waited_s = clock.now_s() - started_s
            if waited_s > deadline_s:
                raise DeadlineExceeded(
                    f"the {self._product} server was not ready after {waited_s:.0f} s ({self._section}.start_deadline_s"
                    f" {deadline_s:g}). The end of its log, {self.log}: {self._log_tail()}"
                )
            with contextlib.suppress(subprocess.TimeoutExpired):  # the usual case: it lives
                self._process.wait(_LOOK_EVERY_S)

    def last_words(self) -> str:
        """Return in a sentence that it ended, and its first error."""
        code = self.exit_code
        how = "runs no more" if code is None else f"was killed by signal {-code}" if code < 0 else f"ended with {code}"
        error = first_error(self._read_log()) or f"none; it ends with: {self._log_tail()}"
        return f"the {self._product} server (pid {self.pid}) {how}; first error in {self.log}: {error}"

    def stop(self, *, grace_s: float) -> None:
        """End it and its children: politely, then not. Blocks for `grace_s` and two seconds at most; idempotent."""
        if self._stopped:
            return
        self._stopped = True
        if self.exit_code is None:
            self._process.terminate()
            try:
                self._process.wait(grace_s)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._wait_for_its_children()
        # They share its group, also when it is gone already.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()
        self._wait_for_its_children()
        os.close(self._ends)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _wait_for_its_children(self) -> None:
        """Let what watches over its shared memory give that back: killed with the others it would leave it behind.

        What it left behind is reaped where this process adopted it: the time of workers is on this one's account then.
        """
        for _ in range(_TIDYING_LOOKS):
            with contextlib.suppress(ChildProcessError):  # nothing was adopted, or all of it is reaped
                while os.waitpid(-self.pid, os.WNOHANG)[0]:
                    pass
            try:
                os.killpg(self.pid, 0)
            except ProcessLookupError:
                return
            time.sleep(_TIDYING_LOOK_S)

    def _log_tail(self) -> str:
        return self._read_log()[-_LOG_TAIL_CHARACTERS:].strip() or "(empty)"

    def _read_log(self) -> str:
        try:
            return self.log.read_text(encoding="utf-8", errors="replace")
        except OSError as error:
            return f"(the log cannot be read: {error})"


def _own_file(path: Path) -> BinaryIO:
    """Open a file for writing that only this user can read, also where an older one lies."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    os.fchmod(handle, 0o600)
    return os.fdopen(handle, "wb")
