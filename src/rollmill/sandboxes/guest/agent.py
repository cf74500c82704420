"""The agent: first process of every sandbox. It runs programs, keeps files, and reaps what is left alone.

Single-threaded, one poll. It has lost every privilege before it reads its first request, and it is not to be killed,
traced or read from inside: the kernel shields the first process of a namespace from signals, and it is not dumpable.

    what the loop waits for
    the owner's socket    a request, room for more output, or its end (then the agent ends, and with it the sandbox)
    a pipe of a job       output to pass on, room for stdin
    a child's end         SIGCHLD, by the wake-up pipe
    the next deadline     of the job that is due first
"""

from __future__ import annotations

import _signal  # pyright: ignore[reportMissingImports]  # typeshed has no stub of it
import _socket
import errno
import json
import os
import select
import signal
import socket
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NoReturn

from rollmill.sandboxes.guest import files, jobs
from rollmill.sandboxes.guest.frames import CHUNK_BYTES, BadFrame, Parser, encode
from rollmill.sandboxes.guest.jobs import Job, User, UserUnknown
from rollmill.sandboxes.guest.sessions import ARGUMENTS, MOST_LINE_BYTES, NoSession, Shell
from rollmill.sandboxes.guest.warm import WarmPython

# Beyond this the pipes of jobs are left alone until the owner has read: a flood stops at its source.
_FULL_BYTES, _ROOM_BYTES = 2 * 1024 * 1024, 512 * 1024
_REMOVED_AT_ONCE = 2000
_MOST_NAMED = 8
_MOMENT_S, _LOOK_S = 1.0, 0.002
# Python's own functions of these modules make enumeration members of what they take and return.
_SIGCHLD = int(signal.SIGCHLD)
_EXHAUSTED = (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Agent:
    """Serves one owner over one socket.

    Args:
        connection: to the owner, not blocking.
        all_users: whether the sandbox has users beside root.
        limits: `cpu_s` and `process_memory_bytes` of each process.
        zygote: where this sandbox's layer is handed out.
        written: the layer, a copy of the mount that holds all that is written here.
        woken: a pipe, for the ends of children.
    """

    def __init__(
        self,
        connection: _socket.socket,
        *,
        all_users: bool,
        limits: dict[str, Any],
        zygote: _socket.socket,
        written: int,
        woken: tuple[int, int],
    ) -> None:
        self._connection = connection
        self._all_users = all_users
        self._limits = limits
        self._zygote = zygote
        self._written = written
        self._parser = Parser()
        self._out = bytearray()
        self._handlers: dict[int, Callable[[int], object]] = {}
        self._poll = select.poll()
        self._jobs: dict[int, Job] = {}
        self._by_pid: dict[int, Job] = {}
        self._warm: dict[str, WarmPython] = {}
        self._shells: dict[int, Shell] = {}
        self._full = False
        self._woken, self._wake = woken
        for one in woken:
            os.set_blocking(one, False)

    def serve(self, ready: bytes) -> NoReturn:
        """Say what protects the host, by a frame made before, then serve until the owner closes; never returns."""
        _signal.signal(_SIGCHLD, _only_wake)
        _signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
        self._watch(self._connection.fileno(), select.POLLIN, self._on_connection)
        self._watch(self._woken, select.POLLIN, self._on_child)
        self._out += ready
        self._flush()
        while True:
            try:
                self._turn()
            except MemoryError:
                continue  # the job that asked gets no answer and ends at its deadline; the sandbox lives on
            except Exception as error:
                # A mistake of ours: said to the owner with its place, for in here nobody could read it.
                trace = error.__traceback__
                while trace is not None and trace.tb_next is not None:
                    trace = trace.tb_next
                line = 0 if trace is None else trace.tb_lineno
                self._send({"op": "crashed", "message": f"{type(error).__name__} at line {line}: {error}"})
                os._exit(3)

    def _turn(self) -> None:
        due = [at for job in self._jobs.values() if (at := job.due()) is not None]
        wait_ms = max(0.0, min(due) - time.monotonic()) * 1000 + 1 if due else None
        for descriptor, events in self._poll.poll(wait_ms):
            if handler := self._handlers.get(descriptor):
                handler(events)
        now = time.monotonic()
        for job in list(self._jobs.values()):
            if (at := job.due()) is not None and now >= at:
                job.expire()
        self._balance()

    def _watch(self, descriptor: int, events: int, handler: Callable[[int], object]) -> None:
        self._handlers[descriptor] = handler
        self._poll.register(descriptor, events)

    def _forget(self, descriptor: int) -> None:
        if self._handlers.pop(descriptor, None) is not None:
            self._poll.unregister(descriptor)

    # -- the owner ---------------------------------------------------------------------------------------------------

    def _send(self, head: dict[str, Any], payload: bytes = b"") -> None:
        self._out += encode(head, payload)
        self._flush()

    def _flush(self) -> None:
        try:
            while self._out:
                del self._out[: self._connection.send(self._out[:CHUNK_BYTES])]
        except BlockingIOError:
            pass
        except OSError:
            os._exit(0)  # the owner is gone
        self._poll.modify(self._connection.fileno(), select.POLLIN | (select.POLLOUT if self._out else 0))

    def _on_connection(self, events: int) -> None:
        if events & select.POLLOUT:
            self._flush()
        if not events & ~select.POLLOUT:
            return
        try:
            data = self._connection.recv(CHUNK_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            os._exit(0)  # the owner closed: the kernel ends everything in here with this process
        try:
            for head, payload in self._parser.feed(data):
                self._serve(head, payload)
        except BadFrame:
            os._exit(2)

    def _serve(self, head: dict[str, Any], payload: bytes) -> None:
        number = head.get("n", 0)
        try:
            self._requests[head["op"]](self, head, payload)
        except UserUnknown as error:
            self._refuse(number, "unknown_user", str(error))
        except files.NotAFile as error:
            self._refuse(number, "not_a_file", str(error))
        except NoSession as error:
            self._refuse(number, "no_session", str(error))
        except OSError as error:
            kinds = {errno.ENOENT: "missing", errno.ENOTDIR: "missing", errno.EOPNOTSUPP: "unsupported"}
            kind = kinds.get(error.errno or 0, "refused")
            self._refuse(number, "exhausted" if error.errno in _EXHAUSTED else kind, str(error))
        except (KeyError, TypeError, ValueError, UnicodeError) as error:
            self._refuse(number, "bad_request", f"{type(error).__name__}: {error}")

    def _refuse(self, number: int, kind: str, message: str) -> None:
        self._send({"n": number, "op": "error", "kind": kind, "message": message})

    def _user(self, head: dict[str, Any]) -> User:
        user = jobs.find_user(head.get("user") or "root")
        if (user.uid or user.gid) and not self._all_users:
            raise UserUnknown(f"this sandbox has one user, root; {user.name!r} needs a range of user ids on the host")
        return user

    # -- files -------------------------------------------------------------------------------------------------------

    def _read(self, head: dict[str, Any], _: bytes) -> None:
        data, size = files.read(head["path"], offset=head["offset"], length=min(head["length"], CHUNK_BYTES))
        self._send({"n": head["n"], "op": "data", "size": size}, data)

    def _write(self, head: dict[str, Any], payload: bytes) -> None:
        files.write(head["path"], payload, offset=head["offset"], mode=head["mode"], owner=self._user(head))
        self._send({"n": head["n"], "op": "done"})

    def _list(self, head: dict[str, Any], _: bytes) -> None:
        entries, truncated = files.list_dir(head["path"])
        self._send({"n": head["n"], "op": "data", "truncated": truncated}, json.dumps(entries).encode())

    def _stat(self, head: dict[str, Any], _: bytes) -> None:
        self._send({"n": head["n"], "op": "data"}, json.dumps(files.describe(head["path"])).encode())

    def _make_dir(self, head: dict[str, Any], _: bytes) -> None:
        made = files.make_dir(head["path"], mode=head["mode"], owner=self._user(head))
        self._send({"n": head["n"], "op": "done", "changed": made})

    def _attributes(self, head: dict[str, Any], _: bytes) -> None:
        files.set_attributes(head["path"], head["group"], dict(head["words"]), owner=self._user(head))
        self._send({"n": head["n"], "op": "done"})

    def _rename(self, head: dict[str, Any], _: bytes) -> None:
        files.rename(head["path"], head["target"], owner=self._user(head))
        self._send({"n": head["n"], "op": "done"})

    def _remove(self, head: dict[str, Any], _: bytes) -> None:
        """Remove a part at a time: a large tree must not keep others waiting."""
        whole = files.remove(head["path"], recursive=head["recursive"], budget=_REMOVED_AT_ONCE)
        self._send({"n": head["n"], "op": "done", "changed": whole})

    def _usage(self, head: dict[str, Any], _: bytes) -> None:
        processes = sum(name.isdigit() for name in os.listdir("/proc"))
        self._send({"n": head["n"], "op": "data", **written_counts(), "processes": processes})

    # -- processes ---------------------------------------------------------------------------------------------------

    def _exec(self, head: dict[str, Any], payload: bytes) -> None:
        user = self._user(head)
        job = Job(head["n"], head, stdin=payload)
        size = head.get("terminal")
        stdio = job.open_terminal(*size, owner=user) if size else job.open_pipes()
        try:
            job.pid = jobs.spawn(
                head["argv"],
                stdio=stdio,
                env=jobs.environment(head["env"], user, terminal="xterm-256color" if size else "dumb"),
                cwd=head.get("cwd") or _home(user),
                user=user,
                cpu_s=self._limits["cpu_s"],
                memory_bytes=self._limits["process_memory_bytes"],
                terminal=bool(size),
            )
        except BaseException:
            job.close()
            raise
        finally:
            for one in set(stdio):
                os.close(one)
        self._by_pid[job.pid] = job
        self._begin(job)

    def _python(self, head: dict[str, Any], payload: bytes) -> None:
        user = self._user(head)
        env = jobs.environment(head["env"], user)
        code, stdin = payload[: head["code_bytes"]], payload[head["code_bytes"] :]
        job = Job(head["n"], head, stdin=stdin)
        stdio = job.open_pipes()
        try:
            cwd = head.get("cwd") or _home(user)
            try:
                self._warm_python(user, env).run(job, code=code, stdio=stdio, env=env, cwd=cwd, argv=head["argv"])
            except ConnectionError:  # ended since its last use, and not noticed yet
                self._on_warm(_warm_key(user, env))
                self._warm_python(user, env).run(job, code=code, stdio=stdio, env=env, cwd=cwd, argv=head["argv"])
        except BaseException:
            job.close()
            raise
        finally:
            for one in stdio:
                os.close(one)
        self._begin(job)

    def _warm_python(self, user: User, env: dict[str, str]) -> WarmPython:
        """Return the running fork-server of a user and a PATH, or start it."""
        key = _warm_key(user, env)
        if key not in self._warm:
            self._warm[key] = warm = WarmPython.start(user, env, limits=self._limits)
            self._watch(warm.fileno(), select.POLLIN, lambda _: self._on_warm(key))
        return self._warm[key]

    def _begin(self, job: Job) -> None:
        self._jobs[job.number] = job
        self._send({"n": job.number, "op": "started", "pid": job.pid})
        if not self._full:
            self._watch_outputs(job)
        if job.feed():
            self._watch(job.stdin_fd, select.POLLOUT if job.stdin else 0, lambda events: self._on_stdin(job, events))
        else:
            self._close_stdin(job)

    def _on_stdin(self, job: Job, events: int = 0) -> None:
        if events & (select.POLLERR | select.POLLHUP) or not job.feed():  # nobody reads there any more, or all is said
            self._close_stdin(job)
        elif job.stdin_fd in self._handlers:
            self._poll.modify(job.stdin_fd, select.POLLOUT if job.stdin else 0)

    def _close_stdin(self, job: Job) -> None:
        if job.stdin_fd >= 0:
            self._forget(job.stdin_fd)
            os.close(job.stdin_fd)
            job.stdin_fd = -1

    def _stdin(self, head: dict[str, Any], payload: bytes) -> None:
        if (job := self._jobs.get(head["n"])) is not None and job.stdin_fd >= 0:
            if head.get("end") and job.terminal:
                payload += b"\x04"  # a terminal is not closed: this is how its input ends
            elif head.get("end"):
                job.stdin_open = False
            job.stdin += payload
            self._on_stdin(job)

    def _resize(self, head: dict[str, Any], _: bytes) -> None:
        if (job := self._jobs.get(head["n"])) is not None and job.terminal and job.stdin_fd >= 0:
            jobs.resize(job.stdin_fd, *head["terminal"])

    def _signal(self, head: dict[str, Any], _: bytes) -> None:
        job = self._jobs.get(head["n"])
        if job is None or not job.pid or job.exit_code is not None:
            return
        if head["signal"] == signal.SIGKILL:
            job.kill("owner")
        elif isinstance(job, Shell):
            job.interrupt(head["signal"])  # the line's, and not the shell
        else:
            jobs.signal_group(job.pid, head["signal"])

    def _watch_outputs(self, job: Job) -> None:
        for descriptor in job.outputs:
            if descriptor not in self._handlers:
                self._watch(descriptor, select.POLLIN, lambda _, fd=descriptor: self._on_output(job, fd))

    def _on_output(self, job: Job, descriptor: int) -> bool:
        """Pass on one read; `False` when there is nothing more now."""
        stream = job.outputs[descriptor]
        before = job.produced[stream]
        data, goes_on = job.read(descriptor)
        if data:
            self._send({"n": job.number, "op": "out", "stream": stream}, data)
        if not goes_on:
            self._forget(descriptor)
            os.close(descriptor)
            del job.outputs[descriptor]
        return goes_on and job.produced[stream] > before

    def _on_child(self, _: int) -> None:
        with suppress(BlockingIOError):
            os.read(self._woken, 4096)
        while True:
            try:
                pid, status, used = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            self._reaped(pid, status, used)

    def _reaped(self, pid: int, status: int, used: Any) -> None:
        if (job := self._by_pid.pop(pid, None)) is not None:
            job.ended(status, cpu_s=used.ru_utime + used.ru_stime, memory_bytes=used.ru_maxrss * 1024)
            self._finish(job)

    def _on_warm(self, key: str) -> None:
        warm = self._warm[key]
        ended, alive = warm.take()
        for job in ended:
            self._finish(job)
        if not alive:
            self._forget(warm.fileno())
            del self._warm[key]
            for job in warm.close():
                self._release(job)
                self._refuse(job.number, "no_python", "the sandbox's python3 is missing, or its fork-server was ended")

    def _finish(self, job: Job) -> None:
        """Drain what the process left in its pipes, then report; a flood is bounded by the hard cap."""
        self._drain(job)
        self._release(job)
        if not isinstance(job, Shell):
            self._send(job.report())
            return
        if job.running:
            self._send(job.end_line())
        for number in job.closed_by:
            self._send({"n": number, "op": "done"})

    def _drain(self, job: Job) -> None:
        for descriptor in list(job.outputs):
            budget = 64
            while budget and self._on_output(job, descriptor):
                budget -= 1

    def _release(self, job: Job) -> None:
        """Forget a job: its pipes leave the poll before they are closed."""
        for descriptor in job.outputs:
            self._forget(descriptor)
        self._close_stdin(job)
        if isinstance(job, Shell):
            self._forget(job.status_fd)
            self._shells.pop(job.session, None)
        job.close()
        self._jobs.pop(job.number, None)

    # -- sessions ----------------------------------------------------------------------------------------------------

    def _open(self, head: dict[str, Any], _: bytes) -> None:
        """Start a shell that stays."""
        user = self._user(head)
        env = jobs.environment(head["env"], user)
        argv = _shell(head.get("shell") or "", env["PATH"])
        shell = Shell(head["n"])
        stdio = shell.open_pipes()
        status = -1
        try:
            shell.status_fd, status = os.pipe()
            os.set_blocking(shell.status_fd, False)
            shell.pid = jobs.spawn(
                argv,
                stdio=stdio,
                env=env,
                cwd=head.get("cwd") or _home(user),
                user=user,
                cpu_s=self._limits["cpu_s"],
                memory_bytes=self._limits["process_memory_bytes"],
                extra=status,
            )
        except BaseException:
            shell.close()
            raise
        finally:
            for one in (*stdio, *([status] if status >= 0 else [])):
                os.close(one)
        self._by_pid[shell.pid] = shell
        self._shells[shell.session] = shell
        self._watch(shell.status_fd, select.POLLIN, lambda _: self._on_status(shell))
        self._watch(shell.stdin_fd, select.POLLOUT, lambda events: self._on_stdin(shell, events))
        self._send({"n": head["n"], "op": "done", "pid": shell.pid})

    def _line(self, head: dict[str, Any], payload: bytes) -> None:
        shell = self._shells.get(head["session"])
        if shell is None or shell.stdin_fd < 0:
            raise NoSession("the session's shell has ended; open another session")
        if shell.running or len(payload) > MOST_LINE_BYTES:
            raise ValueError(f"a session runs one line at a time, of {MOST_LINE_BYTES} bytes at most")
        shell.begin(head["n"], head, payload.decode("utf-8", "surrogateescape"))
        self._jobs[shell.number] = shell
        self._send({"n": shell.number, "op": "started", "pid": shell.pid})
        if not self._full:
            self._watch_outputs(shell)
        self._on_stdin(shell)

    def _on_status(self, shell: Shell) -> None:
        try:
            data = os.read(shell.status_fd, jobs.READ_BYTES)
        except BlockingIOError:
            return
        if not data:
            self._forget(shell.status_fd)  # the shell ends, or was replaced; its end is told when it is there
        elif shell.take_status(data):
            # Between lines nobody reads: what a program in the background writes waits for the next line.
            self._drain(shell)
            for descriptor in shell.outputs:
                self._forget(descriptor)
            self._jobs.pop(shell.number, None)
            self._send(shell.end_line())

    def _close(self, head: dict[str, Any], _: bytes) -> None:
        """End a session and what its lines have started; told when the shell has ended."""
        if (shell := self._shells.get(head["session"])) is None:
            self._send({"n": head["n"], "op": "done"})
            return
        shell.closed_by.append(head["n"])
        jobs.kill_tree(shell.pid)

    # -- layers ------------------------------------------------------------------------------------------------------

    def _layer(self, head: dict[str, Any], _: bytes) -> None:
        """Hand this sandbox's layer out, when nothing runs that could write to it."""
        others = [] if head["force"] else self._others()
        if others:
            names = ", ".join(f"{pid} {jobs.name_of(pid)}" for pid in others[:_MOST_NAMED])
            self._refuse(head["n"], "busy", f"{len(others)} processes run: {names}")
            return
        self._end_all()
        self._hand_out()
        self._send({"n": head["n"], "op": "done", **written_counts()})

    def _others(self) -> list[int]:
        """Return what runs beside this process and its helpers; what was killed just now has a moment to be gone."""
        spared = {warm.pid for warm in self._warm.values()}
        end = time.monotonic() + _MOMENT_S
        while True:
            others = [pid for pid in jobs.processes() if pid not in spared]
            if not others or time.monotonic() >= end or not all(map(jobs.is_dying, others)):
                return others
            time.sleep(_LOOK_S)
            self._on_child(0)

    def _hand_out(self) -> None:
        self._zygote.sendmsg([b"layer"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", self._written))])

    def _end_all(self) -> None:
        """End every process but this one, and take leave of each."""
        for job in self._jobs.values():
            job.killed_by = job.killed_by or "owner"
        with suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)  # of this namespace
        while True:
            try:
                pid, status, used = os.wait4(-1, 0)
            except ChildProcessError:
                break
            self._reaped(pid, status, used)
        for warm in self._warm.values():
            self._forget(warm.fileno())
            ended, _ = warm.take()
            for job in warm.close():
                job.ended(signal.SIGKILL, cpu_s=0.0, memory_bytes=0)
                ended.append(job)
            for job in ended:
                self._finish(job)
        self._warm.clear()

    def _balance(self) -> None:
        """Stop reading jobs while the owner lags, and begin again when it has caught up."""
        if not self._full and len(self._out) > _FULL_BYTES:
            self._full = True
            for job in self._jobs.values():
                for descriptor in job.outputs:
                    self._forget(descriptor)
        elif self._full and len(self._out) < _ROOM_BYTES:
            self._full = False
            for job in self._jobs.values():
                self._watch_outputs(job)

    _requests: dict[str, Callable[[Any, dict[str, Any], bytes], None]] = {  # noqa: RUF012
        "read": _read,
        "write": _write,
        "list": _list,
        "stat": _stat,
        "make_dir": _make_dir,
        "attributes": _attributes,
        "rename": _rename,
        "remove": _remove,
        "usage": _usage,
        "exec": _exec,
        "python": _python,
        "stdin": _stdin,
        "signal": _signal,
        "resize": _resize,
        "open": _open,
        "line": _line,
        "close": _close,
        "layer": _layer,
    }


def _only_wake(_: int, __: object) -> None:
    """Take SIGCHLD: the interpreter has written to the wake-up pipe."""


def _shell(wanted: str, path: str) -> list[str]:
    """Return how a shell is started that reads its commands from its input: the one wanted, else bash, else sh."""
    if wanted:
        return [wanted, *ARGUMENTS.get(os.path.basename(wanted), ("-s",))]
    for name in ("bash", "sh"):
        with suppress(FileNotFoundError):
            return [jobs.find_program(name, path), *ARGUMENTS[name]]
    return ["/bin/sh", *ARGUMENTS["sh"]]


def written_counts() -> dict[str, int]:
    """Return bytes and inodes of all that was written in here."""
    # The image's overlay and /dev/shm lie on one file system, which holds all that the sandbox wrote.
    found = os.statvfs("/dev/shm")
    return {"disk_bytes": (found.f_blocks - found.f_bfree) * found.f_frsize, "inodes": found.f_files - found.f_ffree}


def _warm_key(user: User, env: dict[str, str]) -> str:
    return f"{user.uid}:{env['PATH']}"


def _home(user: User) -> str:
    return user.home if os.path.isdir(user.home) else "/"
