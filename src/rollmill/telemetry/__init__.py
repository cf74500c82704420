"""What a run leaves and shows: run directory, summary, live view, memory."""

from rollmill.telemetry.files import JsonLines, append_jsonl, read_jsonl, write_json_atomic, write_text_atomic
from rollmill.telemetry.interval import Proportion, proportion, wilson
from rollmill.telemetry.live import LiveView, choose_mode, render_live, step_line
from rollmill.telemetry.memory import MemoryUse, memory_of, tree_of
from rollmill.telemetry.run_directory import RESUMABLE, RunDirectory
from rollmill.telemetry.summary import build_summary, check_books, render_summary

__all__ = [
    "RESUMABLE",
    "JsonLines",
    "LiveView",
    "MemoryUse",
    "Proportion",
    "RunDirectory",
    "append_jsonl",
    "build_summary",
    "check_books",
    "choose_mode",
    "memory_of",
    "proportion",
    "read_jsonl",
    "render_live",
    "render_summary",
    "step_line",
    "tree_of",
    "wilson",
    "write_json_atomic",
    "write_text_atomic",
]
