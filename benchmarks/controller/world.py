"""One controller with everything that it owns, and nothing that it waits for: replies come from a table.

Real: core, shell, rollout tasks, rendering, grouping, sample store on disk, files for people. Fake: generation (a delay
on a virtual clock, then prepared tokens), scoring, and a trainer that takes each batch for `STEP_S`. What the trainer
does to the store is measured and taken out; the other fakes' microseconds count as the controller's. Prints JSON.
"""

from __future__ import annotations

import asyncio
import cProfile
import json
import pstats
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from rollmill.buffer.sqlite import SqliteStore
from rollmill.clock import VirtualClock
from rollmill.config.schema import RollmillConfig
from rollmill.controller.replicas import ReplicaSet
from rollmill.controller.reporting import RunReporter
from rollmill.controller.shell import Controller
from rollmill.controller.translate import scheduler_settings
from rollmill.scheduling.core import Scheduler
from rollmill.scheduling.events import ReplicaJoined, RunStarted
from rollmill.telemetry.run_directory import RunDirectory
from rollmill.testing import (
    FakeRepository,
    FakeTrainer,
    ScriptedEnvironment,
    ToyTokenizer,
    in_place,
    rollout_runner,
    run_virtual,
)
from rollmill.types import GenerateRequest, StopReason, Turn, VersionSpan

STEP_S = 0.2
DECODE_STEP_S = 0.05
FASTEST_S, SLOWEST_S = 4.0, 16.0
"""A reply takes a uniform time in between; replies end at decode steps, many at once, as a real engine's do."""
GROUP_SIZE = 8
BUDGET = 4
OUTPUT_TOKENS = 24


class Replica:
    """Answers after a time of the virtual clock with prepared tokens."""

    def __init__(self, clock: VirtualClock, *, vocabulary: int) -> None:
        rng = np.random.default_rng(0)
        self._ids = rng.integers(6, vocabulary, (64, OUTPUT_TOKENS)).astype(np.int32)
        self._logprobs = np.full(OUTPUT_TOKENS, -1.0, dtype=np.float32)
        self._takes = rng.uniform(FASTEST_S, SLOWEST_S, 4096)
        self._clock = clock
        self._requests = 0
        self.version = 1
        self.running = 0
        self.most_running = 0
        self.running_seconds = 0.0
        self._counted_to_s = 0.0

    async def generate(self, request: GenerateRequest) -> Turn:
        number, self._requests = self._requests, self._requests + 1
        self._count(1)
        self.most_running = max(self.most_running, self.running)
        until_s = self._clock.now_s() + self._takes[number % len(self._takes)]
        await asyncio.sleep(round(until_s / DECODE_STEP_S) * DECODE_STEP_S - self._clock.now_s())
        self._count(-1)
        return Turn(
            request_id=request.request_id,
            prompt_ids=request.prompt_ids,
            output_ids=self._ids[number % len(self._ids)],
            behavior_logprobs=self._logprobs,
            version_spans=(VersionSpan(0, OUTPUT_TOKENS, self.version),),
            stop_reason=StopReason.STOP,
        )

    def _count(self, change: int) -> None:
        now_s = self._clock.now_s()
        self.running_seconds += self.running * (now_s - self._counted_to_s)
        self._counted_to_s = now_s
        self.running += change


class Meter:
    """CPU seconds and calls of a few doors between the parts."""

    def __init__(self) -> None:
        self.cpu_s: dict[str, float] = {}
        self.calls: dict[str, int] = {}

    def through(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        self.cpu_s[name], self.calls[name] = 0.0, 0

        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.thread_time()
            try:
                return call(*args, **kwargs)
            finally:
                self.cpu_s[name] += time.thread_time() - began
                self.calls[name] += 1

        return timed


class World:
    """A run with `concurrent` rollouts in flight."""

    def __init__(self, folder: Path, *, concurrent: int, steps: int) -> None:
        batch_groups = concurrent // GROUP_SIZE // (BUDGET + 1)
        base = RollmillConfig()
        sections = {
            "run": {"steps": steps, "directory": str(folder), "name": "run", "stall_limit_s": 1e6},
            "schedule": {
                "batch_groups": batch_groups,
                "group_size": GROUP_SIZE,
                "max_staleness": BUDGET,
                "window_groups": 2 * batch_groups,
            },
            "sampling": {"max_new_tokens": OUTPUT_TOKENS},
        }
        self.config = base.model_copy(
            update={name: getattr(base, name).model_copy(update=fields) for name, fields in sections.items()}
        )
        self.clock = VirtualClock()
        self.store = SqliteStore(folder / "run" / "store.sqlite")
        self.repository = FakeRepository()
        self.environment = ScriptedEnvironment(size=4096, script=[0.0, 1.0])
        self.tokenizer = ToyTokenizer()
        self.replica = Replica(self.clock, vocabulary=self.tokenizer.vocabulary_size)
        self.replicas = ReplicaSet()
        self.meter = Meter()
        self.resident: list[int] = []
        reporter = RunReporter(
            config=self.config,
            directory=RunDirectory(folder / "run"),
            store=self.store,
            clock=self.clock,
            decode=self.tokenizer.decode,
        )
        reporter.group_closed = self.meter.through("files for people", reporter.group_closed)
        reporter.refresh = self.meter.through("live view", reporter.refresh)
        self.reporter = reporter

    async def run(self) -> None:
        settings = scheduler_settings(self.config, training_size=self.environment.training_size())
        self.scheduler = Scheduler(settings)
        self.scheduler.handle = self.meter.through("core", self.scheduler.handle)
        self.repository.publish(optimizer_step=0, at_s=0.0)
        self.controller = Controller(
            config=self.config,
            scheduler=self.scheduler,
            store=self.store,
            repository=self.repository,  # type: ignore[arg-type]
            clock=self.clock,
            run_rollout=rollout_runner(
                self.config,
                environment=self.environment,
                renderer=self.tokenizer,
                generate=self.replicas.generate,
                clock=self.clock,
            ),
            load_replica=self._load,
            ring_trainer=lambda: None,
            reporter=self.reporter,
            stored_groups=set(),
            run_blocking=in_place,
        )
        apply = self.meter.through("store and journal", self.store.apply)
        self.store.apply = apply  # type: ignore[method-assign]
        self.controller.know_version(1, optimizer_step=0)
        self.controller.inbox.put(
            RunStarted(at_s=0.0, history_id="h001", optimizer_step=0, policy_version=1, settings=settings)
        )
        self.replicas.join("generator-0", self.replica)
        slots = self.config.schedule.batch_groups * GROUP_SIZE * (BUDGET + 1)
        self.controller.inbox.put(ReplicaJoined(at_s=0.0, replica_id="generator-0", slots=slots, policy_version=1))
        async with asyncio.TaskGroup() as tasks:
            run = tasks.create_task(self.controller.run())
            trainer = tasks.create_task(self._train())
            await run
            trainer.cancel()

    async def _load(self, replica_id: str, policy_version: int) -> None:
        self.replica.version = policy_version

    async def _train(self) -> None:
        for name, call in (
            ("trainer (not counted)", "lease_batch"),
            ("trainer's record (not counted)", "record_step"),
        ):
            setattr(self.store, call, self.meter.through(name, getattr(self.store, call)))
        trainer = FakeTrainer(
            store=self.store,
            repository=self.repository,
            clock=self.clock,
            ring=self.controller.look,
            step_s=STEP_S,
            look_every_s=DECODE_STEP_S,
        )
        for _ in range(self.config.run.steps):
            await trainer.step()
            self.resident.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)


def measure(*, concurrent: int, steps: int, folder: Path) -> dict[str, Any]:
    """Return CPU seconds per finished rollout, by part."""
    world = World(folder, concurrent=concurrent, steps=steps)
    began_wall, began = time.perf_counter(), time.process_time()
    run_virtual(world.run(), clock=world.clock)
    cpu_s, wall_s = time.process_time() - began, time.perf_counter() - began_wall
    world.store.close()
    view = world.scheduler.view()
    finished = view.trained + view.buffered + sum(view.dropped.values())
    outside = {name: spent for name, spent in world.meter.cpu_s.items() if name.endswith("(not counted)")}
    counted_s = cpu_s - sum(outside.values())
    inside = {name: spent for name, spent in world.meter.cpu_s.items() if name not in outside}
    parts = {**inside, "shell, rollout tasks, event loop": counted_s - sum(inside.values())}
    return {
        "concurrent": concurrent,
        "most_in_flight": world.replica.most_running,
        "mean_in_flight": world.replica.running_seconds / world.clock.now_s(),
        "rollouts": view.admitted,
        "finished": finished,
        "trained": view.trained,
        "dropped": dict(view.dropped),
        "events": world.meter.calls["core"],
        "transactions": world.meter.calls["store and journal"],
        "cpu_s": cpu_s,
        "wall_s": wall_s,
        "cpu_s_per_rollout": counted_s / view.admitted,
        "core_s_per_event": world.meter.cpu_s["core"] / world.meter.calls["core"],
        "parts_s_per_rollout": {name: spent / view.admitted for name, spent in parts.items()},
        "resident_bytes_by_step": world.resident,
    }


def main() -> None:
    plan: dict[str, Any] = json.loads(sys.argv[1])
    with tempfile.TemporaryDirectory(dir=plan["folder"]) as name:
        (Path(name) / "run").mkdir()
        profiler = cProfile.Profile() if plan["profile"] else None
        if profiler is not None:
            profiler.enable()
        result = measure(concurrent=plan["concurrent"], steps=plan["steps"], folder=Path(name))
        if profiler is not None:
            profiler.disable()
            pstats.Stats(profiler, stream=sys.stderr).sort_stats("tottime").print_stats(45)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
