"""The summary of a run from its own records, after any end: the journal, the ledgers, the supervisor's measurements."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rollmill.buffer.sqlite import SqliteStore
from rollmill.config.explain import explain
from rollmill.config.load import load_config
from rollmill.controller.translate import scheduler_settings
from rollmill.ledger.seconds import SecondsReport, merge_reports
from rollmill.runtime.failure import FailureRecord
from rollmill.runtime.fold import fold
from rollmill.runtime.incarnation import Incarnation, Preflight, ProcessSeconds, Segment, read_record
from rollmill.runtime.layout import CONTROLLER, ProcessLayout
from rollmill.telemetry.files import write_json_atomic
from rollmill.telemetry.run_directory import RunDirectory
from rollmill.telemetry.summary import build_summary

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
        before, after = store.note("eval:before"), store.note("eval:after")
        finish_reason = store.note("finish_reason")
    finally:
        store.close()
    reports = process_seconds(layout, segments)
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
            "repairs": list(incarnation.repairs),
            "failure": None
            if failure is None
            else {"process": failure.process, "code": failure.code, "message": failure.message},
        },
    )
    write_json_atomic(directory.summary, summary)
    return summary


def process_seconds(layout: ProcessLayout, segments: list[Segment]) -> dict[str, SecondsReport]:
    """Return the seconds of each process over all incarnations, against the supervisor's measure of its life.

    A process that closed its books is checked: its causes must sum to its own wall time, and what the supervisor saw
    beyond that is `teardown`, at most TEARDOWN_LIMIT_S. A process that was killed left no closed book: what it had not
    booked is `lost`.

    Raises:
        InvariantViolation: if a book does not balance.
    """
    reports: dict[str, list[SecondsReport]] = {}
    for segment in segments:
        for process, wall_s in segment.process_wall_s.items():
            path = layout.seconds(process, incarnation=segment.number)
            book = read_record(path, ProcessSeconds) if path.exists() else None
            report = _of_life(process, book, wall_s=wall_s)
            report.validate()
            reports.setdefault(process, []).append(report)
    return {process: merge_reports(parts) for process, parts in reports.items()}


def _of_life(process: str, book: ProcessSeconds | None, *, wall_s: float) -> SecondsReport:
    if book is None:
        return SecondsReport(owner=process, wall_s=wall_s, seconds={"lost": wall_s})
    own_wall_s = book.closed_at_s - book.spawned_at_s
    own = SecondsReport(owner=process, wall_s=own_wall_s, seconds=book.seconds)
    own.validate()
    rest_s = wall_s - own_wall_s
    cause = "teardown" if rest_s <= TEARDOWN_LIMIT_S else "lost"
    return SecondsReport(owner=process, wall_s=wall_s, seconds={**book.seconds, cause: rest_s})


def read_all(folder: Path, pattern: str, kind: type[Any]) -> list[Any]:
    """Return all records that match, by name."""
    return [read_record(path, kind) for path in sorted(folder.glob(pattern))]


def _resume_command(directory: RunDirectory, step: int, *, total: int, reason: str | None) -> str | None:
    if reason == "end_of_data" or step >= total:
        return None
    return f"rollmill train --resume {directory.root}"
