"""What a service refuses a caller, in its words. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from rollmill.sandboxes.service.law import HttpProblem

RETRY_S = 1.0
"""After which a caller may ask again."""
PAUSED_AS_FILES = "those from before its last pause ended with it, as only its files were kept"
MOVED = (
    "those from before its last pause ended when this node ran short of memory or process ids and moved it to disk, "
    "which keeps its files"
)
"""Why the programs of a sandbox are not there any more."""


def check_room(alive: int, *, count: int, most: int) -> None:
    """Refuse more sandboxes than may be.

    Raises:
        HttpProblem: 429, with a time to ask again.
    """
    if alive + count > most:
        raise HttpProblem(
            429,
            f"{alive} sandboxes are here and {most} may be (max_sandboxes): no room for {count} more; end some first",
            after_s=RETRY_S,
        )


def check_timeout(timeout_s: float, *, most_s: float) -> None:
    """Refuse a timeout that is too long.

    Raises:
        HttpProblem: 400.
    """
    if not 0 <= timeout_s <= most_s:
        raise HttpProblem(400, f"the timeout is {timeout_s:g} s; it must be between 0 and {most_s:g}")


def unknown_template(template: str, *, known: Iterable[str], why: str = "") -> HttpProblem:
    """Return the refusal of a template that is not here."""
    there = ", ".join(sorted(known))
    return HttpProblem(404, f"template {template!r} is not known here; there are: {there}{why}")
