"""What a running job shows."""

import io
import json

import pytest
from rich.console import Console

from rollmill.telemetry.live import LiveView, choose_mode, render_live, step_line

STATE = {
    "run": "one",
    "phase": "running",
    "step": 12,
    "steps": 32,
    "reward_mean": 0.43,
    "reward_before_filter": 0.3,
    "heldout": {"accuracy": 0.5, "low": 0.45, "high": 0.55, "n": 384},
    "heldout_before": {"accuracy": 0.22, "low": 0.18, "high": 0.27, "n": 384},
    "staleness_mean": 0.8,
    "staleness_max": 2,
    "staleness_budget": 2,
    "stock": 60,
    "stock_target": 64,
    "in_flight": 48,
    "buffered": 12,
    "seconds": {"trainer": {"train": 60.0, "wait_data": 20.0}, "generator": {"decode": 75.0, "idle": 5.0}},
    "bound_by": "generator",
    "elapsed_s": 75.0,
    "eta_s": 130.0,
    "train_time_s": 5.0,
    "wait_data_time_s": 1.0,
    "samples": 30,
    "message": "",
}


def shown(state: dict) -> str:
    stream = io.StringIO()
    Console(file=stream, width=110).print(render_live(state))
    return stream.getvalue()


@pytest.mark.parametrize(
    "part",
    [
        "12/32",
        "1 min 15 s, about 2 min 10 s left",
        "0.430, 0.300 before the filter",
        "0.220 [0.180, 0.270] -> 0.500 [0.450, 0.550]",
        "mean 0.80, max 2, budget 2 steps",
        "60 of 64 aimed at: 48 in flight, 12 buffered rollouts",
        "5.0 s training, 1.0 s waiting for data, 30 samples",
        "train 75%  wait_data 25%",  # 60 and 20 of 80 s
        "decode 94%  idle 6%",  # 75 and 5 of 80 s
        "The generator is the bound",
    ],
)
def test_the_live_view_shows(part):
    assert part in shown(STATE)


def test_every_key_may_be_missing_or_unknown_yet():
    assert "0/0" in shown({})
    keys = (
        "reward_mean",
        "reward_before_filter",
        "heldout",
        "staleness_mean",
        "staleness_max",
        "train_time_s",
        "eta_s",
    )
    assert "12/32" in shown({**STATE, **dict.fromkeys(keys)})


def test_a_message_needs_attention_and_is_shown():
    assert "nothing moved for 60 s" in shown({**STATE, "message": "nothing moved for 60 s"})


def test_square_brackets_in_figures_are_not_taken_for_markup():
    assert "[0.450, 0.550]" in shown(STATE)


def test_a_step_line_always_has_the_three_figures():
    line = step_line(
        {"step": 3, "steps": 32, "train_time_s": 4.0, "wait_data_time_s": 0.25, "samples": 24, "loss": 0.5}
    )
    assert line == "step 3/32 train_time_s=4.00 wait_data_time_s=0.25 samples=24 loss=0.50"
    assert step_line({"step": 1}) == "step 1 train_time_s=none wait_data_time_s=none samples=none"


def test_the_mode_follows_the_stream_unless_json_was_asked_for():
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    assert choose_mode(json_lines=False, stream=io.StringIO()) == "lines"
    assert choose_mode(json_lines=False, stream=Terminal()) == "terminal"
    assert choose_mode(json_lines=True, stream=Terminal()) == "json"


def test_json_lines_hold_one_event_each():
    stream = io.StringIO()
    with LiveView(mode="json", stream=stream) as view:
        view.update(STATE)
        view.step({"step": 1, "samples": 8})
        view.message("held-out 0.5", event="evaluation", accuracy=0.5)
    assert [json.loads(line) for line in stream.getvalue().splitlines()] == [
        {"event": "step", "step": 1, "samples": 8},
        {"event": "evaluation", "message": "held-out 0.5", "accuracy": 0.5},
    ]


def test_lines_hold_one_step_each_and_no_control_codes():
    stream = io.StringIO()
    with LiveView(mode="lines", stream=stream) as view:
        view.step({"step": 1, "train_time_s": 1.0, "wait_data_time_s": 0.0, "samples": 8})
        view.update(STATE)
    assert stream.getvalue() == "step 1 train_time_s=1.00 wait_data_time_s=0.00 samples=8\n"


def test_on_a_terminal_the_last_state_and_each_step_stay_on_the_screen():
    stream = io.StringIO()
    with LiveView(mode="terminal", stream=stream) as view:
        view.update(STATE)
        view.step({"step": 1, "train_time_s": 1.0, "wait_data_time_s": 0.0, "samples": 8})
    assert "12/32" in stream.getvalue()
    assert "step 1 train_time_s=1.00" in stream.getvalue()
