"""Starts, calls, bursts, density and bombs; each measure opens what it needs and leaves nothing behind."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable

import psutil
from common import LEASE, MIB, SMALL, Record, canary, new_id, opened, spread, timed
from peers import Peers

from rollmill.errors import RollmillError
from rollmill.sandboxes import ExecResult, HostImage, Limits, SandboxSpec

BATCH = 8
BOMB_DEADLINE_S = 0.5
LOOK_S = 0.01


async def starts(*, repeats: int) -> Record:
    """Measure create to first exec, and a whole life, ours and the peers' in turn."""
    first: list[float] = []
    created: list[float] = []
    lives: dict[str, list[float]] = {"rollmill": []}
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
        return {
            "create": spread(created),
            "create_to_first_exec": spread(first),
            "whole_life_of_true": {name: spread(values) for name, values in lives.items()},
            "peers": {peer.name: peer.version for peer in peers.found},
            "left_out": peers.left_out,
        }


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
        loops = [await one.start_process(["sh", "-c", "while :; do :; done"]) for one in busy]
        found["true_under_full_load"] = spread([await timed(calls["true"]()) for _ in range(repeats)])
        found["loops"] = len(loops)
        return found


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
    """Measure the memory of many idle sandboxes, by what the machine has less, and their end."""
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
        "count": count,
        "bytes_each": (before - after) / count,
        "starts_per_s": count / started_s,
        "all_ended_after_s": time.perf_counter() - at_s,
    }


BOMBS = {
    "fork": (["sh", "-c", "b() { b | b & }; b; sleep 30"], Limits(pids=64, memory_bytes=128 * MIB)),
    "inode": (
        ["python3", "-c", "import itertools\nfor i in itertools.count(): open(f'/tmp/{i}', 'w').close()"],
        Limits(inodes=20_000, memory_bytes=128 * MIB),
    ),
    "disk": (["sh", "-c", "cat /dev/zero > /tmp/zero"], Limits(disk_bytes=64 * MIB, memory_bytes=256 * MIB)),
    "memory": (
        ["python3", "-c", "held = []\nwhile True: held.append(bytearray(1 << 20))"],
        Limits(memory_bytes=128 * MIB),
    ),
    "output": (["yes"], Limits(output_bytes=4 * MIB)),
}


async def bombs(*, repeats: int) -> Record:
    """Measure how long each bomb goes on after its start, and how the host feels meanwhile.

    A bomb is contained when its program was ended or refused. One that goes on within its caps, as forks that are
    refused, is ended by the deadline of its call; how many processes it ever had is told.
    """
    found: Record = {}
    async with opened() as provider:
        for name, (argv, limits) in BOMBS.items():
            ends: list[float] = []
            how, most = "", 0
            canaries: list[float] = []
            for _ in range(repeats):
                spec = SandboxSpec(image=HostImage(), limits=limits)
                sandbox = await provider.create(spec, id=new_id(), lease=LEASE)
                async with canary() as latencies:
                    at_s = time.perf_counter()
                    running = asyncio.create_task(sandbox.exec(argv, timeout_s=BOMB_DEADLINE_S))
                    while not running.done():
                        most = max(most, (await sandbox.usage()).processes or 0)
                        await asyncio.wait({running}, timeout=LOOK_S)
                    how = ended_by(running)
                    ends.append(time.perf_counter() - at_s)
                canaries += latencies
                await sandbox.kill()
            found[name] = {"contained": spread(ends), "how": how, "most_processes": most, "canary": spread(canaries)}
    return found


def ended_by(running: asyncio.Task[ExecResult]) -> str:
    """Return in a word or two what ended a program."""
    try:
        result = running.result()
    except RollmillError as error:
        return type(error).__name__
    return result.killed_by or f"exit status {result.exit_code}"
