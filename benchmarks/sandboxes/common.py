"""What all measures share: a provider of its own, ids, times, and a canary on the host."""

from __future__ import annotations

import asyncio
import os
import statistics
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from rollmill.sandboxes import HostImage, Lease, Limits, SandboxSpec
from rollmill.sandboxes.backends.namespaces import NamespaceProvider, NamespaceSettings

Record = dict[str, Any]
LEASE = Lease(owner="benchmark", ttl_s=3600.0)
MIB = 2**20
SMALL = SandboxSpec(
    image=HostImage(), limits=Limits(memory_bytes=256 * MIB, disk_bytes=64 * MIB, inodes=20_000, pids=64)
)
CANARY_EVERY_S = 0.02


def spread(values: Sequence[float]) -> Record:
    """Return n, median, 99th percentile and extremes, of seconds, in milliseconds."""
    ordered = sorted(values)
    return {
        "n": len(ordered),
        "p50_ms": 1e3 * statistics.median(ordered),
        "p99_ms": 1e3 * ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))],
        "least_ms": 1e3 * ordered[0],
        "most_ms": 1e3 * ordered[-1],
    }


def new_id() -> str:
    """Return an id that no sandbox has had."""
    return f"bench-{uuid.uuid4().hex[:16]}"


@asynccontextmanager
async def opened(**settings: Any) -> AsyncIterator[NamespaceProvider]:
    """A provider of its own; `settings` as of `NamespaceSettings`."""
    with tempfile.TemporaryDirectory(prefix="bench-sandboxes-") as folder:
        async with NamespaceProvider(NamespaceSettings(directory=Path(folder), **settings)) as provider:
            yield provider


async def timed(call: Awaitable[object]) -> float:
    """Return how long a call took, s."""
    at_s = time.perf_counter()
    await call
    return time.perf_counter() - at_s


@asynccontextmanager
async def canary() -> AsyncIterator[list[float]]:
    """Time a tiny piece of work on the host again and again while the block runs: a thread that wakes and looks."""
    latencies: list[float] = [0.0]
    stop = asyncio.Event()

    async def watch() -> None:
        while not stop.is_set():
            at_s = time.perf_counter()
            await asyncio.to_thread(os.stat, "/")
            latencies.append(time.perf_counter() - at_s)
            await asyncio.sleep(CANARY_EVERY_S)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(watch())
        yield latencies
        stop.set()
