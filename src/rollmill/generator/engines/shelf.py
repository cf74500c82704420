"""Which adapters are loaded beside the base, and who has to go when there are too many.

Pure bookkeeping. One version of each name is served. Beyond the limit the least recently asked for goes, never one that
a request uses.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from rollmill.errors import EngineError, ModelError, Overloaded, WeightMismatch

_RETRY_S = 1.0


class Shelved(Protocol):
    """One version of an adapter, as far as the shelf looks at it."""

    @property
    def name(self) -> str:
        """Under which requests ask for it."""
        ...

    @property
    def policy_version(self) -> int:
        """Publication number in its own repository."""
        ...

    @property
    def digest(self) -> str:
        """Of the publication."""
        ...


A = TypeVar("A", bound=Shelved)


class Shelf(Generic[A]):
    """Adapters by name, least recently asked for first.

    Args:
        limit: most of them.

    Attributes:
        loaded: what is served, in the order of loading; never changed in place, so that any thread may read it.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.loaded: tuple[A, ...] = ()
        self._by_use: OrderedDict[str, A] = OrderedDict()

    def __len__(self) -> int:
        return len(self._by_use)

    def ask(self, name: str) -> A | None:
        """Return an adapter for a request, which makes it the most recently asked for; `None` for the base.

        Raises:
            ModelError: if it is not loaded, naming those that are.
        """
        if not name:
            return None
        adapter = self._by_use.get(name)
        if adapter is None:
            loaded = ", ".join(map(repr, self._by_use)) or "none"
            raise ModelError(f"adapter {name!r} is not loaded here; loaded are: {loaded}. Load it, or leave it out")
        self._by_use.move_to_end(name)
        return adapter

    def served(self, name: str) -> A | None:
        """Return the version of a name that is served, which a living request relies on; `None` for the base."""
        return self._by_use[name] if name else None

    def is_there(self, adapter: A) -> bool:
        """Return whether this very version is served, so that putting it again changes nothing.

        Raises:
            EngineError: if a newer version is.
            WeightMismatch: if another publication of this version is.
        """
        served = self._by_use.get(adapter.name)
        if served is None or adapter.policy_version > served.policy_version:
            return False
        if adapter.policy_version < served.policy_version:
            raise EngineError(
                f"adapter {adapter.name!r}: policy version {adapter.policy_version} was to be loaded, and "
                f"{served.policy_version} is served: versions only rise; to roll back, publish the old one anew"
            )
        if adapter.digest != served.digest:
            raise WeightMismatch(
                f"adapter {adapter.name!r}: policy version {adapter.policy_version} is served with digest "
                f"{served.digest}, and was to be loaded with {adapter.digest}: two publications share a number",
                published=adapter.digest,
                served=served.digest,
            )
        return True

    def refuse_update(self, policy_version: int) -> None:
        """Refuse new weights under what is loaded: an adapter is a difference to the base that it was trained on.

        Raises:
            EngineError: naming the adapters.
        """
        if self._by_use:
            raise EngineError(
                f"policy version {policy_version} of the base was to be loaded under the adapters "
                f"{', '.join(map(repr, self._by_use))}, which belong to the base that is served. Drop them first, or "
                "start a replica for the new base"
            )

    def put(self, adapter: A, *, in_use: Callable[[str], bool]) -> list[A]:
        """Serve an adapter, and return those that are not served any more: its older version, and who had to go.

        Args:
            in_use: says whether a request uses a name.

        Raises:
            Overloaded: if there is no place, because requests use all others.
        """
        gone: list[A] = []
        older = self._by_use.get(adapter.name)
        if older is not None:
            gone.append(older)
        elif len(self._by_use) >= self.limit:
            free = next((name for name in self._by_use if not in_use(name)), None)
            if free is None:
                raise Overloaded(
                    f"adapter {adapter.name!r} finds no place: {len(self._by_use)} are loaded (generator.max_loras "
                    f"{self.limit}) and requests use every one. Ask again later, or raise generator.max_loras",
                    retry_after_s=_RETRY_S,
                )
            gone.append(self._by_use.pop(free))
        self._by_use[adapter.name] = adapter
        self._by_use.move_to_end(adapter.name)
        self.loaded = (*(one for one in self.loaded if one not in gone), adapter)
        return gone

    def drop(self, name: str, *, in_use: Callable[[str], bool]) -> A | None:
        """Serve a name no longer; return what was served, or `None` if nothing was.

        Raises:
            EngineError: if requests use it.
        """
        if name in self._by_use and in_use(name):
            raise EngineError(f"adapter {name!r} is in use; drop it when its requests have ended, or abort them")
        gone = self._by_use.pop(name, None)
        self.loaded = tuple(one for one in self.loaded if one is not gone)
        return gone
