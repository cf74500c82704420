"""The controller process: preflight, the replicas' arrival, the run, evaluation, a clean end.

Wires the parts; the core decides. A process serves one *session* after another: a session begins with the fold of the
journal and ends with the run, or when the trainer is lost and started again from the newest checkpoint.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec

from rollmill.buffer.doorbell import Doorbell, ring
from rollmill.buffer.sqlite import SqliteStore
from rollmill.clock import SystemClock
from rollmill.config.schema import RollmillConfig
from rollmill.controller.evaluation import EvaluationResult, Generate
from rollmill.controller.replicas import ReplicaLost
from rollmill.controller.reporting import RunReporter
from rollmill.controller.shell import Controller
from rollmill.controller.side_evaluation import BEFORE, SideEvaluations, due_labels, labels_due
from rollmill.controller.translate import scheduler_settings
from rollmill.environments.protocol import Environment
from rollmill.environments.single_turn import run_rollout
from rollmill.errors import DeadlineExceeded
from rollmill.runtime.evaluation import run_evaluation
from rollmill.runtime.evaluator import Evaluator, evaluate_beside
from rollmill.runtime.fold import Books, fold, unheard_steps
from rollmill.runtime.incarnation import Preflight, ProcessSeconds, write_record
from rollmill.runtime.layout import SUPERVISOR, TRAINER
from rollmill.runtime.preflight import check_first
from rollmill.runtime.process import ProcessContext
from rollmill.runtime.replica_watch import REPLICA_DEADLINE_S, LossLog, ReplicaWatch, replica_deadline_s
from rollmill.runtime.resume import next_incarnation
from rollmill.scheduling.events import ControllerRestarted, RunResumed, RunStarted
from rollmill.scheduling.instructions import StartRollout
from rollmill.scheduling.settings import SchedulerSettings
from rollmill.telemetry.run_directory import RunDirectory
from rollmill.types import Rollout, SamplingParams, WeightManifest, rollout_seed
from rollmill.weights.repository import LocalModelRepository

STATUS_EVERY_S = 2.0
TRAINER_LOST = "trainer_lost"


class TrainerLost(Exception):
    """The trainer is gone and will be started again from the newest checkpoint."""


def run_controller(context: ProcessContext) -> None:
    """Run the controller to the end of the run, or to a clean stop.

    Raises:
        UserError: what the user can fix, found before trainer and generator start.
        Fault: the first failure of any loop.
    """
    asyncio.run(_Run(context).main())


class _Run:
    """One controller process."""

    def __init__(self, context: ProcessContext) -> None:
        self.context = context
        self.config: RollmillConfig = context.config
        self.layout = context.layout
        self.clock = SystemClock()
        self.directory = RunDirectory.open(self.layout.run_directory)
        self.losses = LossLog(context.layout)
        self.stopping = asyncio.Event()
        self._session_number = 0

    async def main(self) -> None:
        environment, renderer, preflight = check_first(self.config)
        self.environment: Environment = environment
        self.renderer = renderer
        store = SqliteStore(self.layout.store)
        self.repository = repository = LocalModelRepository(
            self.layout.weights,
            transport=self.config.weights.transport,
            keep_versions=self.config.weights.keep_versions,
        )
        self.reporter = RunReporter(
            config=self.config, directory=self.directory, store=store, clock=self.clock, decode=renderer.decode
        )
        self.watch = ReplicaWatch(
            config=self.config,
            layout=self.layout,
            clock=self.clock,
            losses=self.losses,
            repository=repository,
            reporter=self.reporter,
        )
        loop = asyncio.get_running_loop()
        try:
            with Doorbell.bind(self.layout.run_directory, self.context.name) as bell:
                loop.add_signal_handler(signal.SIGTERM, self.stopping.set)
                self._rung = asyncio.Event()
                loop.add_reader(bell.fileno(), self._on_bell, bell)
                # Before trainer and generator go on, so that a broken scorer is the first thing reported.
                await environment.start()
                self._announce(preflight)
                while not await self._session(store, repository, preflight):
                    await self._go_back()
                loop.remove_reader(bell.fileno())
        finally:
            await self.watch.close()
            await environment.close()
            self._close_books()
            store.close()
            self.reporter.close()

    # start

    def _announce(self, preflight: Preflight) -> None:
        self.directory.check_data(preflight.data_identity)
        write_record(self.layout.preflight, preflight)
        self.reporter.event("preflight", **msgspec.to_builtins(preflight))
        for name in (SUPERVISOR, TRAINER, *self.watch.names):
            ring(self.layout.run_directory, name)

    def _settings(self, preflight: Preflight) -> SchedulerSettings:
        return scheduler_settings(self.config, training_size=preflight.training_size)

    async def _session(self, store: SqliteStore, repository: LocalModelRepository, preflight: Preflight) -> bool:
        """Run from the fold of the journal to the end of the run; return whether that was reached."""
        lost = False
        try:
            self._check_trainer()
            self._session_number += 1
            self._scheduler_settings = self._settings(preflight)
            books = fold(store, self._scheduler_settings)
            self._new_run = books.events == 0
            # The journal knows this history: a controller before this one was lost, and the trainer lives on.
            self._goes_on = books.scheduler.history_id == self.context.incarnation.history_id
            if not self._goes_on:
                for row, record in unheard_steps(store, books):
                    self.reporter.step(row, record)
            self.controller = self._controller(store, repository, books)
            await self._run(store, repository)
        except* TrainerLost:
            lost = True
        finally:
            self._watching = False
        return not lost

    async def _go_back(self) -> None:
        """Reconcile everything to the newest checkpoint; the trainer that was started meanwhile waits for that."""
        self.reporter.event("trainer_lost", incarnation=self.context.incarnation.number)
        self.context.incarnation = incarnation = await asyncio.to_thread(
            next_incarnation, self.layout, replicas_live=True
        )
        self.reporter.event(
            "gone_back",
            incarnation=incarnation.number,
            optimizer_step=incarnation.optimizer_step,
            checkpoint=incarnation.checkpoint,
            abandoned_versions=list(incarnation.abandoned_versions),
        )
        self.reporter.say(f"went back to optimizer step {incarnation.optimizer_step}; the trainer goes on from there")
        for name in (SUPERVISOR, TRAINER):
            ring(self.layout.run_directory, name)

    def _check_trainer(self) -> None:
        """Raise if the trainer of this incarnation is lost and shall be restarted.

        Raises:
            TrainerLost: if so.
        """
        number = self.context.incarnation.number
        if any(
            loss.process == TRAINER and loss.incarnation == number and loss.decision == "restart"
            for loss in self.losses.all()
        ):
            raise TrainerLost

    def _controller(self, store: SqliteStore, repository: LocalModelRepository, books: Books) -> Controller:
        return Controller(
            config=self.config,
            scheduler=books.scheduler,
            store=store,
            repository=repository,
            clock=self.clock,
            run_rollout=self._rollout,
            load_replica=self.watch.load,
            ring_trainer=lambda: ring(self.layout.run_directory, TRAINER),
            reporter=self.reporter,
            stored_groups=books.stored_groups,
            last_step_row=books.heard_step_row if self._goes_on else books.last_step_row,
        )

    def _on_bell(self, bell: Doorbell) -> None:
        bell.drain()
        self._rung.set()
        if hasattr(self, "controller") and self._watching:
            self.controller.look()

    _watching = False
    _evaluation: asyncio.Task[None] | None = None
    _alarm = ""

    # the run

    async def _run(self, store: SqliteStore, repository: LocalModelRepository) -> None:
        controller = self.controller
        version = await self._first_version(repository)
        self._first_event(controller, repository, store, version)
        await self._let_replicas_join(controller)
        store.set_note("phase", "running")
        self._watching = True
        async with asyncio.TaskGroup() as tasks:
            run = tasks.create_task(controller.run(), name="controller")
            helpers = [
                tasks.create_task(self._evaluate_during(store), name="evaluation"),
                tasks.create_task(self._poll_status(), name="status"),
                tasks.create_task(self._watch_replicas(), name="replicas"),
                tasks.create_task(self._watch_trainer(run), name="trainer"),
            ]
            helpers.append(tasks.create_task(self._stop_on_signal(store, helpers[0]), name="stop"))
            self._evaluation = helpers[0]
            reason = await run
            if reason == TRAINER_LOST:
                raise TrainerLost
            self.reporter.event("finished", reason=reason)
            store.set_note("finish_reason", reason)
            store.set_note("phase", "stopping" if reason == "stopped" else "finishing")
            ring(self.layout.run_directory, TRAINER)
            evaluates = reason != "stopped" and not self.watch.none_comes
            if evaluates:
                # It may be cancelled meanwhile; an error of it ends the task group.
                await asyncio.wait([helpers[0]])
            await self._finish(store, repository, evaluate_at_end=evaluates)
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
            # Of this history, a core that goes on is yet to hear of what was published while nobody listened.
            if not self._goes_on or self._is_old_news(manifest):
                controller.know_version(manifest.policy_version, optimizer_step=manifest.optimizer_step)
        if self._goes_on:
            self.reporter.event("controller_restarted", life=self.context.life)
            controller.inbox.put(ControllerRestarted(at_s=now_s))
            controller.look()
            return
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

    def _stop_evaluating(self) -> None:
        """Nobody is left to ask, and nobody comes back."""
        if self._evaluation is not None and not self._evaluation.done():
            self._evaluation.cancel()
            self.reporter.event("evaluation_skipped", reason="no replica serves and none comes back")

    def _is_old_news(self, manifest: WeightManifest) -> bool:
        known = self.controller.scheduler.known_versions
        return manifest.policy_version in known or manifest.history_id != self.context.incarnation.history_id

    async def _let_replicas_join(self, controller: Controller) -> None:
        """Wait for all of them at the start of a run; later sessions begin with those that live."""
        self.watch.begin(
            controller,
            history_id=self.context.incarnation.history_id,
            on_none_left=self._stop_evaluating,
        )
        if self._goes_on or self._session_number > 1:
            await self.watch.join_anew()
            return
        deadline_s = replica_deadline_s(self.config)
        until_s = self.clock.now_s() + deadline_s
        while missing := self.watch.still_coming(incarnation=self.context.incarnation.number):
            self._check_trainer()
            if self.stopping.is_set():
                return  # the run begins, and ends at once
            if self.clock.now_s() >= until_s:
                raise DeadlineExceeded(
                    f"waited {deadline_s:.0f} s for the address of {', '.join(missing)}; the logs of the other "
                    "processes say why."
                )
            await self._ring_or(1.0)
            await self.watch.look()

    async def _rollout(self, instruction: StartRollout) -> Rollout:
        return await run_rollout(
            instruction,
            environment=self.environment,
            renderer=self.renderer,
            generate=self.watch.replicas.generate,
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

    async def _stop_on_signal(self, store: SqliteStore, evaluation: asyncio.Task[None]) -> None:
        await self.stopping.wait()
        # An evaluation holds weight loads back; a clean stop does not wait for it.
        evaluation.cancel()
        store.set_note("phase", "stopping")
        self.controller.request_stop("the user asked for it")

    async def _watch_replicas(self) -> None:
        """Take lost replicas out of rotation and new ones in."""
        while True:
            await self.watch.look()
            await self._ring_or(1.0)

    async def _watch_trainer(self, run: asyncio.Task[str]) -> None:
        """End the session when the trainer is lost; the transaction under way is finished first."""
        try:
            while True:
                self._check_trainer()
                await self._ring_or(1.0)
        except TrainerLost:
            self.controller.give_up(TRAINER_LOST)
            await asyncio.wait([run])
            raise

    async def _poll_status(self) -> None:
        """Read the replicas' own books for the live view."""
        while True:
            await asyncio.sleep(STATUS_EVERY_S)
            total: dict[str, float] = {}
            tokens = 0
            for status in await self.watch.poll():
                tokens += status.output_tokens
                for cause, seconds in status.seconds.items():
                    total[cause] = total.get(cause, 0.0) + seconds
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
        if settings.replica == "own":
            await self._evaluate_beside(store)
            return
        labels = self._labels_due(store)
        while labels and not self.controller.finished.done():
            loaded_step = self.controller.scheduler.view().loaded_step
            overtaken, due = due_labels(labels, loaded_step=loaded_step)
            if due is None:
                await self._ring_or(1.0)
                continue
            labels = {step: label for step, label in labels.items() if label not in (*overtaken, due)}
            for label in overtaken:
                why = f"step {loaded_step} was loaded by the time that the evaluation before it had ended"
                self.reporter.event("evaluation_skipped", label=label, reason=why)
            self._note_evaluation(store, due, await self._evaluate(due))
        for label in labels.values():
            why = "the run's last step was trained before its version was loaded and its turn came"
            self.reporter.event("evaluation_skipped", label=label, reason=why)

    async def _evaluate_beside(self, store: SqliteStore) -> None:
        """Evaluate what is due with a replica of its own, while newer versions are trained and loaded."""
        incarnation = self.context.incarnation
        evaluator = Evaluator(
            config=self.config,
            layout=self.layout,
            clock=self.clock,
            life=f"{self.context.life}.{self._session_number}",
            incarnation=incarnation.number,
            wait=self._ring_or,
            ask_all=self._ask_beside,
        )
        side = SideEvaluations(
            labels=self._labels_due(store),
            history_id=incarnation.history_id,
            holder=self.repository,
            ask=evaluator.ask,
            keep=lambda due, result: self._note_evaluation(
                store, due.label, self.reporter.evaluated(due.label, result, digest_of=self._digest_of)
            ),
            reports=self.reporter,
        )
        await evaluate_beside(
            side,
            evaluator=evaluator,
            repository=self.repository,
            has_ended=self.controller.finished.done,
            wait=self._ring_or,
        )

    async def _ask_beside(self, generate: Generate, label: str) -> EvaluationResult:
        return await run_evaluation(
            self.config,
            environment=self.environment,
            renderer=self.renderer,
            generate=generate,
            clock=self.clock,
            label=f"eval-{label}",
            replicas=1,
        )

    def _labels_due(self, store: SqliteStore) -> dict[int, str]:
        settings = self.config.evaluation
        return labels_due(
            at_start=settings.at_start,
            every_steps=settings.every_steps,
            steps=self.config.run.steps,
            began_at=self.context.incarnation.optimizer_step,
            done=self._evaluated_labels(store),
        )

    def _evaluated_labels(self, store: SqliteStore) -> set[str]:
        every = self.config.evaluation.every_steps
        steps = range(every, self.config.run.steps, every) if every and self._goes_on else ()
        done = {f"step-{step}" for step in steps if self._is_evaluated(store, step)}
        return done if store.note("eval:before") is None else {*done, BEFORE}

    def _digest_of(self, policy_version: int) -> str:
        return self.repository.manifest(policy_version).digest

    def _is_evaluated(self, store: SqliteStore, step: int) -> bool:
        """Whether the controller before this one has this evaluation, of weights that still count."""
        done = store.note(f"eval:step-{step}")
        return done is not None and done["policy_version"] not in self.context.incarnation.abandoned_versions

    def _note_evaluation(self, store: SqliteStore, label: str, record: dict[str, object] | None) -> None:
        if record is not None:
            store.set_note(f"eval:{label}", record)

    async def _evaluate(self, label: str) -> dict[str, object] | None:
        """Evaluate with one version; anew if a replica was lost meanwhile and its version could not be had again."""
        self.reporter.say(f"evaluating ({label})")
        # A load that failed is tried once more.
        async with self.controller.load_gate.closed(deadline_s=2 * self.config.generator.load_deadline_s):
            await self.watch.align()
            result = await self._ask_all(label, attempt=1)
            if len(result.policy_versions) > 1:
                self.reporter.event("evaluation_repeated", label=label, policy_versions=list(result.policy_versions))
                await self.watch.align()
                result = await self._ask_all(label, attempt=2)
        if len(result.policy_versions) > 1:
            why = f"replicas answered with policy versions {', '.join(map(str, result.policy_versions))}, twice"
            self.reporter.event("evaluation_skipped", label=label, reason=why)
            return None
        if self.watch.none_comes:
            self.reporter.event("evaluation_skipped", label=label, reason="no replica serves and none comes back")
            return None
        return self.reporter.evaluated(label, result, digest_of=self._digest_of)

    async def _ask_all(self, label: str, *, attempt: int) -> EvaluationResult:
        loaded = max((status.policy_version for status in await self.watch.poll()), default=None)
        with contextlib.nullcontext() if loaded is None else self.watch.evaluating(loaded):
            return await run_evaluation(
                self.config,
                environment=self.environment,
                renderer=self.renderer,
                generate=self.watch.replicas.generate_until_answered,
                clock=self.clock,
                # Ids are used once: those of a controller that was lost may still be in the engine.
                label=f"eval-{self.context.life}.{self._session_number}.{attempt}-{label}",
            )

    # the end

    async def _finish(self, store: SqliteStore, repository: LocalModelRepository, *, evaluate_at_end: bool) -> None:
        done = self.layout.trainer_done(incarnation=self.context.incarnation.number)
        if evaluate_at_end and self.config.evaluation.at_end:
            await self._unless_stopped(self._evaluate_at_end(store, repository), label="after")
        await self._until(
            done.exists, deadline_s=self.config.trainer.batch_deadline_s, what="the trainer's last checkpoint"
        )

    async def _evaluate_at_end(self, store: SqliteStore, repository: LocalModelRepository) -> None:
        latest = repository.latest()
        assert latest is not None
        await self._load_everywhere(latest.policy_version)
        self._note_evaluation(store, "after", await self._evaluate("after"))

    async def _unless_stopped(self, evaluation: Coroutine[Any, Any, None], *, label: str) -> None:
        """Evaluate until the user asks for the end; what was evaluated until then is left."""
        work, stop = asyncio.ensure_future(evaluation), asyncio.ensure_future(self.stopping.wait())
        try:
            await asyncio.wait({work, stop}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
            else:
                self.reporter.event("evaluation_skipped", label=label, reason="the user asked for the end")
        finally:
            for task in (work, stop):
                task.cancel()
            await asyncio.gather(work, stop, return_exceptions=True)

    async def _load_everywhere(self, policy_version: int) -> None:
        """Load a version wherever somebody serves; a replica that is lost meanwhile comes back with the newest."""
        for name in list(self.watch.clients):
            with contextlib.suppress(ReplicaLost):
                await self.watch.load(name, policy_version)

    def _close_books(self) -> None:
        closed_at_s = self.clock.now_s()
        write_record(
            self.layout.seconds(self.context.name, life=self.context.life),
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
            self._check_trainer()
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
