"""What a person sees while a run trains: a live view, one line per step, or JSON lines.

Reads only files of the run directory, so that it can never disturb the run.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from rollmill.telemetry.files import whole_lines
from rollmill.telemetry.live import LiveView, choose_mode
from rollmill.telemetry.run_directory import RunDirectory


class Tail:
    """New whole lines of a file of JSON lines."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = path.stat().st_size if path.exists() else 0

    def new(self) -> list[dict[str, Any]]:
        """Return the lines that were completed since the last call; one torn by a kill is passed over."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        return list(whole_lines(whole.splitlines()))


class TrainView:
    """Shows a run from its files; `refresh` is called a few times a second."""

    def __init__(self, directory: RunDirectory, *, as_json: bool) -> None:
        self._directory = directory
        self._metrics = Tail(directory.metrics)
        self._events = Tail(directory.events)
        self._losses = Tail(directory.losses)
        # JSON lines go to stderr, so that stdout holds the one document of the summary.
        stream = sys.stderr if as_json else sys.stdout
        self._view = LiveView(mode=choose_mode(json_lines=as_json, stream=stream), stream=stream)

    def __enter__(self) -> TrainView:
        self._view.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.refresh()
        self._view.__exit__(kind, error, trace)

    def refresh(self) -> None:
        """Show what is new."""
        for loss in self._losses.new():
            self._view.message(str(loss["message"]), event="process_lost")
        for event in self._events.new():
            text = sentence_of(event)
            if text:
                self._view.message(text, event=event["event"])
        for step in self._metrics.new():
            self._view.step(step)
        state = self._state()
        if state is not None:
            self._view.update(state)

    def _state(self) -> dict[str, Any] | None:
        try:
            return msgspec.json.decode(self._directory.live.read_bytes())
        except (FileNotFoundError, msgspec.DecodeError):
            return None


def sentence_of(event: dict[str, Any]) -> str:
    """Return what a person should read of an event; empty for those that only the file keeps."""
    match event["event"]:
        case "stall":
            return f"nothing moved for {event['quiet_s']} s: " + " ".join(event["waits"])
        case "evaluation":
            return (
                f"held-out accuracy ({event['label']}): {event['accuracy']:.3f}, 95 % interval {event['low']:.3f} to "
                f"{event['high']:.3f}, {event['n']} problems"
            )
        case "preflight":
            return (
                f"{event['training_size']} training problems, {event['heldout_size']} held out, "
                f"longest prompt {event['longest_prompt_tokens']} tokens"
            )
        case "alarm":
            return str(event["message"])
        case "replica_joined":
            return f"{event['replica_id']} serves policy version {event['policy_version']}"
        case "gone_back":
            return f"the run went back to optimizer step {event['optimizer_step']}; the trainer is started again"
        case "controller_restarted":
            return "a new controller goes on where the journal ends"
        case "evaluation_skipped":
            which = f" ({event['label']})" if "label" in event else ""
            return f"no evaluation{which}: {event['reason']}"
        case "evaluator_lost":
            again = "; tried again" if event["attempt"] < event["attempts"] else ""
            return f"the replica of evaluation {event['label']!r} was lost: {event['reason']}{again}"
        case "evaluation_failed":
            return f"evaluation {event['label']!r} failed, the run goes on: {event['reasons'][-1]}"
        case _:
            return ""
