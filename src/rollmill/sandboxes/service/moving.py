"""Moves paused sandboxes from memory to disk when a node is short. What goes first is `law`'s to say.

One after the other, each bounded by the node's `transition_s`. Whoever asks for them bounds the whole: what it does not
wait for any longer is carried through, and no further one begins.
"""

from __future__ import annotations

import logging

from rollmill.errors import RollmillError
from rollmill.sandboxes.service.law import to_move
from rollmill.sandboxes.service.node import Node

_log = logging.getLogger(__name__)


async def move_to_disk(node: Node, count: int) -> int:
    """Move so many, and return how many were moved; one that cannot be is told in the log, and the next one tried."""
    moved = 0
    for sandbox_id in to_move(node.paused_in_memory(), count=count):
        try:
            moved += await node.to_disk(sandbox_id)
        except RollmillError as error:
            _log.warning("sandbox %s was not moved to disk: %s", sandbox_id, error)
    return moved
