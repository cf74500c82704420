"""What a running job shows: a live view on a terminal, one line per step elsewhere, or JSON lines.

Pure functions turn plain data into something to show; `LiveView` is the thin shell around them. Decides nothing.

The state (also written as `live.json` in the run directory) is a dict; every key may be missing:

    run                   name of the run
    phase                 `starting`, `evaluating`, `running`, `finishing`, `stopping`
    step, steps           committed optimizer steps, and how many the run has
    reward_mean           mean raw reward of the rollouts trained in the last step
    reward_before_filter  mean raw reward of all scored rollouts since the step before, with those that were filtered
    heldout               newest evaluation: {accuracy, low, high, n, optimizer_step}
    heldout_before        evaluation before the first step, same keys
    staleness_mean, staleness_max, staleness_budget   of trained groups so far, in optimizer steps
    stock, stock_target   rollouts promised and not yet trained, and how many are aimed at
    in_flight, buffered   rollouts
    slots                 sequences that the generator can decode at once
    seconds               {"trainer": {cause: s}, "generator": {cause: s}}
    bound_by, bound_sentence   what bounds the run now, as a word and as a sentence
    elapsed_s, eta_s      since the start, and expected until the end
    train_time_s, wait_data_time_s, samples   of the last step: seconds in the update, seconds waiting for a batch,
                          samples in the loss
    message               one line that needs attention; empty for none

A step is a dict with `step`, `steps`, `train_time_s`, `wait_data_time_s`, `samples`, and any of `reward_mean`,
`reward_before_filter`, `loss`, `grad_norm`, `staleness_mean`, `staleness_max`, `tokens`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Literal, TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from rollmill.telemetry.bound import bound_sentence
from rollmill.telemetry.files import to_json
from rollmill.telemetry.summary import duration

ViewMode = Literal["terminal", "lines", "json"]

BAR_WIDTH = 30

STEP_FIELDS = ("train_time_s", "wait_data_time_s", "samples")
"""Always in a step's line, in this order, so that a script can rely on them."""

STEP_EXTRAS = ("reward_mean", "reward_before_filter", "staleness_mean", "staleness_max", "loss", "grad_norm", "tokens")


def render_live(state: Mapping[str, Any]) -> RenderableType:
    """Return the live view of a state; see the module's docstring for its keys."""
    rows = Table.grid(padding=(0, 2))
    rows.add_column(style="bold", no_wrap=True)
    rows.add_column()
    rows.add_row("step", _progress(state))
    for name, text in (
        ("reward", _reward(state)),
        ("held-out", _heldout(state)),
        ("staleness", _staleness(state)),
        ("stock", _stock(state)),
        ("last step", _last_step(state)),
    ):
        if text:
            rows.add_row(name, text)
    for owner, causes in state.get("seconds", {}).items():
        if causes:
            rows.add_row(owner, _shares(causes))
    parts: list[RenderableType] = [rows]
    sentence = state.get("bound_sentence") or (bound_sentence(state["bound_by"]) if "bound_by" in state else "")
    if sentence:
        parts.append(Text(sentence, style="italic"))
    if state.get("message"):
        parts.append(Text(str(state["message"]), style="yellow"))
    title = " ".join(str(state[key]) for key in ("run", "phase") if state.get(key))
    return Panel(Group(*parts), title=Text(f"rollmill {title}".strip()), title_align="left")


def step_line(step: Mapping[str, Any]) -> str:
    """Return one log line of a finished step.

    Example:
        >>> step_line({"step": 3, "steps": 32, "train_time_s": 4.0, "wait_data_time_s": 0.25, "samples": 24})
        'step 3/32 train_time_s=4.00 wait_data_time_s=0.25 samples=24'
    """
    steps = f"/{step['steps']}" if "steps" in step else ""
    fields = [f"{name}={_number(step.get(name))}" for name in STEP_FIELDS]
    fields += [f"{name}={_number(step[name])}" for name in STEP_EXTRAS if step.get(name) is not None]
    return f"step {step.get('step', '?')}{steps} {' '.join(fields)}"


def choose_mode(*, json_lines: bool, stream: TextIO) -> ViewMode:
    """Return how to show the run: JSON lines if asked for, the live view on a terminal, else lines."""
    if json_lines:
        return "json"
    return "terminal" if stream.isatty() else "lines"


class LiveView:
    """Shows a run in one of three ways. Use as a context manager.

    Example:
        >>> with LiveView(mode="lines", stream=sys.stdout) as view:
        ...     view.step({"step": 1, "train_time_s": 2.0, "wait_data_time_s": 0.0, "samples": 8})
        step 1 train_time_s=2.00 wait_data_time_s=0.00 samples=8
    """

    def __init__(self, *, mode: ViewMode, stream: TextIO | None = None) -> None:
        self._mode: ViewMode = mode
        self._stream = sys.stdout if stream is None else stream
        self._live: Live | None = None

    def __enter__(self) -> LiveView:
        if self._mode == "terminal":
            console = Console(file=self._stream)
            # The run pushes each state; rich's own refresh thread is not needed.
            live = Live(render_live({}), console=console, auto_refresh=False, transient=False)
            live.start()
            self._live = live
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def update(self, state: Mapping[str, Any]) -> None:
        """Show a new state; only the live view has something to show between steps."""
        if self._live is not None:
            self._live.update(render_live(state), refresh=True)

    def step(self, step: Mapping[str, Any]) -> None:
        """Report a finished step."""
        self._say(step_line(step), event={"event": "step", **step})

    def message(self, text: str, *, event: str = "message", **fields: Any) -> None:
        """Report something that a person should read once."""
        self._say(text, event={"event": event, "message": text, **fields})

    def _say(self, text: str, *, event: Mapping[str, Any]) -> None:
        if self._live is not None:
            self._live.console.print(text, markup=False, highlight=False)
            return
        self._stream.write((to_json(event) if self._mode == "json" else text) + "\n")
        self._stream.flush()


def _progress(state: Mapping[str, Any]) -> RenderableType:
    step, steps = state.get("step", 0), state.get("steps", 0)
    grid = Table.grid(padding=(0, 2))
    times = [duration(state["elapsed_s"])] if "elapsed_s" in state else []
    times += [f"about {duration(state['eta_s'])} left"] if state.get("eta_s") is not None else []
    bar = ProgressBar(total=max(steps, 1), completed=step, width=BAR_WIDTH)
    grid.add_row(bar, f"{step}/{steps}", ", ".join(times))
    return grid


def _reward(state: Mapping[str, Any]) -> str:
    parts = [f"{state['reward_mean']:.3f}"] if state.get("reward_mean") is not None else []
    if state.get("reward_before_filter") is not None:
        parts.append(f"{state['reward_before_filter']:.3f} before the filter")
    return ", ".join(parts)


def _heldout(state: Mapping[str, Any]) -> str:
    shown = []
    for key in ("heldout_before", "heldout"):
        entry = state.get(key)
        if entry and not (key == "heldout" and entry == state.get("heldout_before")):
            shown.append(f"{entry['accuracy']:.3f} [{entry['low']:.3f}, {entry['high']:.3f}]")
    return " -> ".join(shown)


def _staleness(state: Mapping[str, Any]) -> str:
    if state.get("staleness_max") is None:
        return ""
    mean = state.get("staleness_mean")
    head = f"mean {mean:.2f}, " if mean is not None else ""
    return f"{head}max {state['staleness_max']}, budget {state.get('staleness_budget', '?')} steps"


def _stock(state: Mapping[str, Any]) -> str:
    if "stock" not in state:
        return ""
    target = f" of {state['stock_target']:g} aimed at" if state.get("stock_target") is not None else ""
    slots = f" ({state['slots']} slots)" if "slots" in state else ""
    return (
        f"{state['stock']:g}{target}: {state.get('in_flight', 0)} in flight{slots}, "
        f"{state.get('buffered', 0)} buffered rollouts"
    )


def _last_step(state: Mapping[str, Any]) -> str:
    if state.get("train_time_s") is None:
        return ""
    return (
        f"{state['train_time_s']:.1f} s training, {state.get('wait_data_time_s', 0.0):.1f} s waiting for data, "
        f"{state.get('samples', 0)} samples"
    )


def _shares(causes: Mapping[str, float]) -> str:
    total = sum(causes.values())
    if total <= 0:
        return ""
    ordered = sorted(causes.items(), key=lambda item: -item[1])
    return "  ".join(f"{name} {value / total:.0%}" for name, value in ordered if value / total >= 0.005)


def _number(value: Any) -> str:
    if value is None:
        return "none"
    return f"{value:.2f}" if isinstance(value, float) else str(value)
