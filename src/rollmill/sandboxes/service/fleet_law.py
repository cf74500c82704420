"""Which node of a fleet gets a sandbox, and how their lists become one. Pure."""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

import msgspec

from rollmill.sandboxes.records import Record
from rollmill.sandboxes.service.law import cursor_of
from rollmill.sandboxes.service.room import Room

TRY_ANOTHER = (429, 503)


class Standing(enum.Enum):
    """How a node stands."""

    OPEN = "open"
    """It takes sandboxes."""
    FULL = "full"
    """It has as many as it may have."""
    CLOSED = "closed"
    """Its guard, its pool or its provider lets nothing start."""
    LOST = "lost"
    """It does not answer."""


class NodeState(Record, frozen=True, kw_only=True):
    """What is known of a node.

    Attributes:
        url: its address.
        reachable: whether it answered when it was asked last.
        sandboxes: that it has.
        most: that it may have.
        starting: creations that it had taken and not answered when it was asked last, of whatever caller.
        promised: creations that this router has sent there and that are not answered yet.
        room: what its pool and its guard say.
    """

    url: str
    reachable: bool = False
    sandboxes: int = 0
    most: int = 0
    starting: int = 0
    promised: int = 0
    room: Room = Room()

    @property
    def free(self) -> int:
        """Return for how many more there is room: none where admission is closed."""
        if not self.room.admitting:
            return 0
        places = self.most - self.sandboxes
        if self.room.running_free is not None:
            places = min(places, self.room.running_free)
        # What this router sent and what the node had taken when it was asked are the same ones, or some of them.
        return places - max(self.promised, self.starting)

    @property
    def headroom(self) -> float:
        """Return the share of memory or disk that is left, whichever is scarcer; 1 where neither is known."""
        return min((one for one in (self.room.memory_free, self.room.disk_free) if one is not None), default=1.0)

    @property
    def waits(self) -> bool:
        """Return whether one more would wait for a start of another one to end."""
        if self.room.starting_free is None:
            return False
        return self.room.ready + self.room.starting_free <= max(0, self.promised - self.starting)

    @property
    def standing(self) -> Standing:
        """Return how it stands, in a word."""
        if not self.reachable:
            return Standing.LOST
        if not self.room.admitting:
            return Standing.CLOSED
        return Standing.OPEN if self.free > 0 else Standing.FULL


def order_of(nodes: Iterable[NodeState], *, key: str = "") -> tuple[str, ...]:
    """Return the nodes that a creation is sent to, one after the other until one takes it.

    Nodes where it need not wait for another start come first, then those with the most free places, weighed by the
    share of memory or disk that is left there, whichever is scarcer. With a key of a call that may come twice the order
    is the key's own, so that both go to the same node; full and closed ones are left out only where there is no key.

    Example:
        >>> a = NodeState(url="a", reachable=True, sandboxes=9, most=10)
        >>> b = NodeState(url="b", reachable=True, sandboxes=5, most=10)
        >>> c = NodeState(url="c", reachable=True, most=10, room=Room(memory_free=0.2))
        >>> order_of([a, b, c, NodeState(url="lost", most=10)])
        ('b', 'c', 'a')
    """
    there = [node for node in nodes if node.reachable]
    if key:
        return tuple(node.url for node in sorted(there, key=lambda node: _weight(key, node.url)))
    return tuple(node.url for node in sorted(there, key=_rank) if node.standing is Standing.OPEN)


def _rank(node: NodeState) -> tuple[bool, float, str]:
    return node.waits, -node.free * node.headroom, node.url


def state_of(url: str, health: Mapping[str, Any]) -> NodeState:
    """Return what a node's answer tells; older nodes tell less, newer ones more.

    Raises:
        KeyError: if it does not tell what every node does.
        ValueError: if what it tells is of another kind.
    """
    told = health.get("room", {})
    return NodeState(
        url=url,
        reachable=True,
        sandboxes=msgspec.convert(health["sandboxes"], int),
        most=msgspec.convert(health["most"], int),
        starting=msgspec.convert(health.get("starting", 0), int),
        room=msgspec.convert({name: told[name] for name in Room.__struct_fields__ if name in told}, Room),
    )


def why_none(nodes: Iterable[NodeState]) -> str:
    """Return why no node takes a sandbox, for whoever wanted one."""
    by_standing = {one: [node for node in nodes if node.standing is one] for one in Standing}
    words = [f"{len(found)} {standing.value}" for standing, found in by_standing.items() if found]
    closed = [f"{node.url}: {node.room.why}" for node in by_standing[Standing.CLOSED]]
    return f"no node of the fleet has room for another sandbox ({', '.join(words)})" + "".join(
        f"; {one}" for one in closed
    )


def spread_of(nodes: Iterable[NodeState]) -> float:
    """Return how unevenly nodes that answer are filled: the share of places held at the fullest less the emptiest.

    Example:
        >>> fleet = [NodeState(url=u, reachable=True, sandboxes=n, most=10) for u, n in (("a", 2), ("b", 9))]
        >>> round(spread_of(fleet), 3)
        0.7
    """
    shares = [node.sandboxes / node.most for node in nodes if node.reachable and node.most > 0]
    return max(shares) - min(shares) if shares else 0.0


def outcome_of(status: int) -> str:
    """Return how a call at a node ended, for counts: `done`, `refused`, `no_room` or `failed`.

    Example:
        >>> [outcome_of(status) for status in (201, 404, 429, 503, 500)]
        ['done', 'refused', 'no_room', 'no_room', 'failed']
    """
    if status in TRY_ANOTHER:
        return "no_room"
    return "done" if status < 400 else "refused" if status < 500 else "failed"


def _weight(key: str, url: str) -> bytes:
    return hashlib.blake2b(f"{key} {url}".encode(), digest_size=8).digest()


def merged(
    pages: Sequence[tuple[Sequence[Mapping[str, Any]], bool]], *, limit: int, newest_first: bool
) -> tuple[list[Mapping[str, Any]], str]:
    """Return one page of those of all nodes, and the cursor of the next, which all nodes understand.

    Args:
        pages: of each node: its items, and whether it has more.
        limit: items of a page.
        newest_first: order.
    """
    items = sorted((item for page, _ in pages for item in page), key=_place, reverse=newest_first)
    shown = items[:limit]
    more = len(items) > limit or any(has_more for _, has_more in pages)
    return shown, cursor_of(*_place(shown[-1])) if more and shown else ""


def _place(item: Mapping[str, Any]) -> tuple[float, str]:
    return datetime.fromisoformat(item["startedAt"]).timestamp(), item["sandboxID"]
