"""Starts and drains replica processes of this machine as the law of scaling says. The shell; decides nothing.

| waits for | woken by | gives up after |
|---|---|---|
| the next look at the fleet | `stop`, the end of a replica's process | `poll_s`: then it looks |
| the status of a replica, of the router | its answer | `status_deadline_s`: it counts as unfit; the load as not seen |
| a replica that drains | its answer: nothing runs there any more | `drain_s`: the rest ends with the tokens it has |
| the end of a replica's process | the process | `stop_grace_s`: it is killed |

A replica is on the list for routers from the moment it serves until it is to drain, so that a router sends it nothing
new while what it runs is finished. All that this process started ends with it: drained if it is told to stop, killed by
the kernel if it is killed.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import msgspec

from rollmill.clock import Clock, SystemClock
from rollmill.errors import ConfigError, RollmillError
from rollmill.generator.client import GeneratorClient
from rollmill.generator.security import TlsFiles
from rollmill.generator.state import ReplicaState
from rollmill.generator.tally import Recent
from rollmill.generator.wire import ReplicaStatus
from rollmill.runtime.parent import PARENT_VARIABLE
from rollmill.runtime.stopping import stop_on_signals
from rollmill.scheduling.scaling import Decision, Fleet, Memory, ReplicaLoad, ReplicaPhase, ScalingSettings, decide

HEADER = "# Written by rollmill autoscale: replicas that serve, one address a line."
_USER_ERROR_STATUS = 2
"""Exit status of a replica that says why it cannot start, in a way that no other try changes."""
_SIGKILL_STATUS = -9
_LOG_TAIL_BYTES = 2000

_PHASE_OF = {
    ReplicaState.STARTING: ReplicaPhase.STARTING,
    ReplicaState.SERVING: ReplicaPhase.SERVING,
    ReplicaState.DIRTY: ReplicaPhase.UNFIT,
    ReplicaState.DRAINING: ReplicaPhase.UNFIT,  # somebody else told it to: it will never serve again
    ReplicaState.DEAD: ReplicaPhase.UNFIT,
}


class AutoscalerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What to start, and where to say so.

    Attributes:
        command: starts one replica; gets `--address-file PATH` at its end.
        directory: logs and address files of the replicas.
        replicas_file: the list for routers.
        settings: of the law.
        router: `host:port` of a router whose queue counts as load.
        poll_s: from one look at the fleet to the next.
        status_deadline_s: a replica that takes longer to say how it is counts as unfit.
        drain_s: time for a replica to finish what it runs.
        stop_grace_s: time for a drained replica's process to end.
        token, tls: what replicas and router ask for.
    """

    command: tuple[str, ...]
    directory: Path
    replicas_file: Path
    settings: ScalingSettings = ScalingSettings()
    router: str | None = None
    poll_s: float = 5.0
    status_deadline_s: float = 5.0
    drain_s: float = 120.0
    stop_grace_s: float = 15.0
    token: str | None = None
    tls: TlsFiles | None = None


class ScalingEvent(msgspec.Struct, frozen=True, kw_only=True):
    """Something that happened, for whoever watches.

    Attributes:
        kind: `decided`: the law said to start or drain; `serving`, `left`, `failed` (before it served), `lost` (after).
        replica: its name; empty for decisions.
        text: one sentence.
    """

    at_s: float
    kind: Literal["decided", "serving", "left", "failed", "lost"]
    replica: str = ""
    text: str


class _Replica:
    """A process that was started here."""

    def __init__(self, name: str, *, directory: Path, now_s: float) -> None:
        self.name = name
        self.address_file = directory / f"{name}.json"
        self.log = directory / f"{name}.log"
        self.process: asyncio.subprocess.Process | None = None
        self.client: GeneratorClient | None = None
        self.phase = ReplicaPhase.STARTING
        self.since_s = now_s
        self.status: ReplicaStatus | None = None
        self.has_served = False
        self._turns = Recent(now_s=now_s)
        self._seen_s = now_s

    def enter(self, phase: ReplicaPhase, *, now_s: float) -> None:
        """Note the phase; draining has no way back."""
        if phase is not self.phase and self.phase is not ReplicaPhase.DRAINING:
            self.phase, self.since_s = phase, now_s

    def saw(self, status: ReplicaStatus, *, now_s: float) -> None:
        """Take what it said of itself."""
        if self.status is not None:
            fresh = max(0, status.finished_turns - self.status.finished_turns)
            self._turns.add(fresh, since_s=self._seen_s, now_s=now_s)
        self.status, self._seen_s = status, now_s
        self.enter(_PHASE_OF[status.state], now_s=now_s)
        self.has_served = self.has_served or self.phase is ReplicaPhase.SERVING

    def load(self, *, now_s: float) -> ReplicaLoad:
        """Return what the law is told."""
        if self.status is None:
            return ReplicaLoad(name=self.name, phase=self.phase, since_s=self.since_s)
        seen = self.status
        return ReplicaLoad(
            name=self.name,
            phase=self.phase,
            since_s=self.since_s,
            running=seen.running,
            waiting=seen.waiting,
            max_num_seqs=seen.max_num_seqs,
            kv_used_tokens=seen.kv_used_tokens,
            kv_capacity_tokens=seen.kv_capacity_tokens,
            turns_per_s=self._turns.per_s(now_s=now_s),
        )

    def last_words(self) -> str:
        """Return the end of its log."""
        try:
            return self.log.read_bytes()[-_LOG_TAIL_BYTES:].decode(errors="replace").strip()
        except FileNotFoundError:
            return ""


class Autoscaler:
    """Keeps as many replicas as the load asks for.

    Args:
        options: what to start, and where to say so.
        on_event: hears what happens; must not raise.
        clock: of rests, windows and rates.
    """

    def __init__(
        self,
        options: AutoscalerOptions,
        *,
        on_event: Callable[[ScalingEvent], None] = lambda event: None,
        clock: Clock | None = None,
    ) -> None:
        self._options = options
        self._on_event = on_event
        self._clock = SystemClock() if clock is None else clock
        self._replicas: dict[str, _Replica] = {}
        self._memory = Memory()
        self._number = 0
        self._failed_starts, self._failed_at_s = 0, -math.inf
        self._listed: tuple[str, ...] | None = None
        self._woken = asyncio.Event()
        self._router = None if options.router is None else self._client(options.router)

    async def run(self, stop: asyncio.Event) -> None:
        """Scale until `stop` is set, then drain and end all replicas.

        Raises:
            ConfigError: if the list of replicas is somebody else's, or a replica says that it cannot start as asked.

        Cancellation:
            kills the replicas.
        """
        options = self._options
        check_replicas_file(options.replicas_file)
        options.directory.mkdir(parents=True, exist_ok=True)
        self._publish()
        try:
            async with asyncio.TaskGroup() as tasks:
                while not stop.is_set():
                    await self._step(tasks)
                    await self._until_next(stop)
                for replica in self._still_here():
                    tasks.create_task(self._retire(replica, why="the autoscaler was told to stop"), name=replica.name)
        except BaseExceptionGroup as group:  # one error as a rule, and the first is the cause of the others
            raise group.exceptions[0] from group
        finally:
            await self._kill_all()
            self._publish()
            if self._router is not None:
                await self._router.close()

    async def _until_next(self, stop: asyncio.Event) -> None:
        """Wait until it is time to look again, a process has ended, or all is over."""
        async with asyncio.TaskGroup() as tasks:
            waits = {tasks.create_task(event.wait()) for event in (stop, self._woken)}
            await asyncio.wait(waits, timeout=self._options.poll_s, return_when=asyncio.FIRST_COMPLETED)
            for wait in waits:
                wait.cancel()
        self._woken.clear()

    async def _step(self, tasks: asyncio.TaskGroup) -> None:
        fleet = await self._look()
        decision, self._memory = decide(fleet, self._memory, settings=self._options.settings, now_s=self._clock.now_s())
        await self._act(decision, tasks=tasks)
        self._publish()

    # -- looking

    async def _look(self) -> Fleet:
        """Return the fleet as it is now; every replica is asked at the same time."""
        async with asyncio.TaskGroup() as tasks:
            for replica in self._replicas.values():
                tasks.create_task(self._ask(replica), name=f"status of {replica.name}")
            queue = tasks.create_task(self._router_queue(), name="status of the router")
        now_s, waiting = self._clock.now_s(), queue.result()
        loads = tuple(replica.load(now_s=now_s) for replica in self._replicas.values())
        held_back = 0 if waiting is None else max(0, waiting - sum(load.waiting for load in loads))
        return Fleet(
            replicas=loads,
            router_queue=held_back,
            blind=waiting is None,
            failed_starts=self._failed_starts,
            failed_at_s=self._failed_at_s,
        )

    async def _ask(self, replica: _Replica) -> None:
        if replica.client is None:
            replica.client = self._reach(replica)
        if replica.client is None:
            return
        before = replica.phase
        try:
            replica.saw(await replica.client.status(), now_s=self._clock.now_s())
        except RollmillError:
            # Its process is watched as well; here it only counts as unfit, until it answers or for too long.
            replica.enter(ReplicaPhase.UNFIT, now_s=self._clock.now_s())
        if replica.phase is ReplicaPhase.SERVING and before is not ReplicaPhase.SERVING:
            self._failed_starts = 0
            self._publish()
            self._tell("serving", f"{replica.client.address} serves", replica=replica)

    def _reach(self, replica: _Replica) -> GeneratorClient | None:
        try:
            return self._client(str(json.loads(replica.address_file.read_text())["address"]))
        except FileNotFoundError:
            return None

    async def _router_queue(self) -> int | None:
        """Return what waits in the router and behind it; 0 without a router, `None` if it does not say."""
        if self._router is None:
            return 0
        try:
            return (await self._router.status()).waiting
        except RollmillError:
            return None

    def _client(self, address: str) -> GeneratorClient:
        options = self._options
        return GeneratorClient(
            address, control_deadline_s=options.status_deadline_s, token=options.token, tls=options.tls
        )

    # -- acting

    async def _act(self, decision: Decision, *, tasks: asyncio.TaskGroup) -> None:
        if decision.start or decision.drain:
            self._tell("decided", decision.reason)
        for name in decision.drain:
            tasks.create_task(self._retire(self._replicas[name], why=decision.reason), name=f"retire {name}")
        for _ in range(decision.start):
            await self._start(tasks)

    async def _start(self, tasks: asyncio.TaskGroup) -> None:
        self._number += 1
        replica = _Replica(f"replica-{self._number}", directory=self._options.directory, now_s=self._clock.now_s())
        replica.address_file.unlink(missing_ok=True)
        command = [*self._options.command, "--address-file", str(replica.address_file)]
        with replica.log.open("wb") as log:
            replica.process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "rollmill.runtime.tether", *command),
                env={**os.environ, PARENT_VARIABLE: str(os.getpid())},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                # A session of its own, so that a terminal's Ctrl-C reaches the autoscaler alone.
                start_new_session=True,
            )
        self._replicas[replica.name] = replica
        tasks.create_task(self._watch(replica, process=replica.process), name=f"end of {replica.name}")

    async def _watch(self, replica: _Replica, *, process: asyncio.subprocess.Process) -> None:
        """See the end of a replica's process, whatever brought it about."""
        status = await process.wait()
        self._replicas.pop(replica.name, None)
        if replica.client is not None:
            await replica.client.close()
        replica.address_file.unlink(missing_ok=True)
        self._publish()
        self._woken.set()
        if replica.phase is ReplicaPhase.DRAINING:
            return
        how = f"ended with status {status}; its log {replica.log} ends with: {replica.last_words() or 'nothing'}"
        if replica.has_served:
            self._tell("lost", how, replica=replica)
            return
        self._failed_starts, self._failed_at_s = self._failed_starts + 1, self._clock.now_s()
        self._tell("failed", how, replica=replica)
        if status == _USER_ERROR_STATUS:
            raise ConfigError(f"a replica cannot be started with these options: it {how}")

    async def _retire(self, replica: _Replica, *, why: str) -> None:
        """Let a replica finish what it runs, then end its process."""
        replica.enter(ReplicaPhase.DRAINING, now_s=self._clock.now_s())
        self._publish()
        unfinished = 0
        if replica.client is not None:
            try:
                unfinished = await replica.client.drain(self._options.drain_s)
            except RollmillError as error:
                why = f"{why}; it could not be asked to drain: {error}"
        process = replica.process
        if process is None:
            return
        killed = not await _end(process, grace_s=self._options.stop_grace_s)
        text = f"left with {unfinished} requests unfinished: {why}"
        self._tell("left", text + ("; it was killed" if killed else ""), replica=replica)

    def _still_here(self) -> list[_Replica]:
        return [replica for replica in self._replicas.values() if replica.phase is not ReplicaPhase.DRAINING]

    async def _kill_all(self) -> None:
        """End what is left after an error or a second signal; waits for the kernel only."""
        for replica in list(self._replicas.values()):
            if replica.process is not None and replica.process.returncode is None:
                replica.process.kill()
                await replica.process.wait()
        self._replicas.clear()

    # -- telling

    def _tell(
        self,
        kind: Literal["decided", "serving", "left", "failed", "lost"],
        text: str,
        *,
        replica: _Replica | None = None,
    ) -> None:
        name = "" if replica is None else replica.name
        self._on_event(ScalingEvent(at_s=self._clock.wall_s(), kind=kind, replica=name, text=text))

    def _publish(self) -> None:
        """Write the list of replicas, if it changed; a replica that is unfit stays on it: a router sees that itself."""
        here = [r for r in self._replicas.values() if r.has_served and r.phase is not ReplicaPhase.DRAINING]
        listed = tuple(replica.client.address for replica in here if replica.client is not None)
        if listed != self._listed:
            write_replicas_file(self._options.replicas_file, listed)
            self._listed = listed


def run_autoscaler(options: AutoscalerOptions, *, on_event: Callable[[ScalingEvent], None]) -> None:
    """Scale until SIGTERM or SIGINT, which drain all replicas; a second signal kills them.

    Raises:
        ConfigError: as `Autoscaler.run`.
        KeyboardInterrupt: on a second signal.
    """

    async def run() -> None:
        with stop_on_signals() as stop:
            await Autoscaler(options, on_event=on_event).run(stop)

    try:
        asyncio.run(run())
    except asyncio.CancelledError as error:
        raise KeyboardInterrupt from error


async def _end(process: asyncio.subprocess.Process, *, grace_s: float) -> bool:
    """Tell a process to end, and kill it if it does not in time; return whether that was not needed."""
    if process.returncode is None:
        process.terminate()
    try:
        async with asyncio.timeout(grace_s):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()
    return process.returncode != _SIGKILL_STATUS


def write_replicas_file(path: Path, addresses: tuple[str, ...]) -> None:
    """Replace the list of replicas in one step, so that nobody reads half of it."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text("".join(f"{line}\n" for line in (HEADER, *addresses)), encoding="utf-8")
    partial.replace(path)


def check_replicas_file(path: Path) -> None:
    """Refuse to write over a list that somebody else keeps.

    Raises:
        ConfigError: if the file has entries and was not written by an autoscaler, or cannot be written.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        if path.parent.is_dir():
            return
        raise ConfigError(f"the folder of the list of replicas, {path.parent}, does not exist; make it first") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the list of replicas {path} cannot be read: {error}") from error
    entries = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    if entries and not text.startswith(HEADER):
        raise ConfigError(
            f"{path} lists {len(entries)} replicas that no autoscaler wrote there, and it would be written over; give "
            "another --replicas-file, or remove it"
        )
