"""States of a replica and the moves between them. Pure.

There is no way back to serving without loading and proving the current version; a move that cannot be is our own bug.

    starting --> serving <--> dirty        dirty --> serving only with proof
        any  --> draining --> dead         dead is the end
"""

from __future__ import annotations

import enum

import msgspec

from rollmill.errors import InvariantViolation


class ReplicaState(enum.StrEnum):
    """What a replica is fit for."""

    STARTING = "starting"
    SERVING = "serving"
    DIRTY = "dirty"
    DRAINING = "draining"
    DEAD = "dead"


class Standing(msgspec.Struct, frozen=True, kw_only=True):
    """A replica's state and why it is in it."""

    state: ReplicaState
    reason: str = ""


_S = ReplicaState
_MOVES: dict[ReplicaState, frozenset[ReplicaState]] = {
    _S.STARTING: frozenset({_S.SERVING, _S.DIRTY, _S.DRAINING, _S.DEAD}),
    _S.SERVING: frozenset({_S.SERVING, _S.DIRTY, _S.DRAINING, _S.DEAD}),
    _S.DIRTY: frozenset({_S.SERVING, _S.DIRTY, _S.DRAINING, _S.DEAD}),
    _S.DRAINING: frozenset({_S.DRAINING, _S.DEAD}),
    _S.DEAD: frozenset({_S.DEAD}),
}


def move(standing: Standing, to: ReplicaState, *, reason: str = "", proven: bool = False) -> Standing:
    """Return the standing after a move.

    Args:
        standing: where the replica is.
        to: where it goes.
        reason: why; shown in every refusal.
        proven: the current version was loaded and its digest and canary agree; needed to serve.

    Raises:
        InvariantViolation: if there is no such move, or serving was not proven.
    """
    if to not in _MOVES[standing.state]:
        raise InvariantViolation(f"a replica cannot go from {standing.state} to {to}")
    if to is ReplicaState.SERVING and not proven:
        raise InvariantViolation(f"a replica cannot go from {standing.state} to serving without proof of its weights")
    if to is standing.state and to is not ReplicaState.SERVING:
        return standing  # the first cause stays the one that is reported
    return Standing(state=to, reason=reason)


def refusal(standing: Standing, *, to_generate: bool) -> str | None:
    """Return why a replica takes no new request (or, if not `to_generate`, no new weights), or `None` if it does."""
    because = f": {standing.reason}" if standing.reason else ""
    match standing.state:
        case ReplicaState.SERVING:
            return None
        case ReplicaState.STARTING:
            return f"the replica is starting{because}; ask again when its health says SERVING" if to_generate else None
        case ReplicaState.DIRTY:
            return (
                f"the replica is dirty{because}; it serves nothing until a newer version loads and proves itself"
                if to_generate
                else None
            )
        case ReplicaState.DRAINING:
            return f"the replica is draining{because}; send the request to another one"
        case ReplicaState.DEAD:
            return f"the replica is dead{because}; restart it"
