"""What the trainer's loop decides, without doing any of it.

The questions: go on waiting for a batch or not, may this batch be trained, is a checkpoint or a publication due. Pure
functions, so that tests ask them directly.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence

import msgspec

from rollmill.errors import InvariantViolation, StalenessViolation
from rollmill.types import Group, WeightManifest

STOPPING_PHASE = "stopping"
ENDING_PHASES = frozenset({"finishing", STOPPING_PHASE})


class EndReason(enum.Enum):
    """Why the loop ended."""

    FINISHED = "finished"
    STOPPED = "stopped"


class WaitMore(msgspec.Struct, frozen=True, kw_only=True):
    """Wait at most `seconds` for the doorbell, then look again; `report` says that a reason is due to be printed."""

    seconds: float
    report: bool


class GiveUp(msgspec.Struct, frozen=True, kw_only=True):
    """The wait has reached its deadline."""

    waited_s: float


def decide_wait(
    *,
    phase: str,
    stop: bool,
    waited_s: float,
    deadline_s: float,
    report_due_s: float,
    recheck_s: float,
) -> EndReason | WaitMore | GiveUp:
    """Return what to do when no batch is assigned for this step.

    Args:
        phase: note of the controller, read before the store was asked for a batch: "finishing" is written after the
            last assignment, so an empty store that was read later is really empty.
        stop: the process was asked to stop.
        waited_s: since the wait began.
        deadline_s: longest wait.
        report_due_s: `waited_s` at which the next reason is due to be printed.
        recheck_s: longest sleep; a ring may be lost, the truth is in the store.
    """
    if stop or phase == STOPPING_PHASE:
        return EndReason.STOPPED
    if phase in ENDING_PHASES:
        return EndReason.FINISHED
    if waited_s >= deadline_s:
        return GiveUp(waited_s=waited_s)
    return WaitMore(seconds=min(recheck_s, deadline_s - waited_s), report=waited_s >= report_due_s)


def loss_steps(group: Group, *, optimizer_step_of: Callable[[int], int]) -> tuple[int, int]:
    """Return (oldest, newest) optimizer step of a group's tokens in the loss, from its version spans.

    Raises:
        InvariantViolation: if the group's own `oldest_optimizer_step` says something else.
    """
    versions = {
        version
        for rollout, counts in zip(group.rollouts, group.in_loss, strict=True)
        if counts
        for version in rollout.policy_versions
    }
    if not versions:
        raise InvariantViolation(f"group {group.group_id} was assigned without a token in the loss.")
    steps = [optimizer_step_of(version) for version in versions]
    oldest = min(steps)
    if oldest != group.oldest_optimizer_step:
        raise InvariantViolation(
            f"group {group.group_id} says its oldest token is of optimizer step {group.oldest_optimizer_step}, its "
            f"version spans (versions {sorted(versions)}) say {oldest}. The group was closed with other labels."
        )
    return oldest, max(steps)


def check_staleness(
    groups: Sequence[Group], *, optimizer_step: int, budget: int, optimizer_step_of: Callable[[int], int]
) -> None:
    """Assert the bound at consumption, the last of the three places where it is enforced.

    Args:
        optimizer_step: the trainer's, before the update.
        budget: `max_staleness`, in optimizer steps.

    Raises:
        StalenessViolation: if a group is older than the budget, or has tokens newer than the trainer.
    """
    for group in groups:
        oldest, newest = loss_steps(group, optimizer_step_of=optimizer_step_of)
        staleness = optimizer_step - oldest
        if staleness > budget:
            raise StalenessViolation(
                f"group {group.group_id} has staleness {staleness} at optimizer step {optimizer_step}, the budget "
                f"(schedule.max_staleness) is {budget}. The scheduling core must not assign it; nothing was trained."
            )
        if newest > optimizer_step:
            raise StalenessViolation(
                f"group {group.group_id} has tokens of optimizer step {newest}, the trainer is at {optimizer_step}: "
                "those weights belong to an abandoned history; the core must not assign them. Nothing was trained."
            )


def checkpoint_due(*, optimizer_step: int, every_steps: int, written_at: int | None) -> bool:
    """Return whether a checkpoint is due after this step (the last one is written at the end in any case)."""
    return optimizer_step % every_steps == 0 and optimizer_step != written_at


def background_pays(*, state_bytes: int, free_bytes: int) -> bool:
    """Return whether a copy of the trainer's state fits and leaves as much free again, for whatever else grows."""
    return free_bytes >= 2 * state_bytes


def publication_due(latest: WeightManifest | None, *, history_id: str, optimizer_step: int) -> bool:
    """Return whether the present weights still have to be published, at the start of a new or resumed run."""
    return latest is None or (latest.history_id, latest.optimizer_step) != (history_id, optimizer_step)
