"""What `rollmill train` does: check, plan, start the processes, show the run, print the summary."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import click
import msgspec
import psutil

from rollmill.cli.output import FAULT_STATUS, INTERRUPTED_STATUS, USER_ERROR_STATUS, show, show_error, show_warnings
from rollmill.cli.view import TrainView
from rollmill.config.load import LoadedConfig, load_config
from rollmill.config.plan import Plan, plan, render
from rollmill.errors import ConfigError, ModelError, RollmillError
from rollmill.runtime.books import write_summary
from rollmill.runtime.incarnation import Incarnation
from rollmill.runtime.layout import ProcessLayout
from rollmill.runtime.nursery import Nursery
from rollmill.runtime.resume import first_incarnation, next_incarnation
from rollmill.runtime.supervisor import RunEnd, Supervisor, signals_held
from rollmill.telemetry.run_directory import RunDirectory
from rollmill.telemetry.summary import check_books, render_summary


def train(
    config_path: str | None,
    *,
    resume_directory: str | None,
    overrides: Sequence[str],
    dry_run: bool,
    as_json: bool,
    nursery: Nursery | None,
) -> None:
    """Train the model of a configuration, or go on with a stopped run; ends the program where that failed.

    Args:
        nursery: imports since the program began; `None` for a dry run.
    """
    loaded = load_config(_config_file(config_path, resume_directory), overrides=overrides)
    planned = _plan(loaded)
    if dry_run:
        show(planned, text=render(planned), as_json=as_json)
        return
    show_warnings(planned.warnings, as_json=as_json)
    with signals_held():
        _run(loaded, resume_directory, as_json=as_json, nursery=nursery)


def _run(loaded: LoadedConfig, resume_directory: str | None, *, as_json: bool, nursery: Nursery | None) -> None:
    directory, layout, incarnation = _open(loaded, resume_directory)
    for repair in incarnation.repairs:
        click.echo(f"warning: {repair}", err=True)
    with TrainView(directory, as_json=as_json) as view:
        end = Supervisor(
            config=loaded.config,
            layout=layout,
            incarnation=incarnation,
            refresh_view=view.refresh,
            nursery=nursery,
        ).run()
    _finish(directory, layout, end, as_json=as_json)


def _config_file(config_path: str | None, resume_directory: str | None) -> Path:
    if resume_directory is not None:
        return Path(config_path) if config_path is not None else Path(resume_directory) / "config.toml"
    if config_path is None:
        raise ConfigError(
            "no configuration was given. Use `rollmill train CONFIG.toml`, for example "
            "`rollmill train examples/arithmetic/train.toml`, or `rollmill train --resume RUN_DIR`."
        )
    return Path(config_path)


def _plan(loaded: LoadedConfig) -> Plan:
    draft = loaded.config.generator.draft_model
    return plan(
        loaded.config,
        facts=_model_facts(loaded.config.model.source),
        draft_facts=None if draft is None else _model_facts(draft),
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=psutil.virtual_memory().available,
        shm_bytes=shutil.disk_usage("/dev/shm").free if Path("/dev/shm").is_dir() else 0,
    )


def _model_facts(source: str) -> object | None:
    """Return the facts of a model that is ready; `None` for one that is yet to be prepared."""
    from rollmill.weights.inspection import inspect
    from rollmill.weights.prepare import find_prepared

    try:
        path = find_prepared(source)
    except ModelError:
        # The preflight prepares it, and says there what is wrong with it.
        return None
    return None if path is None else inspect(path)


def _open(loaded: LoadedConfig, resume_directory: str | None) -> tuple[RunDirectory, ProcessLayout, Incarnation]:
    config, now_s = loaded.config, time.time()
    if resume_directory is None:
        root = Path(config.run.directory) / config.run.name
        directory = RunDirectory.create(root, config=config, started_at_s=now_s)
        layout = ProcessLayout(directory.root)
        return directory, layout, first_incarnation(layout)
    directory, _ = RunDirectory.resume(resume_directory, started_at_s=now_s, config=config)
    layout = ProcessLayout(directory.root)
    return directory, layout, next_incarnation(layout)


def _finish(directory: RunDirectory, layout: ProcessLayout, end: RunEnd, *, as_json: bool) -> None:
    resume = f"rollmill train --resume {directory.root}"
    failure = end.failure
    summary = None
    if layout.store.exists() and layout.preflight.exists():
        try:
            summary = write_summary(directory, layout, failure=failure)
        except RollmillError as error:
            if failure is None:
                raise
            # Of two errors the first is the cause; a full disk has both.
            failure = msgspec.structs.replace(
                failure, message=f"{failure.message} No summary could be written: {error}"
            )
        else:
            # With --json there is one document: the summary, which holds the failure.
            show(summary, text=render_summary(summary), as_json=as_json)
    if failure is not None:
        hint = "" if failure.user_error else f" Logs: {layout.logs}. Go on with: {resume}"
        if summary is None or not as_json:
            show_error(failure.code, failure.message + hint, as_json=as_json, details={"process": failure.process})
        sys.exit(USER_ERROR_STATUS if failure.user_error else FAULT_STATUS)
    if summary is not None:
        check_books(summary)
    if end.interrupted:
        if summary is None:
            show({"interrupted": True, "resume": resume}, text=f"Stopped. Go on with: {resume}", as_json=as_json)
        sys.exit(INTERRUPTED_STATUS)
