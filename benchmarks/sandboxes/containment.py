"""How soon bombs are held by the caps, and how soon a watchdog ends those that go on within them."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from common import LEASE, MIB, Record, canary, new_id, opened, spread

from rollmill.sandboxes import ExecResult, HostImage, Limits, Sandbox, SandboxSpec
from rollmill.sandboxes.backends.namespaces.oversight import NamespaceOverseen
from rollmill.sandboxes.watchdog import NodeReader, Watchdog, WatchdogSettings

BOMB_DEADLINE_S = 5.0
WATCH_DEADLINE_S = 60.0
LOOK_S = 0.01
AT_CAP = 0.95

# Every process of it goes on when it is refused another: the usual one of a shell dies of the first refusals.
_FORKS = "import os\nwhile True:\n try: os.fork()\n except OSError: pass"
FORKS = (["python3", "-c", _FORKS], Limits(pids=64, memory_bytes=128 * MIB))
BOMBS = {
    "fork": FORKS,
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
_AGAIN = "import itertools\nfor i in itertools.count():\n try: open(f'/tmp/{i}', 'w').close()\n except OSError: pass"
STUBBORN = {
    "fork": FORKS,
    "inode": (["python3", "-c", _AGAIN], Limits(inodes=20_000, memory_bytes=128 * MIB)),
    "disk": (
        ["sh", "-c", "while :; do cat /dev/zero >> /tmp/zero; done 2>/dev/null"],
        Limits(disk_bytes=64 * MIB, memory_bytes=256 * MIB),
    ),
    "memory": (
        ["sh", "-c", "while :; do python3 -c 'held = []\nwhile True: held.append(bytearray(1 << 20))'; done"],
        Limits(memory_bytes=128 * MIB),
    ),
}
"""Bombs whose programs go on when they are refused."""


async def bombs(*, repeats: int) -> Record:
    """Measure from a bomb's start until it is held, and how the host feels meanwhile.

    It is held when its program was ended or refused, or, if that goes on within its caps as a fork bomb does, when it
    first stood at the cap. What ends such a one is the watchdog's, and measured by `watchdog_ends`.
    """
    found: Record = {}
    async with opened() as provider:
        for name, (argv, limits) in BOMBS.items():
            held: list[float] = []
            how, most = "", 0
            canaries: list[float] = []
            for _ in range(repeats):
                sandbox = await provider.create(_spec(limits), id=new_id(), lease=LEASE)
                async with canary() as latencies:
                    seconds, how, seen = await _until_held(sandbox, argv, limits=limits, by_cap=name == "fork")
                held.append(seconds)
                most = max(most, seen)
                canaries += latencies
                await sandbox.kill()
            found[name] = {"contained": spread(held), "how": how, "most_processes": most, "canary": spread(canaries)}
    return found


async def _until_held(sandbox: Sandbox, argv: Sequence[str], *, limits: Limits, by_cap: bool) -> tuple[float, str, int]:
    """Run a bomb; return how long it went on, what held it, and how many processes it ever had."""
    at_s, most = time.perf_counter(), 0
    running = asyncio.create_task(sandbox.exec(argv, timeout_s=BOMB_DEADLINE_S))
    while not running.done():
        most = max(most, (await sandbox.usage()).processes or 0)
        if by_cap and most >= AT_CAP * limits.pids:
            seconds = time.perf_counter() - at_s
            await asyncio.wait({running}, timeout=1.0)  # whether it ever gets beyond
            most = max(most, (await sandbox.usage()).processes or 0)
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            return seconds, f"held at {limits.pids} processes", most
        await asyncio.wait({running}, timeout=LOOK_S)
    return time.perf_counter() - at_s, ended_by(running), most


async def watchdog_ends(*, repeats: int) -> Record:
    """Measure from the start of a bomb that goes on within its caps until a watchdog with its defaults has ended it."""
    found: Record = {}
    with tempfile.TemporaryDirectory(prefix="bench-evidence-") as folder:
        async with opened() as provider:
            settings = WatchdogSettings(directory=Path(folder))
            pressure = NodeReader().pressure
            async with Watchdog(NamespaceOverseen(provider), settings=settings, pressure=pressure):
                for name, (argv, limits) in STUBBORN.items():
                    ends: list[float] = []
                    reasons: set[str] = set()
                    for _ in range(repeats):
                        sandbox = await provider.create(_spec(limits), id=new_id(), lease=LEASE)
                        at_s = time.perf_counter()
                        running = asyncio.create_task(sandbox.exec(argv, timeout_s=WATCH_DEADLINE_S))
                        await asyncio.wait({running}, timeout=WATCH_DEADLINE_S + 5.0)
                        end = sandbox.death
                        how = ended_by(running)
                        reasons.add(how if end is None else end.reason.value)
                        if end is not None:  # what ended in another way is in the reasons, and in no time
                            ends.append(time.perf_counter() - at_s)
                        await sandbox.kill()
                    found[name] = {
                        "ended": spread(ends) if ends else None,
                        "not_by_the_watchdog": repeats - len(ends),
                        "reasons": sorted(reasons),
                    }
        found["interval_s"], found["full_s"] = settings.interval_s, settings.full_s
    return found


def _spec(limits: Limits) -> SandboxSpec:
    return SandboxSpec(image=HostImage(), limits=limits)


def ended_by(running: asyncio.Task[ExecResult]) -> str:
    """Return in a word or two what ended a program."""
    if not running.done() or running.cancelled():
        return "nothing"
    error = running.exception()
    if error is not None:
        return type(error).__name__
    result = running.result()
    return result.killed_by or f"exit status {result.exit_code}"
