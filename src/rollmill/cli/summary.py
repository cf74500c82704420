"""`rollmill summary RUN_DIR`: the summary of a run, again."""

from __future__ import annotations

import json
from pathlib import Path

import click

from rollmill.cli.output import json_option, show
from rollmill.errors import RunDirectoryError
from rollmill.telemetry.summary import render_summary


@click.command("summary")
@click.argument("run_directory", metavar="RUN_DIR", type=click.Path())
@json_option
def summary_command(run_directory: str, as_json: bool) -> None:
    """Print the summary of a finished or stopped run."""
    path = Path(run_directory) / "summary.json"
    try:
        summary = json.loads(path.read_text())
    except FileNotFoundError:
        raise RunDirectoryError(
            f"{path} does not exist: the run has not ended, or {run_directory} is not a run directory. "
            "A run that was killed writes it when it is resumed and stopped."
        ) from None
    show(summary, text=render_summary(summary), as_json=as_json)
