"""Locks between processes, by files: they end with the process that holds them, however that ends."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rollmill.errors import DeadlineExceeded
from rollmill.file_lock import take_lock
from rollmill.sandboxes.images.work import Work


@contextmanager
def locked(path: Path, *, what: str, limit_s: float, shared: bool = False, work: Work | None = None) -> Iterator[None]:
    """Hold a lock.

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
        if not take_lock(descriptor, limit_s=limit_s, shared=shared, between=None if work is None else work.check):
            raise DeadlineExceeded(
                f"waited {limit_s:g} s for {what}: another process holds {path}. See who with `fuser {path}`; if it "
                "hangs, end it, and the lock is free."
            )
        yield
    finally:
        os.close(descriptor)  # and with it the lock
