"""What the router's law is told and what it says. Pure."""

from __future__ import annotations

import enum
from collections.abc import Mapping

import msgspec

from rollmill.errors import RollmillError


class Seen(enum.StrEnum):
    """What a replica is fit for, as far as the router knows."""

    UNKNOWN = "unknown"
    """Has not answered yet, or its last answer did not come."""
    JOINING = "joining"
    """Answers, but starts still, or must load the fleet's policy version before it serves."""
    SERVING = "serving"
    DIRTY = "dirty"
    DRAINING = "draining"
    DEAD = "dead"
    LEAVING = "leaving"
    """Was taken off the list; what it runs is finished."""


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """What the law has to know of a request.

    Attributes:
        wave_id: requests of one wave go to one replica or fail.
        min_policy_version: of the adapter, if it names one.
        siblings: samples it holds a place for.
        adapter: that it asks for; empty for what the replica serves itself.
    """

    request_id: str
    job: str = ""
    session_id: str = ""
    group_key: str = ""
    wave_id: str = ""
    min_policy_version: int = 0
    siblings: int = 1
    adapter: str = ""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What a replica said of itself.

    Attributes:
        state: `starting`, `serving`, `dirty`, `draining` or `dead`.
        slots: samples it decodes at once.
        kv_use: share of its KV that is taken.
        age_s: since its engine was made; falls when it was restarted.
        adapters: name -> version of those that it serves, 0 for those that it loads when they are asked for.
    """

    state: str
    policy_version: int
    digest: str = ""
    reason: str = ""
    running: int = 0
    waiting: int = 0
    slots: int = 1
    kv_use: float = 0.0
    age_s: float = 0.0
    max_model_len: int = 0
    adapters: Mapping[str, int] = {}


class Send(msgspec.Struct, frozen=True):
    """Send this request to this replica."""

    request_id: str
    replica: str


class Refuse(msgspec.Struct, frozen=True):
    """Answer this request with this error."""

    request_id: str
    error: RollmillError


Instruction = Send | Refuse


class Ended(enum.Enum):
    """How an attempt at a replica ended."""

    ANSWERED = "answered"
    INVALID = "invalid"
    """The request was bad; the replica is fine."""
    REFUSED = "refused"
    """The replica takes no requests now; nothing was begun."""
    DECLINED = "declined"
    """The replica does not take this request (too many, or its weights are too old); nothing was begun."""
    FAILED = "failed"
    """The replica answered with an error of its own."""
    LOST = "lost"
    """The replica is gone."""
    DROPPED = "dropped"
    """Nobody waits for it any more: the caller left, or a hedge was faster."""
