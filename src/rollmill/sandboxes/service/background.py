"""Tasks of a service that outlive the call that began them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

from rollmill.errors import RollmillError
from rollmill.sandboxes.service.law import Standing
from rollmill.sandboxes.service.served import Served

T = TypeVar("T")
_log = logging.getLogger(__name__)


def looked_at(task: asyncio.Task[T]) -> asyncio.Task[T]:
    """Return a task whose error is not reported as nobody's when its caller has left."""
    task.add_done_callback(lambda one: one.cancelled() or one.exception())
    return task


def lives(task: asyncio.Task[Served]) -> bool:
    """Return whether a creation that is over gave a sandbox that has not ended."""
    return not task.cancelled() and task.exception() is None and task.result().standing is not Standing.ENDED


async def guarded(work: Coroutine[Any, Any, None], name: str) -> None:
    """Run something that nobody waits for; its error is logged and ends nothing else."""
    try:
        await work
    except RollmillError as error:
        _log.warning("%s: %s", name, error)
    except Exception:
        _log.exception("%s failed, which it never should", name)
