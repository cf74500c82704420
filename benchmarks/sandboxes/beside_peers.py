"""Calls into a sandbox that is there, bursts and density: ours and those of OCI runtimes, one after the other.

A runtime's container is started with `run --detach` and a sleeping first process, a call is its `exec`, and it ends by
`delete --force`. bubblewrap has no call into a sandbox that runs and nothing that outlives its program: it takes part
in the whole lives of programs alone, and `left_out` says so.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import footprint
from common import LEASE, SMALL, Record, new_id, opened, spread, timed
from peers import OciRuntime, Peers

from rollmill.sandboxes import Sandbox

PYTHON = ["python3", "-c", "print(1)"]
HERE = Path(__file__).parent
READING_S = 360.0  # a reading has a limit of its own, and ends what it started
NO_CALLS = "it runs one program in a sandbox, which ends with it"


@contextmanager
def runtimes() -> Iterator[tuple[list[OciRuntime], dict[str, str]]]:
    """Yield the runtimes that work here, and why the others do not."""
    with Peers() as peers:
        found = [peer for peer in peers.found if isinstance(peer, OciRuntime)]
        left_out = {**peers.left_out, **{peer.name: NO_CALLS for peer in peers.found if peer not in found}}
        yield found, left_out


async def execs(*, repeats: int) -> Record:
    """Measure a round trip of `true` and of Python into one that is there, in turn: all see the same machine."""
    times: dict[str, dict[str, list[float]]] = {}
    with runtimes() as (found, left_out):
        async with opened() as provider:
            sandbox = await provider.create(SMALL, id=new_id(), lease=LEASE)
            calls: dict[str, dict[str, Callable[[], Awaitable[object]]]] = {"rollmill": _own_calls(sandbox)}
            names = {peer: peer.start() for peer in found}
            try:
                for peer, name in names.items():
                    calls[peer.name] = {
                        "true": lambda peer=peer, name=name: asyncio.to_thread(peer.exec, name, ["true"]),
                        "python": lambda peer=peer, name=name: asyncio.to_thread(peer.exec, name, PYTHON),
                    }
                for _ in range(repeats):
                    for who, kinds in calls.items():
                        for kind, call in kinds.items():
                            times.setdefault(who, {}).setdefault(kind, []).append(await timed(call()))
            finally:
                for peer, name in names.items():
                    peer.end(name)
    return {
        **{who: {kind: spread(values) for kind, values in kinds.items()} for who, kinds in times.items()},
        "left_out": left_out,
    }


def _own_calls(sandbox: Sandbox) -> dict[str, Callable[[], Awaitable[object]]]:
    return {
        "true": lambda: sandbox.exec(["true"]),
        "python": lambda: sandbox.exec(PYTHON),
        "python_by_fork_server": lambda: sandbox.run_python("print(1)"),
    }


async def burst(*, count: int, at_once: int) -> Record:
    """Start many, each with a first `true`, so many at a time; all live until the last one answered."""
    result: Record = {"count": count, "at_once": at_once, "rollmill": await _own_burst(count, at_once)}
    with runtimes() as (found, left_out):
        for peer in found:
            result[peer.name] = await asyncio.to_thread(_burst_of, peer, count, at_once)
    return {**result, "left_out": left_out}


async def _own_burst(count: int, at_once: int) -> Record:
    gate, starts = asyncio.Semaphore(at_once), []
    async with opened() as provider:

        async def one() -> None:
            async with gate:
                at_s = time.perf_counter()
                sandbox = await provider.create(SMALL, id=new_id(), lease=LEASE)
                await sandbox.exec(["true"])
                starts.append(time.perf_counter() - at_s)

        at_s = time.perf_counter()
        await asyncio.gather(*(one() for _ in range(count)))
        took_s = time.perf_counter() - at_s
    return {"rate_per_s": count / took_s, "start": spread(starts)}


def _burst_of(peer: OciRuntime, count: int, at_once: int) -> Record:
    names: list[str] = []

    def one(_: int) -> float:
        at_s = time.perf_counter()
        names.append(name := peer.start())
        peer.exec(name, ["true"])
        return time.perf_counter() - at_s

    with ThreadPoolExecutor(at_once) as threads:
        try:
            at_s = time.perf_counter()
            starts = list(threads.map(one, range(count)))
            took_s = time.perf_counter() - at_s
        finally:
            list(threads.map(peer.end, names))
    return {"rate_per_s": count / took_s, "start": spread(starts)}


async def density(*, count: int, repeats: int) -> Record:
    """Measure the memory of so many idle ones, of ours and of each runtime in turn, each time in fresh processes.

    A reading of the whole machine's free memory tells nothing at this size (it gave runc negative bytes). So this adds
    up the proportional shares of the processes that stay, and what the kernel charges to their group; `footprint.py`
    says what is counted and what is not. Medians over the repeats. A runtime of which one reading fails is left out.
    """
    with runtimes() as (found, left_out):
        names = ["rollmill", *(peer.name for peer in found)]
        versions = {peer.name: peer.version for peer in found}
    readings: dict[str, list[Record]] = {}
    for _ in range(repeats):
        for who in [one for one in names if one not in left_out]:
            try:
                readings.setdefault(who, []).append(await asyncio.to_thread(reading, who, count))
            except subprocess.CalledProcessError as error:
                left_out[who] = error.stderr.strip()[-300:]
            except (subprocess.TimeoutExpired, ValueError) as error:
                left_out[who] = str(error)
    measured = {who: footprint.medians(values) for who, values in readings.items() if who not in left_out}
    return {"count": count, **measured, "peers": versions, "left_out": left_out}


def reading(who: str, count: int) -> Record:
    """Return what one of so many idle ones takes, started and looked at by a process of its own.

    Raises:
        subprocess.CalledProcessError: if it could not be told; the reason is in its `stderr`.
        subprocess.TimeoutExpired: if there was no reading in time.
    """
    command = [sys.executable, str(HERE / "footprint_of.py"), who, str(count)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=READING_S)
    return json.loads(done.stdout)
