"""Locks between processes, by files: they end with the process that holds them, however that ends."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rollmill.errors import DeadlineExceeded
from rollmill.sandboxes.images.work import Work

_LOOK_S = 0.02


@contextmanager
def locked(path: Path, *, what: str, limit_s: float, shared: bool = False, work: Work | None = None) -> Iterator[None]:
    """Hold a lock.

    The kernel has no wait for such a lock that ends by itself, so this looks fifty times a second.

    Args:
        path: file of the lock; made if missing, and never removed: another process may wait at it.
        what: what is waited for, for the message.
        limit_s: how long to wait.
        shared: others may hold it as well, as long as they share it.
        work: of a preparation, whose deadline and end count as well.

    Raises:
        DeadlineExceeded: if it was not free in time.
    """
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        begun = time.monotonic()
        while not _try(descriptor, shared=shared):
            if work is not None:
                work.check()
            if time.monotonic() - begun >= limit_s:
                raise DeadlineExceeded(
                    f"waited {limit_s:g} s for {what}: another process holds {path}. See who with `fuser {path}`; if "
                    "it hangs, end it, and the lock is free."
                )
            time.sleep(_LOOK_S)
        yield
    finally:
        os.close(descriptor)  # and with it the lock


def _try(descriptor: int, *, shared: bool) -> bool:
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
