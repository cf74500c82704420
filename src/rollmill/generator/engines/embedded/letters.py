"""What the engine's thread has to tell the loops of its callers: all tokens of a step at once.

Waking a loop is a system call and a fight for the interpreter's lock. With 64 streams that is once a step, not 64
times.
"""

from __future__ import annotations

import asyncio
import contextlib
from functools import partial

from rollmill.generator.engines.protocol import OnTokens
from rollmill.types import TokenChunk

_Letter = tuple[OnTokens, TokenChunk]


class Letters:
    """Collected and sent by one thread, heard on the loops of the callers, in order."""

    def __init__(self) -> None:
        self._written: dict[asyncio.AbstractEventLoop, list[_Letter]] = {}

    def to(self, loop: asyncio.AbstractEventLoop, hears: OnTokens) -> OnTokens:
        """Return what the engine's thread may call: `hears` is called on `loop` after the next `send`."""

        def write(chunk: TokenChunk) -> None:
            self._written.setdefault(loop, []).append((hears, chunk))

        return write

    def send(self) -> None:
        """Hand over what was written since the last time."""
        if not self._written:
            return
        written, self._written = self._written, {}
        for loop, letters in written.items():
            with contextlib.suppress(RuntimeError):  # the loop was closed: nobody listens any more
                loop.call_soon_threadsafe(partial(_deliver, loop), letters)


def _deliver(loop: asyncio.AbstractEventLoop, letters: list[_Letter]) -> None:
    for hears, chunk in letters:
        loop.call_soon(hears, chunk)  # one that raises does not keep the others from theirs
