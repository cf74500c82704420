from __future__ import annotations

import numpy as np
import pytest

from rollmill.config.schema import RollmillConfig, ScheduleSettings
from rollmill.controller.translate import event_of_error, event_of_rollout, scheduler_settings, why_not_counted
from rollmill.errors import DataError, DeadlineExceeded, EngineDead, LengthMismatch
from rollmill.scheduling.events import FailureClass, RolloutFailed, RolloutFinished
from rollmill.types import (
    Cut,
    InfraFailed,
    Message,
    Outcome,
    PolicyFailed,
    Rollout,
    SamplingParams,
    Scored,
    StopReason,
    Task,
    Turn,
    Unscored,
    VersionSpan,
)

SCORED = Scored(raw_reward=1.0, shaped_reward=1.0)


def rollout(outcome: Outcome = SCORED, *, stop: StopReason = StopReason.STOP) -> Rollout:
    turn = Turn(
        request_id="g0/0.1/turn0",
        prompt_ids=np.array([1], np.int32),
        output_ids=np.array([2, 3, 4], np.int32),
        behavior_logprobs=np.zeros(3, np.float32),
        version_spans=(VersionSpan(0, 2, 7), VersionSpan(2, 3, 8)),
        stop_reason=stop,
    )
    return Rollout(
        rollout_id="g0/0.1",
        group_id="g0",
        sibling=0,
        attempt=1,
        task=Task(task_id="t", environment="toy", messages=(Message("user", "?"),)),
        turns=(turn,),
        outcome=outcome,
        sampling=SamplingParams(),
        started_at_s=0.0,
        finished_at_s=1.0,
    )


def test_a_scored_rollout_counts_and_is_as_old_as_its_oldest_token() -> None:
    event = event_of_rollout(rollout(), optimizer_step_of={7: 6, 8: 7}.__getitem__, at_s=5.0)
    assert event == RolloutFinished(
        at_s=5.0, rollout_id="g0/0.1", output_tokens=3, oldest_optimizer_step=6, counts=True, reason=""
    )


@pytest.mark.parametrize(
    ("outcome", "reason"),
    [
        (SCORED, ""),
        (PolicyFailed(kind="bad_json", reward=0.0), ""),
        (Unscored(reason="reward_failed(timeout)"), "unscored: reward_failed(timeout)"),
        (Cut(reason="overlong"), "overlong"),
    ],
)
def test_only_verdicts_count(outcome: Outcome, reason: str) -> None:
    assert why_not_counted(outcome) == reason
    event = event_of_rollout(rollout(outcome), optimizer_step_of={7: 6, 8: 7}.__getitem__, at_s=5.0)
    assert isinstance(event, RolloutFinished)
    assert event.counts == (reason == "")


@pytest.mark.parametrize(
    "broken",
    [rollout(InfraFailed(kind="sandbox_lost")), rollout(stop=StopReason.ABORT), rollout(stop=StopReason.ERROR)],
)
def test_a_lost_engine_or_sandbox_is_the_infrastructures_failure_and_never_a_reward(broken: Rollout) -> None:
    event = event_of_rollout(broken, optimizer_step_of={7: 6, 8: 7}.__getitem__, at_s=5.0)
    assert isinstance(event, RolloutFailed)
    assert event.failure is FailureClass.INFRA


@pytest.mark.parametrize(
    ("error", "failure"),
    [
        (EngineDead("gone"), FailureClass.INFRA),
        (DeadlineExceeded("late"), FailureClass.INFRA),
        (DataError("too long"), FailureClass.DATA),
        (LengthMismatch(what="logprobs", expected=3, got=5), FailureClass.DATA),
        (KeyError("a bug of ours"), FailureClass.DATA),
    ],
)
def test_an_unknown_error_is_the_datas_so_that_bugs_surface(error: Exception, failure: FailureClass) -> None:
    event = event_of_error("g0/0.1", error, at_s=1.0)
    assert event.failure is failure
    assert type(error).__name__ in event.reason


def test_epochs_bound_the_draws() -> None:
    # 3 epochs of 100 draws
    config = RollmillConfig(schedule=ScheduleSettings(data_epochs=3))
    assert scheduler_settings(config, training_size=100).data_limit == 300
    assert scheduler_settings(RollmillConfig(), training_size=100).data_limit is None
