"""A handle on a child, whoever forked it. Decides nothing; imports little, because it is there before the rest."""

from __future__ import annotations

import os
import select
import subprocess
from typing import Protocol


class Handle(Protocol):
    """How a parent deals with its child: `subprocess.Popen`, or `Forked`."""

    def poll(self) -> int | None:
        """Return its status if it has ended."""
        ...

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end and return its status."""
        ...

    def send_signal(self, sig: int, /) -> None:
        """Send a signal, unless its end was seen."""
        ...


class Forked:
    """A child of this process that another process forked for it."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._status: int | None = None

    def poll(self) -> int | None:
        """Return its status, negative for a signal, if it has ended."""
        return self._reap(os.WNOHANG)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end and return its status.

        Raises:
            subprocess.TimeoutExpired: if it did not end in time.
        """
        if timeout is not None and self._status is None:
            handle = os.pidfd_open(self.pid)
            try:
                if not select.select([handle], [], [], timeout)[0]:
                    raise subprocess.TimeoutExpired(str(self.pid), timeout)
            finally:
                os.close(handle)
        status = self._reap(0)
        if status is None:
            raise AssertionError("a wait without an option returns a status")
        return status

    def send_signal(self, sig: int, /) -> None:
        """Send a signal, unless its end was seen."""
        if self.poll() is None:
            os.kill(self.pid, sig)

    def _reap(self, options: int) -> int | None:
        if self._status is None:
            pid, status = os.waitpid(self.pid, options)
            if pid:
                self._status = os.waitstatus_to_exitcode(status)
        return self._status
