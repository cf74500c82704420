"""A replica that only evaluates: a child of the controller, at low priority, outside the rotation.

Starts with the version that is to be evaluated, loads and proves it like any replica, answers, goes on to later ones,
and ends when no evaluation follows. Decides nothing about when; `rollmill.controller.side_evaluation` does. It dies
with the controller.

    Waits for                   Woken by        Gives up after
    the replica's address       doorbell, tick  REPLICA_DEADLINE_S, or the end of its process
    the load of a version       reply           generator.load_deadline_s
    the end of the process      the kernel      END_GRACE_S, then kills
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable

from rollmill.clock import Clock
from rollmill.config.schema import RollmillConfig
from rollmill.controller.evaluation import EvaluationResult, Generate
from rollmill.controller.side_evaluation import DueVersion, EvaluatorLost, SideEvaluations
from rollmill.errors import EngineDead, Fault
from rollmill.generator.client import GeneratorClient
from rollmill.runtime.children import Child, spawn
from rollmill.runtime.failure import read_record as read_failure
from rollmill.runtime.incarnation import Evaluating, write_record
from rollmill.runtime.layout import EVALUATOR, ProcessLayout
from rollmill.runtime.replica_watch import replica_deadline_s
from rollmill.types import GenerateRequest, Turn
from rollmill.weights.protocol import ModelRepository

END_GRACE_S = 5.0
AskAll = Callable[[Generate, str], Awaitable[EvaluationResult]]


class Evaluator:
    """The replica, started when it is first needed.

    Args:
        life: of the controller; names the lives of the evaluator.
        wait: returns at the next ring of the controller's doorbell, or after this many seconds.
        ask_all: evaluates all held-out tasks with this way to generate, under this label.
    """

    def __init__(
        self,
        *,
        config: RollmillConfig,
        layout: ProcessLayout,
        clock: Clock,
        life: str,
        incarnation: int,
        wait: Callable[[float], Awaitable[None]],
        ask_all: AskAll,
    ) -> None:
        self._config = config
        self._layout = layout
        self._clock = clock
        self._life = life
        self._incarnation = incarnation
        self._wait = wait
        self._ask_all = ask_all
        self._starts = 0
        self._child: Child | None = None
        self._client: GeneratorClient | None = None

    async def ask(self, due: DueVersion, attempt: int) -> EvaluationResult:
        """Evaluate one version.

        Raises:
            EvaluatorLost: if the replica did not start, cannot load the version, or ended meanwhile.
            DeadlineExceeded: if not all tasks were answered within `evaluation.deadline_s`.

        Cancellation:
            cancels the requests; the replica lives until `close`.
        """
        try:
            client = await self._serving(due.policy_version)
            return await self._ask_all(_or_lost(client.generate), f"{self._life}.{self._starts}.{attempt}-{due.label}")
        except* EvaluatorLost as group:
            lost = _first(group)
            words = self._last_words()
            await self.close()
            raise EvaluatorLost(f"{lost}{words}") from None

    async def close(self) -> None:
        """End the replica and write down how long it lived; idempotent."""
        client, self._client = self._client, None
        child, self._child = self._child, None
        if client is not None:
            await client.close()
        if child is not None:
            await asyncio.to_thread(child.end, grace_s=END_GRACE_S, clock=self._clock)
            write_record(self._layout.life(child.name, life=child.life), child.life_until(self._clock.now_s()))

    async def _serving(self, policy_version: int) -> GeneratorClient:
        """Return a client of the replica once it serves this version.

        Raises:
            EvaluatorLost: if it does not start or cannot load it.
        """
        if self._child is None or not self._child.is_alive():
            await self.close()
            self._start(policy_version)
        client = self._client or await self._first_contact()
        try:
            await client.load_weights(policy_version, deadline_s=self._config.generator.load_deadline_s)
        except Fault as fault:
            raise EvaluatorLost(f"it could not load policy version {policy_version}: {fault}") from fault
        return client

    def _start(self, policy_version: int) -> None:
        self._starts += 1
        self._layout.address(EVALUATOR).unlink(missing_ok=True)
        # An engine never goes back to an older version, so it must start with this one, not with the newest.
        write_record(self._layout.asked_version(EVALUATOR), Evaluating(policy_version=policy_version))
        self._child = spawn(
            EVALUATOR,
            layout=self._layout,
            life=f"{self._life}.{self._starts}",
            incarnation=self._incarnation,
            threads=self._config.generator.threads,
            deterministic=self._config.run.deterministic,
            now_s=self._clock.now_s(),
        )

    async def _first_contact(self) -> GeneratorClient:
        file, until_s = self._layout.address(EVALUATOR), self._clock.now_s() + replica_deadline_s(self._config)
        while not file.exists():
            if self._child is None or not self._child.is_alive():
                raise EvaluatorLost("it ended while it started")
            if self._clock.now_s() >= until_s:
                raise EvaluatorLost(f"it did not serve within {replica_deadline_s(self._config):.0f} s of its start")
            await self._wait(1.0)
        self._client = GeneratorClient(json.loads(file.read_text())["address"])
        return self._client

    def _last_words(self) -> str:
        """Return what the process itself says of its end, or where its log is."""
        if self._child is None:
            return ""
        record = read_failure(self._layout.process_failure(self._child.name, life=self._child.life))
        return f": {record.message}" if record is not None else f"; see {self._layout.log(EVALUATOR)}"


async def evaluate_beside(
    side: SideEvaluations,
    *,
    evaluator: Evaluator,
    repository: ModelRepository,
    has_ended: Callable[[], bool],
    wait: Callable[[float], Awaitable[None]],
) -> None:
    """Evaluate until nothing comes any more: what is due is held as soon as it is published.

    Args:
        has_ended: whether the training has; what is published by then is the last to be looked at.
        wait: returns at the next ring of the doorbell, or after this many seconds.

    Cancellation:
        ends the replica and lets go of all versions.
    """

    async def watch() -> None:
        newest = 0
        while True:
            ended, latest = has_ended(), repository.latest()
            if latest is not None and latest.policy_version != newest:
                newest = latest.policy_version
                side.look(repository.manifests())
            if ended:
                side.close()
            await wait(1.0)

    try:
        async with asyncio.TaskGroup() as tasks:
            watching = tasks.create_task(watch(), name="versions to evaluate")
            await side.run()
            watching.cancel()
    finally:
        await evaluator.close()


def _or_lost(generate: Generate) -> Generate:
    """Return `generate` with a lost replica as the end of the whole evaluation, not as one task without a verdict."""

    async def generate_or_lost(request: GenerateRequest) -> Turn:
        try:
            return await generate(request)
        except EngineDead as error:
            raise EvaluatorLost(f"it could not be reached: {error}") from error

    return generate_or_lost


def _first(group: BaseExceptionGroup[EvaluatorLost]) -> EvaluatorLost:
    first = group.exceptions[0]
    return _first(first) if isinstance(first, BaseExceptionGroup) else first
