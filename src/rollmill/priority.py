"""Who goes first on the processor: processes and threads that must not hold up others step back.

Decides nothing about what steps back; its owner does.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

R = TypeVar("R")

NICENESS = 5
"""Of what must not hold up others: a quarter of a core where another wants it, all where nobody."""


def lower_priority() -> None:
    """Let everything else of the run go before this process."""
    os.nice(NICENESS)
    # Where the kernel groups processes by session, niceness counts inside a session only; this is the group's own.
    with contextlib.suppress(OSError):
        Path("/proc/self/autogroup").write_text(str(NICENESS))


def lower_thread_priority() -> None:
    """Let other threads, those of this process too, go before the calling one, for as long as it lives.

    On Linux alone: elsewhere priorities belong to whole processes, and nothing happens.
    """
    if sys.platform == "linux":
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + NICENESS)


async def beside(work: Callable[[], R]) -> R:
    """Return what `work` returns, done on a thread of its own that lets others go first.

    A thread that is shared would keep its priority: only a privileged user may raise it again.

    Cancellation:
        the work goes on to its end, and nobody hears of it.
    """
    executor = ThreadPoolExecutor(1, thread_name_prefix="rollmill-beside", initializer=lower_thread_priority)
    try:
        return await asyncio.get_running_loop().run_in_executor(executor, work)
    finally:
        executor.shutdown(wait=False)
