"""Starts many idle sandboxes of one launcher and prints what one takes; each reading is a process of its own.

    python benchmarks/sandboxes/footprint_of.py rollmill 50     # or runc, crun, runsc; prints one line of JSON

Two processes. The outer one makes a memory group and takes in every process whose parent ends, so that none escapes the
count and none that ended lingers. The inner one enters the group, starts the sandboxes, waits and looks. Whatever
they start stays below the group (`cgroupsPath` of a bundle says so to runtimes that choose a place of their own);
if one process does not, nothing is printed but which one. Where no group may be made, only processes are counted.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import psutil
from common import LEASE, SMALL, new_id, opened
from footprint import Look, each, look, strangers
from peers import OciRuntime, Peers

from rollmill.sandboxes.guest.cgroups import Hierarchy, discover

BATCH = 8
SETTLE_S = 3.0  # what a start leaves to be done, and the kernel's counters, which lag
LIMIT_S = 300.0  # of a whole reading
EMPTY_S = 5.0  # until a group whose processes have ended may be removed
_PR_SET_CHILD_SUBREAPER = 36


def outer(who: str, count: int) -> int:
    """Run the inner process; return its exit status."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "orphans cannot be taken in (prctl)")
    with _memory_group() as group:
        argv = [sys.executable, __file__, who, str(count), "--inner", "" if group is None else str(group)]
        inner = os.posix_spawn(sys.executable, argv, os.environ)
        try:
            with _limited(f"{count} sandboxes of {who} were not started, looked at and ended"):
                return _reaped_until(inner)
        finally:
            _end_children()


@contextmanager
def _limited(what: str) -> Iterator[None]:
    def late(*_: object) -> None:
        raise TimeoutError(f"{what} within {LIMIT_S:g} s; ask for fewer, or look what else this machine does")

    signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, LIMIT_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)


def _reaped_until(inner: int) -> int:
    while True:
        pid, status = os.wait()
        if pid == inner:
            return os.waitstatus_to_exitcode(status)


def _end_children() -> None:
    """End and take in what is left, such as a runtime's processes whose end failed."""
    with contextlib.suppress(ChildProcessError):
        while True:
            for one in psutil.Process().children(recursive=True):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(one.pid, signal.SIGKILL)
            os.wait()


@contextmanager
def _memory_group() -> Iterator[Path | None]:
    """A fresh group of the memory controller below our own, with a leaf for us; `None` where none may be made."""
    hierarchy = next((one for one in discover() if "memory" in one.controllers), None)
    if hierarchy is None:
        yield None
        return
    group = Path(hierarchy.group) / f"bench-{os.getpid()}"
    # Runtimes that are told the path make it in the other hierarchies too, and remove only its last part.
    absent = [one for point in _cgroup_mounts() for one in _absent(point / _inside(group))]
    try:
        yield _made(hierarchy, group)
    finally:
        for root, _, _ in os.walk(group, topdown=False):
            _remove(Path(root))
        for one in absent:
            with contextlib.suppress(OSError):  # never made, or by now another's too
                one.rmdir()


def _made(hierarchy: Hierarchy, group: Path) -> Path | None:
    try:
        if hierarchy.version == 2:
            (group.parent / "cgroup.subtree_control").write_text("+memory")
        (group / "leaf").mkdir(parents=True)
        if hierarchy.version == 2:
            (group / "cgroup.subtree_control").write_text("+memory")
    except OSError:  # not ours to write, or in version 2 a parent with processes of its own
        return None
    return group


def _remove(group: Path) -> None:
    deadline_s = time.monotonic() + EMPTY_S
    while group.exists():
        try:
            group.rmdir()
        except OSError:
            if time.monotonic() > deadline_s:
                print(f"the group {group} could not be removed in {EMPTY_S:g} s; remove it by rmdir", file=sys.stderr)
                return
            time.sleep(0.05)


def _absent(path: Path) -> list[Path]:
    """Return what of a path is not there, the deepest first."""
    return [one for one in (path, *path.parents) if not one.exists()]


def _cgroup_mounts() -> list[Path]:
    lines = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    return [Path(fields[1]) for fields in lines if fields[2] in ("cgroup", "cgroup2")]


def _inside(group: Path) -> Path:
    """Return the path of a group inside its hierarchy, as runtimes are told it."""
    point = next(one for one in group.parents if os.path.ismount(one))
    return group.relative_to(point)


def inner(who: str, count: int, group: Path | None) -> dict[str, float | None]:
    """Enter the group, start the sandboxes, and return what one takes."""
    if group is not None:
        (group / "leaf" / "cgroup.procs").write_text(str(os.getpid()))

    def looks() -> Look:
        made = [one for one in psutil.Process(os.getppid()).children(recursive=True) if one.pid != os.getpid()]
        if group is not None:
            _refuse_strangers(made, group)
        return look(made, owner=os.getpid(), group=group)

    before, after = asyncio.run(_ours(count, looks)) if who == "rollmill" else _of_peer(who, count, looks, group)
    if before.processes or after.processes < count:
        raise RuntimeError(
            f"{before.processes} processes before, and {after.processes} with {count} sandboxes of {who}"
        )
    return each(before, after, count=count)


def _refuse_strangers(made: list[psutil.Process], group: Path) -> None:
    groups = {}
    for one in made:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            lines = Path(f"/proc/{one.pid}/cgroup").read_text().splitlines()
            fields = [line.split(":", 2) for line in lines]
            by_name = {name: path for _, names, path in fields for name in names.split(",")}
            groups[one.pid] = by_name.get("memory", by_name.get("", "")).lstrip("/")
    if astray := strangers(groups, group=str(_inside(group))):
        raise RuntimeError(
            f"{len(astray)} of {len(groups)} processes are outside the group {group}, such as {astray[0]} in "
            f"/{groups[astray[0]]}: what the kernel charges to them cannot be told from what others take"
        )


async def _ours(count: int, looks: Callable[[], Look]) -> tuple[Look, Look]:
    before = looks()
    async with opened() as provider:
        for first in range(0, count, BATCH):
            batch = range(first, min(first + BATCH, count))
            await asyncio.gather(*(provider.create(SMALL, id=new_id(), lease=LEASE) for _ in batch))
        await asyncio.sleep(SETTLE_S)
        return before, looks()


def _of_peer(who: str, count: int, looks: Callable[[], Look], group: Path | None) -> tuple[Look, Look]:
    with Peers((who,)) as peers, ThreadPoolExecutor(2) as threads:
        peer = next(iter(peers.found), None)
        if not isinstance(peer, OciRuntime):
            raise RuntimeError(f"{who} does not work here: {peers.left_out.get(who, 'it is not an OCI runtime')}")
        names: list[str] = []
        time.sleep(SETTLE_S)
        before = looks()
        try:
            names.extend(peer.start(below=None if group is None else f"/{_inside(group)}") for _ in range(count))
            time.sleep(SETTLE_S)
            return before, looks()
        finally:
            list(threads.map(peer.end, names))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("who")
    parser.add_argument("count", type=int)
    parser.add_argument("--inner", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.inner is None:
        return outer(args.who, args.count)
    print(json.dumps(inner(args.who, args.count, Path(args.inner) if args.inner else None)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
