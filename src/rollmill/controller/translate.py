"""Pure translation between what happened and what the core is told.

Decides which class a failure belongs to (the policy's never comes here: it is an outcome); does no I/O.
"""

from __future__ import annotations

from collections.abc import Callable

from rollmill.config.schema import RollmillConfig
from rollmill.errors import DeadlineExceeded, EngineError, EnvironmentFault, ProducersGone
from rollmill.scheduling.events import FailureClass, RolloutFailed, RolloutFinished
from rollmill.scheduling.settings import SchedulerSettings
from rollmill.types import Cut, InfraFailed, Outcome, PolicyFailed, Rollout, Scored, StopReason, Unscored


def scheduler_settings(config: RollmillConfig, *, training_size: int) -> SchedulerSettings:
    """Return the core's settings for this configuration and this number of training problems."""
    schedule = config.schedule
    epochs = schedule.data_epochs
    return SchedulerSettings(
        batch_groups=schedule.batch_groups,
        group_size=schedule.group_size,
        max_staleness=schedule.max_staleness,
        total_steps=config.run.steps,
        window_groups=schedule.window_groups,
        group_oversampling=schedule.group_oversampling,
        member_oversampling=schedule.member_oversampling,
        reopen_groups=schedule.reopen_groups,
        replace_zero_advantage=schedule.zero_advantage == "replace",
        rollout_deadline_s=schedule.rollout_deadline_s,
        group_deadline_s=schedule.group_deadline_s,
        infra_attempts=schedule.infra_attempts,
        infra_failures_in_a_row=schedule.infra_failures_in_a_row,
        data_retries=schedule.data_retries,
        data_failure_limit=schedule.data_failure_limit,
        prior_step_s=schedule.prior_step_s,
        prior_group_s=schedule.prior_group_s,
        prior_yield=schedule.prior_yield,
        data_limit=None if epochs is None else epochs * training_size,
        deterministic=config.run.deterministic,
        loads_at_once=config.generator.loads_at_once,
    )


def why_not_counted(outcome: Outcome) -> str:
    """Return why an outcome stays out of baseline and loss; empty if it counts."""
    match outcome:
        case Scored() | PolicyFailed():
            return ""
        case Unscored(reason=reason):
            return f"unscored: {reason}"
        case Cut(reason=reason):
            return reason
        case InfraFailed(kind=kind):
            return f"infra_failed: {kind}"


_TIMED = ("reward_failed(timeout)", "reward_failed(died)")
"""Scores whose absence says how fast or how lucky the scorer was, not what the reply was worth."""


def event_of_rollout(
    rollout: Rollout, *, optimizer_step_of: Callable[[int], int], at_s: float, deterministic: bool = False
) -> RolloutFinished | RolloutFailed:
    """Return what the core hears of a rollout that came back.

    A rollout whose last turn was aborted without the core asking for it has lost its engine or its deadline:
    that is the infrastructure's failure, never a reward. In deterministic mode a scorer that took too long or died is
    one too: a group without that sibling would be a result of timing.
    """
    if deterministic and isinstance(rollout.outcome, Unscored) and rollout.outcome.reason in _TIMED:
        return _infra(rollout.rollout_id, f"unscored: {rollout.outcome.reason}", at_s=at_s)
    last = rollout.turns[-1] if rollout.turns else None
    if isinstance(rollout.outcome, InfraFailed):
        return _infra(rollout.rollout_id, rollout.outcome.kind, at_s=at_s)
    if last is None or last.stop_reason in (StopReason.ABORT, StopReason.ERROR):
        reason = "no turn came back" if last is None else f"generation ended with {last.stop_reason.value}"
        return _infra(rollout.rollout_id, reason, at_s=at_s)
    reason = why_not_counted(rollout.outcome)
    return RolloutFinished(
        at_s=at_s,
        rollout_id=rollout.rollout_id,
        output_tokens=rollout.output_tokens,
        oldest_optimizer_step=min(optimizer_step_of(version) for version in rollout.policy_versions),
        counts=not reason,
        reason=reason,
    )


def event_of_error(rollout_id: str, error: BaseException, *, at_s: float) -> RolloutFailed:
    """Return what the core hears of an error: engine, deadline and environment faults are infrastructure."""
    infra = isinstance(error, EngineError | DeadlineExceeded | EnvironmentFault | ProducersGone)
    return RolloutFailed(
        at_s=at_s,
        rollout_id=rollout_id,
        failure=FailureClass.INFRA if infra else FailureClass.DATA,
        reason=f"{type(error).__name__}: {error}",
    )


def _infra(rollout_id: str, reason: str, *, at_s: float) -> RolloutFailed:
    return RolloutFailed(at_s=at_s, rollout_id=rollout_id, failure=FailureClass.INFRA, reason=reason)
