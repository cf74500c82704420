"""The tiny parent of a run: spawns the processes, sees each death through the kernel, ends or stops the rest.

Holds no torch and makes no scheduling decision. `on_exit` and `on_signal` are pure: they say what a death or a
signal means; `Supervisor` does it.

    Waits for                     Woken by         Gives up after
    preflight of the controller   doorbell         PREFLIGHT_DEADLINE_S
    death of any child            pidfd            -
    Ctrl-C, SIGTERM               signal           second Ctrl-C kills
    clean stop of the children    pidfd            run.shutdown_grace_s, then kills
    children after a death        pidfd            KILL_AFTER_S, so that all are gone within 5 s
"""

from __future__ import annotations

import enum
import os
import resource
import selectors
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from types import FrameType

import msgspec
import psutil

from rollmill.buffer.doorbell import Doorbell
from rollmill.clock import SystemClock
from rollmill.config.schema import RollmillConfig
from rollmill.runtime.failure import FailureRecord, earliest, read_record, record_of_exit
from rollmill.runtime.failure import write_record as write_failure
from rollmill.runtime.incarnation import Incarnation, Segment, write_record
from rollmill.runtime.layout import CONTROLLER, SUPERVISOR, TRAINER, ProcessLayout, replica_name
from rollmill.runtime.process import PARENT_VARIABLE, SPAWNED_VARIABLE
from rollmill.runtime.threads import process_environment
from rollmill.telemetry.memory import memory_of, tree_of
from rollmill.weights.repository import LocalModelRepository
from rollmill.weights.transport import sweep_shared_memory

PREFLIGHT_DEADLINE_S = 900.0
KILL_AFTER_S = 3.0
MEASURE_EVERY_S = 3.0


class Phase(enum.Enum):
    """Where the run stands, as the supervisor sees it."""

    PREFLIGHT = "preflight"
    RUNNING = "running"
    STOPPING = "stopping"
    ENDING = "ending"
    FAILING = "failing"


class Action(enum.Enum):
    """What the supervisor must do."""

    NOTHING = "nothing"
    STOP_CLEANLY = "stop_cleanly"
    END_OTHERS = "end_others"
    FAIL = "fail"
    KILL_ALL = "kill_all"


def on_exit(name: str, status: int, *, phase: Phase) -> tuple[Phase, Action]:
    """Return what the exit of a child means.

    The controller leads: its clean exit ends the run. The trainer may end cleanly before it (it was told to in the
    store). A replica never ends by itself.
    """
    if phase in (Phase.FAILING, Phase.ENDING):
        return phase, Action.NOTHING
    if status == 0 and name == CONTROLLER:
        return Phase.ENDING, Action.END_OTHERS
    if status == 0 and name == TRAINER:
        return phase, Action.NOTHING
    return Phase.FAILING, Action.FAIL


def on_signal(count: int, *, phase: Phase) -> tuple[Phase, Action]:
    """Return what the `count`-th Ctrl-C or SIGTERM means."""
    if count > 1 or phase is Phase.PREFLIGHT:
        return Phase.FAILING, Action.KILL_ALL
    if phase is Phase.RUNNING:
        return Phase.STOPPING, Action.STOP_CLEANLY
    return phase, Action.NOTHING


class RunEnd(msgspec.Struct, frozen=True, kw_only=True):
    """How an incarnation ended."""

    phase: Phase
    failure: FailureRecord | None
    interrupted: bool


class Child:
    """A process of the run and the kernel's handle on it."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], *, spawned_at_s: float) -> None:
        self.name = name
        self.process = process
        self.pidfd = os.pidfd_open(process.pid)
        self.spawned_at_s = spawned_at_s
        self.wall_s: float | None = None

    def send(self, number: signal.Signals) -> None:
        """Send a signal if the process still runs."""
        if self.wall_s is None:
            self.process.send_signal(number)


class Supervisor:
    """Runs the processes of one incarnation to their end."""

    def __init__(
        self,
        *,
        config: RollmillConfig,
        layout: ProcessLayout,
        incarnation: Incarnation,
        refresh_view: Callable[[], None],
    ) -> None:
        self._config = config
        self._layout = layout
        self._incarnation = incarnation
        self._refresh_view = refresh_view
        self._clock = SystemClock()
        self._phase = Phase.PREFLIGHT
        self._children: dict[str, Child] = {}
        self._selector = selectors.DefaultSelector()
        self._signals = 0
        self._failure: FailureRecord | None = None
        self._kill_at_s: float | None = None
        self._started_s = self._clock.now_s()
        self._started_wall_s = self._clock.wall_s()
        self._measured_at_s = 0.0
        self._peak_memory_bytes = 0

    def run(self) -> RunEnd:
        """Run until no child is left."""
        sweep_shared_memory()
        # What a killed incarnation of this run left there; the lock on the run directory says that nobody uses it.
        self._clean_shared_memory()
        self._layout.preflight.unlink(missing_ok=True)
        with Doorbell.bind(self._layout.run_directory, SUPERVISOR) as doorbell, _Signals(self._on_signal) as signals:
            self._doorbell = doorbell
            self._selector.register(doorbell.fileno(), selectors.EVENT_READ, self._on_bell)
            self._selector.register(signals.fileno(), selectors.EVENT_READ, signals.drain)
            self._spawn(CONTROLLER, threads=1)
            try:
                while any(child.wall_s is None for child in self._children.values()):
                    for key, _ in self._selector.select(timeout=0.25):
                        key.data()
                    self._periodic()
            finally:
                self._signal_all(signal.SIGKILL)
                self._clean_shared_memory()
                self._measure(ended=self._phase.value)
        return RunEnd(phase=self._phase, failure=self._failure, interrupted=self._signals > 0)

    def _clean_shared_memory(self) -> None:
        """Remove published tensors: nobody is left to read them, and a resume publishes its checkpoint anew."""
        weights = self._config.weights
        LocalModelRepository(
            self._layout.weights, transport=weights.transport, keep_versions=weights.keep_versions
        ).clean()

    # what wakes us

    def _on_bell(self) -> None:
        self._doorbell.drain()
        if self._phase is Phase.PREFLIGHT and self._layout.preflight.exists():
            self._start_workers()

    def _on_signal(self) -> None:
        self._signals += 1
        self._phase, action = on_signal(self._signals, phase=self._phase)
        self._act(action)

    def _on_child(self, child: Child) -> None:
        status = child.process.wait()
        child.wall_s = self._clock.now_s() - child.spawned_at_s
        self._selector.unregister(child.pidfd)
        os.close(child.pidfd)
        self._phase, action = on_exit(child.name, status, phase=self._phase)
        if action is Action.FAIL:
            self._keep_first_cause(child.name, status)
        self._act(action)

    def _periodic(self) -> None:
        now_s = self._clock.now_s()
        if self._phase is Phase.PREFLIGHT:
            self._on_bell()
            if now_s - self._started_s > PREFLIGHT_DEADLINE_S:
                self._give_up(f"the preflight took longer than {PREFLIGHT_DEADLINE_S:.0f} s; see {self._layout.logs}.")
        if self._kill_at_s is not None and now_s >= self._kill_at_s:
            if self._phase is Phase.STOPPING:
                grace_s = self._config.run.shutdown_grace_s
                self._give_up(
                    f"the processes did not stop within run.shutdown_grace_s = {grace_s:.0f} s and were killed. "
                    "Nothing acknowledged is lost; the last checkpoint is used on resume."
                )
            self._signal_all(signal.SIGKILL)
        if now_s - self._measured_at_s >= MEASURE_EVERY_S:
            self._measured_at_s = now_s
            self._measure(ended="running")
        self._refresh_view()

    # what we do

    def _act(self, action: Action) -> None:
        match action:
            case Action.NOTHING:
                return
            case Action.STOP_CLEANLY:
                self._children[CONTROLLER].send(signal.SIGTERM)
                self._kill_after(self._config.run.shutdown_grace_s)
            case Action.END_OTHERS:
                self._signal_all(signal.SIGTERM)
                self._kill_after(self._config.run.shutdown_grace_s)
            case Action.FAIL:
                self._signal_all(signal.SIGTERM)
                self._kill_after(KILL_AFTER_S)
            case Action.KILL_ALL:
                self._signal_all(signal.SIGKILL)

    def _start_workers(self) -> None:
        self._phase = Phase.RUNNING
        self._spawn(TRAINER, threads=self._config.trainer.threads)
        for index in range(self._config.generator.replicas):
            self._spawn(replica_name(index), threads=self._config.generator.threads)

    def _spawn(self, name: str, *, threads: int) -> None:
        environment = process_environment(threads=threads, deterministic=self._config.run.deterministic)
        spawned_at_s = self._clock.now_s()
        environment[PARENT_VARIABLE] = str(os.getpid())
        environment[SPAWNED_VARIABLE] = repr(spawned_at_s)
        with self._layout.log(name).open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "rollmill.runtime.process", name, str(self._layout.run_directory)],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                # A session of its own, so that a terminal's Ctrl-C reaches the supervisor alone.
                start_new_session=True,
            )
        child = Child(name, process, spawned_at_s=spawned_at_s)
        self._children[name] = child
        self._selector.register(child.pidfd, selectors.EVENT_READ, lambda: self._on_child(child))

    def _signal_all(self, number: signal.Signals) -> None:
        for child in self._children.values():
            child.send(number)

    def _kill_after(self, seconds: float) -> None:
        self._kill_at_s = self._clock.now_s() + seconds

    def _keep_first_cause(self, name: str, status: int) -> None:
        number = self._incarnation.number
        records = [
            record
            for child in self._children
            if (record := read_record(self._layout.process_failure(child, incarnation=number))) is not None
        ]
        if not any(record.process == name for record in records):
            records.append(record_of_exit(name, status, at_wall_s=self._clock.wall_s()))
        self._failure = earliest(records)
        write_failure(self._layout.failure, self._failure)

    def _give_up(self, message: str) -> None:
        self._phase = Phase.FAILING
        self._failure = FailureRecord(
            process=SUPERVISOR, code="deadline", message=message, user_error=False, at_wall_s=self._clock.wall_s()
        )
        write_failure(self._layout.failure, self._failure)
        self._act(Action.KILL_ALL)

    def _measure(self, *, ended: str) -> None:
        now_s = self._clock.now_s()
        alive = [child.process.pid for child in self._children.values() if child.wall_s is None]
        self._peak_memory_bytes = max(self._peak_memory_bytes, memory_of(tree_of()).total_bytes)
        segment = Segment(
            number=self._incarnation.number,
            started_wall_s=self._started_wall_s,
            wall_s=now_s - self._started_s,
            cpu_s=_cpu_s(alive),
            peak_memory_bytes=self._peak_memory_bytes,
            process_wall_s={
                child.name: now_s - child.spawned_at_s if child.wall_s is None else child.wall_s
                for child in self._children.values()
            },
            ended=ended,
        )
        write_record(self._layout.segment(self._incarnation.number), segment)


def _cpu_s(alive: list[int]) -> float:
    """Return CPU seconds of this process, its dead children and their dead children, and the living children."""
    total = 0.0
    for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN):
        usage = resource.getrusage(who)
        total += usage.ru_utime + usage.ru_stime
    for pid in alive:
        try:
            times = psutil.Process(pid).cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system
    return total


class _Signals:
    """SIGINT and SIGTERM as something a selector can wait for."""

    def __init__(self, handle: Callable[[], None]) -> None:
        self._handle = handle

    def __enter__(self) -> _Signals:
        self._read, self._write = socket.socketpair()
        self._read.setblocking(False)
        self._write.setblocking(False)
        self._before_fd = signal.set_wakeup_fd(self._write.fileno())
        self._before = {number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._before_fd)
        self._read.close()
        self._write.close()

    def fileno(self) -> int:
        return self._read.fileno()

    def drain(self) -> None:
        """Handle each signal that arrived."""
        for _ in self._read.recv(64):
            self._handle()

    def _note(self, number: int, frame: FrameType | None) -> None:
        """Do nothing here: the wake-up descriptor carries the signal into the selector."""
