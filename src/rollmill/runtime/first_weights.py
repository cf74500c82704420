"""A replica that is started before the run that it serves: the wait for the run's first publication.

Waits for                    Woken by     Gives up after
a manifest of the run        its tick     the deadline that the user gave
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path

from rollmill.errors import DeadlineExceeded, RunDirectoryError
from rollmill.runtime.serving import open_repository

_LOOK_EVERY_S = 0.5


def await_first_weights(
    directory: Path,
    *,
    deadline_s: float,
    say: Callable[[str], None],
    now_s: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Return once a run has published weights in its directory, or in the model repository that it is.

    Args:
        say: told once, if there are none yet.

    Raises:
        DeadlineExceeded: if none were published in time.
    """
    until_s = now_s() + deadline_s
    told = False
    while not _has_weights(directory):
        if now_s() >= until_s:
            raise DeadlineExceeded(
                f"no weights were published in {directory} within {deadline_s:g} s (--wait-s). Start the run that "
                "publishes there, or look at why it does not; its directory is run.directory/run.name"
            )
        if not told:
            say(f"waiting up to {deadline_s:g} s for the first weights in {directory}")
            told = True
        sleep(_LOOK_EVERY_S)


def _has_weights(directory: Path) -> bool:
    with contextlib.suppress(RunDirectoryError):
        return open_repository(directory).latest() is not None
    return False
