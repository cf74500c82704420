"""A controller with fake replicas and a fake trainer on a virtual clock: no model, no process, no waiting."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from rollmill.buffer.memory import MemoryStore
from rollmill.buffer.protocol import StepRecord
from rollmill.config.schema import (
    AlgorithmSettings,
    EnvironmentSettings,
    RollmillConfig,
    RunSettings,
    SamplingSettings,
    ScheduleSettings,
    TaskMix,
)
from rollmill.controller.replicas import ReplicaSet
from rollmill.controller.shell import Controller
from rollmill.controller.translate import scheduler_settings
from rollmill.scheduling.core import Scheduler
from rollmill.scheduling.events import ReplicaJoined, RunStarted
from rollmill.testing import (
    FakeEngine,
    FakeFaults,
    FakeLatency,
    FakeRepository,
    FakeTrainer,
    ScriptedEnvironment,
    ToyTokenizer,
    VirtualClock,
    in_place,
    rollout_runner,
)


class Reports:
    """Keeps what the controller reports."""

    def __init__(self) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.steps: list[StepRecord] = []
        self.groups: list[Any] = []

    def group_closed(self, group: Any) -> None:
        self.groups.append(group)

    def step(self, row: int, record: StepRecord) -> None:
        self.steps.append(record)

    def event(self, kind: str, **fields: object) -> None:
        self.events.append((kind, dict(fields)))

    def refresh(self, scheduler: Scheduler) -> None:
        scheduler.validate()


def config_of(*, steps: int = 4, max_staleness: int = 2, **schedule: Any) -> RollmillConfig:
    return RollmillConfig(
        run=RunSettings(steps=steps, stall_report_s=20.0, stall_limit_s=100.0),
        environment=EnvironmentSettings(tasks=(TaskMix(name="scripted"),)),
        sampling=SamplingSettings(max_new_tokens=4),
        algorithm=AlgorithmSettings(),
        schedule=ScheduleSettings(
            **{
                "batch_groups": 2,
                "group_size": 2,
                "max_staleness": max_staleness,
                "window_groups": 4,
                "rollout_deadline_s": 30.0,
                "group_deadline_s": 60.0,
                **schedule,
            }
        ),
    )


class World:
    """Everything around one controller.

    Args:
        faults: one entry per replica.
        step_s: virtual seconds of one optimizer step.

    Attributes:
        token_s: virtual seconds of one decoding step.
    """

    token_s = 0.05

    def __init__(
        self,
        config: RollmillConfig,
        *,
        faults: tuple[FakeFaults, ...] = (FakeFaults(),),
        step_s: float = 2.0,
        environment: ScriptedEnvironment | None = None,
        quiet_trainer: bool = False,
    ) -> None:
        self.config = config
        self.clock = VirtualClock()
        self.store = MemoryStore()
        self.repository = FakeRepository()
        self.reports = Reports()
        self.environment = environment or ScriptedEnvironment(size=64, script=[0.0, 1.0])
        self.tokenizer = ToyTokenizer()
        self.replicas = ReplicaSet()
        self._faults = faults
        self._step_s = step_s
        self._quiet_trainer = quiet_trainer
        self.engines: dict[str, FakeEngine] = {}
        self.loaded: list[tuple[str, int]] = []

    async def run(self, *, meanwhile: Callable[[Any], Any] | None = None) -> str:
        settings = scheduler_settings(self.config, training_size=self.environment.training_size())
        first = self.repository.publish(optimizer_step=0, at_s=0.0)
        controller = self.new_controller(Scheduler(settings))
        controller.know_version(1, optimizer_step=0)
        controller.inbox.put(
            RunStarted(at_s=0.0, history_id="h001", optimizer_step=0, policy_version=1, settings=settings)
        )
        for index, faults in enumerate(self._faults):
            self._join(f"generator-{index}", faults, digest=first.digest)
        async with asyncio.TaskGroup() as tasks:
            run = tasks.create_task(controller.run())
            others = [tasks.create_task(self._train())] if not self._quiet_trainer else []
            if meanwhile is not None:
                others.append(tasks.create_task(meanwhile(self)))
            reason = await run
            for other in others:
                other.cancel()
        return reason

    def new_controller(
        self, scheduler: Scheduler, *, stored_groups: set[str] | None = None, last_step_row: int = 0
    ) -> Controller:
        """Make the controller of a session and keep it as `controller`."""
        self.controller = Controller(
            config=self.config,
            scheduler=scheduler,
            store=self.store,
            repository=self.repository,  # type: ignore[arg-type]
            clock=self.clock,
            run_rollout=rollout_runner(
                self.config,
                environment=self.environment,
                renderer=self.tokenizer,
                generate=lambda request: self.replicas.generate(request),
                clock=self.clock,
            ),
            load_replica=self._load,
            ring_trainer=lambda: None,
            reporter=self.reports,
            stored_groups=stored_groups or set(),
            last_step_row=last_step_row,
            run_blocking=in_place,
        )
        return self.controller

    def ring(self) -> None:
        """The trainer's doorbell; nobody may listen."""
        self.controller.look()

    def _join(self, name: str, faults: FakeFaults, *, digest: str, policy_version: int = 1) -> None:
        engine = FakeEngine(
            clock=self.clock,
            vocabulary_size=self.tokenizer.vocabulary_size,
            max_num_seqs=8,
            latency=FakeLatency(step_s=self.token_s),
            faults=faults,
            digest=digest,
            policy_version=policy_version,
        )
        self.engines[name] = engine
        self.replicas.join(name, engine)
        self.controller.inbox.put(
            ReplicaJoined(at_s=self.clock.now_s(), replica_id=name, slots=8, policy_version=policy_version)
        )

    async def _load(self, replica_id: str, policy_version: int) -> None:
        engine = self.engines[replica_id]
        await engine.pause("keep")
        try:
            await engine.update(
                {},
                policy_version=policy_version,
                digest=f"fake-{policy_version}",
                kv="keep",
            )
        finally:
            await engine.resume()
        self.loaded.append((replica_id, policy_version))

    async def _train(self) -> None:
        """A trainer that takes each batch at once and needs `step_s` for it."""
        trainer = FakeTrainer(
            store=self.store,
            repository=self.repository,
            clock=self.clock,
            ring=lambda: self.ring(),
            step_s=self._step_s,
            look_every_s=0.25,
        )
        while True:
            await trainer.step()
