"""The pressure of this Linux node, read in a thread: a disk that hangs must not hold up the loop."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from rollmill.sandboxes.admission.pressure import PressureSample
from rollmill.sandboxes.watchdog.node import NodeReader
from rollmill.sandboxes.watchdog.records import NodeReading


class NodePressure:
    """Samples the node for a pool of local sandboxes; give its `sample` to the pool.

    Args:
        paths: on the file systems that sandboxes write to, to be watched for space and inodes.
        root: where `proc` is mounted; another one in tests.
    """

    def __init__(self, paths: Sequence[Path] = (), *, root: Path = Path("/")) -> None:
        self._reader = NodeReader(paths, root=root)
        self._reading: asyncio.Future[NodeReading] | None = None

    async def sample(self) -> PressureSample:
        """Return what is seen now.

        Cancellation: the reading goes on, and the next call waits for it: threads that hang do not pile up.
        """
        if self._reading is None or self._reading.done():
            self._reading = asyncio.ensure_future(asyncio.to_thread(self._reader.read))
        return sample_of(await asyncio.shield(self._reading))


def sample_of(reading: NodeReading) -> PressureSample:
    """Return a reading as the law of pressure takes it."""
    stalls = reading.pressure
    return PressureSample(
        cpu_some=None if stalls is None else stalls.cpu_some,
        io_full=None if stalls is None else stalls.io_full,
        memory_some=None if stalls is None else stalls.memory_some,
        memory_full=None if stalls is None else stalls.memory_full,
        memory_free=reading.memory_free,
        disk_free=reading.disk_free,
        inodes_free=reading.inodes_free,
        pids_free=reading.pids_free,
    )
