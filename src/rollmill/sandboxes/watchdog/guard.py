"""The node guard: once a second it reads its node, and closes or opens admission and evicts. Decides nothing itself.

what it waits for       until when   and then
a reading of the node   `read_s`     admission stays as it is; counted
an eviction             `evict_s`    the next look decides anew; counted
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any, Protocol

import msgspec

from rollmill.sandboxes.watchdog.background import Background
from rollmill.sandboxes.watchdog.guard_law import Evict, Evictable, GuardDecision, GuardState, decide
from rollmill.sandboxes.watchdog.law import next_tick
from rollmill.sandboxes.watchdog.node import NodeReader
from rollmill.sandboxes.watchdog.records import GuardStatistics, NodeReading, Pressure
from rollmill.sandboxes.watchdog.settings import GuardSettings


class Gate(Protocol):
    """What the guard needs of whoever admits sandboxes and keeps pools."""

    def stop_admission(self, why: str) -> None:
        """Start no further sandbox; called again when the reason changes."""
        ...

    def resume_admission(self) -> None:
        """Start sandboxes again."""
        ...

    def evictable(self) -> Evictable:
        """Return what could go now."""
        ...

    async def evict_pooled(self, count: int) -> int:
        """End this many pooled sandboxes that nobody was given; return how many went."""
        ...

    async def evict_suspended(self, count: int) -> int:
        """Move this many paused sandboxes to disk; return how many went."""
        ...


async def _in_thread(reader: NodeReader) -> NodeReading:
    return await asyncio.to_thread(reader.read)


class NodeGuard:
    """Guards one node. Use it as an asynchronous context manager, or call `run` in a task of yours.

    Args:
        gate: who admits.
        reader: reads the node, in a thread; a disk that hangs must not hold up the loop.
        settings: the bounds.
        read: in place of the reader, for tests.
    """

    def __init__(
        self,
        gate: Gate,
        *,
        reader: NodeReader | None = None,
        settings: GuardSettings | None = None,
        read: Callable[[], Awaitable[NodeReading]] | None = None,
    ) -> None:
        self._gate = gate
        self._settings = GuardSettings() if settings is None else settings
        chosen = NodeReader() if reader is None else reader
        self._read = (lambda: _in_thread(chosen)) if read is None else read
        self._reading: asyncio.Future[NodeReading] | None = None
        self._state = GuardState()
        self._stopped_at_s: float | None = None
        self._statistics = GuardStatistics()
        self._background = Background("the guard of the node")

    async def __aenter__(self) -> NodeGuard:
        """Begin to guard."""
        self._background.start(self.run())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop; admission stays as it is."""
        await self._background.stop()

    def statistics(self) -> GuardStatistics:
        """Return what was done so far; time since the last look is not counted yet."""
        return self._statistics

    def pressure(self) -> Pressure | None:
        """Return the node's pressure as last read: for the watchdog."""
        return self._statistics.reading.pressure

    async def run(self) -> None:
        """Look until cancelled; whoever calls owns the task."""
        loop = asyncio.get_running_loop()
        due_s = loop.time()
        try:
            while True:
                await asyncio.sleep(max(0.0, due_s - loop.time()))
                await self.look()
                due_s, missed = next_tick(due_s, now_s=loop.time(), interval_s=self._settings.interval_s)
                self._count(missed_ticks=self._statistics.missed_ticks + missed)
        finally:
            if self._reading is not None:
                self._reading.cancel()

    async def look(self) -> None:
        """Read the node once, and do what follows."""
        reading = await self._read_in_time()
        if reading is None:
            self._count(failed_readings=self._statistics.failed_readings + 1)
            return
        now_s = asyncio.get_running_loop().time()
        decision = decide(self._state, reading, evictable=self._gate.evictable(), now_s=now_s, settings=self._settings)
        self._count(reading=reading)
        self._turn(decision, now_s=now_s)
        self._state = decision.state
        if decision.evict is not None:
            await self._evict(decision.evict, decision.count)

    async def _read_in_time(self) -> NodeReading | None:
        """Return a reading; one that hangs is not started again until it has ended."""
        if self._reading is None:
            self._reading = asyncio.ensure_future(self._read())
        try:
            async with asyncio.timeout(self._settings.read_s):
                reading = await asyncio.shield(self._reading)
        except TimeoutError:
            if self._reading.done():
                self._reading = None
            return None
        except Exception:  # a node that cannot be read closes nothing: counted, and tried again
            self._reading = None
            return None
        self._reading = None
        return reading

    def _turn(self, decision: GuardDecision, *, now_s: float) -> None:
        """Close or open admission."""
        admitting, before = decision.state.admitting, self._statistics
        if self._stopped_at_s is not None:
            self._count(stopped_s=before.stopped_s + now_s - self._stopped_at_s)
        self._stopped_at_s = None if admitting else now_s
        if admitting and not before.admitting:
            self._gate.resume_admission()
        elif not admitting and (before.admitting or decision.why != before.why):
            self._gate.stop_admission(decision.why)
        stops = before.stops + (before.admitting and not admitting)
        self._count(admitting=admitting, why=decision.why, stops=stops)

    async def _evict(self, what: Evict, count: int) -> None:
        action = self._gate.evict_pooled if what is Evict.POOLED else self._gate.evict_suspended
        field = f"evicted_{what.value}"
        try:
            async with asyncio.timeout(self._settings.evict_s):
                gone = await action(count)
        except Exception:  # whatever failed there, the next look decides anew; counted
            self._count(failed_evictions=self._statistics.failed_evictions + 1)
            return
        self._count(**{field: getattr(self._statistics, field) + gone})

    def _count(self, **changes: Any) -> None:
        self._statistics = msgspec.structs.replace(self._statistics, **changes)
