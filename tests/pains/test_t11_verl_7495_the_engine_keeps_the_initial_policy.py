"""T11: an engine that does not take the weights is found at the first sync.

Reported elsewhere: the adapter is never delivered and the generator keeps the initial policy, which looks like
staleness (verl 7495); the failed reply to a sync is not checked (miles 684).
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from generator_builders import MemoryRepository, embedded, random_model, tensors_of
from replica_builders import fake_engine, in_flight, repository_of, started, two_models, why_refused
from rollmill.errors import EngineError, WeightError, WeightMismatch
from rollmill.generator.engines.fake import FakeFaults
from rollmill.generator.engines.protocol import EngineInfo, UpdateReport
from rollmill.generator.state import ReplicaState
from rollmill.types import StopReason
from rollmill.weights import LocalModelRepository


async def test_an_engine_that_ignores_an_update_is_a_mismatch_with_both_digests_and_samples_nothing_more():
    repository = repository_of(*two_models())
    engine = fake_engine(repository, faults=FakeFaults(ignore_updates=frozenset({2})))
    replica = await started(engine, repository)
    running = await in_flight(engine, ["a"])
    sampled = engine.load().output_tokens
    with pytest.raises(WeightMismatch) as caught:
        await replica.load(2)
    old, new = (repository.manifest(version).digest for version in (1, 2))
    assert (caught.value.published, caught.value.served) == (new, old)
    assert new in str(caught.value)
    assert old in str(caught.value)
    assert (await running[0]).stop_reason is StopReason.ABORT
    assert replica.standing.state is ReplicaState.DIRTY
    assert "digest" in str(why_refused(replica))
    assert engine.load().paused
    assert engine.load().output_tokens == sampled


def moved_a_little(model: Any) -> Any:
    """The model after an update that moves its log-probs by less than the tolerance of the canary."""
    moved = random_model(seed=1)
    with torch.no_grad():
        for before, after in zip(model.parameters(), moved.parameters(), strict=True):
            after.copy_(before + 2e-5 * torch.sign(before))
    return moved


class Deaf:
    """Makes an engine say that it serves what it was given, and go on computing with what it has."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._said: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def info(self) -> EngineInfo:
        return msgspec.structs.replace(self._engine.info(), **self._said)

    async def update(self, tensors: Any, *, policy_version: int, digest: str, **_: Any) -> UpdateReport:
        self._said = {"policy_version": policy_version, "digest": digest}
        return UpdateReport(policy_version=policy_version, nbytes=0, pause_s=0.0, changed=True)


async def test_an_engine_that_says_it_loaded_but_computes_with_the_old_weights_is_a_mismatch(tmp_path):
    old = random_model(seed=1)
    new = moved_a_little(old)
    repository = MemoryRepository()
    for model in (old, new):
        repository.put(model)
    canaries = [repository.manifest(version).canary for version in (1, 2)]
    moved = np.abs(canaries[0].logprobs - canaries[1].logprobs).max()  # type: ignore[union-attr]
    assert 1e-4 < moved < canaries[1].tolerance == 1e-3  # type: ignore[union-attr]
    engine = embedded(tmp_path, old, digest=repository.manifest(1).digest)
    try:
        replica = await started(Deaf(engine), repository)  # type: ignore[arg-type]
        with pytest.raises(
            WeightMismatch, match=r"still those of version 1, though the trainer's have moved"
        ) as caught:
            await replica.load(2)
        assert caught.value.published == repository.manifest(2).digest
        assert caught.value.served == repository.manifest(1).digest
        assert "still those of version 1" in str(why_refused(replica))
        assert engine.load().paused
    finally:
        await engine.close()


async def test_the_same_small_update_that_is_taken_is_served(tmp_path):
    old = random_model(seed=1)
    repository = repository_of(old, moved_a_little(old))
    engine = embedded(tmp_path, old, digest=repository.manifest(1).digest)
    try:
        replica = await started(engine, repository)
        report = await replica.load(2)
        assert report.canary_difference is not None
        assert report.canary_difference < 1e-5
        assert replica.standing.state is ReplicaState.SERVING
    finally:
        await engine.close()


class Refusing:
    """Makes an engine answer every update with a failure of its own words."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def update(self, *_: Any, policy_version: int, **__: Any) -> UpdateReport:
        raise EngineError(f"collective call failed for policy version {policy_version}: 3 of 4 workers answered")


async def test_a_sync_that_the_engine_reports_as_failed_raises_with_its_words_and_the_old_version_goes_on():
    repository = repository_of(*two_models())
    engine = fake_engine(repository)
    replica = await started(Refusing(engine), repository)  # type: ignore[arg-type]
    running = await in_flight(engine, ["a"])
    with pytest.raises(EngineError, match="3 of 4 workers answered"):
        await replica.load(2)
    turn = await asyncio.wait_for(running[0], 20)
    assert (turn.stop_reason, turn.version_spans[-1].policy_version) == (StopReason.LENGTH, 1)


@pytest.fixture
def repository(tmp_path):
    return LocalModelRepository(tmp_path / "weights", transport="file")


def publish(repository: LocalModelRepository, model: Any, *, step: int, parent: int | None):
    return repository.publish(
        tensors_of(model),
        optimizer_step=step,
        parent=parent,
        history_id="h",
        training_dtype="float32",
        canary=None,
        at_s=0.0,
    )


def test_an_update_that_changed_no_tensor_is_an_error_and_no_version(repository):
    model = random_model(seed=1)
    first = publish(repository, model, step=0, parent=None)
    with pytest.raises(WeightError, match=rf"optimizer step 1 changed no tensor: .*{first.digest[:16]}.*version 1"):
        publish(repository, model, step=1, parent=1)
    assert repository.latest() == first
    # one number in one tensor is a change
    with torch.no_grad():
        next(model.parameters())[0, 0] += 1.0
    assert publish(repository, model, step=1, parent=1).policy_version == 2


def test_a_resumed_run_publishes_the_same_weights_of_the_same_step_again(repository):
    model = random_model(seed=1)
    publish(repository, model, step=4, parent=None)
    assert publish(repository, model, step=4, parent=1).policy_version == 2


def test_an_update_without_tensors_is_an_error(repository):
    with pytest.raises(WeightError, match="no tensors were given"):
        repository.publish(
            {}, optimizer_step=1, parent=None, history_id="h", training_dtype="float32", canary=None, at_s=0.0
        )
    assert repository.latest() is None
