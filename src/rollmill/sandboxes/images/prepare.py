"""The asynchronous front of the store: prepares images beside the loop, with a deadline, and stops when cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from rollmill.clock import SystemClock
from rollmill.sandboxes.images.records import StoredImage
from rollmill.sandboxes.images.sources import SourceKind, add_source
from rollmill.sandboxes.images.store import ImageStore
from rollmill.sandboxes.images.work import ImageProgress, Work

DEFAULT_DEADLINE_S = 3600.0
T = TypeVar("T")


async def prepare_image(
    store: ImageStore,
    source: str,
    *,
    name: str,
    kind: SourceKind = SourceKind.AUTO,
    ref: str | None = None,
    deadline_s: float = DEFAULT_DEADLINE_S,
    report: Callable[[ImageProgress], None] | None = None,
) -> StoredImage:
    """Make an image of a source ahead of its first use.

    Args:
        store: where to.
        source: a directory, an OCI layout or archive, a tar of a root file system, or `debian:SUITE`.
        name: of the image.
        kind: what the source is; found out unless given.
        ref: which image of a layout, where it holds several.
        deadline_s: seconds from now.
        report: told how far it is, from another thread.

    Raises:
        ImageError: if the source is refused.
        DeadlineExceeded: if it took too long.

    Cancellation: the preparation ends at its next step and leaves nothing but finished layers.
    """
    clock = SystemClock()
    work = Work(store.settings.limits, deadline_s=clock.now_s() + deadline_s, report=report, clock=clock)
    return await in_thread(lambda: add_source(store, source, name=name, work=work, kind=kind, ref=ref), work)


async def in_thread(call: Callable[[], T], work: Work) -> T:
    """Run a part of a preparation in a thread, and wait for its end even when cancelled: it holds locks."""
    running = asyncio.get_running_loop().run_in_executor(None, call)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        work.cancel()
        await asyncio.wait([running])
        if not running.cancelled():
            running.exception()  # that it ended early is what the caller wanted
        raise
