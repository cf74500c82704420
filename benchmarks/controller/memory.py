"""Bytes that the core keeps for each finished rollout, over a long run of the core alone. Prints JSON.

The fold of the journal keeps every rollout's fate for the whole run, because a resume from an older checkpoint may have
to put trained groups back. What that costs is measured between two points of one run, each with its live groups full.
"""

from __future__ import annotations

import gc
import json
import sys
import tracemalloc
from collections import deque
from typing import Any

from rollmill.scheduling.core import Scheduler
from rollmill.scheduling.events import (
    AnyEvent,
    BatchTaken,
    BatchTrained,
    GroupClosed,
    ReplicaJoined,
    RolloutFinished,
    RunStarted,
    WeightsLoaded,
    WeightsPublished,
)
from rollmill.scheduling.instructions import AnyInstruction, AssignBatch, CloseGroup, LoadWeights, StartRollout
from rollmill.scheduling.settings import SchedulerSettings

GROUP_SIZE = 8


def measure(*, steps: int, batch_groups: int) -> dict[str, Any]:
    """Return bytes per rollout between a third of the run and its end; every third group has no signal."""
    settings = SchedulerSettings(
        batch_groups=batch_groups, group_size=GROUP_SIZE, max_staleness=2, total_steps=steps + 1, window_groups=64
    )
    core = Scheduler(settings)
    work: deque[AnyEvent] = deque(
        [
            RunStarted(at_s=0.0, history_id="h", optimizer_step=0, policy_version=0),
            ReplicaJoined(at_s=0.0, replica_id="r0", slots=64, policy_version=0),
        ]
    )
    at_s, serving_step, trained, marks = 0.0, 0, 0, {}
    tracemalloc.start()
    while trained < steps:
        at_s += 0.01
        event = work.popleft()
        trained += isinstance(event, BatchTrained)
        for instruction in core.handle(event):
            if isinstance(instruction, LoadWeights):
                serving_step = instruction.policy_version
            work.extend(_answers(instruction, at_s=at_s, serving_step=serving_step))
        if trained in (steps // 3, steps) and trained not in marks:
            gc.collect()
            marks[trained] = (tracemalloc.get_traced_memory()[0], core.ledger.admitted)
    tracemalloc.stop()
    (first_bytes, first), (last_bytes, last) = marks[steps // 3], marks[steps]
    return {
        "rollouts": last - first,
        "bytes": last_bytes - first_bytes,
        "bytes_per_rollout": (last_bytes - first_bytes) / (last - first),
    }


def _answers(instruction: AnyInstruction, *, at_s: float, serving_step: int) -> list[AnyEvent]:
    """Return what a world without failures would report."""
    match instruction:
        case StartRollout(rollout_id=rollout_id):
            return [
                RolloutFinished(
                    at_s=at_s,
                    rollout_id=rollout_id,
                    output_tokens=24,
                    oldest_optimizer_step=serving_step,
                    counts=True,
                )
            ]
        case CloseGroup(group_id=group_id):
            signal = int(group_id[1:]) % 3 > 0
            return [
                GroupClosed(
                    at_s=at_s,
                    group_id=group_id,
                    has_signal=signal,
                    oldest_optimizer_step=serving_step,
                    loss_tokens=192,
                    reason="" if signal else "zero_advantage",
                )
            ]
        case AssignBatch(batch_id=batch_id, optimizer_step=step):
            trained = BatchTrained(at_s=at_s, batch_id=batch_id, optimizer_step=step + 1, step_s=1.0)
            published = WeightsPublished(at_s=at_s, policy_version=step + 1, optimizer_step=step + 1)
            return [BatchTaken(at_s=at_s, batch_id=batch_id), trained, published]
        case LoadWeights(replica_id=replica_id, policy_version=version):
            return [WeightsLoaded(at_s=at_s, replica_id=replica_id, policy_version=version)]
        case _:
            return []


def main() -> None:
    plan: dict[str, Any] = json.loads(sys.argv[1])
    print(json.dumps(measure(steps=plan["steps"], batch_groups=plan["batch_groups"])))


if __name__ == "__main__":
    main()
