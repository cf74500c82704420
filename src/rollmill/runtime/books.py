"""The summary of a run from its own records, after any end: the journal, the ledgers, the supervisor's measurements."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

from rollmill.buffer.protocol import StepRecord
from rollmill.buffer.sqlite import SqliteStore
from rollmill.config.explain import explain
from rollmill.config.load import load_config
from rollmill.controller.translate import scheduler_settings
from rollmill.errors import RunDirectoryError
from rollmill.ledger.seconds import SecondsReport, merge_reports
from rollmill.runtime.failure import FailureRecord
from rollmill.runtime.fold import fold
from rollmill.runtime.incarnation import (
    Incarnation,
    Life,
    Preflight,
    ProcessSeconds,
    Segment,
    history_of,
    read_record,
)
from rollmill.runtime.layout import CONTROLLER, TRAINER, ProcessLayout
from rollmill.runtime.losses import LossRecord, read_losses
from rollmill.telemetry.files import write_json_atomic
from rollmill.telemetry.run_directory import RunDirectory
from rollmill.telemetry.summary import build_summary

T = TypeVar("T")
TEARDOWN_LIMIT_S = 5.0
"""A process that closed its books ends within this time; more means seconds that nobody booked."""


def write_summary(directory: RunDirectory, layout: ProcessLayout, *, failure: FailureRecord | None) -> dict[str, Any]:
    """Build the summary, write `summary.json`, return it.

    Raises:
        RunDirectoryError: if a record of the run is missing or damaged.
    """
    loaded = load_config(directory.config_toml)
    preflight = read_record(layout.preflight, Preflight)
    segments = read_all(layout.processes, "segment.*.json", Segment)
    settings = scheduler_settings(loaded.config, training_size=preflight.training_size)
    store = SqliteStore(layout.store)
    try:
        view = fold(store, settings, include_unheard=True).scheduler.view()
        records = [record for _, record in store.steps()]
        history = [*records, *(record for _, record in store.steps(abandoned=True))]
        before, after = store.note("eval:before"), store.note("eval:after")
        finish_reason = store.note("finish_reason")
    finally:
        store.close()
    lives = life_reports(layout, segments, steps=history)
    reports = process_seconds(layout, segments, steps=history)
    incarnation = read_record(layout.incarnation, Incarnation)
    # The controller's seconds are of no interest: it never limits and does one thing.
    reports.pop(CONTROLLER, None)
    summary = build_summary(
        run=str(directory.root),
        reason="failed" if failure is not None else finish_reason or "stopped",
        resume=_resume_command(directory, view.optimizer_step, total=loaded.config.run.steps, reason=finish_reason),
        steps=view.optimizer_step,
        wall_s=sum(segment.wall_s for segment in segments),
        cpu_s=sum(segment.cpu_s for segment in segments),
        eval_before=before,
        eval_after=after,
        rollouts=view.rollouts(),
        seconds={owner: report.seconds for owner, report in reports.items()},
        seconds_wall_s={owner: report.wall_s for owner, report in reports.items()},
        staleness_mean=view.staleness_mean if records else None,
        staleness_max=view.staleness_max if records else None,
        staleness_budget=loaded.config.schedule.max_staleness,
        useful_tokens=int(sum(record.metrics.get("loss_tokens", 0.0) for record in records)),
        peak_memory_bytes=max((segment.peak_memory_bytes for segment in segments), default=0),
        bound_by=view.bound_most,
        bound_seconds=view.seconds_bound,
        settings={row.key: row.value for row in explain(loaded)},
        extra={
            "incarnations": incarnation.number,
            "repairs": [*incarnation.repairs, *damaged_measures(layout)],
            "restarts": restarts_of(read_losses(layout.losses), lives),
            "degraded_steps": view.degraded_steps,
            "failure": None
            if failure is None
            else {"process": failure.process, "code": failure.code, "message": failure.message},
        },
    )
    write_json_atomic(directory.summary, summary)
    return summary


def process_seconds(
    layout: ProcessLayout, segments: Sequence[Segment], *, steps: Sequence[StepRecord]
) -> dict[str, SecondsReport]:
    """Return the seconds of each process over all its lives, against the supervisor's measure of them.

    Args:
        steps: all step records, those of abandoned histories too: they hold what a killed trainer had booked.

    Raises:
        InvariantViolation: if a book does not balance.
    """
    reports: dict[str, list[SecondsReport]] = {}
    for life, report in life_reports(layout, segments, steps=steps):
        reports.setdefault(life.process, []).append(report)
    return {process: merge_reports(parts) for process, parts in reports.items()}


def life_reports(
    layout: ProcessLayout, segments: Sequence[Segment], *, steps: Sequence[StepRecord]
) -> list[tuple[Life, SecondsReport]]:
    """Return where the seconds of each life of each process went.

    The supervisor measured those of its own children; whoever starts another writes its life down.

    A process that closed its books is checked: its causes must sum to its own wall time, and what the supervisor saw
    beyond that is `teardown`, at most TEARDOWN_LIMIT_S. One that was killed has what it had written down: a replica its
    book of a moment ago, the trainer its step records. The rest is `lost`.

    Raises:
        InvariantViolation: if a book does not balance.
    """
    found: list[tuple[Life, SecondsReport]] = []
    others: list[Life] = read_all(layout.processes, "*.life.json", Life)
    for life in (*(life for segment in segments for life in segment.lives), *others):
        path = layout.seconds(life.process, life=life.life)
        book = _if_whole(path, ProcessSeconds)
        by_steps = book is None and life.process == TRAINER
        report = _of_steps(life, steps) if by_steps else _of_book(life, book)
        report.validate()
        found.append((life, report))
    return found


def _of_book(life: Life, book: ProcessSeconds | None) -> SecondsReport:
    if book is None:
        return SecondsReport(owner=life.process, wall_s=life.wall_s, seconds={"lost": life.wall_s})
    own_wall_s = book.closed_at_s - book.spawned_at_s
    own = SecondsReport(owner=life.process, wall_s=own_wall_s, seconds=book.seconds)
    own.validate()
    # A supervisor that was killed measured it for the last time a few seconds before.
    wall_s = max(life.wall_s, own_wall_s)
    rest_s = wall_s - own_wall_s
    cause = "teardown" if book.closed and rest_s <= TEARDOWN_LIMIT_S else "lost"
    return SecondsReport(owner=life.process, wall_s=wall_s, seconds={**book.seconds, cause: rest_s})


def _of_steps(life: Life, steps: Sequence[StepRecord]) -> SecondsReport:
    """Return the account of a trainer that closed no book: its history is its own, and each record holds a part."""
    seconds: dict[str, float] = {}
    for record in steps:
        if record.history_id == history_of(life.incarnation):
            for cause, spent in record.seconds.items():
                seconds[cause] = seconds.get(cause, 0.0) + spent
    wall_s = max(life.wall_s, sum(seconds.values()))
    seconds["lost"] = wall_s - sum(seconds.values())
    return SecondsReport(owner=life.process, wall_s=wall_s, seconds=seconds)


def restarts_of(losses: Sequence[LossRecord], lives: Sequence[tuple[Life, SecondsReport]]) -> dict[str, dict[str, Any]]:
    """Return for each process that was lost: how often, why, what it cost.

    `down_s` passed between the end of a life and the next; `startup_s` until the new one was ready; `lost_s` is work
    that no book tells of.
    """
    found: dict[str, dict[str, Any]] = {}
    for loss in losses:
        entry = found.setdefault(
            loss.process, {"losses": 0, "restarts": 0, "causes": [], "down_s": 0.0, "startup_s": 0.0, "lost_s": 0.0}
        )
        entry["losses"] += 1
        entry["restarts"] += loss.decision == "restart"
        entry["causes"].append(loss.cause.message)
    for process, entry in found.items():
        own = [(life, report) for life, report in lives if life.process == process]
        ends = {loss.life for loss in losses if loss.process == process and loss.decision != "fail"}
        for (before, _), (after, report) in pairwise(own):
            if before.life in ends:
                entry["down_s"] += max(0.0, after.spawned_at_s - before.spawned_at_s - before.wall_s)
                entry["startup_s"] += report.seconds.get("startup", 0.0)
        if process != CONTROLLER:
            # The controller does one thing and never limits: nothing of its time is worth an account.
            entry["lost_s"] = sum(report.seconds.get("lost", 0.0) for _, report in own)
    return found


def damaged_measures(layout: ProcessLayout) -> list[str]:
    """Return in words which measures of processes cannot be read, and so are missing in the seconds."""
    kinds = {"segment.*.json": Segment, "*.life.json": Life, "*.seconds.json": ProcessSeconds}
    paths = [(path, kind) for pattern, kind in kinds.items() for path in sorted(layout.processes.glob(pattern))]
    return [
        f"{path.name} is damaged: what it measured is missing in this summary. A power cut leaves such a file."
        for path, kind in paths
        if _if_whole(path, kind) is None
    ]


def read_all(folder: Path, pattern: str, kind: type[Any]) -> list[Any]:
    """Return all records that match, by name; one that a power cut damaged is passed over: it was only a measure."""
    found = (_if_whole(path, kind) for path in sorted(folder.glob(pattern)))
    return [one for one in found if one is not None]


def _if_whole(path: Path, kind: type[T]) -> T | None:
    try:
        return read_record(path, kind)
    except RunDirectoryError:  # missing, or damaged
        return None


def _resume_command(directory: RunDirectory, step: int, *, total: int, reason: str | None) -> str | None:
    if reason == "end_of_data" or step >= total:
        return None
    return f"rollmill train --resume {directory.root}"
