"""The replicas of the generator as the controller sees them.

`choose` is pure: siblings of a group go to one replica, because they share its prefill; a new group goes to the replica
with the least work. Everything else here is a thin call.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from rollmill.errors import ProducersGone
from rollmill.types import GenerateRequest, Turn


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


class ReplicaSet:
    """Serving replicas with the work each has from us."""

    def __init__(self) -> None:
        self._clients: dict[str, ReplicaClient] = {}
        self._work: dict[str, int] = {}
        self._homes: dict[str, str] = {}

    def join(self, replica_id: str, client: ReplicaClient) -> None:
        """Put a replica into rotation."""
        self._clients[replica_id] = client
        self._work[replica_id] = 0

    def leave(self, replica_id: str) -> None:
        """Take a replica out of rotation; its requests end with their own errors."""
        self._clients.pop(replica_id, None)
        self._work.pop(replica_id, None)

    def forget_group(self, group_key: str) -> None:
        """Drop the affinity of a group that has no request any more."""
        self._homes.pop(group_key, None)

    async def generate(self, request: GenerateRequest) -> Turn:
        """Send a request to the replica that suits it.

        Cancellation:
            cancels the call, which frees the KV in the replica.
        """
        name = choose(request.group_key, homes=self._homes, work=self._work)
        if request.group_key:
            self._homes[request.group_key] = name
        self._work[name] += 1
        try:
            return await self._clients[name].generate(request)
        finally:
            if name in self._work:
                self._work[name] -= 1
