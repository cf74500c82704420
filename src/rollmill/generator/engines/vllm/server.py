"""The vLLM server as a child process: started, waited for, read of its errors, ended.

Its own process group; the kernel ends it with this process (with the thread that started it, on Linux: start it from
one that lives as long as the engine). Listens on a Unix socket in a folder that only this user can enter, because its
control routes ask nobody who they are. Decides nothing about requests.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from rollmill.clock import Clock
from rollmill.errors import ConfigError, DeadlineExceeded, EngineDead

SERVER_SIDE = Path(__file__).parent / "server_side"
_PLUGIN = "rollmill_vllm_plugin"
_LONGEST_SOCKET_PATH = 100
"""The kernel takes 107 bytes."""
_LOOK_EVERY_S = 0.2
_LOG_TAIL_BYTES = 4000


class Server(Protocol):
    """A server as its watch and its engine see it."""

    @property
    def pid(self) -> int:
        """Its process."""
        ...

    @property
    def socket(self) -> Path:
        """The Unix socket that it listens on."""
        ...

    @property
    def ends(self) -> int:
        """A file descriptor that can be read once it has ended."""
        ...

    @property
    def exit_code(self) -> int | None:
        """How it ended, or `None` while it runs."""
        ...

    def last_words(self) -> str:
        """Return in a sentence that it ended, and its first error."""
        ...

    def stop(self, *, grace_s: float) -> None:
        """End it and its children, and remove what is its own; idempotent."""
        ...


def listens(server: Server) -> bool:
    """Return whether anybody listens on its socket; an HTTP client would leave each refused connection open."""
    with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as probe:
        try:
            probe.connect(str(server.socket))
        except OSError:  # not made yet, or closed
            return False
        return True


class ServerFolder:
    """A folder of one server: its socket, the plugin on its path, and its log if nobody gave a place for it."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="rollmill-vllm-"))
        self.socket = self.path / "socket"
        self.plugin = self.path / "plugin"
        if len(os.fsencode(self.socket)) > _LONGEST_SOCKET_PATH:
            shutil.rmtree(self.path)
            raise ConfigError(
                f"the folder for temporary files, {self.path.parent}, has so long a path that no socket can be made "
                "in it. Set TMPDIR to a shorter one."
            )
        write_plugin(self.plugin, entry_point="rollmill_file")

    def remove(self) -> None:
        """Remove it; idempotent."""
        shutil.rmtree(self.path, ignore_errors=True)


def write_plugin(folder: Path, *, entry_point: str) -> None:
    """Make a folder that, put on the server's path, holds the plugin as an installed distribution would."""
    information = folder / f"{_PLUGIN}-1.0.dist-info"
    information.mkdir(parents=True)
    shutil.copyfile(SERVER_SIDE / f"{_PLUGIN}.py", folder / f"{_PLUGIN}.py")
    name = _PLUGIN.replace("_", "-")
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n", encoding="utf-8")
    (information / "entry_points.txt").write_text(
        f"[vllm.general_plugins]\n{entry_point} = {_PLUGIN}:register\n", encoding="utf-8"
    )


class ServerProcess:
    """A running server.

    Args:
        python: interpreter of its environment.
        arguments: of the server.
        environment: its variables, whole.
        folder: its own; removed when it is stopped.
        log: file for what it prints; in its folder if `None`.
    """

    def __init__(
        self,
        *,
        python: Path,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        folder: ServerFolder,
        log: Path | None = None,
    ) -> None:
        self.log = log = folder.path / "server.log" if log is None else log
        self.socket = folder.socket
        self._folder = folder
        command = [str(python), str(SERVER_SIDE / "launch.py"), str(os.getpid()), *arguments]
        try:
            with log.open("wb") as output:
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
                f"the vLLM server cannot be started with {python}: {error.strerror or error}. Make its environment "
                "with `rollmill engine install vllm`, or set generator.vllm.python."
            ) from error
        self.pid = self._process.pid
        self.ends = os.pidfd_open(self.pid)
        self._stopped = False

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
                    f"the vLLM server was not ready after {waited_s:.0f} s (generator.vllm.start_deadline_s "
                    f"{deadline_s:g}). The end of its log, {self.log}: {self.log_tail()}"
                )
            with contextlib.suppress(subprocess.TimeoutExpired):  # the usual case: it lives
                self._process.wait(_LOOK_EVERY_S)

    def last_words(self) -> str:
        """Return in a sentence that it ended, and its first error."""
        code = self.exit_code
        how = "runs no more" if code is None else f"was killed by signal {-code}" if code < 0 else f"ended with {code}"
        error = first_error(self._read_log()) or f"its log ends with: {self.log_tail()}"
        return f"the vLLM server (pid {self.pid}) {how}; first error in {self.log}: {error}"

    def log_tail(self) -> str:
        """Return the end of its log."""
        return self._read_log()[-_LOG_TAIL_BYTES // 4 :].strip() or "(empty)"

    def _read_log(self) -> str:
        try:
            return self.log.read_text(encoding="utf-8", errors="replace")
        except OSError as error:
            return f"(the log cannot be read: {error})"

    def stop(self, *, grace_s: float) -> None:
        """End it and its children: politely, then not. Blocks for `grace_s` and the kernel's time; idempotent."""
        if self._stopped:
            return
        if self.exit_code is None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):  # killed below
                self._process.wait(grace_s)
        # Its own children share its group, also when it is gone already.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()
        self._stopped = True
        os.close(self.ends)
        self._folder.remove()


_ERROR = re.compile(r"\b(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt|Killed)\b(?::.*)?$")
_PREFIX = re.compile(r"^\([^)]*\)\s*")
_LEVEL = re.compile(r"^ERROR \S+ \S+ \[[^\]]*\]\s?")


def first_error(log: str) -> str | None:
    """Return the first exception that a server's log tells of, or `None`.

    The first is the cause; what follows is how others took it.

    Example:
        >>> first_error("INFO all is well\\nERROR 11-30 09:00:00 [core.py:1] ValueError: no room\\nOSError: later")
        'ValueError: no room'
    """
    for line in log.splitlines():
        text = _LEVEL.sub("", _PREFIX.sub("", line.strip())).strip()
        if text.startswith(("INFO", "WARNING", "DEBUG")):
            continue
        found = _ERROR.match(text)
        if found is not None:
            return found.group(0)[:600]
    return None
