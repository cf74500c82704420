"""Becomes the vLLM server, and has the kernel end it with the process that started it.

Runs in vLLM's environment: imports nothing of Rollmill. `launch.py PARENT_PID ARGUMENTS...`
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Replace this process by the server."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(sys.argv[1]):  # it ended before the kernel was told
        os._exit(1)
    # Not the command `vllm`: the CPU build is another distribution, and the command asks for the one called vllm.
    os.execv(sys.executable, [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *sys.argv[2:]])


if __name__ == "__main__":
    main()
