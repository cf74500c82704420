"""A shell that stays: lines run one after another in one process, which keeps its directory, variables and functions.

The end of a line is told on a descriptor of its own, never in its output. Each line has a word that only this agent
and the shell's next command know, so that neither output nor a program left behind by an earlier line can tell an end.
A line that digs for the shell's own descriptors can lie about itself and nothing else.
"""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from rollmill.sandboxes.guest import jobs
from rollmill.sandboxes.guest.jobs import Job

MOST_LINE_BYTES = 256 * 1024
GRACE_S = 1.0
_AGAIN_S = 0.1
_MOST_STATUS_BYTES = 1024 * 1024
_TICKS = os.sysconf("SC_CLK_TCK")
# The status descriptor moves away from those that scripts use; the function gives a line the status of the one before.
PROLOGUE = b'exec 8>&3 3>&-\n__rollmill_status() { return "$1"; }\n'
ARGUMENTS = {"bash": ("--noprofile", "--norc", "-s"), "sh": ("-s",)}


class NoSession(LookupError):
    """There is no such session, or its shell has ended."""


def wrap(line: str, *, word: str, status: int) -> bytes:
    """Return what the shell reads to run a line and to tell its end.

    A line that is no whole command, or breaks in the middle, ends alone: `command` takes from `eval` what would end the
    shell with it. What the line does to standard input and to the status descriptor is undone after it.

    Args:
        line: what to run.
        word: what tells the end.
        status: of the line before, for `$?`.
    """
    quoted = "'" + line.replace("'", "'\\''") + "'"
    before = f"__rollmill_status {status} || " if status else ""
    return (f"{{ {before}command eval {quoted}; }} </dev/null 8>&-\ncommand printf '{word} %d\\n' \"$?\" >&8\n").encode(
        "utf-8", "surrogateescape"
    )


class Shell(Job):
    """The process of a session. While a line runs it stands for that line: its number, caps and deadline.

    Args:
        number: of the session.
    """

    grace_s = GRACE_S

    def __init__(self, number: int) -> None:
        super().__init__(number, {"cap": 0, "hard_cap": 0, "stdin_open": True}, stdin=PROLOGUE)
        self.session = number
        self.status_fd = -1
        self.closed_by: list[int] = []
        self.running = False
        self._word = ""
        self._status = 0
        self._told = bytearray()
        self._told_bytes = 0
        self._patience: float | None = None
        self._gives_up = 0.0
        self._owed, self._owed_at, self._owed_until = 0, 0.0, 0.0
        self._cpu_before_s = 0.0

    def begin(self, number: int, request: dict[str, Any], line: str) -> None:
        """Run a line."""
        self.number = number
        self.cap, self.hard_cap = int(request["cap"]), int(request["hard_cap"])
        self.produced = {1: 0, 2: 0}
        self.started = time.monotonic()
        self.deadline = self.started + float(request["timeout_s"])
        self.killed_by = ""
        self.running = True
        self._patience, self._told_bytes, self._owed = None, 0, 0
        self._cpu_before_s = self._used_cpu_s()
        self._word = os.urandom(8).hex()
        self.stdin += wrap(line, word=self._word, status=self._status)

    def take_status(self, data: bytes) -> bool:
        """Take what was said on the status descriptor; return whether the line has ended."""
        self._told += data
        self._told_bytes += len(data)
        *lines, rest = self._told.split(b"\n")
        self._told = bytearray(rest[-64:])
        if self._told_bytes > _MOST_STATUS_BYTES and self.running:
            self.kill("output")
            jobs.kill_tree(self.pid)
        for one in lines:
            word, _, status = one.partition(b" ")
            if self.running and word.decode("ascii", "replace") == self._word and status.isdigit():
                self._status = min(255, int(status[:4]))
                return True
        return False

    def interrupt(self, number: int) -> None:
        """Send a signal to what the line has started, or owe it for a moment while that is nothing yet."""
        if not jobs.signal_descendants(self.pid, number):
            now = time.monotonic()
            self._owed, self._owed_at, self._owed_until = number, now + _AGAIN_S, now + self.grace_s

    def due(self) -> float | None:
        """Return when something is to be done about it."""
        at = self._patience if self.killed_by else super().due()
        return at if not self._owed else self._owed_at if at is None else min(at, self._owed_at)

    def expire(self) -> None:
        """Send what is owed; kill what the line runs; if the shell goes on with it all the same, kill the shell."""
        if self._owed:
            self._pay()
            if (at := self.due()) is None or time.monotonic() < at:
                return
        if not self.killed_by:
            self.kill("timeout")
            return
        now = time.monotonic()
        if now < self._gives_up:
            # What the shell was about to start when the line was killed.
            self._patience = min(self._gives_up, now + _AGAIN_S)
            jobs.signal_descendants(self.pid, signal.SIGKILL)
            return
        self._patience = None
        jobs.kill_tree(self.pid)

    def _pay(self) -> None:
        now = time.monotonic()
        if jobs.signal_descendants(self.pid, self._owed) or now >= self._owed_until:
            self._owed = 0
        else:
            self._owed_at = now + _AGAIN_S

    def kill(self, reason: str) -> None:
        """Kill what the running line has started; the shell itself has a moment to go on."""
        self.killed_by = self.killed_by or reason
        if self.pid and self.exit_code is None:
            now = time.monotonic()
            self._gives_up, self._patience = now + self.grace_s, now + _AGAIN_S
            jobs.signal_descendants(self.pid, signal.SIGKILL)

    def end_line(self) -> dict[str, Any]:
        """Return the report of the line, and stand for the session again."""
        report = {**self.report(), "alive": self.exit_code is None}
        if self.exit_code is None:
            report.update(code=self._status, cpu_s=max(0.0, self._used_cpu_s() - self._cpu_before_s), memory_bytes=0)
        self.number, self.running, self.deadline, self._patience = self.session, False, None, None
        self._owed = 0
        return report

    def close(self) -> None:
        """Close every pipe."""
        super().close()
        if self.status_fd >= 0:
            os.close(self.status_fd)
            self.status_fd = -1

    def _used_cpu_s(self) -> float:
        try:
            with open(f"/proc/{self.pid}/stat", "rb") as stream:
                fields = stream.read().rpartition(b")")[2].split()
        except OSError:
            return self._cpu_before_s  # ended just now
        return sum(map(int, fields[11:15])) / _TICKS
