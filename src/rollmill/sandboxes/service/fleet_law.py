"""Which node of a fleet gets a sandbox, and how their lists become one. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

from rollmill.sandboxes.records import Record
from rollmill.sandboxes.service.law import cursor_of


class NodeState(Record, frozen=True, kw_only=True):
    """What is known of a node.

    Attributes:
        url: its address.
        reachable: whether it answered when it was asked last.
        sandboxes: that it has.
        most: that it may have.
        promised: that were sent there and are not among its own yet.
    """

    url: str
    reachable: bool = False
    sandboxes: int = 0
    most: int = 0
    promised: int = 0

    @property
    def free(self) -> int:
        """Return for how many more there is room."""
        return self.most - self.sandboxes - self.promised


def order_of(nodes: Iterable[NodeState], *, key: str = "") -> tuple[str, ...]:
    """Return the nodes that a creation is sent to, one after the other until one takes it: the emptiest first.

    With a key of a call that may come twice the order is the key's own, so that both go to the same node; full ones
    are left out only where there is no key.

    Example:
        >>> a = NodeState(url="a", reachable=True, sandboxes=9, most=10)
        >>> b = NodeState(url="b", reachable=True, sandboxes=5, most=10)
        >>> order_of([a, b, NodeState(url="c", most=10)])
        ('b', 'a')
    """
    there = [node for node in nodes if node.reachable]
    if key:
        return tuple(node.url for node in sorted(there, key=lambda node: _weight(key, node.url)))
    return tuple(node.url for node in sorted(there, key=lambda node: (-node.free, node.url)) if node.free > 0)


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
