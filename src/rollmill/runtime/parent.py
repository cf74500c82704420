"""What the kernel is told of parents and names: Linux calls that Python has no words for. Decides nothing."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

PARENT_VARIABLE = "ROLLMILL_PARENT_PID"

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent dies, so that a killed supervisor leaves nothing behind."""
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    parent = os.environ.get(PARENT_VARIABLE)
    if parent is not None and os.getppid() != int(parent):
        os._exit(1)


def adopt_orphans(yes: bool) -> None:
    """Have processes that lose their parent fall to this one, if they descend from it. Without effect but on Linux."""
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, int(yes), 0, 0, 0)


def show_as(command: Sequence[str]) -> None:
    """Have `ps` show this command line, cut to the room that there is.

    Written over the arguments that the process was started with. The kernel shows it up to its end where the last byte
    of the old ones is not zero: so do all programs that change their title.
    """
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])
    room = end - start
    title = " ".join(command).encode()[: room - 2]
    ctypes.memmove(start, title + bytes(room - len(title) - 1) + b" ", room)
