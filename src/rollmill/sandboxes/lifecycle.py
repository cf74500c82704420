"""Laws of a sandbox's life: how its end is explained, and whose doing it is. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from rollmill.errors import SandboxDead
from rollmill.sandboxes.records import Culprit, Death, DeathReason

_SIGKILL = -9
_BY_INFRASTRUCTURE = frozenset(
    {
        DeathReason.LEASE_EXPIRED,
        DeathReason.KILLED_BY_OPERATOR,
        DeathReason.START_FAILED,
        DeathReason.PROVIDER_LOST,
        DeathReason.EXITED,
    }
)


def culprit_of(reason: DeathReason) -> Culprit:
    """Return whose doing an end is.

    Example:
        >>> culprit_of(DeathReason.POLICY_INODES), culprit_of(DeathReason.PROVIDER_LOST)
        (<Culprit.ROLLOUT: 'rollout'>, <Culprit.INFRASTRUCTURE: 'infrastructure'>)
    """
    if reason is DeathReason.RELEASED:
        return Culprit.NOBODY
    return Culprit.INFRASTRUCTURE if reason in _BY_INFRASTRUCTURE else Culprit.ROLLOUT


def death(reason: DeathReason, *, detail: str = "") -> Death:
    """Return an end with its culprit."""
    return Death(reason=reason, culprit=culprit_of(reason), detail=detail)


def explain_end(
    *,
    ordered: DeathReason | None,
    exit_code: int,
    usage: Mapping[str, int],
    by_operator: bool,
    memory_bytes: int,
    complaint: str = "",
) -> Death:
    """Explain why a sandbox's first process ended.

    Args:
        ordered: the reason of the owner's own order to end it, which goes before everything else.
        exit_code: of the first process, negative for a signal.
        usage: the sandbox's last counts, `oom_kills` among them where they are kept.
        by_operator: whether somebody outside left a note that it was to be killed.
        memory_bytes: the memory cap, for the message.
        complaint: what was wrong with its agent, if that is why it was ordered to end.
    """
    if ordered is not None:
        return death(ordered, detail=complaint)
    if by_operator:
        return death(DeathReason.KILLED_BY_OPERATOR, detail="ended by `rollmill sandbox kill`")
    if exit_code == _SIGKILL and usage.get("oom_kills", 0) > 0:
        return death(DeathReason.OUT_OF_MEMORY, detail=f"the memory cap of {memory_bytes} bytes was reached")
    if exit_code == _SIGKILL:
        detail = "its first process was killed from outside: by the host running out of memory, or by its user"
        return death(DeathReason.PROVIDER_LOST, detail=detail)
    return death(DeathReason.EXITED, detail=f"its first process ended with {exit_code}, which it never does by itself")


def dead_error(sandbox_id: str, end: Death) -> SandboxDead:
    """Return the error of a call on a sandbox that has ended."""
    cause = f": {end.detail}" if end.detail else ""
    return SandboxDead(
        f"sandbox {sandbox_id} has ended ({end.reason.value}{cause}). Its files and processes are gone; start another.",
        reason=end.reason.value,
        fault=end.culprit.value,
    )
