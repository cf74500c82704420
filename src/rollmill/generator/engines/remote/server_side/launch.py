"""Becomes a server, and has the kernel end it with the process that started it.

Runs in the server's environment: imports nothing of Rollmill. `launch.py PARENT_PID MODULE ARGUMENTS...`
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Replace this process by the server."""
    parent, module, *arguments = sys.argv[1:]
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(parent):  # it ended before the kernel was told
        os._exit(1)
    os.execv(sys.executable, [sys.executable, "-m", module, *arguments])


if __name__ == "__main__":
    main()
