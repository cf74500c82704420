"""A wait for a file's lock that ends by itself. The kernel frees the lock of a process that dies."""

from __future__ import annotations

import fcntl
import time
from collections.abc import Callable

_FIRST_REST_S = 0.001
_LONGEST_REST_S = 0.02


def take_lock(
    descriptor: int, *, limit_s: float, shared: bool = False, between: Callable[[], None] | None = None
) -> bool:
    """Wait for the lock of an open file; return whether it came in time.

    The kernel has no such wait with a deadline, so this looks again and again.

    Args:
        descriptor: of the file; closing it gives the lock back.
        limit_s: how long to wait; 0 looks once.
        shared: others may hold it as well, as long as they share it.
        between: called between two looks; it may raise.
    """
    operation = (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB
    until_s, rest_s = time.monotonic() + limit_s, _FIRST_REST_S
    while True:
        try:
            fcntl.flock(descriptor, operation)
        except BlockingIOError:
            if time.monotonic() >= until_s:
                return False
            if between is not None:
                between()
            time.sleep(rest_s)
            rest_s = min(2 * rest_s, _LONGEST_REST_S)
        else:
            return True
