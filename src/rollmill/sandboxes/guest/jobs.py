"""Processes that the agent runs for its owner: how one is started, read, bounded and ended.

A job's output is read until its process ends; what children of it still hold open is then closed, so that a daemon
cannot keep a call waiting. Beyond the cap output is counted and thrown away, and beyond the hard bound the job is
killed.
"""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import signal
import struct
import time
from collections.abc import Iterable
from typing import Any

from rollmill.sandboxes.guest import kernel

READ_BYTES = 128 * 1024
EXTRA_PATH = "/opt/rollmill/bin"
DEFAULT_PATH = f"/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:{EXTRA_PATH}"
NOT_FOUND, NOT_EXECUTABLE = 127, 126
_VICTIM_OOM_SCORE = "500"
_PF_EXITING = 4
_TIOCSCTTY, _TIOCSWINSZ = 0x540E, 0x5414
_RESET_SIGNALS = (signal.SIGCHLD, signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT)


class UserUnknown(LookupError):
    """The sandbox has no such user."""


class User:
    """Ids and home of a user inside."""

    def __init__(self, name: str, uid: int, gid: int, home: str) -> None:
        self.name, self.uid, self.gid, self.home = name, uid, gid, home


def find_user(name: str, *, passwd: str = "/etc/passwd") -> User:
    """Look a user up, by name, `uid` or `uid:gid`.

    Raises:
        UserUnknown: if there is none.
    """
    uid_text, _, gid_text = name.partition(":")
    try:
        with open(passwd, encoding="utf-8", errors="replace") as stream:
            rows = [line.rstrip("\n").split(":") for line in stream]
    except OSError:
        rows = []
    for row in rows:
        if len(row) >= 6 and row[2].isdigit() and row[3].isdigit() and name in (row[0], row[2]):
            return User(row[0], int(row[2]), int(row[3]), row[5] or "/")
    if name == "root":
        return User("root", 0, 0, "/root")
    if uid_text.isdigit() and (not gid_text or gid_text.isdigit()) and int(uid_text) < 65536:
        return User(uid_text, int(uid_text), int(gid_text or uid_text), "/")
    raise UserUnknown(f"the sandbox has no user {name!r}")


def environment(given: dict[str, str], user: User, *, terminal: str = "dumb") -> dict[str, str]:
    """Return the whole environment of a process: nothing of the host's."""
    defaults = {"PATH": DEFAULT_PATH, "HOME": user.home, "USER": user.name, "LANG": "C.UTF-8", "TERM": terminal}
    return {**defaults, **given}


class Job:
    """One process and its pipes.

    Args:
        number: the request that asked for it.
        request: `cap`, `hard_cap`, `timeout_s`, `stdin_open`.
    """

    def __init__(self, number: int, request: dict[str, Any], *, stdin: bytes) -> None:
        self.number = number
        self.pid = 0
        self.stdin = bytearray(stdin)
        self.stdin_open = bool(request.get("stdin_open"))
        self.stdin_fd = -1
        self.outputs: dict[int, int] = {}
        self.produced = {1: 0, 2: 0}
        self.cap = int(request["cap"])
        self.hard_cap = int(request["hard_cap"])
        self.started = time.monotonic()
        timeout_s = request.get("timeout_s")
        self.deadline = None if timeout_s is None else self.started + float(timeout_s)
        self.killed_by = ""
        self.terminal = False
        self.exit_code: int | None = None
        self.cpu_s = 0.0
        self.memory_bytes = 0

    def open_pipes(self) -> tuple[int, int, int]:
        """Make the pipes; return the ends of the process: stdin, stdout, stderr.

        Raises:
            OSError: if there are no descriptors left; nothing stays open.
        """
        made: list[int] = []
        try:
            for _ in range(3):
                made += os.pipe()
        except OSError:
            for one in made:
                os.close(one)
            raise
        (in_read, self.stdin_fd), (out_read, out_write), (err_read, err_write) = made[:2], made[2:4], made[4:]
        self.outputs = {out_read: 1, err_read: 2}
        for one in (self.stdin_fd, out_read, err_read):
            os.set_blocking(one, False)
        return in_read, out_write, err_write

    def open_terminal(self, rows: int, columns: int, *, owner: User) -> tuple[int, int, int]:
        """Make a terminal; return its other end three times, for the process.

        Raises:
            OSError: if there are no descriptors or terminals left.
        """
        master, slave = os.openpty()
        try:
            resize(master, rows, columns)
            if owner.uid or owner.gid:
                os.fchown(slave, owner.uid, -1)
            self.stdin_fd = os.dup(master)
        except OSError:
            os.close(master)
            os.close(slave)
            raise
        self.terminal = True
        self.outputs = {master: 1}
        for one in (master, self.stdin_fd):
            os.set_blocking(one, False)
        return slave, slave, slave

    def due(self) -> float | None:
        """Return when its time is over, `None` if nobody waits for that."""
        return None if self.killed_by else self.deadline

    def expire(self) -> None:
        """Its time is over."""
        self.kill("timeout")

    def feed(self) -> bool:
        """Write what stdin has; `False` when the pipe is done with and must leave the poll."""
        while self.stdin:
            try:
                del self.stdin[: os.write(self.stdin_fd, self.stdin[:READ_BYTES])]
            except BlockingIOError:
                return True
            except OSError as error:
                if error.errno not in (errno.EPIPE, errno.EIO):  # the second from a terminal that nobody has open
                    raise
                self.stdin.clear()
                self.stdin_open = False
        return self.stdin_open

    def read(self, descriptor: int) -> tuple[bytes, bool]:
        """Return what is kept of one read, and whether the pipe goes on."""
        try:
            data = os.read(descriptor, READ_BYTES)
        except BlockingIOError:
            return b"", True
        except OSError as error:
            if error.errno != errno.EIO:  # a terminal's way to say that its last user has closed it
                raise
            return b"", False
        if not data:
            return b"", False
        stream = self.outputs[descriptor]
        room = max(0, self.cap - self.produced[stream])
        self.produced[stream] += len(data)
        if sum(self.produced.values()) > self.hard_cap and not self.killed_by:
            self.kill("output")
        return data[:room], True

    def kill(self, reason: str) -> None:
        """Kill the process, its group, and its descendants that left the group."""
        self.killed_by = self.killed_by or reason
        if self.pid and self.exit_code is None:
            kill_tree(self.pid)

    def close(self) -> None:
        """Close every pipe."""
        for one in [*self.outputs, *([self.stdin_fd] if self.stdin_fd >= 0 else [])]:
            os.close(one)
        self.outputs = {}
        self.stdin_fd = -1

    def ended(self, status: int, *, cpu_s: float, memory_bytes: int) -> None:
        """Note how the process ended."""
        self.exit_code = os.waitstatus_to_exitcode(status)
        self.cpu_s = cpu_s
        self.memory_bytes = memory_bytes

    def report(self) -> dict[str, Any]:
        """Return the last message of this job."""
        return {
            "n": self.number,
            "op": "exit",
            "code": self.exit_code,
            "killed_by": self.killed_by,
            "wall_s": time.monotonic() - self.started,
            "cpu_s": self.cpu_s,
            "memory_bytes": self.memory_bytes,
            "stdout_bytes": self.produced[1],
            "stderr_bytes": self.produced[2],
        }


def signal_group(pid: int, number: int) -> None:
    """Send a signal to a process's group, or to the process alone while it has not made its group yet."""
    for target in (-pid, pid):
        try:
            os.kill(target, number)
        except ProcessLookupError:
            continue
        return


def resize(terminal: int, rows: int, columns: int) -> None:
    """Set the size of a terminal; what runs in its foreground gets SIGWINCH."""
    fcntl.ioctl(terminal, _TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))


def kill_tree(pid: int) -> None:
    """Kill a process, its group and its descendants."""
    _signal_all((-pid, pid, *_descendants(pid)), signal.SIGKILL)


def signal_descendants(pid: int, number: int) -> bool:
    """Send a signal to what a process has started, and not to the process; `False` if that is nothing."""
    found = _descendants(pid)
    _signal_all(found, number)
    return bool(found)


def _signal_all(targets: Iterable[int], number: int) -> None:
    for target in targets:
        try:
            os.kill(target, number)
        except (ProcessLookupError, PermissionError):
            continue  # gone already, or not a group of its own yet


def _states() -> dict[int, tuple[str, int]]:
    """Return state and parent of every process."""
    found: dict[int, tuple[str, int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as stream:
                    # The name in brackets may hold anything, so count from its end.
                    words = stream.read().rpartition(b")")[2].split()
                found[int(name)] = words[0].decode(), int(words[1])
            except (OSError, IndexError, ValueError):
                continue  # ended meanwhile
    return found


def processes() -> list[int]:
    """Return every process of this namespace that runs, but its first."""
    return sorted(pid for pid, (state, _) in _states().items() if pid != 1 and state not in "ZX")


def is_dying(pid: int) -> bool:
    """Return whether a process has ended, or was killed and has yet to notice."""
    try:
        with open(f"/proc/{pid}/status", "rb") as stream:
            lines = [line.split() for line in stream]
        with open(f"/proc/{pid}/stat", "rb") as stream:
            flags = int(stream.read().rpartition(b")")[2].split()[6])
    except OSError:
        return True
    if flags & _PF_EXITING:
        return True
    pending = [int(words[1], 16) for words in lines if words[:1] in ([b"SigPnd:"], [b"ShdPnd:"])]
    return any(one >> (signal.SIGKILL - 1) & 1 for one in pending)


def name_of(pid: int) -> str:
    """Return the name of a process, `?` if it has ended; what is no letter is left out, for it chose the name."""
    try:
        with open(f"/proc/{pid}/comm", "rb") as stream:
            found = stream.read(16).strip().decode("ascii", "replace")
    except OSError:
        return "?"
    return "".join(one for one in found if one.isalnum() or one in "-_.") or "?"


def _descendants(pid: int) -> list[int]:
    parents: dict[int, list[int]] = {}
    for child, (_, parent) in _states().items():
        parents.setdefault(parent, []).append(child)
    found: list[int] = []
    front = [pid]
    while front:
        front = [child for one in front for child in parents.get(one, [])]
        found += front
    return found


def spawn(
    argv: list[str],
    *,
    stdio: tuple[int, int, int],
    env: dict[str, str],
    cwd: str,
    user: User,
    cpu_s: int,
    memory_bytes: int,
    extra: int | None = None,
    terminal: bool = False,
) -> int:
    """Start a program; return the process id. What keeps it from running stands on its stderr, as with a shell.

    Args:
        memory_bytes: address space of the process, 0 for no bound of its own.
        extra: a descriptor that becomes number 3.
        terminal: whether its standard input is a terminal, which then controls it.

    Raises:
        OSError: if there is no room for another process.
    """
    # What bounds a process must hold before it runs, or what it forks at once has no bound.
    if not (user.uid or user.gid or cpu_s or memory_bytes or terminal) and extra is None:
        pid = _spawn_without_copy(argv, stdio=stdio, env=env, cwd=cwd)
        if pid:
            _make_victim(pid)
            return pid
    pid = os.fork()
    if pid:
        return pid
    try:
        _enter(stdio, extra=extra, cwd=cwd, user=user, cpu_s=cpu_s, memory_bytes=memory_bytes, terminal=terminal)
        os.execvpe(argv[0], argv, env)
    except BaseException as error:
        try:
            os.write(2, f"{argv[0]}: {error}\n".encode("utf-8", "replace"))
        finally:
            os._exit(NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_EXECUTABLE)


def _spawn_without_copy(argv: list[str], *, stdio: tuple[int, int, int], env: dict[str, str], cwd: str) -> int:
    """Start a program without a copy of the agent's memory, most of a fork's cost; 0 if it must be forked after all.

    Every descriptor of the agent is closed on exec. Errors of the program or its directory are left to the fork, which
    tells them.
    """
    actions = [(os.POSIX_SPAWN_DUP2, source, target) for target, source in enumerate(stdio)]
    try:
        os.chdir(cwd)  # the agent is single-threaded, and otherwise knows absolute paths only
        path = find_program(argv[0], env["PATH"])
        return os.posix_spawn(path, argv, env, file_actions=actions, setsid=True, setsigdef=_RESET_SIGNALS)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.ENOMEM):
            raise
        return 0
    finally:
        os.chdir("/")


def find_program(name: str, path: str) -> str:
    """Return where a program is.

    Raises:
        FileNotFoundError: if no directory of the PATH has it.
    """
    if "/" in name:
        return name
    for directory in path.split(":"):
        candidate = f"{directory or '.'}/{name}"
        if os.access(candidate, os.X_OK) and not os.path.isdir(candidate):
            return candidate
    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)


def _make_victim(pid: int) -> None:
    """When memory runs out it goes before the agent; it may have ended already, and then its files are nobody's."""
    try:
        with open(f"/proc/{pid}/oom_score_adj", "w") as stream:
            stream.write(_VICTIM_OOM_SCORE)
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return


def _enter(
    stdio: tuple[int, int, int],
    *,
    extra: int | None,
    cwd: str,
    user: User,
    cpu_s: int,
    memory_bytes: int,
    terminal: bool,
) -> None:
    """Turn a fork of the agent into what will be executed."""
    signal.set_wakeup_fd(-1)
    for number in _RESET_SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    os.setsid()
    for target, source in enumerate(stdio):
        os.dup2(source, target)
    if extra is not None:
        os.dup2(extra, 3)
    if terminal:
        fcntl.ioctl(0, _TIOCSCTTY, 0)
    kernel.close_all_except((0, 1, 2) if extra is None else (0, 1, 2, 3))
    # Nothing of the agent's descriptors is left in reach now; readable, so that the file below belongs to this process.
    kernel.set_dumpable(True)
    with open("/proc/self/oom_score_adj", "w") as stream:
        stream.write(_VICTIM_OOM_SCORE)  # when memory runs out this goes before the agent does
    kernel.set_dumpable(False)  # until it is the program: its executable is still the host's (CVE-2019-5736)
    if cpu_s:
        resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s))
    if memory_bytes:
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    if user.uid or user.gid:
        os.setgroups([])
        os.setresgid(user.gid, user.gid, user.gid)
        os.setresuid(user.uid, user.uid, user.uid)
    os.chdir(cwd)
