"""The goals of the router, and which of them a result reaches. Pure; reads results of any age."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

GOAL_S = 0.3e-3
SESSIONS = 5_000
WAYS = {
    "generate": "answers in one piece",
    "generate_keep_tokens": "answers in one piece, tokens kept",
    "stream": "streams of single tokens",
    "exchange_generate": "answers in one piece, asked for in an exchange",
    "exchange_generate_keep_tokens": "answers in one piece, tokens kept, asked for in an exchange",
    "exchange_stream": "streams of single tokens, asked for in an exchange",
}


def goals_of(result: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return each goal with what was measured and whether it is reached; `None` where nothing was measured.

    Times count with as many sessions at once as the goal names, not with fewer.

    Example:
        >>> runs = [{"part": "whole", "side": "router", "way": "generate", "cpu_s_per_request": 0.0002}]
        >>> goals_of({"runs": runs, "settings": {"sessions": 5000}})["cpu_s_per_request_generate"]["reached"]
        True
    """
    sessions = result.get("settings", {}).get("sessions")
    found: dict[str, dict[str, Any]] = {
        "sessions": {
            "what": "concurrent sessions",
            "goal": f">= {SESSIONS}",
            "measured": sessions,
            "reached": None if sessions is None else sessions >= SESSIONS,
        }
    }
    for way, text in WAYS.items():
        cpu_s = [run["cpu_s_per_request"] for run in result.get("runs", ()) if _is_router(run, way)]
        measured = statistics.median(cpu_s) if cpu_s else None
        counts = measured is not None and sessions is not None and sessions >= SESSIONS
        found[f"cpu_s_per_request_{way}"] = {
            "what": f"CPU seconds of the router per request, {text}",
            "goal": f"< {GOAL_S:g}",
            "measured": measured,
            "reached": measured < GOAL_S if counts and measured is not None else None,
        }
    return found


def _is_router(run: Mapping[str, Any], way: str) -> bool:
    return (run.get("part"), run.get("side"), run.get("way")) == ("whole", "router", way)
