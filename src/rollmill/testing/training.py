"""What stands around a controller on virtual time: a trainer and a repository without a model, and how rollouts run.

Of the trainer what others see is real: leases and records in the store, and the order of publication, record and ring.
Not there are tensors, losses and checkpoints.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, ParamSpec, TypeVar

import msgspec

from rollmill.buffer.protocol import LeasedBatch, SampleStore, StepRecord
from rollmill.clock import Clock
from rollmill.config.schema import RollmillConfig
from rollmill.environments.protocol import Environment
from rollmill.environments.rendering import MessageRenderer
from rollmill.environments.single_turn import Generate, run_rollout
from rollmill.scheduling.instructions import StartRollout
from rollmill.types import Rollout, SamplingParams, WeightManifest, derive_seed

P = ParamSpec("P")
T = TypeVar("T")

HISTORY_ID = "h001"


def fake_manifest(policy_version: int, **changed: Any) -> WeightManifest:
    """Return the manifest of a version without tensors, with these fields changed; the first version is step 0.

    Example:
        >>> manifest = fake_manifest(3, history_id="h002")
        >>> manifest.optimizer_step, manifest.parent, manifest.history_id, manifest.digest
        (2, 2, 'h002', 'fake-3')
    """
    manifest = WeightManifest(
        policy_version=policy_version,
        optimizer_step=policy_version - 1,
        parent=policy_version - 1 or None,
        history_id=HISTORY_ID,
        training_dtype="float32",
        serving_dtype="float32",
        tensors={},
        digest=f"fake-{policy_version}",
        transport="shm",
        location="",
    )
    return msgspec.structs.replace(manifest, **changed)


class FakeRepository:
    """What a controller reads of a model repository: manifests, here without tensors."""

    def __init__(self) -> None:
        self._manifests: list[WeightManifest] = []

    def publish(self, *, optimizer_step: int, at_s: float) -> WeightManifest:
        """Make the next version visible and return its manifest."""
        version = len(self._manifests) + 1
        self._manifests.append(fake_manifest(version, optimizer_step=optimizer_step, published_at_s=at_s))
        return self._manifests[-1]

    def manifests(self, *, after: int = 0) -> list[WeightManifest]:
        """Return the manifests of later versions, ascending."""
        return [one for one in self._manifests if one.policy_version > after]

    def latest(self) -> WeightManifest | None:
        """Return the newest manifest, or `None` before the first publication."""
        return self._manifests[-1] if self._manifests else None


class FakeTrainer:
    """Trains what is assigned, one optimizer step after the other.

    Args:
        ring: wakes the controller: after a lease and after a record.
        step_s: seconds of the loop's time that a step takes.
        look_every_s: how often it looks for its batch.

    Attributes:
        optimizer_step: steps made so far.
    """

    def __init__(
        self,
        *,
        store: SampleStore,
        repository: FakeRepository,
        clock: Clock,
        ring: Callable[[], None],
        step_s: float,
        look_every_s: float,
        lease_s: float = 1000.0,
    ) -> None:
        self.optimizer_step = 0
        self._store = store
        self._repository = repository
        self._clock = clock
        self._ring = ring
        self._step_s = step_s
        self._look_every_s = look_every_s
        self._lease_s = lease_s

    async def step(self) -> StepRecord:
        """Wait for the next batch, train it, publish, and record it; return the record.

        Cancellation: the batch stays leased, as after the death of a trainer.
        """
        batch = await self._next_batch()
        self._ring()
        await asyncio.sleep(self._step_s)
        self.optimizer_step += 1
        manifest = self._repository.publish(optimizer_step=self.optimizer_step, at_s=self._clock.now_s())
        record = StepRecord(
            batch_id=batch.batch_id,
            history_id=manifest.history_id,
            optimizer_step=self.optimizer_step,
            policy_version=manifest.policy_version,
            group_ids=tuple(group.group_id for group in batch.groups),
            finished_at_s=self._clock.now_s(),
            seconds={"train": self._step_s},
            metrics={},
        )
        self._store.record_step(record, owner="trainer")
        self._ring()
        return record

    async def _next_batch(self) -> LeasedBatch:
        while True:
            batch = self._store.lease_batch(
                optimizer_step=self.optimizer_step, owner="trainer", now_s=self._clock.now_s(), lease_s=self._lease_s
            )
            if batch is not None:
                return batch
            await asyncio.sleep(self._look_every_s)


def rollout_runner(
    config: RollmillConfig,
    *,
    environment: Environment,
    renderer: MessageRenderer,
    generate: Generate,
    clock: Clock,
) -> Callable[[StartRollout], Awaitable[Rollout]]:
    """Return what a controller hands a started rollout to, with the configuration's sampling, schedule and seed."""

    async def run(start: StartRollout) -> Rollout:
        sampling = config.sampling
        return await run_rollout(
            start,
            environment=environment,
            renderer=renderer,
            generate=generate,
            sampling=SamplingParams(
                temperature=sampling.temperature,
                max_new_tokens=sampling.max_new_tokens,
                seed=derive_seed(config.run.seed, start.group_id, start.sibling),
            ),
            schedule=config.schedule,
            clock=clock,
        )

    return run


async def in_place(function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a blocking function on the loop's own thread: `asyncio.to_thread` for virtual time."""
    return function(*args, **kwargs)
