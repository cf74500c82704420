"""Writes the events of one stream to a reader of any speed, one at a time.

| wait | ends after |
|---|---|
| for the reader to take one event | `stall_s`: the request is aborted with `SlowReader` |

Nothing is held here: while an event waits, nothing more is read from the replica, whose own bound on waiting events
counts then. The deadline costs one timer for a stream, not one for each event.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

from rollmill.errors import SlowReader
from rollmill.generator.proto import policy_inference_pb2 as pb

Write = Callable[[bytes], Awaitable[None]]


class StreamWriter:
    """Writer of one stream.

    Args:
        write: hands one serialized event to the reader.
        stall_s: longest time that one may take.
    """

    def __init__(self, write: Write, *, stall_s: float) -> None:
        self._write, self._stall_s = write, stall_s
        # Siblings that go on at several replicas write to one stream, which takes one event at a time.
        self._writing = asyncio.Lock()
        self._loop = asyncio.get_running_loop()
        self._since_s: float | None = None
        self._stalled = False
        self._request_id = ""

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """End the running task if its reader stalls meanwhile.

        Raises:
            SlowReader: instead of the cancellation, if the reader stalled.
        """
        task = asyncio.current_task()
        if task is None:
            raise AssertionError("a stream is written by a task")
        self._timer = self._loop.call_later(self._stall_s, self._look, task)
        try:
            yield
        except asyncio.CancelledError:
            if not self._stalled:
                raise
            task.uncancel()
            raise SlowReader(
                f"the caller of request {self._request_id} did not take an event for {self._stall_s:g} s; the request "
                "was aborted"
            ) from None
        finally:
            self._timer.cancel()

    async def emit(self, event: pb.GenerateEvent, raw: bytes | None) -> None:
        """Write an event, after those that are being written."""
        async with self._writing:
            self._request_id = event.request_id
            self._since_s = self._loop.time()
            await self._write(event.SerializeToString() if raw is None else raw)
            self._since_s = None

    def _look(self, task: asyncio.Task[Any]) -> None:
        since_s = self._since_s
        waited_s = 0.0 if since_s is None else self._loop.time() - since_s
        if waited_s >= self._stall_s:
            self._stalled = True
            task.cancel()
        else:
            self._timer = self._loop.call_later(self._stall_s - waited_s, self._look, task)
