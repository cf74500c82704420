"""What trainer and replicas may do before the controller has looked at model and data.

Reading a model that is ready harms nothing: what the preflight refuses is ended before anything is published. Where a
model cannot be read ahead, nothing is said: the preflight says it in its own words, or it is read again after it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TypeVar

from rollmill.errors import RollmillError
from rollmill.runtime.process import ProcessContext
from rollmill.weights.prepare import find_ready

T = TypeVar("T")


def read_ahead(context: ProcessContext, read: Callable[[str], T]) -> tuple[str, T] | None:
    """Return the model's directory and what `read` made of it; `None` if the preflight must be waited for.

    Only at the start of a run: what is started again finds the preflight done.
    """
    first = not context.layout.preflight.exists() and context.spawned_for == context.incarnation.number
    if first:
        with contextlib.suppress(RollmillError):
            path = find_ready(context.config.model.source)
            if path is not None:
                return str(path), read(str(path))
    return None


def read_once(path: str, *, ahead: tuple[str, T] | None, read: Callable[[str], T]) -> T:
    """Return what was read ahead if it is of this model, and read the model now if not.

    Example:
        >>> read_once("/m", ahead=("/m", 1), read=len), read_once("/m", ahead=("/other", 1), read=len)
        (1, 2)
    """
    return ahead[1] if ahead is not None and ahead[0] == path else read(path)
