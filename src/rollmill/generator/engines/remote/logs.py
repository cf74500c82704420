"""What a server's log says of its end. Pure."""

from __future__ import annotations

import re

_ERROR = re.compile(r"\b(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt|Killed)\b(?::.*)?$")
_PREFIX = re.compile(r"^\([^)]*\)\s*")
_LEVEL = re.compile(r"^ERROR \S+ \S+ \[[^\]]*\]\s?")


def first_error(log: str) -> str | None:
    """Return the first exception that a server's log tells of, or `None`.

    The first is the cause; what follows is how others took it.

    Example:
        >>> first_error("INFO all is well\\nERROR 11-30 09:00:00 [core.py:1] ValueError: no room\\nOSError: later")
        'ValueError: no room'
    """
    for line in log.splitlines():
        text = _LEVEL.sub("", _PREFIX.sub("", line.strip())).strip()
        if text.startswith(("INFO", "WARNING", "DEBUG")):
            continue
        found = _ERROR.match(text)
        if found is not None:
            return found.group(0)[:600]
    return None
