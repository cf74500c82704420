"""Who serves: replicas join when their address appears, leave when they are lost, and join anew when they are back.

Decides nothing about restarts; the supervisor does. A replica joins only after it has proven the weights it serves, and
only with weights of the run's present history. A replica that lives but serves nothing is ended here, so that it comes
back like any other. A fleet (`generator.fleet`) stands in the rotation as one replica; nobody here starts or ends it.

    Waits for                          Woken by          Gives up after
    the address of a new replica       its tick          REPLICA_DEADLINE_S, or whoever restarts it gives up
    a fleet that serves this run       its tick          fleet.lost_deadline_s
    a status                           reply             two answers missed in a row
    the end of a replica that was lost its tick          LOST_GRACE_S, then ends it
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Iterator

import msgspec
import psutil

from rollmill.clock import Clock
from rollmill.config.fleet import FleetSettings
from rollmill.config.schema import RollmillConfig
from rollmill.controller.replicas import Overtaken, ReplicaLost, ReplicaSet
from rollmill.controller.shell import Controller, Reporter
from rollmill.errors import DeadlineExceeded, EngineDead, Fault, NotServing, ProducersGone, RollmillError, WeightError
from rollmill.generator.client import GeneratorClient
from rollmill.generator.state import ReplicaState
from rollmill.generator.wire import ReplicaStatus
from rollmill.runtime.failure import record_of_error, write_record
from rollmill.runtime.fleet import FLEET, FleetClient
from rollmill.runtime.incarnation import Evaluating, Incarnation
from rollmill.runtime.incarnation import read_record as read_run_record
from rollmill.runtime.incarnation import write_record as write_run_record
from rollmill.runtime.layout import ProcessLayout, replica_name
from rollmill.runtime.losses import LossRecord, life_of, read_losses
from rollmill.runtime.process import LIFE_VARIABLE
from rollmill.scheduling.events import AfterLoss, ReplicaJoined, ReplicaResized
from rollmill.weights.repository import LocalModelRepository

REPLICA_DEADLINE_S = 300.0


def replica_deadline_s(config: RollmillConfig) -> float:
    """Return how long a replica may take from its start until it serves."""
    generator = config.generator
    if generator.fleet.address:
        # Later than the watch's own deadline for it, whose words say what is missing.
        return generator.fleet.lost_deadline_s + FLEET_PATIENCE_S
    server_s = {"vllm": generator.vllm.start_deadline_s, "sglang": generator.sglang.start_deadline_s}
    return REPLICA_DEADLINE_S + server_s.get(generator.engine, 0.0)


FLEET_PATIENCE_S = 60.0
FLEET_BACKOFF_S, FLEET_MAX_BACKOFF_S = 1.0, 15.0
LOST_GRACE_S = 2.0
"""A replica whose channel broke is dead as a rule; the supervisor then knows why before this time is over."""
LOST_STATES = (ReplicaState.DIRTY, ReplicaState.DEAD)

AFTER_LOSS = {
    "restart": AfterLoss.AWAIT,
    "wait": AfterLoss.AWAIT,
    "degrade": AfterLoss.DEGRADE,
    # The supervisor ends the run, with the cause.
    "stop": AfterLoss.AWAIT,
}


LOAD_ATTEMPTS = 2


def next_pause_s(pause_s: float) -> float:
    """Return how long a fleet that does not serve is left alone, after it was left alone for so long.

    Example:
        >>> next_pause_s(1.0), next_pause_s(12.0)
        (2.0, 15.0)
    """
    return min(2 * pause_s, FLEET_MAX_BACKOFF_S)


def loads_again(state: ReplicaState | None, *, failures: int) -> bool:
    """Return whether a load that failed is tried again: only where the old version serves on, and only once.

    Args:
        state: of the replica after the failure; `None` if it does not answer.
    """
    return state is ReplicaState.SERVING and failures < LOAD_ATTEMPTS


class Lost(msgspec.Struct, frozen=True, kw_only=True):
    """A replica that left the rotation and may still have to be ended."""

    pid: int
    reason: str
    at_s: float


class LossLog:
    """The losses that the supervisor has written down, read again only when there are more."""

    def __init__(self, layout: ProcessLayout) -> None:
        self._path = layout.losses
        self._size = -1
        self._losses: list[LossRecord] = []

    def all(self) -> list[LossRecord]:
        """Return all losses of the run, oldest first."""
        size = self._path.stat().st_size if self._path.exists() else 0
        if size != self._size:
            self._losses, self._size = read_losses(self._path), size
        return self._losses


class ReplicaWatch:
    """Keeps the rotation in step with the replica processes, over all sessions of one controller process.

    Attributes:
        clients: replica -> its client, while it is in rotation.
    """

    def __init__(
        self,
        *,
        config: RollmillConfig,
        layout: ProcessLayout,
        clock: Clock,
        losses: LossLog,
        repository: LocalModelRepository,
        reporter: Reporter,
    ) -> None:
        self.clients: dict[str, GeneratorClient | FleetClient] = {}
        self.replicas = ReplicaSet(on_lost=self._on_broken_channel)
        self._evaluating: int | None = None
        self._config = config
        self._layout = layout
        self._clock = clock
        self._losses = losses
        self._repository = repository
        self._reporter = reporter
        self._fleet = config.generator.fleet if config.generator.fleet.address else None
        # Who runs the fleet brings it back; the run waits for that.
        self._then = AfterLoss.AWAIT if self._fleet else AFTER_LOSS[config.run.on_generator_loss]
        self._fleet_pause_s, self._fleet_due_s, self._fleet_slots = FLEET_BACKOFF_S, 0.0, 0
        self._pids: dict[str, int] = {}
        self._heard: set[tuple[str, str]] = set()
        self._dead: dict[int, float] = {}
        self._lost: dict[str, Lost] = {}
        self._closing: list[GeneratorClient | FleetClient] = []
        self._missed: dict[str, int] = {}
        self._controller: Controller | None = None
        self._history_id = ""
        self._on_none_left: Callable[[], None] = lambda: None

    @property
    def names(self) -> list[str]:
        """Names of all replicas that the configuration asks for."""
        return [FLEET] if self._fleet else [replica_name(index) for index in range(self._config.generator.replicas)]

    @property
    def none_comes(self) -> bool:
        """Whether nobody serves and nobody will."""
        return not self.clients and self._then is AfterLoss.DEGRADE

    def begin(self, controller: Controller, *, history_id: str, on_none_left: Callable[[], None]) -> None:
        """Serve another session: its controller is told of joins and losses from now on.

        Args:
            on_none_left: called when the last replica is lost and none will come back.
        """
        self._controller = controller
        self._history_id = history_id
        self._on_none_left = on_none_left

    def still_coming(self, *, incarnation: int) -> list[str]:
        """Return the replicas that have not joined yet, without those that the run goes on without.

        Raises:
            ProducersGone: if all were lost before they served, and none comes back.
        """
        coming = [name for name in self.names if name not in self.clients]
        if self._then is not AfterLoss.DEGRADE:
            return coming
        lost = {loss.process for loss in self._losses.all() if loss.incarnation == incarnation}
        for name in coming:
            if name in lost and name not in self._lost:
                self._lost[name] = Lost(pid=0, reason="it was lost before it served", at_s=self._clock.now_s())
                self._told().replica_lost(name, reason="it was lost before it served", then=self._then)
        coming = [name for name in coming if name not in self._lost]
        if not coming and not self.clients:
            raise ProducersGone(alive=0, buffered=0)
        return coming

    async def join_anew(self) -> None:
        """Let all that serve join a new session, with weights of its history; say which others are lost."""
        for name, client in list(self.clients.items()):
            await self._admit_anew(name, client)
        await self.look()
        for name in self.names:
            if name not in self.clients:
                self._told().replica_lost(name, reason="it was lost before", then=self._then)
                self._lost.setdefault(name, Lost(pid=0, reason="it was lost before", at_s=self._clock.now_s()))

    async def look(self) -> None:
        """Take out what was lost, take in what has come.

        Raises:
            DeadlineExceeded: naming a replica that did not come back.
        """
        for loss in self._losses.all():
            if (loss.process, loss.life) not in self._heard:
                self._heard.add((loss.process, loss.life))
                self._dead[loss.pid] = loss.at_wall_s
                if self._pids.get(loss.process) == loss.pid and self._is_dead(loss.pid):
                    self._leave(loss.process, reason=loss.cause.message)
        while self._closing:
            await self._closing.pop().close()
        for name in self.names:
            if name not in self.clients:
                self._end_if_it_lingers(name)
                await self._take_in(name)

    async def load(self, replica_id: str, policy_version: int) -> dict[str, float]:
        """Have a replica load and prove a version, and return how long each part took; one that cannot is lost.

        A failed load that left the old version serving is tried once more: a slow disk or a version that was retired
        while it was read is no reason to lose a replica.

        Raises:
            ReplicaLost: if it is gone or could not load; the controller has been told.
            Overtaken: if it serves on, and a newer version is there: this one may be retired.
        """
        client = self.clients.get(replica_id)
        if client is None:
            raise ReplicaLost(f"{replica_id} is not in rotation any more; it joins again with newer weights.")
        failures = 0
        while True:
            try:
                report = await client.load_weights(policy_version, deadline_s=self._config.generator.load_deadline_s)
            except Fault as fault:
                failures += 1
                status = await self._status(replica_id, client)
                if not loads_again(None if status is None else status.state, failures=failures):
                    if self.clients.get(replica_id) is client:
                        self._condemn(replica_id, fault)
                    raise ReplicaLost(
                        f"{replica_id} could not load policy version {policy_version}: {fault}"
                    ) from fault
                self._reporter.event(
                    "load_failed", replica_id=replica_id, policy_version=policy_version, reason=str(fault)
                )
                newest = self._repository.latest()
                if newest is not None and newest.policy_version > policy_version:
                    raise Overtaken(
                        f"{replica_id} could not load policy version {policy_version}, and {newest.policy_version} is "
                        "there by now"
                    ) from fault
            else:
                return report.seconds()

    async def align(self) -> set[int]:
        """Have all replicas in rotation serve the newest version that one of them serves; return what they serve then.

        For an evaluation, which holds other loads back. One that cannot is lost, and has been told.
        """
        served = {name: status.policy_version for name, _, status in await self._statuses()}
        newest = max(served.values(), default=0)
        for name in [name for name, version in served.items() if version < newest]:
            try:
                await self.load(name, newest)
                served[name] = newest
            except ReplicaLost:
                del served[name]
            except Overtaken:
                continue  # it serves on, with its old version
        return set(served.values())

    async def poll(self) -> list[ReplicaStatus]:
        """Return the status of each replica in rotation; one that serves nothing any more is lost."""
        found: list[ReplicaStatus] = []
        for name, client, status in await self._statuses():
            found.append(status)
            if self.clients.get(name) is not client:
                continue
            if status.state in LOST_STATES:
                self._condemn(name, EngineDead(f"{name} is {status.state.value}: {status.reason}. Its log has more."))
            elif self._fleet is not None:
                self._follow_fleet(status)
        return found

    async def _statuses(self) -> list[tuple[str, GeneratorClient | FleetClient, ReplicaStatus]]:
        found: list[tuple[str, GeneratorClient | FleetClient, ReplicaStatus]] = []
        for name, client in list(self.clients.items()):
            if (status := await self._status(name, client)) is not None:
                found.append((name, client, status))
        return found

    async def close(self) -> None:
        """Close all channels."""
        for client in (*self.clients.values(), *self._closing):
            await client.close()

    @contextlib.contextmanager
    def evaluating(self, policy_version: int) -> Iterator[None]:
        """Keep a version to be had, and have it served by whoever comes back, while an evaluation asks for it."""
        owner = "evaluation"
        try:
            self._repository.hold(policy_version, owner=owner)
        except WeightError:
            # Retired already: those who serve it go on, who comes back serves the newest.
            yield
            return
        self._evaluating = policy_version
        write_run_record(self._layout.evaluating, Evaluating(policy_version=policy_version))
        try:
            yield
        finally:
            self._evaluating = None
            self._layout.evaluating.unlink(missing_ok=True)
            self._repository.release(policy_version, owner=owner)

    # losing

    async def _status(self, name: str, client: GeneratorClient | FleetClient) -> ReplicaStatus | None:
        try:
            status = await client.status()
        except EngineDead as error:
            if self.clients.get(name) is client:
                self._leave(name, reason=str(error))
        except DeadlineExceeded as error:
            self._missed[name] = self._missed.get(name, 0) + 1
            if self._missed[name] > 1 and self.clients.get(name) is client:
                self._condemn(name, EngineDead(f"{name} did not answer twice in a row: {error}"))
        else:
            self._missed.pop(name, None)
            return status
        return None

    def _on_broken_channel(self, name: str, reason: str) -> None:
        if name in self.clients:
            self._leave(name, reason=reason)

    def _leave(self, name: str, *, reason: str) -> None:
        """Take a replica out of rotation and tell the core, before any of its requests reports its own failure."""
        self.replicas.leave(name)
        self._closing.append(self.clients.pop(name))
        self._missed.pop(name, None)
        self._lost[name] = Lost(pid=self._pids.pop(name), reason=reason, at_s=self._clock.now_s())
        self._told().replica_lost(name, reason=reason, then=self._then)
        if self.none_comes:
            self.replicas.end()
            self._on_none_left()

    def _condemn(self, name: str, error: RollmillError) -> None:
        """Take a replica out that lives but cannot serve, and end it, with the reason where the supervisor looks."""
        pid = self._pids[name]
        self._leave(name, reason=str(error))
        if pid:
            self._end(name, pid, error)

    def _end_if_it_lingers(self, name: str) -> None:
        lost = self._lost.get(name)
        if lost is None or not lost.pid or self._is_dead(lost.pid):
            self._check_deadline(name, lost)
            return
        if self._clock.now_s() - lost.at_s >= LOST_GRACE_S:
            self._end(name, lost.pid, EngineDead(f"{name} could not be reached and was ended: {lost.reason}"))

    def _is_dead(self, pid: int) -> bool:
        """Return whether the process of this number was lost; a later one may have it, as a container counts anew."""
        lost_wall_s = self._dead.get(pid)
        if lost_wall_s is None:
            return False
        try:
            return psutil.Process(pid).create_time() <= lost_wall_s
        except psutil.NoSuchProcess:
            return True

    def _end(self, name: str, pid: int, error: RollmillError) -> None:
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError, psutil.AccessDenied):
            process = psutil.Process(pid)
            if name not in process.cmdline():
                # Another process has the number by now.
                return
            # Without the variable somebody else started it, and it found its name as this does.
            life = process.environ().get(LIFE_VARIABLE) or life_of(
                name,
                incarnation=read_run_record(self._layout.incarnation, Incarnation).number,
                losses=self._losses.all(),
            )
            record = record_of_error(name, error, at_wall_s=time.time())
            write_record(self._layout.process_failure(name, life=life), record)
            os.kill(pid, signal.SIGKILL)

    def _check_deadline(self, name: str, lost: Lost | None) -> None:
        if lost is None:
            return
        if self._fleet is not None:
            if self._clock.now_s() - lost.at_s > self._fleet.lost_deadline_s:
                raise DeadlineExceeded(
                    f"the fleet at {self._fleet.address} did not serve this run for {self._fleet.lost_deadline_s:.0f} "
                    f"s (generator.fleet.lost_deadline_s): {lost.reason}. Start its replicas on this run's weights "
                    f"(rollmill serve --repository {self._layout.run_directory}), or look at the router's log; then "
                    "resume the run."
                )
            return
        # A wait for somebody to start it is the supervisor's, with its own deadline.
        if self._config.run.on_generator_loss != "restart":
            return
        deadline_s = replica_deadline_s(self._config)
        if self._clock.now_s() - lost.at_s > deadline_s:
            raise DeadlineExceeded(
                f"{name} was lost ({lost.reason}) and did not serve again within {deadline_s:.0f} s of its restart; "
                f"see {self._layout.log(name)}."
            )

    # joining

    async def _take_in(self, name: str) -> None:
        """Let a replica join whose address has appeared, unless it is a dead one's."""
        if self._fleet is not None:
            await self._take_in_fleet(name, self._fleet)
            return
        try:
            record = json.loads(self._layout.address(name).read_text())
        except (FileNotFoundError, ValueError):
            return
        pid = int(record["pid"])
        lost = self._lost.get(name)
        if self._is_dead(pid) or (lost is not None and lost.pid == pid) or not psutil.pid_exists(pid):
            return
        client = GeneratorClient(record["address"])
        try:
            await self._admit(name, client, pid=pid)
        finally:
            if self.clients.get(name) is not client:
                await client.close()

    async def _admit(self, name: str, client: GeneratorClient, *, pid: int) -> None:
        """Put a replica into rotation once it serves weights of this history."""
        self.clients[name], self._pids[name] = client, pid
        try:
            status = await client.status()
            version = self._version_to_load(status.policy_version)
            if version is not None:
                await client.load_weights(version, deadline_s=self._config.generator.load_deadline_s)
                status = msgspec.structs.replace(status, policy_version=version)
        except EngineDead as error:
            self._leave(name, reason=str(error))
            return
        except Fault as fault:
            self._condemn(name, fault)
            return
        self._put_into_rotation(name, client, status)

    async def _admit_anew(self, name: str, client: GeneratorClient | FleetClient) -> None:
        """Let one that serves join another session."""
        if isinstance(client, GeneratorClient):
            await self._admit(name, client, pid=self._pids[name])
            return
        try:
            await self._admit_fleet(name, client)
        except Fault as fault:
            self._leave(name, reason=str(fault))

    async def _take_in_fleet(self, name: str, settings: FleetSettings) -> None:
        """Let the fleet join as soon as it serves this run; say what is missing whenever that changes."""
        if self._clock.now_s() < self._fleet_due_s:
            return
        client = FleetClient(settings, digest_of=lambda version: self._repository.manifest(version).digest)
        try:
            await self._admit_fleet(name, client)
            self._fleet_pause_s = FLEET_BACKOFF_S
        except Fault as fault:
            before = self._lost.get(name)
            since_s = self._clock.now_s() if before is None else before.at_s
            if before is None or before.reason != str(fault):
                self._reporter.event("fleet_awaited", address=settings.address, reason=str(fault))
            self._lost[name] = Lost(pid=0, reason=str(fault), at_s=since_s)
            self._fleet_due_s = self._clock.now_s() + self._fleet_pause_s
            self._fleet_pause_s = next_pause_s(self._fleet_pause_s)
        finally:
            if self.clients.get(name) is not client:
                await client.close()

    async def _admit_fleet(self, name: str, client: FleetClient) -> None:
        """Put the fleet into rotation once it serves the version that counts, which it may have to load.

        Raises:
            Fault: saying why it does not serve this run.
        """
        status = await client.status()
        if not status.max_num_seqs:
            raise NotServing(status.reason)
        newest = self._repository.latest()
        version = self._evaluating or (0 if newest is None else newest.policy_version)
        # Always: also where it serves this number already, that they are this run's weights is seen by loading them.
        await client.load_weights(version, deadline_s=self._config.generator.load_deadline_s)
        self.clients[name], self._pids[name] = client, 0
        self._fleet_slots = status.max_num_seqs
        self._put_into_rotation(name, client, msgspec.structs.replace(status, policy_version=version))

    def _follow_fleet(self, status: ReplicaStatus) -> None:
        """Take note of replicas that joined or left it."""
        if not status.max_num_seqs:
            self._leave(FLEET, reason=status.reason)
        elif status.max_num_seqs != self._fleet_slots:
            self._fleet_slots = status.max_num_seqs
            resized = ReplicaResized(at_s=self._clock.now_s(), replica_id=FLEET, slots=status.max_num_seqs)
            self._told().inbox.put(resized)
            self._reporter.event("fleet_resized", slots=status.max_num_seqs)

    def _put_into_rotation(self, name: str, client: GeneratorClient | FleetClient, status: ReplicaStatus) -> None:
        controller = self._told()
        # So that the core has heard of the version before it hears who serves it.
        controller.look()
        self._lost.pop(name, None)
        self.replicas.join(name, client)
        controller.inbox.put(
            ReplicaJoined(
                at_s=self._clock.now_s(),
                replica_id=name,
                slots=status.max_num_seqs,
                policy_version=status.policy_version,
            )
        )
        self._reporter.event("replica_joined", replica_id=name, policy_version=status.policy_version)

    def _version_to_load(self, served: int) -> int | None:
        """Return the version that a replica must load before it joins; `None` if it may join with what it serves."""
        if self._evaluating is not None and self._evaluating >= served:
            return None if self._evaluating == served else self._evaluating
        if self._repository.manifest(served).history_id == self._history_id:
            return None
        newest = self._repository.latest()
        return None if newest is None else newest.policy_version

    def _told(self) -> Controller:
        if self._controller is None:
            raise AssertionError("a replica joins or leaves only in a session")
        return self._controller
