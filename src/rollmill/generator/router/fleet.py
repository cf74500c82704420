"""Keeps the law's table in step with the replicas: who is on the list, who answers, who needs which weights.

| loop | waits for | woken by | gives up after |
|---|---|---|---|
| list | another list of replicas | its tick (`list_s`) | never; an unreadable list changes nothing |
| owner of a replica | its status | its tick (`poll_s`), a request that broke | `status_deadline_s`: out of rotation |
| the same, if it is behind | its load | a place in `max_unavailable` | `load_deadline_s`; again after a back-off |
| update of the fleet | the load of each replica | the loads | `load_deadline_s` for each |

One owner task per replica; nobody else asks it for its status.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

import msgspec

from rollmill.clock import Clock
from rollmill.errors import DataError, EngineError, ModelError, NotServing, RollmillError
from rollmill.generator.proto import policy_inference_pb2 as pb
from rollmill.generator.router.law import RouterLaw
from rollmill.generator.router.membership import ListUnreadable, Source
from rollmill.generator.router.records import Instruction, Report, Seen
from rollmill.generator.router.rolling import Result, RollingUpdate
from rollmill.generator.router.table import Member
from rollmill.generator.router.upstream import Upstream, UpstreamError
from rollmill.generator.wire import LoadReport, report_from_message

log = logging.getLogger(__name__)

LOAD_BACKOFF_S = 5.0
MAX_LOAD_BACKOFF_S = 120.0
_LOOK_AGAIN_S = 0.05
"""Least time between two looks at one replica, however many requests broke there."""


class ReplicaLoad(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one replica in an update.

    Attributes:
        report: of its load, if it loaded.
        error: why it did not.
    """

    replica: str
    result: Result
    report: LoadReport | None = None
    error: RollmillError | None = None


class Fleet:
    """The replicas behind one router.

    Args:
        law: of the router.
        source: the list of replicas.
        connect: opens a connection to an address.
        obey: takes what the law says when replicas come, go and report.
        clock: the law's time.
        on_change: told after anything that may have changed who serves.
    """

    def __init__(
        self,
        law: RouterLaw,
        *,
        source: Source,
        connect: Callable[[str], Upstream],
        obey: Callable[[Sequence[Instruction]], None],
        clock: Clock,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self.upstreams: dict[str, Upstream] = {}
        self.statuses: dict[str, pb.StatusReply] = {}
        self.list_error: str | None = None
        self._law = law
        self._settings = law.settings
        self._source = source
        self._connect = connect
        self._obey = obey
        self._clock = clock
        self._on_change = on_change
        self._looks: dict[str, asyncio.Event] = {}
        self._loading = asyncio.Semaphore(law.settings.max_unavailable)
        self._updating = asyncio.Lock()
        self._first_list = asyncio.Event()

    # -- loops

    async def run(self) -> None:
        """Follow the list and the replicas for ever.

        Cancellation:
            closes all connections.
        """
        owners: dict[str, asyncio.Task[None]] = {}
        try:
            async with asyncio.TaskGroup() as tasks:
                while True:
                    await self._follow_list(owners, tasks)
                    self._first_list.set()
                    await asyncio.sleep(self._settings.list_s)
        finally:
            for upstream in self.upstreams.values():
                await upstream.close()

    async def _follow_list(self, owners: dict[str, asyncio.Task[None]], tasks: asyncio.TaskGroup) -> None:
        try:
            entries = await self._source.read()
        except ListUnreadable as error:
            if str(error) != self.list_error:
                log.warning("%s; the known replicas stay", error)
            self.list_error = str(error)
            return
        self.list_error = None
        listed = {entry.address: entry for entry in entries}
        for name in [name for name, owner in owners.items() if owner.done()]:
            del owners[name]
        for name in owners:
            if name in self._law.table and self._law.table[name].seen is not Seen.LEAVING:
                if name in listed and listed[name].jobs == self._law.table[name].jobs:
                    continue
                log.info("replica %s was taken off the list, or serves other jobs now", name)
                self._obey(self._law.leave(name, now_s=self._clock.now_s()))
                self.look(name)
        for name, entry in listed.items():
            if name not in owners:
                log.info("replica %s is on the list", name)
                self._law.table.join(name, jobs=entry.jobs)
                self.upstreams[name] = self._connect(name)
                self._looks[name] = asyncio.Event()
                owners[name] = tasks.create_task(self._own(name), name=f"owner of {name}")
        self._on_change()

    async def _own(self, name: str) -> None:
        """Look at one replica again and again, until it was taken off the list and has finished."""
        look, failures = self._looks[name], 0
        try:
            while name in self._law.table:
                look.clear()
                await self._look(name)
                if self._is_behind(name):
                    failures = 0 if await self._catch_up(name) else failures + 1
                    if failures:
                        backoff_s = min(LOAD_BACKOFF_S * 2 ** (failures - 1), MAX_LOAD_BACKOFF_S)
                        await self._wait(look, backoff_s)
                    continue
                await asyncio.sleep(_LOOK_AGAIN_S)
                await self._wait(look, self._settings.poll_s)
        finally:
            upstream = self.upstreams.pop(name)
            del self._looks[name]
            self.statuses.pop(name, None)
            await upstream.close()

    @staticmethod
    async def _wait(look: asyncio.Event, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await look.wait()
        except TimeoutError:
            return

    def look(self, name: str) -> None:
        """Have a replica looked at now."""
        if name in self._looks:
            self._looks[name].set()

    async def _look(self, name: str) -> None:
        if name not in self._law.table:
            return
        before = self._law.table[name].in_flight
        try:
            status = await self.upstreams[name].status(timeout_s=self._settings.status_deadline_s)
        except UpstreamError as error:
            self.statuses.pop(name, None)  # its last figures say nothing of now
            if name in self._law.table:
                self._say(name, "does not answer", str(error.error))
                self._law.table.silent(name, reason=str(error.error))
                self._on_change()
            return
        if name not in self._law.table:
            return
        self.statuses[name] = status
        seen = self._law.table[name].seen
        report = report_of(status)
        self._obey(self._law.report(name, report, now_s=self._clock.now_s(), in_flight_before=before))
        now = self._law.table[name]
        if now.seen is not seen:
            self._say(name, f"is {now.seen.value}", now.reason or f"policy version {now.policy_version}")
        self._on_change()

    def _say(self, name: str, what: str, why: str) -> None:
        if self._law.table[name].reason != why or what.startswith("is"):
            log.info("replica %s %s: %s", name, what, why)

    # -- weights

    def _is_behind(self, name: str) -> bool:
        if name not in self._law.table:
            return False
        member = self._law.table[name]
        return member.seen is Seen.JOINING and member.target is not None

    async def _catch_up(self, name: str) -> bool:
        """Have a late joiner load the fleet's version; return whether it did."""
        version = self._law.table[name].target
        if version is None:
            return True
        async with self._loading:
            loaded = await self._load(name, version)
        if loaded.error is not None:
            log.warning("replica %s cannot join: %s", name, loaded.error)
            if name in self._law.table:
                self._law.table[name].reason = f"could not load policy version {version}: {loaded.error}"
        return loaded.error is None

    async def load_weights(self, policy_version: int, *, job: str = "") -> list[ReplicaLoad]:
        """Have all replicas of a job load a version, a few at a time; return what became of each.

        Later joiners load it before they serve.

        Args:
            job: whose replicas; may be left out where all replicas serve the same jobs.

        Raises:
            DataError: if the job is left out and replicas serve different ones.
            NotServing: if there is no replica to load anything.
        """
        async with self._updating:
            members = [m for m in self._law.table.of_job(job) if m.seen in (Seen.SERVING, Seen.DIRTY, Seen.JOINING)]
            self._check_job(job, members)
            names = [member.name for member in members]
            update = RollingUpdate(names, max_unavailable=self._settings.max_unavailable)
            return await self._roll(update, policy_version)

    async def load_adapter(self, name: str, policy_version: int, *, job: str = "") -> list[ReplicaLoad]:
        """Have all replicas that serve and know an adapter load a version of it, at once: none of them pauses for it.

        Args:
            name: of the adapter.
            policy_version: of it; 0 lets each replica take the newest.
            job: whose replicas; empty for all.

        Raises:
            ModelError: if no replica that serves knows the adapter.
        """
        async with self._updating:
            serving = [member.name for member in self._law.table.of_job(job) if member.seen is Seen.SERVING]
            names = [one for one in serving if name in self._law.table[one].adapters]
            if not names:
                raise ModelError(
                    f"no replica that serves knows adapter {name!r}: {self._law.table.summary()}. Start one with "
                    f"--adapter {name}=DIR"
                )
            async with asyncio.TaskGroup() as tasks:
                loads = [tasks.create_task(self._load_adapter(one, name, policy_version)) for one in names]
            return [load.result() for load in loads]

    async def _load_adapter(self, replica: str, name: str, policy_version: int) -> ReplicaLoad:
        try:
            upstream = self.upstreams[replica]
            deadline_s = self._settings.load_deadline_s
            reply = await upstream.load_weights(policy_version, timeout_s=deadline_s, adapter=name)
        except KeyError:
            gone = NotServing(f"{replica} was taken off the list")
            return ReplicaLoad(replica=replica, result=Result.KEPT, error=gone)
        except UpstreamError as error:
            return ReplicaLoad(replica=replica, result=Result.KEPT, error=error.error)
        await self._look(replica)
        return ReplicaLoad(replica=replica, result=Result.LOADED, report=report_from_message(reply))

    def _check_job(self, job: str, members: Sequence[Member]) -> None:
        if not members:
            raise NotServing(
                f"no replica{f' of job {job}' if job else ''} takes weights now: {self._law.table.summary()}. Look at "
                "the replicas' logs"
            )
        sets = {member.jobs for member in members}
        if not job and len(sets) > 1:
            names = ", ".join(sorted({name for jobs in sets for name in jobs}))
            raise DataError(
                f"the replicas serve different jobs ({names}), each with its own policy versions; say whose weights "
                "these are (metadata `rollmill-job`)"
            )

    async def _roll(self, update: RollingUpdate, policy_version: int) -> list[ReplicaLoad]:
        found: dict[str, ReplicaLoad] = {}
        running: set[asyncio.Task[ReplicaLoad]] = set()
        async with asyncio.TaskGroup() as tasks:
            while not update.over:
                for name in update.start():
                    running.add(tasks.create_task(self._load_in_turn(name, policy_version), name=f"load at {name}"))
                if not running:
                    continue
                done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    loaded = task.result()
                    found[loaded.replica] = loaded
                    update.done(loaded.replica, loaded.result)
        return [found.get(name) or ReplicaLoad(replica=name, result=result) for name, result in update.results.items()]

    async def _load_in_turn(self, name: str, policy_version: int) -> ReplicaLoad:
        async with self._loading:
            return await self._load(name, policy_version)

    async def _load(self, name: str, policy_version: int) -> ReplicaLoad:
        upstream = self.upstreams.get(name)
        if upstream is None or name not in self._law.table:
            gone = NotServing(f"{name} was taken off the list")
            return ReplicaLoad(replica=name, result=Result.KEPT, error=gone)
        self._law.table.loads(name, policy_version)
        try:
            reply = await upstream.load_weights(policy_version, timeout_s=self._settings.load_deadline_s)
        except UpstreamError as error:
            await self._look(name)
            result = Result.KEPT if self._serves_on(name) else Result.BROKEN
            return ReplicaLoad(replica=name, result=result, error=error.error)
        finally:
            self._law.table.loads(name, None)
        if name in self._law.table:
            # From now on others can load it too, and must before they join.
            self._law.table.set_target(self._law.table[name].jobs, policy_version)
        await self._look(name)
        return ReplicaLoad(replica=name, result=Result.LOADED, report=report_from_message(reply))

    def _serves_on(self, name: str) -> bool:
        return name not in self._law.table or self._law.table[name].seen not in (Seen.DIRTY, Seen.UNKNOWN, Seen.DEAD)


def report_of(status: pb.StatusReply) -> Report:
    """Return what a status says to the law."""
    capacity = status.kv_capacity_tokens
    return Report(
        state=status.state,
        reason=status.reason,
        policy_version=status.policy_version,
        digest=status.digest,
        running=status.running,
        waiting=status.waiting,
        slots=status.max_num_seqs or 1,
        kv_use=status.kv_used_tokens / capacity if capacity else 0.0,
        age_s=status.wall_s,
        max_model_len=status.max_model_len,
        adapters={one.name: one.policy_version for one in status.adapters},
    )


def joined_report(loads: Sequence[ReplicaLoad], *, policy_version: int) -> LoadReport:
    """Return one report over all replicas: sums of bytes, and the longest time of each part.

    Raises:
        RollmillError: if none loaded; the first one's error, or what happened to each.
    """
    loaded = [one.report for one in loads if one.report is not None]
    if not loaded:
        errors = [one.error for one in loads if one.error is not None]
        if len(errors) == 1:
            raise errors[0]
        story = "; ".join(f"{one.replica}: {one.error or one.result.value}" for one in loads)
        kind = type(errors[0]) if errors and len({type(e) for e in errors}) == 1 else EngineError
        text = f"no replica loaded policy version {policy_version}: {story}"
        try:
            raise kind(text)
        except TypeError:  # a class that wants more than a message
            raise EngineError(text) from errors[0]
    times = ("pull_s", "stage_s", "finish_s", "pause_s", "drain_s", "swap_s", "prove_s", "resume_s")
    differences = [one.canary_difference for one in loaded if one.canary_difference is not None]
    return LoadReport(
        policy_version=policy_version,
        digest=loaded[0].digest,
        nbytes=sum(one.nbytes for one in loaded),
        changed=any(one.changed for one in loaded),
        canary_difference=max(differences, default=None),
        cut=sum(one.cut for one in loaded),
        **{name: max(getattr(one, name) for one in loaded) for name in times},
    )
