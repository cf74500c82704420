"""What an error of a creation means: whose fault it is, and whether a sandbox may be left. Pure."""

from __future__ import annotations

import enum

from rollmill.errors import (
    CreateUnknown,
    DeadlineExceeded,
    ImageError,
    RollmillError,
    SandboxIdInUse,
    SandboxRetryable,
    SandboxUnsupported,
    UserError,
)
from rollmill.sandboxes.admission.records import How
from rollmill.sandboxes.records import Record


class Left(enum.Enum):
    """What may be left of a creation that failed."""

    NOTHING = "nothing"
    MAYBE = "maybe"
    """One kill settles it."""
    UNKNOWN = "unknown"
    """It may still appear, so it is looked for during a while."""


class Outcome(Record, frozen=True, kw_only=True):
    """How a creation ended that gave no sandbox."""

    how: How
    left: Left
    after_s: float = 0.0


def outcome_of(error: Exception) -> Outcome:
    """Return what an error of `Provider.create` means.

    Example:
        >>> outcome_of(SandboxRetryable("full", after_s=2.0))
        Outcome(how=<How.NO_ROOM: 'no_room'>, left=<Left.NOTHING: 'nothing'>, after_s=2.0)
    """
    match error:
        case SandboxRetryable(after_s=after_s):
            return Outcome(how=How.NO_ROOM, left=Left.NOTHING, after_s=after_s)
        case CreateUnknown():
            return Outcome(how=How.FAILED, left=Left.UNKNOWN)
        case ImageError():
            return Outcome(how=How.IMAGE, left=Left.NOTHING)
        case SandboxIdInUse() | SandboxUnsupported() | UserError():
            return Outcome(how=How.REQUEST, left=Left.NOTHING)
        case OSError() | DeadlineExceeded():  # a connection or a wait that broke off says nothing about the other end
            return Outcome(how=How.FAILED, left=Left.UNKNOWN)
        case RollmillError():
            return Outcome(how=How.FAILED, left=Left.MAYBE)
        case _:  # a bug somewhere: its caller gets it as it is
            return Outcome(how=How.REQUEST, left=Left.MAYBE)
