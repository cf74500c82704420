"""The goals of the generator, and which of them a result reaches. Pure; reads results of any age."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MEMORY = "memory_end_over_2000_requests"
GOALS: dict[str, tuple[str, float, str]] = {
    "peers_per_s_over_vllm_16_groups": (">=", 1.5, "tokens/s over vLLM CPU, groups of 8, 16 in flight"),
    "peers_per_s_over_vllm_64_groups": (">=", 1.5, "tokens/s over vLLM CPU, groups of 8, 64 in flight"),
    "peers_per_s_over_vllm_16_unrelated": (">=", 1.0, "tokens/s over vLLM CPU, unrelated prompts, 16 in flight"),
    "peers_per_s_over_vllm_64_unrelated": (">=", 1.0, "tokens/s over vLLM CPU, unrelated prompts, 64 in flight"),
    "peers_share_of_ideal_per_s_64_unrelated": (">=", 0.55, "share of this machine's ideal, unrelated, 64 in flight"),
    "faces_cpu_grpc_over_bare": ("<", 1.03, "CPU of gRPC over the bare engine, 64 in flight"),
    "faces_cpu_http_over_bare": ("<", 1.03, "CPU of HTTP over the bare engine, 64 in flight"),
    "faces_cpu_grpc_stream_over_bare": ("<", 1.03, "CPU of streamed gRPC over the bare engine, 64 in flight"),
    "faces_cpu_http_stream_over_bare": ("<", 1.03, "CPU of streamed HTTP over the bare engine, 64 in flight"),
    "swap_pause_over_copy": ("<=", 2.0, "pause of a weight load over one copy of the weights in memory"),
    "swap_tokens_per_s_storm_over_quiet": (">=", 0.9, "tokens/s with a load every second over tokens/s without"),
    f"memory_{MEMORY}": ("<=", 1.02, "memory after 10,000 requests over memory after 2,000"),
}
"""Ratio of a result -> bound, number, and what it is. Flat memory is taken as 2 %: the goal names no number."""
_MEETS = {">=": lambda a, b: a >= b, "<": lambda a, b: a < b, "<=": lambda a, b: a <= b}


def goals_of(result: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return each goal with what was measured and whether it is reached; `None` where nothing was measured.

    A smoke run reaches and misses nothing: it measures nothing.

    Example:
        >>> goals_of({"ratios": {"swap_pause_over_copy": 1.4}})["swap_pause_over_copy"]["reached"]
        True
    """
    smoke = bool(result.get("settings", {}).get("smoke"))
    ratios = {} if smoke else result.get("ratios", {})
    found = {}
    for name, (bound, number, text) in GOALS.items():
        measured = ratios.get(name)
        reached = None if measured is None else _MEETS[bound](measured, number)
        found[name] = {"what": text, "goal": f"{bound} {number:g}", "measured": measured, "reached": reached}
    return found


def lines_of(goals: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the goals as text, a line each."""
    words = {True: "reached", False: "MISSED", None: "not measured"}
    return "\n".join(
        f"{words[one['reached']]:>12}  {one['what']}: "
        f"{'-' if one['measured'] is None else format(one['measured'], '.3g')} (goal {one['goal']})"
        for one in goals.values()
    )
