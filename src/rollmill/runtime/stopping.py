"""How a service of one event loop is told to stop. Decides nothing."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Iterator


@contextlib.contextmanager
def stop_on_signals() -> Iterator[asyncio.Event]:
    """Set an event on the first SIGTERM or SIGINT, and end the running task on the second."""
    stop, loop, task = asyncio.Event(), asyncio.get_running_loop(), asyncio.current_task()

    def hear() -> None:
        if stop.is_set() and task is not None:
            task.cancel()
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, hear)
    # A parent that holds signals back hands the block down, and then nothing would ever be heard.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM, signal.SIGINT))
    try:
        yield stop
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
