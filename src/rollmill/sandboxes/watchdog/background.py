"""A coroutine that runs beside a block of code, and whose failure is told at once and not only at the block's end."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


class Background:
    """One coroutine that never returns by itself.

    Args:
        name: for the message of its failure.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._running: asyncio.Future[None] | None = None

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Begin."""
        self._running = asyncio.ensure_future(work)
        self._running.add_done_callback(self._look)

    def _look(self, running: asyncio.Future[None]) -> None:
        if not running.cancelled() and (error := running.exception()) is not None:
            running.get_loop().call_exception_handler(
                {"message": f"{self._name} has failed and does nothing any more", "exception": error, "future": running}
            )

    async def stop(self) -> None:
        """End it, and wait for what it does at its end; its failure was told before."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait([self._running])
