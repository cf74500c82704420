"""How a service hears that it shall stop."""

from __future__ import annotations

import asyncio
import os
import signal

from rollmill.runtime.stopping import stop_on_signals


async def test_a_signal_is_heard_though_the_parent_held_it_back():
    held = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM,))
    try:
        with stop_on_signals() as stop:
            os.kill(os.getpid(), signal.SIGTERM)
            async with asyncio.timeout(30):
                await stop.wait()
    finally:
        signal.sigtimedwait((signal.SIGTERM,), 0)  # unheard, it would end the suite
        signal.pthread_sigmask(signal.SIG_SETMASK, held)
