"""Training and weight loads go on while a replica of its own evaluates; through the shared one they wait."""

from __future__ import annotations

import asyncio

from controller_world import World, config_of

from rollmill.controller.evaluation import EvaluationResult, Generate, evaluate
from rollmill.controller.side_evaluation import DueVersion, SideEvaluations, labels_due
from rollmill.runtime.evaluator import evaluate_beside
from rollmill.testing import FakeEngine, FakeLatency, FakeRepository, ScriptedEnvironment, run_virtual

STEPS = 12
TOKEN_S = 2.0
"""A slow evaluator: 8 tasks, two at a time, up to 4 tokens each, at 2 s per token: many training steps of 1 s."""


class HoldingRepository(FakeRepository):
    """Keeps the newest two versions and those that are held."""

    def __init__(self) -> None:
        super().__init__()
        self.holds: set[int] = set()
        self.ever_held: list[int] = []

    def hold(self, policy_version: int, *, owner: str) -> None:
        self.holds.add(policy_version)
        self.ever_held.append(policy_version)

    def release(self, policy_version: int, *, owner: str) -> None:
        self.holds.discard(policy_version)

    def loadable(self) -> set[int]:
        return {manifest.policy_version for manifest in self.manifests()[-2:]} | self.holds


class FakeEvaluator:
    """An engine of its own that loads what it is asked for, if it can still be had."""

    def __init__(self, world: World, repository: HoldingRepository) -> None:
        self.world = world
        self.repository = repository
        self.windows: dict[str, tuple[float, float]] = {}
        self.closed = False

    async def ask(self, due: DueVersion, attempt: int) -> EvaluationResult:
        began_s = self.world.clock.now_s()
        engine = FakeEngine(
            clock=self.world.clock,
            vocabulary_size=self.world.tokenizer.vocabulary_size,
            max_num_seqs=2,
            latency=FakeLatency(step_s=TOKEN_S),
            digest=due.digest,
            policy_version=due.policy_version,
        )
        try:
            return await self.world_evaluation(engine.generate, label=due.label)
        finally:
            assert due.policy_version in self.repository.loadable()
            await engine.close()
            self.windows[due.label] = (began_s, self.world.clock.now_s())

    async def world_evaluation(self, generate: Generate, *, label: str) -> EvaluationResult:
        environment = ScriptedEnvironment(size=8, heldout_size=8, script=lambda task, reply: 1.0)
        return await evaluate(
            environment.heldout(),
            environment=environment,
            renderer=self.world.tokenizer,
            generate=generate,
            clock=self.world.clock,
            temperature=0.0,
            max_new_tokens=4,
            deadline_s=600.0,
            concurrency=2,
            label=label,
        )

    async def close(self) -> None:
        self.closed = True


def run_with_evaluator(*, every_steps: int = 0) -> tuple[World, FakeEvaluator, dict[str, EvaluationResult], float]:
    world = World(config_of(steps=STEPS, max_staleness=2), step_s=1.0)
    world.repository = repository = HoldingRepository()
    evaluator = FakeEvaluator(world, repository)
    kept: dict[str, EvaluationResult] = {}
    trained_at_s: list[float] = []

    async def beside(world: World) -> None:
        side = SideEvaluations(
            labels=labels_due(at_start=True, every_steps=every_steps, steps=STEPS, began_at=0, done=()),
            history_id="h001",
            holder=repository,
            ask=evaluator.ask,
            keep=lambda due, result: kept.update({due.label: result}),
            reports=world.reports,
        )
        await evaluate_beside(
            side,
            evaluator=evaluator,  # type: ignore[arg-type]
            repository=repository,  # type: ignore[arg-type]
            has_ended=world.controller.finished.done,
            wait=lambda seconds: asyncio.sleep(min(seconds, 0.25)),
        )

    async def main() -> None:
        async with asyncio.TaskGroup() as tasks:

            async def start(world: World) -> None:
                # Outlives the run, which waits for it as the controller does.
                tasks.create_task(beside(world))

            reason = await world.run(meanwhile=start)
            assert reason == "steps_done"
            trained_at_s.append(world.clock.now_s())

    run_virtual(main(), clock=world.clock)
    return world, evaluator, kept, trained_at_s[0]


def trained_within(world: World, window: tuple[float, float]) -> int:
    return sum(window[0] < record.finished_at_s < window[1] for record in world.reports.steps)


def shared_run() -> tuple[World, tuple[float, float], float]:
    """The same evaluation through the training replica's gate, for as long as the other one took."""
    world = World(config_of(steps=STEPS, max_staleness=2), step_s=1.0)
    windows: list[tuple[float, float]] = []

    async def evaluating(world: World) -> None:
        async with world.controller.load_gate.closed(deadline_s=1.0):
            began_s = world.clock.now_s()
            await asyncio.sleep(4 * 4 * TOKEN_S)
            windows.append((began_s, world.clock.now_s()))

    run_virtual(world.run(meanwhile=evaluating), clock=world.clock)
    return world, windows[0], world.clock.now_s()


def test_training_goes_on_during_an_evaluation_with_a_replica_of_its_own() -> None:
    world, evaluator, kept, trained_s = run_with_evaluator()
    window = evaluator.windows["before"]
    # With a budget of 2 steps and loads held back, no more than 3 steps could be trained.
    assert trained_within(world, window) > 3
    assert {version for _, version in world.loaded} > {2, 3, 4, 5}
    assert kept["before"].policy_versions == (1,)
    assert kept["before"].n == 8
    assert evaluator.closed
    held_up, shared_window, shared_s = shared_run()
    assert trained_within(held_up, shared_window) <= 3
    assert trained_s < shared_s


def test_each_evaluation_sees_its_own_version_however_far_the_training_is() -> None:
    world, _, kept, _ = run_with_evaluator(every_steps=4)
    skipped = [fields["label"] for kind, fields in world.reports.events if kind == "evaluation_skipped"]
    assert {label: result.policy_versions for label, result in kept.items()} == {
        label: (step + 1,) for label, step in (("before", 0), ("step-4", 4), ("step-8", 8)) if label not in skipped
    }
    assert len(kept) >= 2
    repository = world.repository
    assert isinstance(repository, HoldingRepository)
    assert repository.holds == set()
    assert repository.ever_held == [result.policy_versions[0] for result in kept.values()]


def test_the_staleness_budget_holds_as_without_an_evaluation() -> None:
    world, _, _, _ = run_with_evaluator(every_steps=4)
    view = world.controller.scheduler.view()
    assert (view.optimizer_step, view.in_flight) == (STEPS, 0)
    assert view.staleness_max <= 2
