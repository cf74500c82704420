"""T10: a set of weights that came only in part is never a version.

Reported elsewhere: the new version is published after a chunk of the update had failed (tokenspeed 672); the version
counts calls of the update instead of publications (UniRL 324).
"""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch

from generator_builders import MemoryRepository, embedded, random_model, request, tensors_of
from replica_builders import fake_engine, in_flight, repository_of, started, two_models, why_refused
from rollmill.errors import EngineError, WeightError
from rollmill.generator.engines.fake import FakeFaults
from rollmill.generator.state import ReplicaState
from rollmill.types import StopReason


async def test_an_update_in_three_buckets_is_one_version():
    repository = repository_of(*two_models())
    engine = fake_engine(repository, update_buckets=3)
    replica = await started(engine, repository)
    report = await replica.load(2)
    assert (report.policy_version, report.changed) == (2, True)
    assert (engine.info().policy_version, engine.info().digest) == (2, repository.manifest(2).digest)
    assert replica.standing.state is ReplicaState.SERVING
    assert repository.held_versions() == [2]


async def test_a_failed_first_bucket_changes_nothing_and_requests_go_on():
    repository = repository_of(*two_models())
    engine = fake_engine(repository, update_buckets=3, faults=FakeFaults(fail_buckets={2: 1}))
    replica = await started(engine, repository)
    running = await in_flight(engine, ["a", "b"])
    with pytest.raises(WeightError, match="fail bucket 1 of 3 of policy version 2; nothing was changed"):
        await replica.load(2)
    turns = await asyncio.gather(*running)
    assert [turn.stop_reason for turn in turns] == [StopReason.LENGTH] * 2
    assert {span.policy_version for turn in turns for span in turn.version_spans} == {1}
    assert why_refused(replica) is None
    assert repository.held_versions() == [1]


async def test_a_failed_second_bucket_is_rolled_back_to_the_proven_old_version():
    repository = repository_of(*two_models())
    engine = fake_engine(repository, update_buckets=3, faults=FakeFaults(fail_buckets={2: 2}))
    replica = await started(engine, repository)
    running = await in_flight(engine, ["a"])
    with pytest.raises(EngineError, match=r"bucket 2 of 3 .*Version 1 was loaded again and proven"):
        await replica.load(2)
    partial = await running[0]
    assert partial.stop_reason is StopReason.ABORT
    assert {span.policy_version for span in partial.version_spans} == {1}
    assert (engine.info().policy_version, engine.info().digest) == (1, repository.manifest(1).digest)
    assert why_refused(replica) is None
    turn = await engine.generate(request("later", [1, 2]))
    assert turn.version_spans[0].policy_version == 1
    assert repository.held_versions() == [1]


async def test_where_the_old_version_cannot_be_proven_the_engine_stays_dirty_and_refuses():
    repository = repository_of(*two_models(), random_model(seed=3))
    engine = fake_engine(repository, update_buckets=3, faults=FakeFaults(fail_buckets={2: 2}))
    replica = await started(engine, repository)
    repository.damage(1)
    running = await in_flight(engine, ["a"])
    with pytest.raises(EngineError, match="bucket 2 of 3"):
        await replica.load(2)
    assert (await running[0]).stop_reason is StopReason.ABORT
    assert engine.info().policy_version == 1
    assert replica.standing.state is ReplicaState.DIRTY
    assert "The way back to version 1 failed too: tensor" in str(why_refused(replica))
    with pytest.raises(EngineError, match="the engine is dirty"):
        await engine.generate(request("late", [1, 2]))
    # the way out of dirty: a newer version that loads and proves itself
    assert (await replica.load(3)).policy_version == 3
    assert why_refused(replica) is None


class Unreadable(torch.Tensor):
    """A tensor whose numbers are gone when they are asked for, as behind a map whose file was cut."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is torch.Tensor.copy_:
            raise RuntimeError("bus error")
        return super().__torch_function__(func, types, args, kwargs or {})


class CutShort(MemoryRepository):
    """Verifies every version, but the last tensor of version 2 cannot be read when it is copied."""

    def load(self, policy_version: int) -> dict[str, torch.Tensor]:
        tensors = dict(super().load(policy_version))
        if policy_version == 2:
            last = list(tensors)[-1]
            tensors[last] = tensors[last].as_subclass(Unreadable)
        return tensors


@pytest.mark.parametrize(
    ("stage_weights", "why"),
    [
        (False, r"bus error.*Version 1 was loaded again and proven"),
        (True, r"bus error.*Nothing was changed, the version before goes on being served"),
    ],
    ids=["in-the-pause", "staged"],
)
async def test_the_embedded_engine_comes_back_to_exactly_the_old_weights(tmp_path, stage_weights, why):
    old, new = two_models()
    repository = CutShort()
    repository.put(old)
    repository.put(new)
    engine = embedded(tmp_path, old, digest=repository.manifest(1).digest)
    try:
        replica = await started(engine, repository, stage_weights=stage_weights)
        before = await engine.score(np.arange(1, 12))
        with pytest.raises(EngineError, match=why):
            await replica.load(2)
        np.testing.assert_array_equal(await engine.score(np.arange(1, 12)), before)
        assert (engine.info().policy_version, engine.info().digest) == (1, repository.manifest(1).digest)
        turn = await engine.generate(request("later", [1, 2]))
        assert turn.version_spans[0].policy_version == 1
    finally:
        await engine.close()


async def test_the_version_is_the_publication_not_the_number_of_updates(tmp_path):
    old, new = two_models()
    repository = repository_of(old, *(new for _ in range(6)))
    engine = embedded(tmp_path, old, digest=repository.manifest(1).digest)
    try:
        replica = await started(engine, repository)
        await replica.load(7)
        await replica.load(7)
        assert engine.info().policy_version == 7
        assert tensors_of(new).keys() == repository.load(7).keys()
    finally:
        await engine.close()
