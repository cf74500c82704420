"""The controller process: preflight, the replicas' arrival, the run, evaluation, a clean end.

Wires the parts; the core decides.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
from collections.abc import Callable

import msgspec

from rollmill.buffer.doorbell import Doorbell, ring
from rollmill.buffer.sqlite import SqliteStore
from rollmill.clock import SystemClock
from rollmill.config.schema import RollmillConfig
from rollmill.controller.replicas import ReplicaSet
from rollmill.controller.reporting import RunReporter
from rollmill.controller.shell import Controller
from rollmill.controller.translate import scheduler_settings
from rollmill.environments.protocol import Environment
from rollmill.environments.single_turn import run_rollout
from rollmill.errors import DeadlineExceeded, EngineDead
from rollmill.generator.client import GeneratorClient
from rollmill.generator.state import ReplicaState
from rollmill.runtime.evaluation import run_evaluation
from rollmill.runtime.fold import Books, fold
from rollmill.runtime.incarnation import Preflight, ProcessSeconds, write_record
from rollmill.runtime.layout import SUPERVISOR, TRAINER, replica_name
from rollmill.runtime.preflight import check_first
from rollmill.runtime.process import ProcessContext
from rollmill.scheduling.events import ReplicaJoined, RunResumed, RunStarted
from rollmill.scheduling.instructions import StartRollout
from rollmill.scheduling.settings import SchedulerSettings
from rollmill.telemetry.run_directory import RunDirectory
from rollmill.types import Rollout, SamplingParams, rollout_seed
from rollmill.weights.repository import LocalModelRepository

REPLICA_DEADLINE_S = 300.0
STATUS_EVERY_S = 2.0
LOST_STATES = (ReplicaState.DIRTY, ReplicaState.DEAD)


def run_controller(context: ProcessContext) -> None:
    """Run the controller to the end of the run, or to a clean stop.

    Raises:
        UserError: what the user can fix, found before trainer and generator start.
        Fault: the first failure of any loop.
    """
    asyncio.run(_Run(context).main())


class _Run:
    """The controller process of one incarnation."""

    def __init__(self, context: ProcessContext) -> None:
        self.context = context
        self.config: RollmillConfig = context.config
        self.layout = context.layout
        self.clock = SystemClock()
        self.directory = RunDirectory.open(self.layout.run_directory)
        self.clients: dict[str, GeneratorClient] = {}
        self.replicas = ReplicaSet()
        self.stopping = asyncio.Event()

    async def main(self) -> None:
        environment, renderer, preflight = check_first(self.config)
        self.environment: Environment = environment
        self.renderer = renderer
        store = SqliteStore(self.layout.store)
        repository = LocalModelRepository(
            self.layout.weights,
            transport=self.config.weights.transport,
            keep_versions=self.config.weights.keep_versions,
        )
        self.reporter = RunReporter(
            config=self.config, directory=self.directory, store=store, clock=self.clock, decode=renderer.decode
        )
        loop = asyncio.get_running_loop()
        try:
            with Doorbell.bind(self.layout.run_directory, self.context.name) as bell:
                loop.add_signal_handler(signal.SIGTERM, self.stopping.set)
                self._rung = asyncio.Event()
                loop.add_reader(bell.fileno(), self._on_bell, bell)
                # Before trainer and generator start, so that a broken scorer is the first thing reported.
                await environment.start()
                self._announce(preflight)
                books = fold(store, self._settings(preflight))
                self._new_run = books.events == 0
                self._scheduler_settings = self._settings(preflight)
                self.controller = self._controller(store, repository, books)
                await self._run(store, repository)
                loop.remove_reader(bell.fileno())
        finally:
            for client in self.clients.values():
                await client.close()
            await environment.close()
            self._close_books()
            store.close()

    # start

    def _announce(self, preflight: Preflight) -> None:
        self.directory.check_data(preflight.data_identity)
        write_record(self.layout.preflight, preflight)
        self.reporter.event("preflight", **msgspec.to_builtins(preflight))
        ring(self.layout.run_directory, SUPERVISOR)

    def _settings(self, preflight: Preflight) -> SchedulerSettings:
        return scheduler_settings(self.config, training_size=preflight.training_size)

    def _controller(self, store: SqliteStore, repository: LocalModelRepository, books: Books) -> Controller:
        return Controller(
            config=self.config,
            scheduler=books.scheduler,
            store=store,
            repository=repository,
            clock=self.clock,
            run_rollout=self._rollout,
            load_replica=self._load_replica,
            ring_trainer=lambda: ring(self.layout.run_directory, TRAINER),
            reporter=self.reporter,
            stored_groups=books.stored_groups,
            last_step_row=books.last_step_row,
        )

    def _on_bell(self, bell: Doorbell) -> None:
        bell.drain()
        self._rung.set()
        if hasattr(self, "controller") and self._watching:
            self.controller.look()

    _watching = False
    _alarm = ""

    # the run

    async def _run(self, store: SqliteStore, repository: LocalModelRepository) -> None:
        controller = self.controller
        self._first_event(controller, repository, store, await self._first_version(repository))
        await self._wait_for_replicas()
        store.set_note("phase", "running")
        self._watching = True
        async with asyncio.TaskGroup() as tasks:
            run = tasks.create_task(controller.run(), name="controller")
            helpers = [
                tasks.create_task(self._evaluate_during(store), name="evaluation"),
                tasks.create_task(self._poll_status(), name="status"),
            ]
            helpers.append(tasks.create_task(self._stop_on_signal(store, helpers[0]), name="stop"))
            reason = await run
            self.reporter.event("finished", reason=reason)
            store.set_note("finish_reason", reason)
            store.set_note("phase", "stopping" if reason == "stopped" else "finishing")
            ring(self.layout.run_directory, TRAINER)
            if reason != "stopped":
                await helpers[0]
            await self._finish(store, repository, evaluate_at_end=reason != "stopped")
            for helper in helpers:
                helper.cancel()
        self.reporter.refresh(controller.scheduler)

    async def _first_version(self, repository: LocalModelRepository) -> int:
        """Return the version that the trainer published for this incarnation, waiting for it."""
        history_id = self.context.incarnation.history_id

        def published() -> bool:
            manifest = repository.latest()
            return manifest is not None and manifest.history_id == history_id

        await self._until(published, deadline_s=REPLICA_DEADLINE_S, what="the trainer's first publication of weights")
        manifest = repository.latest()
        assert manifest is not None
        return manifest.policy_version

    def _first_event(
        self, controller: Controller, repository: LocalModelRepository, store: SqliteStore, version: int
    ) -> None:
        incarnation, now_s = self.context.incarnation, self.clock.now_s()
        for manifest in repository.manifests():
            controller.know_version(manifest.policy_version, optimizer_step=manifest.optimizer_step)
        if self._new_run:
            event: RunStarted | RunResumed = RunStarted(
                at_s=now_s,
                history_id=incarnation.history_id,
                optimizer_step=0,
                policy_version=version,
                settings=self._scheduler_settings,
            )
        else:
            event = RunResumed(
                at_s=now_s,
                history_id=incarnation.history_id,
                optimizer_step=incarnation.optimizer_step,
                policy_version=version,
                trained_group_ids=incarnation.trained_group_ids,
                abandoned_above=min(incarnation.abandoned_versions, default=version) - 1,
                abandoned_group_ids=abandoned_groups(store, versions=frozenset(incarnation.abandoned_versions)),
                settings=self._scheduler_settings,
            )
        controller.inbox.put(event)

    async def _wait_for_replicas(self) -> None:
        for index in range(self.config.generator.replicas):
            name = replica_name(index)
            file = self.layout.address(name)
            await self._until(file.exists, deadline_s=REPLICA_DEADLINE_S, what=f"the address of {name}")
            client = GeneratorClient(json.loads(file.read_text())["address"])
            status = await client.status()
            self.clients[name] = client
            self.replicas.join(name, client)
            self.controller.inbox.put(
                ReplicaJoined(
                    at_s=self.clock.now_s(),
                    replica_id=name,
                    slots=status.max_slots,
                    policy_version=status.policy_version,
                )
            )
            self.reporter.event("replica_joined", replica_id=name, policy_version=status.policy_version)

    async def _rollout(self, instruction: StartRollout) -> Rollout:
        return await run_rollout(
            instruction,
            environment=self.environment,
            renderer=self.renderer,
            generate=self.replicas.generate,
            sampling=self._sampling(instruction),
            schedule=self.config.schedule,
            request_deadline_s=self.config.generator.request_deadline_s,
            clock=self.clock,
        )

    def _sampling(self, instruction: StartRollout) -> SamplingParams:
        sampling = self.config.sampling
        return SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            max_new_tokens=sampling.max_new_tokens,
            seed=rollout_seed(self.config.run.seed, task_index=instruction.task_index, sibling=instruction.sibling),
            stop_token_ids=self.renderer.stop_token_ids,
        )

    async def _load_replica(self, replica_id: str, policy_version: int) -> None:
        await self.clients[replica_id].load_weights(policy_version, deadline_s=self.config.generator.load_deadline_s)

    async def _stop_on_signal(self, store: SqliteStore, evaluation: asyncio.Task[None]) -> None:
        await self.stopping.wait()
        # An evaluation holds weight loads back; a clean stop does not wait for it.
        evaluation.cancel()
        store.set_note("phase", "stopping")
        self.controller.request_stop("the user asked for it")

    async def _poll_status(self) -> None:
        """Read the replicas' own books for the live view; a replica that lost its engine ends the run with its reason.

        Raises:
            EngineDead: naming the replica and why it cannot serve.
        """
        while True:
            await asyncio.sleep(STATUS_EVERY_S)
            total: dict[str, float] = {}
            tokens, lost = 0, ""
            for name, client in self.clients.items():
                # A replica whose process died shows at the supervisor, with its first error.
                with contextlib.suppress(EngineDead, DeadlineExceeded):
                    status = await client.status()
                    if status.state in LOST_STATES:
                        lost = f"{name} is {status.state.value}: {status.reason}. Its log has more."
                    tokens += status.output_tokens
                    for cause, seconds in status.seconds.items():
                        total[cause] = total.get(cause, 0.0) + seconds
            if lost:
                raise EngineDead(lost)
            self.reporter.replica_seconds(total)
            self._show_alarm()
            if tokens != getattr(self, "_tokens_seen", 0):
                self._tokens_seen = tokens
                self.controller.moved()

    def _show_alarm(self) -> None:
        """Say once when the scores have stopped meaning anything (all failed, all equal)."""
        alarm = self.environment.alarm()
        if alarm and alarm != self._alarm:
            self.reporter.event("alarm", message=alarm)
        self._alarm = alarm

    # evaluation

    async def _evaluate_during(self, store: SqliteStore) -> None:
        """Evaluate at the start, and whenever another `evaluation.every_steps` steps are loaded."""
        settings = self.config.evaluation
        began_at = self.context.incarnation.optimizer_step
        # A run that was stopped before this evaluation ended cannot make it up once it has trained.
        if settings.at_start and began_at == 0 and store.note("eval:before") is None:
            store.set_note("eval:before", await self._evaluate("before"))
        if settings.every_steps == 0:
            return
        due = began_at - began_at % settings.every_steps + settings.every_steps
        while due < self.config.run.steps and not self.controller.finished.done():
            if self.controller.scheduler.view().optimizer_step < due:
                await self._ring_or(1.0)
                continue
            store.set_note(f"eval:step-{due}", await self._evaluate(f"step-{due}"))
            due += settings.every_steps

    async def _evaluate(self, label: str) -> dict[str, object]:
        self.reporter.say(f"evaluating ({label})")
        async with self.controller.load_gate.closed(deadline_s=self.config.generator.load_deadline_s):
            result = await run_evaluation(
                self.config,
                environment=self.environment,
                renderer=self.renderer,
                generate=self.replicas.generate,
                clock=self.clock,
                label=f"eval-{self.context.incarnation.number}-{label}",
            )
        return self.reporter.evaluated(label, result)

    # the end

    async def _finish(self, store: SqliteStore, repository: LocalModelRepository, *, evaluate_at_end: bool) -> None:
        done = self.layout.trainer_done(incarnation=self.context.incarnation.number)
        if evaluate_at_end and self.config.evaluation.at_end:
            latest = repository.latest()
            assert latest is not None
            for name in self.clients:
                await self._load_replica(name, latest.policy_version)
            store.set_note("eval:after", await self._evaluate("after"))
        await self._until(
            done.exists, deadline_s=self.config.trainer.batch_deadline_s, what="the trainer's last checkpoint"
        )

    def _close_books(self) -> None:
        closed_at_s = self.clock.now_s()
        write_record(
            self.layout.seconds(self.context.name, incarnation=self.context.incarnation.number),
            ProcessSeconds(
                process=self.context.name,
                incarnation=self.context.incarnation.number,
                spawned_at_s=self.context.spawned_at_s,
                closed_at_s=closed_at_s,
                seconds={"control": closed_at_s - self.context.spawned_at_s},
            ),
        )

    # waiting

    async def _until(self, predicate: Callable[[], bool], *, deadline_s: float, what: str) -> None:
        until_s = self.clock.now_s() + deadline_s
        while not predicate():
            if self.clock.now_s() >= until_s:
                raise DeadlineExceeded(
                    f"waited {deadline_s:.0f} s for {what}; the logs of the other processes say why."
                )
            await self._ring_or(1.0)

    async def _ring_or(self, seconds: float) -> None:
        """Return at the next ring, or after this many seconds."""
        self._rung.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._rung.wait()


def abandoned_groups(store: SqliteStore, *, versions: frozenset[int]) -> tuple[str, ...]:
    """Return the waiting groups that hold tokens of abandoned versions."""
    if not versions:
        return ()
    return tuple(
        group_id
        for group_id in store.waiting_groups()
        if any(versions.intersection(rollout.policy_versions) for rollout in store.group(group_id).rollouts)
    )
