"""Starts, calls, bursts and density; each measure opens what it needs and leaves nothing behind."""

from __future__ import annotations

import asyncio
import os
import subprocess
import time
from collections.abc import Awaitable, Callable, Sequence

import psutil
from beside_peers import reading
from common import LEASE, SMALL, Record, new_id, opened, spread, timed
from peers import Peers

from rollmill.errors import RollmillError
from rollmill.sandboxes import Sandbox
from rollmill.sandboxes.backends.namespaces import NamespaceProvider

BATCH = 8
PYTHON = ["python3", "-c", "print(1)"]


async def starts(*, repeats: int) -> Record:
    """Measure create to first exec, and whole lives of `true` and of Python, ours and the peers' in turn."""
    first: list[float] = []
    created: list[float] = []
    lives: dict[str, list[float]] = {"rollmill": []}
    pythons: dict[str, list[float]] = {}
    with Peers() as peers:
        async with opened() as provider:
            for _ in range(repeats):
                at_s = time.perf_counter()
                sandbox = await provider.create(SMALL, id=new_id(), lease=LEASE)
                created.append(time.perf_counter() - at_s)
                await sandbox.exec(["true"])
                first.append(time.perf_counter() - at_s)
                await sandbox.kill()
                lives["rollmill"].append(time.perf_counter() - at_s)
                for peer in peers.found:
                    spent = await timed(asyncio.to_thread(peer.run, ["true"]))
                    lives.setdefault(peer.name, []).append(spent)
                    spent = await timed(asyncio.to_thread(peer.run, PYTHON))
                    pythons.setdefault(peer.name, []).append(spent)
                pythons.setdefault("rollmill", []).append(await timed(_life_of_python(provider)))
        return {
            "create": spread(created),
            "create_to_first_exec": spread(first),
            "whole_life_of_true": {name: spread(values) for name, values in lives.items()},
            "whole_life_of_python": {name: spread(values) for name, values in pythons.items()},
            "peers": {peer.name: peer.version for peer in peers.found},
            "left_out": peers.left_out,
        }


async def _life_of_python(provider: NamespaceProvider) -> None:
    sandbox = await provider.create(SMALL, id=new_id(), lease=LEASE)
    await sandbox.exec(PYTHON)
    await sandbox.kill()


async def execs(*, repeats: int) -> Record:
    """Measure calls into a sandbox that is there, alone and while the cores are busy."""
    async with opened() as provider:
        sandbox = await provider.create(SMALL, id=new_id(), lease=LEASE)
        calls: dict[str, Callable[[], Awaitable[object]]] = {
            "true": lambda: sandbox.exec(["true"]),
            "python_by_fork_server": lambda: sandbox.run_python("print(1)"),
            "python_by_exec": lambda: sandbox.exec(["python3", "-c", "print(1)"]),
            "write_4_kib": lambda: sandbox.write("/tmp/file", b"x" * 4096),
            "read_4_kib": lambda: sandbox.read("/tmp/file"),
        }
        found: Record = {}
        for name, call in calls.items():
            await call()  # the first makes what later ones find made
            found[name] = spread([await timed(call()) for _ in range(repeats)])
        busy = [await provider.create(SMALL, id=new_id(), lease=LEASE) for _ in range(2 * len(os.sched_getaffinity(0)))]
        found["all_exec_at_once"] = await _all_at_once(busy, repeats=repeats)
        loops = [await one.start_process(["sh", "-c", "while :; do :; done"]) for one in busy]
        found["true_beside_loops"] = spread([await timed(calls["true"]()) for _ in range(repeats)])
        own = busy[0]
        found["true_in_one_that_loops"] = spread([await timed(own.exec(["true"])) for _ in range(repeats)])
        found["loops"] = len(loops)
        return found


async def _all_at_once(sandboxes: Sequence[Sandbox], *, repeats: int) -> Record:
    """Measure round trips while every sandbox has one under way all the time, more of them than cores."""
    times: list[float] = []

    async def calls(sandbox: Sandbox) -> None:
        times.extend([await timed(sandbox.exec(["true"])) for _ in range(repeats)])

    at_s = time.perf_counter()
    await asyncio.gather(*(calls(one) for one in sandboxes))
    rate = len(times) / (time.perf_counter() - at_s)
    return {"sandboxes": len(sandboxes), "calls_per_s": rate, **spread(times)}


async def burst(*, count: int, at_once: int, deadline_s: float = 60.0) -> Record:
    """Start many with a cap on those that are starting; all live until the last one answered."""
    gate = asyncio.Semaphore(at_once)
    waits: list[float] = []
    alone: list[float] = []
    late: list[str] = []
    async with opened() as provider:

        async def one(began_s: float) -> None:
            async with gate:
                at_s = time.perf_counter()
                try:
                    async with asyncio.timeout(deadline_s):
                        sandbox = await provider.create(SMALL, id=new_id(), lease=LEASE)
                        await sandbox.exec(["true"])
                except (RollmillError, TimeoutError) as error:
                    late.append(f"{type(error).__name__}: {error}"[:200])
                    return
                now_s = time.perf_counter()
            alone.append(now_s - at_s)
            waits.append(now_s - began_s)

        began_s = time.perf_counter()
        async with asyncio.TaskGroup() as tasks:
            for _ in range(count):
                tasks.create_task(one(began_s))
        took_s = time.perf_counter() - began_s
    return {
        "count": count,
        "at_once": at_once,
        "failed": late,
        "rate_per_s": len(alone) / took_s,
        "start": spread(alone),
        "wait_and_start": spread(waits),
    }


async def density(*, count: int) -> Record:
    """Measure the memory of many idle sandboxes, how fast they start, and their end.

    `bytes_each` and its kinds are the sum that `footprint.py` describes, read in a process of its own; they are left
    out where that cannot be told, with the reason. `available_bytes_each` is by what the machine has less, which also
    shows what others do, and lags behind what has just ended: it is compared with nothing.
    """
    result: Record = {"count": count, **await _many(count)}
    try:
        return result | await asyncio.to_thread(reading, "rollmill", count)
    except subprocess.CalledProcessError as error:
        return result | {"left_out": error.stderr.strip()[-300:]}
    except (subprocess.TimeoutExpired, ValueError) as error:
        return result | {"left_out": str(error)}


async def _many(count: int) -> Record:
    async with opened() as provider:
        before = psutil.virtual_memory().available
        at_s = time.perf_counter()
        for first in range(0, count, BATCH):
            batch = range(first, min(first + BATCH, count))
            await asyncio.gather(*(provider.create(SMALL, id=new_id(), lease=LEASE) for _ in batch))
        started_s = time.perf_counter() - at_s
        after = psutil.virtual_memory().available
        at_s = time.perf_counter()
    return {
        "available_bytes_each": (before - after) / count,
        "starts_per_s": count / started_s,
        "all_ended_after_s": time.perf_counter() - at_s,
    }
