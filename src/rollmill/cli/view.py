"""What a person sees while a run trains: a live view on a terminal, one line per step elsewhere, JSON lines with `--json`.

Reads only files of the run directory, so that it can never disturb the run.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import TracebackType
from typing import Any

import click
import msgspec
from rich.console import Console
from rich.live import Live

from rollmill.telemetry.files import to_json
from rollmill.telemetry.live import render_live, step_line
from rollmill.telemetry.run_directory import RunDirectory


class Tail:
    """New whole lines of a file of JSON lines."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = path.stat().st_size if path.exists() else 0

    def new(self) -> list[dict[str, Any]]:
        """Return the lines that were completed since the last call."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        return [msgspec.json.decode(line) for line in whole.splitlines() if line.strip()]


class TrainView:
    """Shows a run from its files; `refresh` is called a few times a second."""

    def __init__(self, directory: RunDirectory, *, as_json: bool) -> None:
        self._directory = directory
        self._as_json = as_json
        self._metrics = Tail(directory.metrics)
        self._events = Tail(directory.events)
        self._live: Live | None = None
        if not as_json and sys.stdout.isatty():
            self._live = Live(console=Console(), refresh_per_second=4, transient=False)

    def __enter__(self) -> TrainView:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.refresh()
        if self._live is not None:
            self._live.stop()

    def refresh(self) -> None:
        """Show what is new."""
        if self._live is not None:
            state = self._state()
            if state is not None:
                self._live.update(render_live(state))
            return
        for event in self._events.new():
            self._show_event(event)
        for step in self._metrics.new():
            # JSON lines go to stderr, so that stdout holds the one document of the summary.
            click.echo(to_json(step) if self._as_json else step_line(step), err=self._as_json)

    def _show_event(self, event: dict[str, Any]) -> None:
        if self._as_json:
            click.echo(to_json(event), err=True)
        elif event["event"] == "stall":
            click.echo(f"nothing moved for {event['quiet_s']} s: " + " ".join(event["waits"]))
        elif event["event"] == "evaluation":
            click.echo(
                f"held-out accuracy {event['label']}: {event['accuracy']:.3f} "
                f"(95 % {event['low']:.3f} to {event['high']:.3f}, n {event['n']})"
            )

    def _state(self) -> dict[str, Any] | None:
        try:
            return msgspec.json.decode(self._directory.live.read_bytes())
        except (FileNotFoundError, msgspec.DecodeError):
            return None
