"""The tiny parent of a run: spawns the processes, sees each death through the kernel, ends, stops or restarts.

Holds no torch and makes no scheduling decision. `rollmill.runtime.losses` says what a death or a signal means;
`Supervisor` does it.

    Waits for                        Woken by           Gives up after
    preflight of the controller      doorbell           PREFLIGHT_DEADLINE_S
    the processes of the nursery     its socket         NURSERY_DEADLINE_S, then starts them itself
    death of any process             pidfd              -
    a pause before a restart         its tick           losses.LONGEST_PAUSE_S
    the controller's reconciliation  doorbell, its tick RECONCILE_DEADLINE_S (restart of the trainer)
    a replica that somebody starts   its tick           run.replica_deadline_s
    Ctrl-C, SIGTERM                  signal             second Ctrl-C kills
    clean stop of the children       pidfd              run.shutdown_grace_s, then kills
    children after a death           pidfd              KILL_AFTER_S, so that all are gone within 5 s
"""

from __future__ import annotations

import contextlib
import resource
import selectors
import shlex
import signal
import socket
from collections.abc import Callable, Iterable, Iterator
from types import FrameType

import msgspec
import psutil

from rollmill.buffer.doorbell import Doorbell, ring
from rollmill.buffer.sqlite import SqliteStore
from rollmill.clock import SystemClock
from rollmill.config.schema import RollmillConfig
from rollmill.errors import RollmillError
from rollmill.runtime.children import Child, adopt, birth_of, command_of, serving_pid, spawn
from rollmill.runtime.failure import FailureRecord, earliest, read_record, record_of_exit
from rollmill.runtime.failure import write_record as write_failure
from rollmill.runtime.incarnation import Incarnation, Segment, write_record
from rollmill.runtime.incarnation import read_record as read_run_record
from rollmill.runtime.layout import CONTROLLER, NURSERY, SUPERVISOR, TRAINER, ProcessLayout, replica_name
from rollmill.runtime.losses import (
    LOSSES,
    Action,
    Chain,
    LossRecord,
    Phase,
    append_loss,
    first_cause_of,
    life_of,
    loss_message,
    on_exit,
    on_signal,
    policy_of,
    read_losses,
)
from rollmill.runtime.nursery import NURSERY_DEADLINE_S, Birth, Nursery
from rollmill.runtime.process import LIFE_VARIABLE, SPAWNED_VARIABLE
from rollmill.telemetry.memory import memory_of, tree_of
from rollmill.weights.repository import LocalModelRepository
from rollmill.weights.transport import sweep_shared_memory

PREFLIGHT_DEADLINE_S = 900.0
RECONCILE_DEADLINE_S = 300.0
KILL_AFTER_S = 3.0
MEASURE_EVERY_S = 3.0
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextlib.contextmanager
def signals_held() -> Iterator[None]:
    """Keep Ctrl-C and SIGTERM waiting until a `Supervisor` listens: neither cuts the making of a run in half."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class RunEnd(msgspec.Struct, frozen=True, kw_only=True):
    """How a run ended."""

    phase: Phase
    failure: FailureRecord | None
    interrupted: bool


class Supervisor:
    """Runs the processes of a run to their end.

    Args:
        refresh_view: called a few times a second.
        nursery: forks trainer and replicas at the start; without one they are started each for itself.
    """

    def __init__(
        self,
        *,
        config: RollmillConfig,
        layout: ProcessLayout,
        incarnation: Incarnation,
        refresh_view: Callable[[], None],
        nursery: Nursery | None = None,
    ) -> None:
        self._config = config
        self._layout = layout
        self._incarnation = incarnation
        self._segment_number = incarnation.number
        self._refresh_view = refresh_view
        self._nursery = nursery
        self._unborn: dict[str, Birth] = {}
        self._clock = SystemClock()
        self._phase = Phase.PREFLIGHT
        self._children: dict[str, Child] = {}
        self._ended: list[Child] = []
        self._chains: dict[str, Chain] = {}
        self._seen_row = self._reached_step = 0
        self._due_s: dict[str, float] = {}
        self._awaited_until_s: dict[str, float] = {}
        self._trainer_serves = incarnation.number
        self._reconciled_by_s: float | None = None
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
            self._spawn_all()
            try:
                while self._somebody_runs() or self._unborn or (self._phase is Phase.RUNNING and self._due_s):
                    for key, _ in self._selector.select(timeout=0.25):
                        key.data()
                    self._periodic()
            finally:
                self._signal_all(signal.SIGKILL)
                self._clean_shared_memory()
                self._measure(ended=self._phase.value)
        return RunEnd(phase=self._phase, failure=self._failure, interrupted=self._signals > 0)

    def _somebody_runs(self) -> bool:
        return any(child.runs for child in self._children.values())

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
            self._phase = Phase.RUNNING
        self._look_for_reconciliation()
        self._start_due()

    def _on_signal(self) -> None:
        self._signals += 1
        leaders_run = all(name in self._children and self._children[name].runs for name in (CONTROLLER, TRAINER))
        # A trainer that has finished is missed by nobody.
        finished = self._layout.trainer_done(incarnation=self._incarnation.number).exists()
        self._phase, action = on_signal(self._signals, phase=self._phase, leaders_run=leaders_run or finished)
        self._act(action)

    def _on_child(self, child: Child) -> None:
        self._selector.unregister(child.pidfd)
        status = child.reap(now_s=self._clock.now_s())
        self._ended.append(child)
        own = read_record(self._layout.process_failure(child.name, life=child.life))
        chain = self._chain(child.name)
        self._phase, action = on_exit(
            child.name,
            status,
            phase=self._phase,
            policy=policy_of(child.name, self._config.run),
            restarts_left=chain.restarts_left(self._config.run.restart_budget),
            cause=own,
        )
        if action in LOSSES:
            action = self._lose(child, status, action=action, own=own, chain=chain)
        self._act(action)

    def _periodic(self) -> None:
        now_s = self._clock.now_s()
        if self._phase is Phase.PREFLIGHT:
            self._on_bell()
            if now_s - self._started_s > PREFLIGHT_DEADLINE_S:
                self._give_up(f"the preflight took longer than {PREFLIGHT_DEADLINE_S:.0f} s; see {self._layout.logs}.")
        if self._unborn:
            self._on_nursery()
        if self._phase is Phase.RUNNING:
            self._look_for_reconciliation()
            self._start_due()
            self._look_for_replicas()
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

    # a loss

    def _chain(self, name: str) -> Chain:
        """Return the losses of a process since the run last got further."""
        self._look_at_progress()
        return self._chains.get(name, Chain()).at(self._reached_step)

    def _look_at_progress(self) -> None:
        """Note the highest optimizer step that was ever recorded, in abandoned histories too."""
        if not self._layout.store.exists():
            return
        try:
            store = SqliteStore(self._layout.store, create=False)
        except RollmillError:
            # A store that cannot be read shows no progress; whoever needs it says what is wrong with it.
            return
        try:
            found = [one for old in (False, True) for one in store.steps(after=self._seen_row, abandoned=old)]
        except RollmillError:
            return
        finally:
            store.close()
        self._seen_row = max((row for row, _ in found), default=self._seen_row)
        self._reached_step = max([self._reached_step, *(record.optimizer_step for _, record in found)])

    def _lose(
        self, child: Child, status: int | None, *, action: Action, own: FailureRecord | None, chain: Chain
    ) -> Action:
        """Write the loss down at once, remember it for the budget, wake the controller; return what is to be done."""
        run, now_s, now_wall_s = self._config.run, self._clock.now_s(), self._clock.wall_s()
        cause = own or record_of_exit(child.name, status, at_wall_s=now_wall_s)
        pause_s = chain.pause_s() if action is Action.RESTART else 0.0
        left = max(0, chain.restarts_left(run.restart_budget) - (action is Action.RESTART))
        loss = LossRecord(
            process=child.name,
            life=child.life,
            pid=child.pid,
            # A trainer that is lost before its incarnation has begun is lost in that one.
            incarnation=self._serves(child.name),
            at_wall_s=now_wall_s,
            exit_status=status,
            cause=cause,
            decision=action.value,
            restarts_left=left,
            pause_s=pause_s,
            message=loss_message(
                child.name, cause, action=action, restarts_left=left, pause_s=pause_s, how=self._how(child.name, action)
            ),
        )
        try:
            append_loss(self._layout.losses, loss)
        except OSError as error:
            # Nobody else hears of it, so nobody could make it good.
            self._phase = Phase.FAILING
            self._fail(
                msgspec.structs.replace(
                    cause,
                    message=f"{cause.message} And the loss could not be written to {self._layout.losses}: {error}.",
                )
            )
            return Action.FAIL
        self._chains[child.name] = chain = Chain(losses=(*chain.losses, loss), reached_step=chain.reached_step)
        if serving_pid(self._layout.address(child.name)) in (child.pid, None):
            self._layout.address(child.name).unlink(missing_ok=True)
        if action is Action.FAIL:
            self._keep_first_cause(chain)
        elif action is Action.RESTART:
            self._due_s[child.name] = now_s + pause_s
            if child.name == TRAINER:
                self._trainer_serves += 1
                self._reconciled_by_s = now_s + RECONCILE_DEADLINE_S
        elif action is Action.WAIT:
            self._awaited_until_s[child.name] = now_s + run.replica_deadline_s
        ring(self._layout.run_directory, CONTROLLER)
        return action

    def _how(self, name: str, action: Action) -> str:
        """Return what happens next, where the action alone does not say it."""
        if action is Action.WAIT:
            command = shlex.join(command_of(name, self._layout.run_directory.resolve()))
            return (
                f"The run waits up to {self._config.run.replica_deadline_s:.0f} s for somebody to start it again: "
                f"{command}"
            )
        if action is Action.RESTART and name == TRAINER:
            return "The run goes back to its newest checkpoint; the generator lives on."
        return ""

    def _keep_first_cause(self, chain: Chain) -> None:
        """Keep why the run fails: the chain's first cause, or an earlier failure of a process that still counts."""
        others = [
            record
            for child in self._children.values()
            if child.name != chain.losses[0].process
            and (record := read_record(self._layout.process_failure(child.name, life=child.life))) is not None
        ]
        self._fail(earliest([first_cause_of(chain, budget=self._config.run.restart_budget), *others]))

    def _fail(self, failure: FailureRecord) -> None:
        """Keep why the run fails, on the disk too if that takes it: the user is told it in any case."""
        self._failure = failure
        with contextlib.suppress(OSError):
            write_failure(self._layout.failure, failure)

    def _start_due(self) -> None:
        """Start again what is due; a trainer imports while the controller goes back to the newest checkpoint."""
        now_s = self._clock.now_s()
        for name in [name for name, due_s in self._due_s.items() if due_s <= now_s]:
            if self._phase is not Phase.RUNNING:
                return
            del self._due_s[name]
            self._spawn(name)

    def _look_for_reconciliation(self) -> None:
        """Take note of the incarnation that a lost trainer waits for; give up where it does not come."""
        if self._reconciled_by_s is None:
            return
        newest = read_run_record(self._layout.incarnation, Incarnation)
        if newest.number >= self._trainer_serves:
            self._incarnation, self._reconciled_by_s = newest, None
        elif self._clock.now_s() > self._reconciled_by_s:
            self._give_up(
                f"the controller did not go back to the newest checkpoint within {RECONCILE_DEADLINE_S:.0f} s of the "
                f"trainer's loss, and the trainer waits for that; see {self._layout.log(CONTROLLER)}."
            )

    def _look_for_replicas(self) -> None:
        """Take in replicas that somebody else started; give up where nobody did in time."""
        now_s = self._clock.now_s()
        for name, until_s in list(self._awaited_until_s.items()):
            child = adopt(
                name,
                layout=self._layout,
                life=self._next_life(name),
                incarnation=self._incarnation.number,
                now_s=now_s,
            )
            if child is not None:
                del self._awaited_until_s[name]
                self._take_in(child)
            elif now_s >= until_s:
                self._phase = Phase.FAILING
                first = self._chains[name].losses[-1].cause
                waited_s = self._config.run.replica_deadline_s
                self._fail(
                    msgspec.structs.replace(
                        first,
                        message=f"{name} was lost and nobody started it again within run.replica_deadline_s = "
                        f"{waited_s:.0f} s. {first.message}",
                    )
                )
                self._act(Action.FAIL)
                return

    # what we do

    def _act(self, action: Action) -> None:
        match action:
            case Action.NOTHING | Action.WAIT | Action.DEGRADE:
                return
            case Action.RESTART:
                self._start_due()
            case Action.STOP_CLEANLY:
                self._children[CONTROLLER].send(signal.SIGTERM)
                self._kill_after(self._config.run.shutdown_grace_s)
            case Action.END_OTHERS:
                self._signal_all(signal.SIGTERM)
                self._kill_after(self._config.run.shutdown_grace_s if self._trainer_runs() else KILL_AFTER_S)
            case Action.FAIL:
                self._signal_all(signal.SIGTERM)
                self._kill_after(KILL_AFTER_S)
            case Action.KILL_ALL:
                self._signal_all(signal.SIGKILL)

    def _trainer_runs(self) -> bool:
        return TRAINER in self._children and self._children[TRAINER].runs

    def _spawn_all(self) -> None:
        """Start everything at once: trainer and replicas import meanwhile, and wait for the preflight themselves."""
        self._spawn(CONTROLLER)
        names = [TRAINER, *(replica_name(index) for index in range(self._config.generator.own_replicas))]
        # What makes two runs equal to the bit must be set before the interpreter starts, and it did without.
        if self._nursery is None or self._config.run.deterministic:
            self._end_nursery()
            for name in names:
                self._spawn(name)
            return
        now_s = self._clock.now_s()
        self._unborn = {name: self._birth(name, now_s=now_s) for name in names}
        self._selector.register(self._nursery, selectors.EVENT_READ, self._on_nursery)
        self._nursery.ask(list(self._unborn.values()))

    def _birth(self, name: str, *, now_s: float) -> Birth:
        return birth_of(
            name,
            layout=self._layout,
            life=self._next_life(name),
            incarnation=self._serves(name),
            threads=self._threads(name),
            now_s=now_s,
        )

    def _on_nursery(self) -> None:
        """Take what the nursery forked; start the rest, if it failed or takes too long, each for itself."""
        if self._nursery is None:
            return
        late = self._clock.now_s() - self._started_s > NURSERY_DEADLINE_S
        born = self._nursery.born()
        if born is None and not late:
            return
        unborn, self._unborn = self._unborn, {}
        for name, handle in (born or {}).items():
            birth = unborn.pop(name)
            self._take_in(
                Child(
                    name,
                    pid=handle.pid,
                    handle=handle,
                    life=birth.environment[LIFE_VARIABLE],
                    incarnation=self._serves(name),
                    spawned_at_s=float(birth.environment[SPAWNED_VARIABLE]),
                )
            )
        if unborn:
            why = f"took longer than {NURSERY_DEADLINE_S:.0f} s" if late else "failed"
            self._layout.log(NURSERY).write_text(
                f"the nursery {why}; {', '.join(unborn)} are started without it.\n{self._nursery.output()}"
            )
        self._end_nursery(grace_s=0.0 if unborn else 1.0)
        for name in unborn:
            self._spawn(name)

    def _end_nursery(self, *, grace_s: float = 0.0) -> None:
        self._unborn = {}
        if self._nursery is None:
            return
        with contextlib.suppress(KeyError):  # it was never asked
            self._selector.unregister(self._nursery)
        self._nursery.close(grace_s=grace_s)
        self._nursery = None

    def _spawn(self, name: str) -> None:
        child = spawn(
            name,
            layout=self._layout,
            life=self._next_life(name),
            incarnation=self._serves(name),
            threads=self._threads(name),
            deterministic=self._config.run.deterministic,
            now_s=self._clock.now_s(),
        )
        self._take_in(child)

    def _take_in(self, child: Child) -> None:
        self._children[child.name] = child
        self._selector.register(child.pidfd, selectors.EVENT_READ, lambda: self._on_child(child))

    def _serves(self, name: str) -> int:
        """Return the incarnation that a process serves; a trainer that is started again is there before it."""
        return self._trainer_serves if name == TRAINER else self._incarnation.number

    def _next_life(self, name: str) -> str:
        return life_of(name, incarnation=self._serves(name), losses=read_losses(self._layout.losses))

    def _threads(self, name: str) -> int:
        if name == CONTROLLER:
            return 1
        return self._config.trainer.threads if name == TRAINER else self._config.generator.threads

    def _signal_all(self, number: signal.Signals) -> None:
        self._end_nursery()
        for child in self._children.values():
            child.send(number)

    def _kill_after(self, seconds: float) -> None:
        self._kill_at_s = self._clock.now_s() + seconds

    def _give_up(self, message: str) -> None:
        self._phase = Phase.FAILING
        self._fail(
            FailureRecord(
                process=SUPERVISOR, code="deadline", message=message, user_error=False, at_wall_s=self._clock.wall_s()
            )
        )
        self._act(Action.KILL_ALL)

    def _measure(self, *, ended: str) -> None:
        now_s = self._clock.now_s()
        tree = tree_of()
        self._peak_memory_bytes = max(self._peak_memory_bytes, memory_of(tree).total_bytes)
        lives = [*self._ended, *(child for child in self._children.values() if child.runs)]
        segment = Segment(
            number=self._segment_number,
            started_wall_s=self._started_wall_s,
            wall_s=now_s - self._started_s,
            cpu_s=_cpu_s(tree[1:]),
            peak_memory_bytes=self._peak_memory_bytes,
            lives=tuple(child.life_until(now_s) for child in lives),
            ended=ended,
        )
        # A full disk ends the run by the process that it stops, which says so; a measure is no reason to.
        with contextlib.suppress(OSError):
            write_record(self._layout.segment(self._segment_number), segment)


def _cpu_s(alive: Iterable[int]) -> float:
    """Return CPU seconds of this process, its dead children and their dead children, and its living descendants."""
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
        self._before = {number: signal.signal(number, self._note) for number in STOP_SIGNALS}
        # Before anything is spawned: a child would inherit the block.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
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
