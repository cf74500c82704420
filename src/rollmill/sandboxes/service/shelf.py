"""Snapshots that callers made: templates for further sandboxes until they are deleted or the service ends. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from rollmill.sandboxes.records import Record, SnapshotRef


class Kept(Record, frozen=True, kw_only=True):
    """One snapshot.

    Attributes:
        ref: the backend's.
        name: the caller's; empty for none.
        sandbox_id: whose files they were.
        envs: environment of that one's commands.
    """

    ref: SnapshotRef
    name: str
    sandbox_id: str
    envs: Mapping[str, str]

    @property
    def id(self) -> str:
        """Return the id that callers know it by."""
        return self.ref.snapshot_id


class Shelf:
    """The snapshots of a node, in order of their making."""

    def __init__(self) -> None:
        self._kept: dict[str, Kept] = {}

    def put(self, kept: Kept) -> Kept | None:
        """Add one; return the one whose name it takes over, which is on the shelf no more."""
        replaced = self.take(kept.name) if kept.name else None
        self._kept[kept.id] = kept
        return replaced

    def find(self, name: str) -> Kept | None:
        """Return one, by its id or name, with or without the tag `:default`."""
        name = name.removesuffix(":default")
        return self._kept.get(name) or next((one for one in self._kept.values() if one.name == name), None)

    def take(self, name: str) -> Kept | None:
        """Take one off the shelf."""
        kept = self.find(name)
        return None if kept is None else self._kept.pop(kept.id)

    def ids(self) -> tuple[str, ...]:
        """Return the ids of all."""
        return tuple(self._kept)

    def refs(self) -> tuple[SnapshotRef, ...]:
        """Return the backend's own of all."""
        return tuple(one.ref for one in self._kept.values())

    def chosen(self, *, sandbox_id: str, name: str) -> tuple[Kept, ...]:
        """Return those of one sandbox and of one name; empty takes all."""
        return tuple(
            one for one in self._kept.values() if sandbox_id in ("", one.sandbox_id) and name in ("", one.name)
        )
