"""Builders of groups, batches and step records for tests of the sample store."""

from __future__ import annotations

import numpy as np

from rollmill.buffer import Assignment, CommitPoint, StepRecord, Transition
from rollmill.types import (
    FilterVerdict,
    Group,
    Message,
    Rollout,
    SamplingParams,
    Scored,
    StopReason,
    Task,
    Turn,
    VersionSpan,
)


def a_rollout(group_id: str, sibling: int) -> Rollout:
    turn = Turn(
        request_id=f"{group_id}/{sibling}.0#0",
        prompt_ids=np.array([1, 2, 3], np.int32),
        output_ids=np.array([7, 8], np.int32),
        behavior_logprobs=np.array([-0.5, -0.25], np.float32),
        version_spans=(VersionSpan(0, 1, 1), VersionSpan(1, 2, 2)),
        stop_reason=StopReason.STOP,
    )
    return Rollout(
        rollout_id=f"{group_id}/{sibling}.0",
        group_id=group_id,
        sibling=sibling,
        attempt=0,
        task=Task(task_id="t", environment="toy", messages=(Message("user", "1 + 1"),), reference={"answer": 2}),
        turns=(turn,),
        outcome=Scored(raw_reward=float(sibling), shaped_reward=float(sibling)),
        sampling=SamplingParams(seed=sibling),
        started_at_s=0.0,
        finished_at_s=1.0,
    )


def a_group(group_id: str) -> Group:
    return Group(
        group_id=group_id,
        task_index=0,
        rollouts=(a_rollout(group_id, 0), a_rollout(group_id, 1)),
        advantages=np.array([-1.0, 1.0], np.float32),
        in_loss=np.array([True, True]),
        verdict=FilterVerdict.TRAINABLE,
        oldest_optimizer_step=0,
        newest_optimizer_step=1,
    )


def put(*ids: str, journal: tuple[bytes, ...] = ()) -> Transition:
    return Transition(puts=tuple(a_group(i) for i in ids), journal=journal)


def assign(batch_id: int, *ids: str, step: int) -> Transition:
    return Transition(assignments=(Assignment(batch_id=batch_id, optimizer_step=step, group_ids=ids),))


def drop(group_id: str, reason: str = "stale") -> Transition:
    return Transition(drops=((group_id, reason),))


def a_step(batch_id: int, *ids: str, step: int, version: int | None = None, history: str = "h1") -> StepRecord:
    return StepRecord(
        batch_id=batch_id,
        history_id=history,
        optimizer_step=step,
        policy_version=step + 1 if version is None else version,
        group_ids=ids,
        finished_at_s=float(step),
        seconds={"train": 1.0},
        metrics={"loss": 0.5},
    )


def commit_at(step: int, *ids: str, version: int | None = None, offset: int = 0) -> CommitPoint:
    return CommitPoint(
        history_id="h1",
        optimizer_step=step,
        policy_version=step + 1 if version is None else version,
        trained_group_ids=ids,
        journal_offset=offset,
    )
