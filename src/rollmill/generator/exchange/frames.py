"""Gathers what many requests have to say into frames, one message of the wire each.

| wait | ends after |
|---|---|
| for something to say | the writer is closed |
| between two frames, while there is more | `pace_s` |
| for the reader to take a frame | `stall_s`, then the writer ends with `SlowReader` |

The first item after a pause goes at once. Under load items wait for at most `pace_s` and share a frame: a message costs
0.03 to 0.1 ms of CPU on each side, whatever is in it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from rollmill.errors import SlowReader

T = TypeVar("T")

FRAME_BYTES = 256 * 1024
"""A frame takes no further item that would make it larger than this."""
FRAME_BYTES_KEY = "rollmill-frame-bytes"
"""Initial metadata of an exchange: how large a frame of its caller may be."""
ITEM_BYTES = 24
"""What an item takes in a frame beside its content, at most."""
PACE_S = 0.002


class FrameWriter(Generic[T]):
    """Items of many requests on their way to one reader.

    Args:
        write: hands a frame's items to the reader.
        stall_s: longest time that one frame may take.
        frame_bytes: of a frame with more than one item, at most.
        pace_s: shortest time from the end of a frame to the next one.

    Attributes:
        frame_bytes: as above; may become another one.
    """

    def __init__(
        self,
        write: Callable[[list[T]], Awaitable[None]],
        *,
        stall_s: float,
        frame_bytes: int = FRAME_BYTES,
        pace_s: float = PACE_S,
    ) -> None:
        self._write, self._stall_s, self._pace_s = write, stall_s, pace_s
        self.frame_bytes = frame_bytes
        self._waiting: deque[tuple[T, int]] = deque()
        self._more = asyncio.Event()
        self._closed = False

    @property
    def backlog(self) -> int:
        """Items that wait."""
        return len(self._waiting)

    def put(self, item: T, *, nbytes: int) -> None:
        """Send an item after all that were put before.

        Args:
            nbytes: of its content.
        """
        self._waiting.append((item, nbytes + ITEM_BYTES))
        self._more.set()

    def close(self) -> None:
        """End `run` once what waits is written."""
        self._closed = True
        self._more.set()

    async def run(self) -> None:
        """Write frames until closed.

        Raises:
            SlowReader: if the reader stalled.
        """
        loop = asyncio.get_running_loop()
        next_s = loop.time()
        while await self._something():
            if (early_s := next_s - loop.time()) > 0:
                await asyncio.sleep(early_s)
            await self._send(self._frame())
            next_s = loop.time() + self._pace_s

    async def _something(self) -> bool:
        """Wait for an item; return false if none will come."""
        while not self._waiting and not self._closed:
            self._more.clear()
            await self._more.wait()
        return bool(self._waiting)

    def _frame(self) -> list[T]:
        item, nbytes = self._waiting.popleft()
        frame = [item]
        while self._waiting and nbytes + self._waiting[0][1] <= self.frame_bytes:
            item, more = self._waiting.popleft()
            frame.append(item)
            nbytes += more
        return frame

    async def _send(self, frame: list[T]) -> None:
        try:
            async with asyncio.timeout(self._stall_s):
                await self._write(frame)
        except TimeoutError:
            raise SlowReader(
                f"the other side of an exchange took no frame for {self._stall_s:g} s, with {self.backlog} items "
                "behind it: its requests were aborted. Is its process stopped, or its event loop blocked?"
            ) from None
