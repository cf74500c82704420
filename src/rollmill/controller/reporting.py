"""What the controller writes for people: events, metrics, rollouts and the live state.

Decides nothing. Every figure comes from the core's view, the trainer's step records or the replicas' own books.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from rollmill.buffer.protocol import SampleStore, StepRecord
from rollmill.clock import Clock
from rollmill.config.schema import RollmillConfig
from rollmill.controller.evaluation import EvaluationResult
from rollmill.errors import DataError
from rollmill.scheduling.core import Scheduler
from rollmill.telemetry.bound import bound_sentence
from rollmill.telemetry.files import JsonLines, append_jsonl, read_jsonl, write_json_atomic
from rollmill.telemetry.interval import proportion
from rollmill.telemetry.run_directory import RunDirectory
from rollmill.types import FilterVerdict, Group, Rollout, raw_reward_of


class GroupStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """What a closed group tells about reward and length."""

    rewards: tuple[float, ...]
    output_tokens: int
    loss_tokens: int
    trainable: bool


def statistics_of(group: Group) -> GroupStatistics:
    """Return the figures of a closed group."""
    rewards = [reward for rollout in group.rollouts if (reward := raw_reward_of(rollout.outcome)) is not None]
    lengths = np.array([rollout.output_tokens for rollout in group.rollouts])
    return GroupStatistics(
        rewards=tuple(rewards),
        output_tokens=int(lengths.sum()),
        loss_tokens=int(lengths[group.in_loss].sum()),
        trainable=group.verdict is FilterVerdict.TRAINABLE,
    )


def evaluation_record(result: EvaluationResult) -> dict[str, Any]:
    """Return the JSON form of an evaluation, with its 95 % Wilson interval.

    Raises:
        DataError: if no held-out problem got a verdict.
    """
    if result.n == 0:
        raise DataError(
            f"none of {result.unscored} held-out problems got a verdict. The scorer or the generator failed for all of "
            "them; events.jsonl and the logs say how."
        )
    return {
        **msgspec.to_builtins(result),
        **proportion(result.correct, result.n).as_dict(),
        "policy_version": max(result.policy_versions),
    }


def readable_rollout(
    rollout: Rollout, *, advantage: float, in_loss: bool, decode: Callable[[np.ndarray], str]
) -> dict[str, Any]:
    """Return a rollout as a person wants to read it."""
    return {
        "rollout_id": rollout.rollout_id,
        "group_id": rollout.group_id,
        "task_id": rollout.task.task_id,
        "question": rollout.task.messages[-1].content,
        "answer": " ".join(decode(turn.output_ids) for turn in rollout.turns),
        "reference": rollout.task.reference,
        "outcome": msgspec.to_builtins(rollout.outcome),
        "advantage": round(float(advantage), 6),
        "in_loss": bool(in_loss),
        "output_tokens": rollout.output_tokens,
        "stop_reason": rollout.turns[-1].stop_reason.value if rollout.turns else None,
        "version_spans": [
            [span.start_token, span.end_token, span.policy_version]
            for turn in rollout.turns
            for span in turn.version_spans
        ],
        "started_at_s": round(rollout.started_at_s, 3),
        "finished_at_s": round(rollout.finished_at_s, 3),
        "seconds": {phase: round(seconds, 4) for phase, seconds in rollout.seconds.items()},
    }


class RunReporter:
    """Writes the readable files of a run directory."""

    def __init__(
        self,
        *,
        config: RollmillConfig,
        directory: RunDirectory,
        store: SampleStore,
        clock: Clock,
        decode: Callable[[np.ndarray], str],
    ) -> None:
        self._config = config
        self._directory = directory
        self._store = store
        self._clock = clock
        self._decode = decode
        self._events: JsonLines = append_jsonl(directory.events)
        # A step may be heard once more after a resume: its line came before its event was in the journal.
        self._written = {_key(line) for line in read_jsonl(directory.metrics)} if directory.metrics.exists() else set()
        self._metrics: JsonLines = append_jsonl(directory.metrics)
        self._rollouts: JsonLines = append_jsonl(directory.rollouts)
        self._started_s = clock.now_s()
        self._groups: dict[str, GroupStatistics] = {}
        self._closed_since_step: list[GroupStatistics] = []
        self._last_step: dict[str, Any] = {}
        self._trainer_seconds: dict[str, float] = {}
        self._replica_seconds: Mapping[str, float] = {}
        self._heldout: dict[str, Any] | None = None
        self._recent_step_s: deque[float] = deque(maxlen=8)
        self._message = ""

    def event(self, kind: str, **fields: object) -> None:
        """Append a line to events.jsonl; a stall also becomes the live view's message."""
        record = {"at_wall_s": round(self._clock.wall_s(), 3), "event": kind, **fields}
        self._events.append(record)
        if kind == "stall":
            self._message = f"nothing moved for {fields['quiet_s']} s: " + " ".join(map(str, fields["waits"]))  # type: ignore[arg-type]

    def group_closed(self, group: Group) -> None:
        """Record a closed group and its rollouts."""
        statistics = statistics_of(group)
        if statistics.trainable:  # the others are in no step, and a long run has very many
            self._groups[group.group_id] = statistics
        self._closed_since_step.append(statistics)
        for rollout, advantage, in_loss in zip(group.rollouts, group.advantages, group.in_loss, strict=True):
            line = readable_rollout(rollout, advantage=advantage, in_loss=in_loss, decode=self._decode)
            self._rollouts.append(line)

    def step(self, row: int, record: StepRecord) -> None:
        """Write the metrics of an optimizer step, unless its line is there."""
        for cause, seconds in record.seconds.items():
            self._trainer_seconds[cause] = self._trainer_seconds.get(cause, 0.0) + seconds
        if (record.batch_id, round(record.finished_at_s, 3)) in self._written:
            return
        trained = [self._statistics(group_id) for group_id in record.group_ids]
        closed, self._closed_since_step = self._closed_since_step, []
        wait_s = record.seconds.get("wait_data", 0.0)
        line = {
            "step": record.optimizer_step,
            "steps": self._config.run.steps,
            "policy_version": record.policy_version,
            "batch_id": record.batch_id,
            "samples": sum(len(group.rewards) for group in trained),
            "groups": len(trained),
            "reward_mean": _mean([reward for group in trained for reward in group.rewards]),
            "reward_before_filter": _mean([reward for group in closed for reward in group.rewards]),
            "groups_closed": len(closed),
            "groups_without_signal": sum(not group.trainable for group in closed),
            "loss_tokens": sum(group.loss_tokens for group in trained),
            "train_time_s": round(sum(record.seconds.values()) - wait_s, 4),
            "wait_data_time_s": round(wait_s, 4),
            "seconds": {cause: round(seconds, 4) for cause, seconds in record.seconds.items()},
            "finished_at_s": round(record.finished_at_s, 3),
            **{name: round(value, 6) for name, value in record.metrics.items()},
        }
        self._metrics.append(line)
        self._last_step = line
        self._recent_step_s.append(sum(record.seconds.values()))
        self._message = ""

    def replica_seconds(self, seconds: Mapping[str, float]) -> None:
        """Take the newest books of the replicas, summed."""
        self._replica_seconds = seconds

    def evaluated(self, label: str, result: EvaluationResult, *, digest_of: Callable[[int], str]) -> dict[str, Any]:
        """Record an evaluation with the digest of the weights that answered; return its JSON form."""
        record = evaluation_record(result)
        record["digest"] = digest_of(record["policy_version"])
        self._heldout = record
        self._message = ""
        self.event("evaluation", label=label, **record)
        return record

    def say(self, message: str) -> None:
        """Show a sentence in the live view until the next step or the end of an evaluation."""
        self._message = message

    def refresh(self, scheduler: Scheduler) -> None:
        """Write live.json from the newest figures."""
        write_json_atomic(self._directory.live, self.live_state(scheduler))

    def live_state(self, scheduler: Scheduler) -> dict[str, Any]:
        """Return the state that `rollmill.telemetry.live` renders."""
        view = scheduler.view()
        steps = self._config.run.steps
        step_s = _mean(list(self._recent_step_s))
        last = self._last_step
        return {
            "run": self._config.run.name,
            "step": view.optimizer_step,
            "steps": steps,
            "reward_mean": last.get("reward_mean"),
            "reward_before_filter": last.get("reward_before_filter"),
            "heldout": self._heldout,
            "staleness_mean": view.staleness_mean,
            "staleness_max": view.staleness_max,
            "staleness_budget": self._config.schedule.max_staleness,
            "stock": view.stock,
            "stock_target": view.stock_target,
            "in_flight": view.in_flight,
            "buffered": view.buffered,
            "seconds": {"trainer": self._trainer_seconds, "generator": dict(self._replica_seconds)},
            "bound_by": view.bound_by,
            "bound_sentence": bound_sentence(view.bound_by),
            "elapsed_s": self._clock.now_s() - self._started_s,
            "eta_s": None if step_s is None else step_s * (steps - view.optimizer_step),
            "train_time_s": last.get("train_time_s"),
            "wait_data_time_s": last.get("wait_data_time_s"),
            "samples": last.get("samples"),
            "message": self._message,
        }

    def close(self) -> None:
        """Close the files; every line is already out."""
        for lines in (self._events, self._metrics, self._rollouts):
            lines.close()

    def _statistics(self, group_id: str) -> GroupStatistics:
        # After a resume, buffered groups were closed by an earlier controller.
        if group_id not in self._groups:
            self._groups[group_id] = statistics_of(self._store.group(group_id))
        return self._groups.pop(group_id)


def _key(line: Mapping[str, Any]) -> tuple[int, float]:
    """Return what tells a step's line from all others: batches are numbered anew after a way back."""
    return line["batch_id"], line["finished_at_s"]


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
