"""The agent's side of the fork-server: one warm Python per user, started at first use.

The server belongs to the sandbox: nothing that it says is believed beyond the jobs that were given to it.
"""

from __future__ import annotations

import json
import os
import socket
from typing import Any

from rollmill.sandboxes.guest import jobs
from rollmill.sandboxes.guest.jobs import Job, User

# Read when the zygote starts: inside there is no such file. Not imported: no sandbox has a use for what it needs.
with open(os.path.join(os.path.dirname(__file__), "forkserver.py"), "rb") as _stream:
    _SOURCE = _stream.read().decode("ascii")
_MOST_REPORT_BYTES = 4096
_LARGEST_PID = 2**22


class WarmPython:
    """One fork-server and the jobs it runs."""

    def __init__(self, pid: int, control: socket.socket) -> None:
        self.pid = pid
        self._control = control
        self._jobs: dict[int, Job] = {}

    @classmethod
    def start(cls, user: User, env: dict[str, str], *, limits: dict[str, Any]) -> WarmPython:
        """Start the server under the image's own Python.

        Raises:
            OSError: if no process or descriptor is left.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
        try:
            pid = jobs.spawn(
                ["python3", "-I", "-c", _SOURCE],
                stdio=(null, null, null),
                env=env,
                cwd="/",
                user=user,
                cpu_s=limits["cpu_s"],
                memory_bytes=limits["process_memory_bytes"],
                extra=theirs.fileno(),
            )
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
            os.close(null)
        ours.setblocking(False)
        return cls(pid, ours)

    def fileno(self) -> int:
        """Return the descriptor to poll."""
        return self._control.fileno()

    def run(
        self, job: Job, *, code: bytes, stdio: tuple[int, int, int], env: dict[str, str], cwd: str, argv: list[str]
    ) -> None:
        """Hand a piece of code over.

        Raises:
            OSError: if the server is gone, or does not keep up.
        """
        source = os.memfd_create("code", os.MFD_CLOEXEC)
        try:
            view = memoryview(code)
            while view:
                view = view[os.write(source, view) :]
            request = json.dumps({"n": job.number, "argv": argv, "env": env, "cwd": cwd}).encode()
            socket.send_fds(self._control, [request], [*stdio, source])
        finally:
            os.close(source)
        self._jobs[job.number] = job

    def take(self) -> tuple[list[Job], bool]:
        """Read what the server says; return the jobs that ended, and whether the server lives."""
        ended: list[Job] = []
        while True:
            try:
                message = self._control.recv(_MOST_REPORT_BYTES)
            except BlockingIOError:
                return ended, True
            except OSError:
                message = b""
            if not message:
                return ended, False
            try:
                self._note(json.loads(message), ended)
            except Exception:  # whatever it says, the agent must go on
                return ended, False  # no fork-server of ours talks like this

    def _note(self, report: dict[str, Any], ended: list[Job]) -> None:
        job = self._jobs.get(report["n"])
        if job is None:
            return
        if "pid" in report:
            job.pid = _within(report["pid"], least=2, most=_LARGEST_PID)
            if job.killed_by:
                job.kill(job.killed_by)
            return
        job.ended(
            _within(report["status"], least=0, most=0xFFFF),
            cpu_s=float(_within(report["cpu_s"], least=0, most=1e9)),
            memory_bytes=_within(report["memory_bytes"], least=0, most=2**60),
        )
        ended.append(self._jobs.pop(job.number))

    def close(self) -> list[Job]:
        """End the server; return the jobs that end unfinished with it."""
        jobs.kill_tree(self.pid)
        self._control.close()
        left, self._jobs = list(self._jobs.values()), {}
        for job in left:
            job.kill("owner")
        return left


def _within(value: Any, *, least: int, most: float) -> Any:
    """Return a number that a server of ours could have told.

    Raises:
        ValueError: if it could not.
    """
    if not least <= value <= most:  # NaN is within nothing
        raise ValueError(f"{value!r} is not between {least} and {most}")
    return value
