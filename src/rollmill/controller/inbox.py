"""Where events wait for the core."""

from __future__ import annotations

import asyncio
from collections import deque

import msgspec

from rollmill.scheduling.events import AnyEvent


class InboxStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """How the inbox has been used."""

    waiting: int
    most_waiting: int
    taken: int


class Inbox:
    """Events in order of arrival, taken many at a time so that one transaction serves them all.

    Bounded by the work in flight: each rollout, load, step and timer has at most one event here.
    """

    def __init__(self) -> None:
        self._events: deque[AnyEvent] = deque()
        self._arrived = asyncio.Event()
        self._most_waiting = 0
        self._taken = 0

    def put(self, event: AnyEvent) -> None:
        """Add an event; never blocks."""
        self._events.append(event)
        self._most_waiting = max(self._most_waiting, len(self._events))
        self._arrived.set()

    async def take(self) -> list[AnyEvent]:
        """Return all events that wait, at least one.

        The timer puts a tick every second, so this wait ends; the stall report is made at the tick.
        """
        while not self._events:
            self._arrived.clear()
            await self._arrived.wait()
        events = list(self._events)
        self._events.clear()
        self._taken += len(events)
        return events

    def statistics(self) -> InboxStatistics:
        """Return counts."""
        return InboxStatistics(waiting=len(self._events), most_waiting=self._most_waiting, taken=self._taken)
