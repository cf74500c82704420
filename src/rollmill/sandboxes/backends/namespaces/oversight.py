"""Namespace sandboxes as the watchdog sees them: from outside, by their groups, their tmpfs and /proc.

No agent is asked, for a bomb may starve it; but as a plain user nobody else can say what the files take, and then it is
asked, within the limit of the survey. Whatever may block is read in a thread that is left behind when time is up.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

import msgspec

from rollmill.errors import RollmillError, SandboxUnsupported
from rollmill.sandboxes.backends.namespaces.counters import Counters
from rollmill.sandboxes.backends.namespaces.provider import NamespaceProvider
from rollmill.sandboxes.backends.namespaces.sandbox import NamespaceSandbox
from rollmill.sandboxes.disk_records import ProcessMark
from rollmill.sandboxes.guest.cgroups import Groups
from rollmill.sandboxes.records import Death, DeathReason, Limits, SandboxState, Usage
from rollmill.sandboxes.watchdog import processes
from rollmill.sandboxes.watchdog.processes import ProcessRow
from rollmill.sandboxes.watchdog.records import Sample, Survey, Watched

T = TypeVar("T")

_WATCHED_STATES = frozenset({SandboxState.READY, SandboxState.BUSY, SandboxState.PAUSED})
_EVENT_FILES = (
    "memory.events",
    "memory.oom_control",
    "memory.failcnt",
    "memory.max_usage_in_bytes",
    "memory.peak",
    "memory.pressure",
    "pids.events",
    "pids.peak",
    "cpu.stat",
    "cpu.pressure",
    "io.pressure",
    "cgroup.events",
)
_MOST_EVENT_BYTES = 1024
_MOST_COMMAND_BYTES = 256
_TOP = 10
_ASKED_AT_A_TIME = 64
_FREEZE_LOOK_S = 0.002
_COMMANDS_S = 0.3


class _Target(NamedTuple):
    """What a thread needs to know of a sandbox."""

    sandbox_id: str
    limits: Limits
    groups: Groups
    first: ProcessMark
    output_bytes: int
    below: tuple[int, int] = (0, 0)  # bytes and inodes of the layers that it stands on


class _Seen(NamedTuple):
    """What was last read of a sandbox, and the processor time that its group had counted before that.

    While the count stands still nothing has run in it, so nothing can have changed: an idle sandbox costs one read.
    """

    cpu_path: str
    cpu: bytes
    watched: Watched


class NamespaceOverseen:
    """The sandboxes of one provider, for a `Watchdog`.

    Args:
        provider: whose.
    """

    def __init__(self, provider: NamespaceProvider) -> None:
        self._provider = provider
        self._stuck: dict[str, threading.Thread] = {}
        self._last: dict[str, _Seen] = {}
        self._counters: dict[str, Counters] = {}
        self._late: tuple[str, ...] = ()

    async def survey(self, *, limit_s: float) -> Survey:
        """Look at all from outside."""
        loop = asyncio.get_running_loop()
        end_s = loop.time() + limit_s
        self._stuck = {one: thread for one, thread in self._stuck.items() if thread.is_alive()}
        targets = [_target(one) for one in self._provider.alive() if one.state in _WATCHED_STATES]
        known = [one for one in targets if one is not None]
        # Whoever was late comes first: where a look takes too long, the same ones must not be left out each time.
        overdue = set(self._late)
        free = [one for one in known if one.sandbox_id not in self._stuck]
        free.sort(key=lambda one: one.sandbox_id not in overdue)
        look = _Look(free, last=self._last, counters=self._counters, clock=loop.time)
        thread = _start(look.run, loop, look.done)
        try:
            async with asyncio.timeout(limit_s):
                await look.done.wait()
        except TimeoutError:
            look.abandoned = True
            if look.at:
                self._stuck[look.at] = thread  # it is not tried again while the kernel holds that thread
        found = dict(look.found)
        for sandbox_id, files in (await self._ask(look.unseen, end_s=end_s)).items():
            if sandbox_id in found:
                counts = {"disk_bytes": files.disk_bytes, "inodes": files.inodes}
                found[sandbox_id] = _with_files(found[sandbox_id], **counts)
        self._last = {one: look.seen[one] for one in found if one in look.seen}
        alive = {one.sandbox_id for one in known}
        self._counters = {one: counters for one, counters in list(look.counters.items()) if one in alive}
        seen = found.keys() | look.gone
        self._late = tuple(one.sandbox_id for one in known if one.sandbox_id not in seen)
        return Survey(found=found, late=self._late)

    async def _ask(self, ids: list[str], *, end_s: float) -> dict[str, Usage]:
        """Ask the agents of those whose files cannot be seen from outside; who is late goes without."""
        answers: dict[str, Usage] = {}
        room = asyncio.Semaphore(_ASKED_AT_A_TIME)

        async def ask(sandbox: NamespaceSandbox) -> None:
            try:
                async with asyncio.timeout_at(end_s), room:
                    answers[sandbox.id] = await sandbox.usage()
            except (TimeoutError, RollmillError):
                return

        alive = {one.id: one for one in self._provider.alive()}
        async with asyncio.TaskGroup() as group:
            for one in ids:
                if one in alive and alive[one].state is not SandboxState.PAUSED:
                    group.create_task(ask(alive[one]))
        return answers

    async def freeze(self, sandbox_id: str) -> None:
        """Stop every process, and wait until all stand.

        Raises:
            SandboxUnsupported: without a version 2 hierarchy.
        """
        groups = (await self._provider.attach(sandbox_id)).groups
        if not await _beside(lambda: groups.freeze(True)):
            raise SandboxUnsupported("there is no cgroup v2 hierarchy here that may be written to", capability="pause")
        paths = [f"{directory}/cgroup.events" for version, directory in groups.directories if version == 2]
        # The kernel tells nobody who does not poll the file; the watchdog bounds this.
        while not any(b"frozen 1" in processes.read_bytes(path) for path in paths):  # noqa: ASYNC110
            await asyncio.sleep(_FREEZE_LOOK_S)

    async def describe(self, sandbox_id: str) -> Mapping[str, Any]:
        """Return its labels, largest processes, and what its groups counted."""
        sandbox = await self._provider.attach(sandbox_id)
        status, target = sandbox.status(), _target(sandbox)
        told: dict[str, Any] = {
            "labels": dict(status.labels),
            "rollout_id": status.lease.rollout_id,
            "age_s": round(status.age_s, 3),
            "state": status.state.value,
            "isolation": status.isolation,
        }
        if target is None:
            return told
        told |= await _beside(lambda: _evidence(target))
        top = {row["pid"]: row for row in (*told["top_cpu"], *told["top_memory"])}
        try:
            async with asyncio.timeout(_COMMANDS_S):
                commands = await _beside(lambda: _commands(list(top)))
        except TimeoutError:
            return told  # a process that holds its own memory keeps its command line, and nothing else
        for row in (*told["top_cpu"], *told["top_memory"]):
            row["command"] = commands[row["pid"]]
        return told

    async def kill(self, sandbox_id: str, *, reason: DeathReason, detail: str) -> Death:
        """End it; one that is ending already ends as it was ordered."""
        sandbox = await self._provider.attach(sandbox_id)
        if sandbox.ordered is None:
            sandbox.distrust(detail, reason)
        return await sandbox.kill(reason)


def _target(sandbox: NamespaceSandbox) -> _Target | None:
    first = sandbox.record.first_process
    if first is None:
        return None  # just born: the zygote's word is under way
    limits, output_bytes = sandbox.spec.limits, sandbox.channel.output_bytes
    return _Target(sandbox.id, limits, sandbox.groups, first, output_bytes, below=sandbox.layer_counts)


def _with_files(watched: Watched, *, disk_bytes: int | None, inodes: int | None) -> Watched:
    sample = msgspec.structs.replace(watched.sample, disk_bytes=disk_bytes, inodes=inodes)
    return msgspec.structs.replace(watched, sample=sample)


def _start(work: Callable[[], None], loop: asyncio.AbstractEventLoop, done: asyncio.Event) -> threading.Thread:
    """Run something that may block for ever in a thread that keeps nobody from ending."""

    def whole() -> None:
        try:
            work()
        finally:
            with suppress(RuntimeError):  # the loop was closed while this was left behind
                loop.call_soon_threadsafe(done.set)

    thread = threading.Thread(target=whole, name="sandbox-survey", daemon=True)
    thread.start()
    return thread


async def _beside(work: Callable[[], T]) -> T:
    """Return what a call gives that may block; whoever waits bounds it, and the thread is left behind."""
    done, results, failures = asyncio.Event(), list[T](), list[Exception]()

    def whole() -> None:
        try:
            results.append(work())
        except Exception as error:  # raised again below, in the task that waits
            failures.append(error)

    _start(whole, asyncio.get_running_loop(), done)
    await done.wait()
    if failures:
        raise failures[0]
    return results[0]


class _Look:
    """One look at many sandboxes, in a thread."""

    def __init__(
        self,
        targets: list[_Target],
        *,
        last: Mapping[str, _Seen],
        counters: Mapping[str, Counters],
        clock: Callable[[], float],
    ) -> None:
        self._targets = targets
        self.counters = dict(counters)
        self._last = last
        self._clock = clock
        self.done = asyncio.Event()
        self.found: dict[str, Watched] = {}
        self.seen: dict[str, _Seen] = {}
        self.gone: set[str] = set()
        self.unseen: list[str] = []
        self.at = ""
        self.abandoned = False
        self._children: dict[int, list[ProcessRow]] | None = None

    def run(self) -> None:
        for target in self._targets:
            if self.abandoned:
                return
            self.at = target.sandbox_id
            if not self._is_idle(target):
                self._look_at(target)
        self.at = ""

    def _is_idle(self, target: _Target) -> bool:
        """Return whether nothing has run since the last look, which then stands for this one."""
        last = self._last.get(target.sandbox_id)
        if last is None or not last.cpu or processes.read_bytes(last.cpu_path) != last.cpu:
            return False
        sample = msgspec.structs.replace(last.watched.sample, at_s=self._clock(), output_bytes=target.output_bytes)
        watched = Watched(sample=sample, limits=target.limits)
        self.found[target.sandbox_id] = watched
        self.seen[target.sandbox_id] = last._replace(watched=watched)
        return True

    def _look_at(self, target: _Target) -> None:
        counters = self.counters.get(target.sandbox_id) or Counters.of(target.groups)
        self.counters[target.sandbox_id] = counters
        # Before the rest: what runs meanwhile is seen next.
        cpu = processes.read_bytes(counters.cpu_path) if counters.cpu_path else b""
        counts: dict[str, Any] = dict(counters.read())
        if not {"pids", "cpu_s", "memory_bytes"} <= counts.keys():
            counts = {**self._tree_counts(target), **counts}
        files = _file_counts(target.first.pid, below=target.below)
        row = processes.read_row(target.first.pid)
        if row is None or row.state == "Z" or row.started_ticks != target.first.started_ticks:
            self.gone.add(target.sandbox_id)  # what was read may be another process's by now
            return
        sample = Sample(at_s=self._clock(), output_bytes=target.output_bytes, **counts, **(files or {}))
        self.found[target.sandbox_id] = watched = Watched(sample=sample, limits=target.limits)
        if files is None:
            self.unseen.append(target.sandbox_id)
        else:
            self.seen[target.sandbox_id] = _Seen(counters.cpu_path, cpu, watched)

    def _tree_counts(self, target: _Target) -> dict[str, Any]:
        if self._children is None:
            self._children = processes.trees(processes.read_all().values())
        rows = processes.descendants(target.first.pid, children=self._children)
        first = processes.read_row(target.first.pid)
        return {
            "pids": sum(row.threads for row in rows),
            # What has ended counts with whoever waited for it, at last the first process.
            "cpu_s": sum(row.cpu_s for row in rows) + (0.0 if first is None else first.cpu_s),
            "memory_bytes": _memory_of(rows, cap_bytes=target.limits.memory_bytes),
        }


def _memory_of(rows: list[ProcessRow], *, cap_bytes: int) -> int:
    """Return the memory of processes: an upper bound that costs little, and the truth where that passes the cap."""
    bound = sum(max(0, row.resident_bytes - processes.shared_bytes(row.pid)) for row in rows)
    if bound <= cap_bytes:
        return bound
    exact = [processes.proportional_bytes(row.pid) for row in rows]
    return sum(one for one in exact if one is not None)


def _file_counts(first_process: int, *, below: tuple[int, int]) -> dict[str, int] | None:
    """Return what a sandbox's files take, `None` where its root is not shown: a plain user may not look there."""
    try:
        # All that a sandbox writes lies on one file system, and this mount of it nobody inside can exchange.
        found = os.statvfs(f"/proc/{first_process}/root/dev/shm")
    except OSError:
        return None
    return {
        "disk_bytes": (found.f_blocks - found.f_bfree) * found.f_frsize + below[0],
        "inodes": found.f_files - found.f_ffree + below[1],
    }


def _evidence(target: _Target) -> dict[str, Any]:
    """Return the largest processes and the counts of the groups."""
    children = processes.trees(processes.read_all().values())
    rows = processes.descendants(target.first.pid, children=children)
    told: dict[str, Any] = {
        "processes": len(rows),
        "threads": sum(row.threads for row in rows),
        "output_bytes": target.output_bytes,
        "events": _events(target.groups),
    }
    by_cpu = sorted(rows, key=lambda row: -row.cpu_s)[:_TOP]
    by_memory = sorted(rows, key=lambda row: -row.resident_bytes)[:_TOP]
    told["top_cpu"] = [_told(row) for row in by_cpu]
    told["top_memory"] = [_told(row) for row in by_memory]
    return told


def _told(row: ProcessRow) -> dict[str, Any]:
    return {
        "pid": row.pid,
        "name": row.name,
        "state": row.state,
        "threads": row.threads,
        "cpu_s": round(row.cpu_s, 2),
        "resident_bytes": row.resident_bytes,
    }


def _commands(pids: list[int]) -> dict[int, str]:
    """Return command lines, which may wait for a process that is busy with its memory."""
    return {pid: processes.command_line(pid, most_bytes=_MOST_COMMAND_BYTES) for pid in pids}


def _events(groups: Groups) -> dict[str, str]:
    found: dict[str, str] = {}
    for version, directory in groups.directories:
        for name in _EVENT_FILES:
            if data := processes.read_bytes(f"{directory}/{name}", most_bytes=_MOST_EVENT_BYTES):
                found[f"version {version}: {name}"] = data.decode("ascii", "replace").strip()
    return found
