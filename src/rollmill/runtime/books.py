"""The summary of a run from its own records, after any end: the journal, the ledgers, the supervisor's measurements."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rollmill.buffer.sqlite import SqliteStore
from rollmill.config.load import load_config
from rollmill.controller.translate import scheduler_settings
from rollmill.ledger.seconds import SecondsReport, merge_reports
from rollmill.runtime.failure import FailureRecord
from rollmill.runtime.fold import fold
from rollmill.runtime.incarnation import Incarnation, Preflight, ProcessSeconds, Segment, read_record
from rollmill.runtime.layout import ProcessLayout
from rollmill.telemetry.run_directory import RunDirectory
from rollmill.telemetry.summary import build_summary


def write_summary(directory: RunDirectory, layout: ProcessLayout, *, failure: FailureRecord | None) -> dict[str, Any]:
    """Build the summary, write `summary.json`, return it.

    Raises:
        InvariantViolation: if the books do not balance.
    """
    config = load_config(layout.run_directory / "config.toml").config
    preflight = read_record(layout.preflight, Preflight)
    segments = read_all(layout.processes, "segment.*.json", Segment)
    store = SqliteStore(layout.store)
    try:
        books = fold(store, scheduler_settings(config, training_size=preflight.training_size))
        view = books.scheduler.view()
        records = [record for _, record in store.steps()]
        notes = {label: store.note(f"eval:{label}") for label in ("before", "after")}
        finish_reason = store.note("finish_reason")
    finally:
        store.close()
    wall_s = sum(segment.wall_s for segment in segments)
    trained_tokens = sum(record.metrics.get("loss_tokens", 0.0) for record in records)
    summary = build_summary(
        run=directory.path.name,
        reason=_reason(finish_reason, failure),
        resume=f"rollmill train --resume {directory.path}",
        view=view,
        steps=view.optimizer_step,
        total_steps=config.run.steps,
        staleness_budget=config.schedule.max_staleness,
        evaluation=notes,
        wall_s=wall_s,
        cpu_s=sum(segment.cpu_s for segment in segments),
        peak_memory_bytes=max((segment.peak_memory_bytes for segment in segments), default=0),
        seconds=process_seconds(layout, segments),
        useful_tokens_per_s=trained_tokens / wall_s if wall_s > 0 else 0.0,
        incarnations=read_record(layout.incarnation, Incarnation).number,
        failure=failure,
    )
    directory.write_summary(summary)
    return summary


def process_seconds(layout: ProcessLayout, segments: list[Segment]) -> dict[str, SecondsReport]:
    """Return the seconds ledger of each process over all incarnations.

    A process that was killed left no closed book: its unbooked seconds are named `lost`. The supervisor's own measure of
    the process's life is the wall time, so that the sum is checked against somebody else's clock.
    """
    reports: dict[str, list[SecondsReport]] = {}
    for segment in segments:
        for process, wall_s in segment.process_wall_s.items():
            path = layout.seconds(process, incarnation=segment.number)
            seconds = dict(read_record(path, ProcessSeconds).seconds) if path.exists() else {}
            cause = "teardown" if path.exists() else "lost"
            seconds[cause] = wall_s - sum(seconds.values())
            reports.setdefault(process, []).append(SecondsReport(owner=process, wall_s=wall_s, seconds=seconds))
    return {process: merge_reports(parts) for process, parts in reports.items()}


def read_all(folder: Path, pattern: str, kind: type[Any]) -> list[Any]:
    """Return all records that match, by name."""
    return [read_record(path, kind) for path in sorted(folder.glob(pattern))]


def _reason(finish_reason: str | None, failure: FailureRecord | None) -> str:
    if failure is not None:
        return f"failed: {failure.process}: {failure.code}"
    return finish_reason or "killed"
