"""What a replica does when a load meets something else that happens to it."""

from __future__ import annotations

import asyncio
import errno
import os
import sys
import threading
from typing import Any

import msgspec
import numpy as np
import pytest

from generator_builders import MemoryRepository, random_model
from replica_builders import fake_engine, in_flight, repository_of, started, two_models, why_refused
from rollmill.errors import EngineDead, EngineError, WeightMismatch
from rollmill.generator.engines.fake import FakeFaults
from rollmill.generator.proof import serves_older
from rollmill.generator.service import InferenceService
from rollmill.generator.state import ReplicaState, move
from rollmill.priority import NICENESS
from rollmill.types import Canary, StopReason


class Meanwhile:
    """Makes something happen during the update of an engine."""

    def __init__(self, engine: Any, happening: Any) -> None:
        self._engine = engine
        self._happening = happening

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def update(self, *args: Any, **kwargs: Any) -> Any:
        await self._happening()
        return await self._engine.update(*args, **kwargs)


@pytest.mark.parametrize("faults", [FakeFaults(), FakeFaults(fail_buckets={2: 1}), FakeFaults(fail_buckets={2: 2})])
async def test_a_replica_asked_to_drain_during_a_load_drains_and_never_serves_again(faults):
    repository = repository_of(*two_models())
    engine = fake_engine(repository, update_buckets=3, faults=faults)

    async def drain() -> None:
        replica.standing = move(replica.standing, ReplicaState.DRAINING, reason="asked to drain")

    replica = await started(Meanwhile(engine, drain), repository)  # type: ignore[arg-type]
    running = await in_flight(engine, ["a"])
    await asyncio.gather(replica.load(2), return_exceptions=True)
    turn = await asyncio.wait_for(running[0], 20)
    assert turn.stop_reason in (StopReason.LENGTH, StopReason.ABORT)
    assert (turn.stop_reason is StopReason.ABORT) == (faults.fail_buckets.get(2) == 2)
    assert replica.standing.state is ReplicaState.DRAINING
    assert "draining" in str(why_refused(replica))


async def test_an_engine_that_dies_in_a_load_is_dead_not_dirty():
    repository = repository_of(*two_models())
    engine = fake_engine(repository)

    async def die() -> None:
        engine.kill(RuntimeError("pulled the plug"))

    replica = await started(Meanwhile(engine, die), repository)  # type: ignore[arg-type]
    with pytest.raises(EngineDead, match="pulled the plug"):
        await replica.load(2)
    assert replica.standing.state is ReplicaState.DEAD


async def test_a_load_cut_short_in_the_swap_is_dirty_until_the_next_proves_itself():
    repository = repository_of(*two_models())
    engine = fake_engine(repository)
    loading: list[asyncio.Task[Any]] = []

    async def cancel() -> None:
        loading[0].cancel()
        await asyncio.sleep(0)

    replica = await started(Meanwhile(engine, cancel), repository)  # type: ignore[arg-type]
    loading.append(asyncio.ensure_future(replica.load(2)))
    with pytest.raises(asyncio.CancelledError):
        await loading[0]
    assert replica.standing.state is ReplicaState.DIRTY
    assert "cut short (CancelledError)" in str(why_refused(replica))
    replica.engine = engine
    await replica.load(2)
    assert why_refused(replica) is None


async def test_a_failed_load_of_a_dirty_replica_does_not_bring_back_what_was_never_proven():
    repository = repository_of(*two_models(), random_model(seed=3))
    engine = fake_engine(repository, faults=FakeFaults(ignore_updates=frozenset({2}), fail_buckets={3: 1}))
    replica = await started(engine, repository)
    with pytest.raises(WeightMismatch):
        await replica.load(2)
    with pytest.raises(Exception, match="fail bucket 1"):
        await replica.load(3)
    assert replica.standing.state is ReplicaState.DIRTY
    assert engine.load().paused


class Stages:
    """Notes the calls of a load in their order, and makes something happen while weights are made ready."""

    def __init__(self, engine: Any, happening: Any = None, *, capable: bool = True) -> None:
        self._engine = engine
        self._happening = happening
        self._capable = capable
        self.calls: list[str] = []
        self.staged: list[tuple[int, Any]] = []
        self.updated: list[tuple[int, Any]] = []

    def __getattr__(self, name: str) -> Any:
        if name in ("pause", "resume"):
            self.calls.append(name)
        return getattr(self._engine, name)

    def info(self) -> Any:
        info = self._engine.info()
        capabilities = tuple(name for name in info.capabilities if name != "stage" or self._capable)
        return msgspec.structs.replace(info, capabilities=capabilities)

    async def stage(self, tensors: Any, *, policy_version: int) -> None:
        self.calls.append("stage")
        self.staged.append((policy_version, tensors))
        if self._happening is not None:
            await self._happening()
        await self._engine.stage(tensors, policy_version=policy_version)

    async def update(self, tensors: Any, *, policy_version: int, **others: Any) -> Any:
        self.calls.append("update")
        self.updated.append((policy_version, tensors))
        return await self._engine.update(tensors, policy_version=policy_version, **others)


async def test_weights_are_made_ready_before_the_pause_and_the_same_are_swapped_in():
    repository = repository_of(*two_models())
    engine = Stages(fake_engine(repository))
    replica = await started(engine, repository)  # type: ignore[arg-type]
    await replica.load(2)
    assert engine.calls == ["stage", "pause", "update", "resume"]
    (staged, made_ready), (updated, swapped_in) = engine.staged[0], engine.updated[0]
    assert (staged, updated) == (2, 2)
    assert made_ready is swapped_in


@pytest.mark.parametrize(("capable", "stage_weights"), [(False, True), (True, False)])
async def test_nothing_is_made_ready_by_an_engine_that_cannot_or_where_the_setting_says_no(capable, stage_weights):
    repository = repository_of(*two_models())
    engine = Stages(fake_engine(repository), capable=capable)
    replica = await started(engine, repository, stage_weights=stage_weights)  # type: ignore[arg-type]
    report = await replica.load(2)
    assert engine.calls == ["pause", "update", "resume"]
    assert report.policy_version == 2


async def test_a_failure_while_weights_are_made_ready_changes_nothing_and_the_next_version_loads():
    repository = repository_of(*two_models(), random_model(seed=3))
    fake = fake_engine(repository, faults=FakeFaults(fail_stages=frozenset({2})))
    engine = Stages(fake)
    replica = await started(engine, repository)  # type: ignore[arg-type]
    with pytest.raises(EngineError, match="told to fail staging policy version 2"):
        await replica.load(2)
    assert engine.calls == ["stage"]  # no token was held up
    assert why_refused(replica) is None
    assert (fake.info().policy_version, repository.held_versions()) == (1, [1])
    assert (await replica.load(3)).policy_version == 3
    assert repository.held_versions() == [3]


async def test_a_load_cut_short_while_weights_are_made_ready_leaves_the_old_version_serving():
    repository = repository_of(*two_models())
    fake = fake_engine(repository)
    loading: list[asyncio.Task[Any]] = []

    async def cancel() -> None:
        loading[0].cancel()
        await asyncio.sleep(0)

    engine = Stages(fake, cancel)
    replica = await started(engine, repository)  # type: ignore[arg-type]
    loading.append(asyncio.ensure_future(replica.load(2)))
    with pytest.raises(asyncio.CancelledError):
        await loading[0]
    assert engine.calls == ["stage"]
    assert why_refused(replica) is None
    assert (fake.info().policy_version, repository.held_versions()) == (1, [1])
    replica.engine = fake
    assert (await replica.load(2)).changed


async def test_an_engine_that_dies_while_weights_are_made_ready_is_dead():
    repository = repository_of(*two_models())
    fake = fake_engine(repository)

    async def die() -> None:
        fake.kill(RuntimeError("pulled the plug"))

    replica = await started(Stages(fake, die), repository)  # type: ignore[arg-type]
    with pytest.raises(EngineDead, match="pulled the plug"):
        await replica.load(2)
    assert replica.standing.state is ReplicaState.DEAD


async def test_a_replica_told_to_drain_while_weights_are_made_ready_drains_and_never_serves_again():
    repository = repository_of(*two_models())
    fake = fake_engine(repository)

    async def drain() -> None:
        replica.standing = move(replica.standing, ReplicaState.DRAINING, reason="asked to drain")

    replica = await started(Stages(fake, drain), repository)  # type: ignore[arg-type]
    await replica.load(2)
    assert replica.standing.state is ReplicaState.DRAINING
    assert not fake.load().paused


async def test_damaged_tensors_are_found_before_anything_stops():
    repository = repository_of(*two_models())
    engine = fake_engine(repository)
    replica = await started(engine, repository)
    repository.damage(2)
    with pytest.raises(WeightMismatch, match="was damaged"):
        await replica.load(2)
    assert not engine.load().paused
    assert why_refused(replica) is None
    assert repository.held_versions() == [1]


async def test_a_replica_that_takes_no_weights_any_more_says_why():
    repository = MemoryRepository()
    repository.put(random_model(seed=1))
    replica = await started(fake_engine(repository), repository)
    replica.standing = move(replica.standing, ReplicaState.DRAINING, reason="asked to drain")
    with pytest.raises(EngineError, match=r"no new weights: .*asked to drain"):
        await replica.load(1)


def canary(*logprobs: float, ids: int = 0) -> Canary:
    return Canary(
        token_ids=np.arange(ids, ids + len(logprobs) + 1, dtype=np.int32),
        logprobs=np.array(logprobs, dtype=np.float32),
        tolerance=1e-3,
    )


@pytest.mark.parametrize(
    ("scored", "older", "expected"),
    [
        ((-1.0, -2.0), canary(-1.0004, -2.0004), False),  # the new weights
        ((-1.0004, -2.0004), canary(-1.0004, -2.0004), True),  # the old ones: 4e-4 from the new, 0 from the old
        ((-1.0003, -2.0003), canary(-1.0004, -2.0004), False),  # nearer to the old, not 4 times: 3e-4 against 1e-4
        ((-1.00035, -2.00035), canary(-1.0004, -2.0004), True),  # 3.5e-4 against 0.5e-4: 7 times
        ((-1.000004, -2.000004), canary(-1.000004, -2.000004), False),  # an update smaller than rounding: undecided
        ((-1.0004, -2.0004), None, False),
        ((-1.0004, -2.0004), canary(-1.0004, -2.0004, ids=5), False),  # another prompt
    ],
)
def test_old_weights_are_told_from_new_ones_beyond_rounding(scored, older, expected):
    assert serves_older(canary(-1.0, -2.0), older=older, scored=np.array(scored, dtype=np.float32)) is expected


class NoWayOn:
    """An engine whose `resume` fails so many times."""

    def __init__(self, engine: Any, *, failures: int) -> None:
        self._engine = engine
        self._failures = failures

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def resume(self) -> None:
        if self._failures:
            self._failures -= 1
            raise EngineError("the server did not thaw")
        await self._engine.resume()


async def test_an_engine_that_does_not_go_on_after_a_proven_swap_is_dirty_and_not_serving_nothing():
    repository = repository_of(*two_models())
    replica = await started(NoWayOn(fake_engine(repository), failures=1), repository)  # type: ignore[arg-type]
    with pytest.raises(EngineError, match="did not thaw"):
        await replica.load(2)
    assert replica.standing.state is ReplicaState.DIRTY
    assert "did not go on after a pause for new weights" in str(why_refused(replica))
    report = await replica.load(2)  # no repeated load that finds nothing to do
    assert why_refused(replica) is None
    assert report.policy_version == 2
    assert replica.engine.load().paused is False


async def test_an_engine_that_does_not_go_on_after_a_failed_swap_is_dirty_too():
    repository = repository_of(*two_models())
    engine = NoWayOn(fake_engine(repository, faults=FakeFaults(fail_buckets={2: 1})), failures=9)
    replica = await started(engine, repository)  # type: ignore[arg-type]
    with pytest.raises(EngineError):
        await replica.load(2)
    assert replica.standing.state is ReplicaState.DIRTY


@pytest.mark.skipif(sys.platform != "linux", reason="threads have priorities of their own on Linux alone")
async def test_reading_and_verifying_a_version_lets_decoding_go_first():
    repository, seen = repository_of(*two_models()), []
    replica = await started(fake_engine(repository), repository)
    read = repository.load

    def noted(version: int) -> Any:
        seen.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        return read(version)

    repository.load = noted  # type: ignore[method-assign]
    await replica.load(2)
    own = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    assert seen == [min(19, own + NICENESS)]


async def test_what_the_disk_refuses_in_a_load_reaches_its_caller_and_the_old_version_goes_on_serving():
    repository = repository_of(*two_models())
    replica = await started(fake_engine(repository), repository)

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    repository.load = full  # type: ignore[method-assign]
    async with asyncio.TaskGroup() as tasks:
        service = InferenceService(replica, tasks=tasks)
        with pytest.raises(EngineError, match=r"version 2 was not loaded: OSError: .*No space left.* is serving"):
            await service.load_weights(2)
        assert why_refused(replica) is None
        assert replica.engine.info().policy_version == 1
