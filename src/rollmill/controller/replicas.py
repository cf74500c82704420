"""The replicas of the generator as the controller sees them.

`choose` is pure: siblings of a group go to one replica, because they share its prefill; a new group goes to the replica
with the least work. A replica that cannot be reached leaves the rotation before its callers hear of it, so that one
loss is told as one. Everything else here is a thin call.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Protocol

import msgspec

from rollmill.errors import EngineDead, EngineError, ProducersGone, RequestAborted
from rollmill.types import GenerateRequest, Turn


class ReplicaLost(EngineDead):
    """A load ended because its replica is gone, and the loss has been told: the replica joins anew, or not at all."""


class Overtaken(EngineError):
    """A load failed, the old version is served on, and there is a newer one to be loaded instead."""


class ReplicaClient(Protocol):
    """What the controller needs of a generator client; see `rollmill.generator.client`."""

    async def generate(self, request: GenerateRequest) -> Turn:
        """Return the turn."""
        ...


def choose(group_key: str, *, homes: Mapping[str, str], work: Mapping[str, int]) -> str:
    """Return the replica for a request.

    Args:
        homes: group key -> replica that serves its siblings.
        work: serving replica -> requests it has from us.

    Raises:
        ProducersGone: if no replica serves.
    """
    if not work:
        raise ProducersGone(alive=0, buffered=0)
    home = homes.get(group_key)
    if home is not None and home in work:
        return home
    return min(work, key=lambda name: (work[name], name))


class Seat:
    """A replica in rotation, from its joining to its leaving; one that comes back gets another."""

    def __init__(self, client: ReplicaClient) -> None:
        self.client = client
        self.work = 0


class ReplicaSet:
    """Serving replicas with the work each has from us.

    Args:
        on_lost: called with the name and the reason when a replica cannot be reached, before any caller hears of it.
    """

    def __init__(self, *, on_lost: Callable[[str, str], None] | None = None) -> None:
        self._seats: dict[str, Seat] = {}
        self._homes: dict[str, str] = {}
        self._requests_of: dict[str, int] = {}
        self._on_lost = on_lost
        self._serving = asyncio.Event()
        self._ended = False

    def join(self, replica_id: str, client: ReplicaClient) -> None:
        """Put a replica into rotation."""
        self._seats[replica_id] = Seat(client)
        self._serving.set()

    def leave(self, replica_id: str) -> None:
        """Take a replica out of rotation; its requests end with their own errors."""
        self._seats.pop(replica_id, None)
        if not self._seats and not self._ended:
            self._serving.clear()

    def end(self) -> None:
        """Nobody will join any more: who waits for a replica is told so."""
        self._ended = True
        self._serving.set()

    @property
    def homes(self) -> Mapping[str, str]:
        """Group key -> replica that serves it, of the groups that have a request."""
        return MappingProxyType(self._homes)

    async def generate(self, request: GenerateRequest) -> Turn:
        """Send a request to the replica that suits it.

        Raises:
            EngineDead: if the replica cannot be reached; it has left the rotation then.
            ProducersGone: if no replica serves.

        Cancellation:
            cancels the call, which frees the KV in the replica.
        """
        work = {name: seat.work for name, seat in self._seats.items()}
        name = choose(request.group_key, homes=self._homes, work=work)
        self._settle(request.group_key, name)
        seat = self._seats[name]
        seat.work += 1
        try:
            return await seat.client.generate(request)
        except EngineDead as error:
            self._lose(name, seat, reason=str(error))
            raise
        finally:
            seat.work -= 1
            self._unsettle(request.group_key)

    def _settle(self, group_key: str, replica_id: str) -> None:
        if group_key:
            self._homes[group_key] = replica_id
            self._requests_of[group_key] = self._requests_of.get(group_key, 0) + 1

    def _unsettle(self, group_key: str) -> None:
        """Forget the home of a group with its last request: a long run has very many groups."""
        if group_key:
            self._requests_of[group_key] -= 1
            if not self._requests_of[group_key]:
                del self._requests_of[group_key], self._homes[group_key]

    async def generate_until_answered(self, request: GenerateRequest) -> Turn:
        """Send a request, and again to whoever serves next if its replica is lost. The caller's deadline ends it.

        Raises:
            RequestAborted: if it was aborted by a replica that goes on serving.
            ProducersGone: if no replica serves and none will.

        Cancellation:
            cancels the call.
        """
        attempt = 0
        while True:
            served_by = dict(self._seats)
            again = msgspec.structs.replace(request, request_id=f"{request.request_id}~{attempt}")
            try:
                return await self.generate(again if attempt else request)
            except (EngineDead, ProducersGone):
                if self._ended and not self._seats:
                    raise
                attempt += 1
            except RequestAborted:
                # The channel of a lost replica is closed under its last requests.
                if served_by == self._seats:
                    raise
                attempt += 1
            await self._serving.wait()

    def _lose(self, name: str, seat: Seat, *, reason: str) -> None:
        if self._seats.get(name) is not seat:
            return
        self.leave(name)
        if self._on_lost is not None:
            self._on_lost(name, reason)
