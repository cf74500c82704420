"""Which replica holds the KV of a session or group. Pure; bounded, the longest unused is forgotten first."""

from __future__ import annotations

from collections import OrderedDict

Key = tuple[str, str, str]
"""Kind, job, name: two jobs may have sessions of one name."""


class Homes:
    """Key -> replica.

    Args:
        limit: keys that are remembered.
    """

    def __init__(self, *, limit: int) -> None:
        self._limit = limit
        self._homes: OrderedDict[Key, str] = OrderedDict()

    def __len__(self) -> int:
        return len(self._homes)

    def get(self, key: Key) -> str | None:
        """Return the home of a key, which is thereby used."""
        home = self._homes.get(key)
        if home is not None:
            self._homes.move_to_end(key)
        return home

    def put(self, key: Key, replica: str) -> None:
        """Remember a home."""
        self._homes[key] = replica
        self._homes.move_to_end(key)
        if len(self._homes) > self._limit:
            self._homes.popitem(last=False)

    def forget(self, replica: str) -> None:
        """Forget all whose replica has lost its KV."""
        for key in [key for key, home in self._homes.items() if home == replica]:
            del self._homes[key]
