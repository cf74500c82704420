"""Shares of a whole, as the summary shows them. Pure."""

from __future__ import annotations

from collections.abc import Mapping


def shares(seconds: Mapping[str, float], *, total_s: float) -> str:
    """Return the shares of a total, largest first; those that would be shown as 0 % are left out.

    Example:
        >>> shares({"idle": 10.0, "decode": 89.9, "paused": 0.1}, total_s=100.0)
        'decode 90%, idle 10%'
    """
    shown = sorted((name for name in seconds if seconds[name] > total_s / 200), key=lambda name: -seconds[name])
    return ", ".join(f"{name} {seconds[name] / total_s:.0%}" for name in shown)
