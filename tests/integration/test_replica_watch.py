"""Who joins the rotation and who leaves it, with real channels and a process that can be ended."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from generator_builders import MemoryRepository
from rollmill.clock import SystemClock
from rollmill.config.schema import EnvironmentSettings, GeneratorSettings, RollmillConfig, RunSettings, TaskMix
from rollmill.controller.replicas import Overtaken, ReplicaLost
from rollmill.errors import EngineDead, ProducersGone, WeightError
from rollmill.generator.engines.fake import FakeEngine, FakeFaults
from rollmill.generator.main import serve
from rollmill.generator.state import ReplicaState
from rollmill.generator.wire import LoadReport, ReplicaStatus
from rollmill.runtime.failure import read_record, record_of_exit
from rollmill.runtime.layout import ProcessLayout
from rollmill.runtime.losses import LossRecord, append_loss
from rollmill.runtime.process import LIFE_VARIABLE
from rollmill.runtime.replica_watch import LossLog, ReplicaWatch, loads_again
from rollmill.scheduling.events import AfterLoss, ReplicaJoined
from rollmill.types import GenerateRequest, SamplingParams, Turn

pytestmark = pytest.mark.integration

NAME = "generator-0"


class Repository(MemoryRepository):
    """Two versions, each of its own history."""

    def __init__(self) -> None:
        super().__init__()
        self.loads_to_fail = 0
        self.add(optimizer_step=3, history_id="h001")
        self.add(optimizer_step=2, history_id="h002")

    def add(self, *, optimizer_step: int, history_id: str) -> None:
        self.publish(
            {"weight": torch.full((2,), float(optimizer_step))},
            optimizer_step=optimizer_step,
            parent=None,
            history_id=history_id,
            training_dtype="float32",
            canary=None,
            at_s=0.0,
        )

    def load(self, policy_version: int) -> dict[str, torch.Tensor]:
        if self.loads_to_fail:
            self.loads_to_fail -= 1
            raise WeightError("the disk is slow today")
        return super().load(policy_version)


class Controller:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.inbox = self
        self.told: list[Any] = []
        self.events: list[str] = []

    def put(self, event: Any) -> None:
        self.told.append(event)

    def look(self) -> None:
        self.told.append("look")

    def replica_lost(self, replica_id: str, *, reason: str, then: AfterLoss) -> None:
        self.told.append((replica_id, reason, then))

    def event(self, kind: str, **fields: object) -> None:
        """As a reporter."""
        self.events.append(kind)


class Setting:
    """One replica that serves in this process, and a process that stands for its own."""

    def __init__(self, folder: Path, *, policy: str, faults: FakeFaults, served: int) -> None:
        self.layout = ProcessLayout(folder)
        self.layout.processes.mkdir(exist_ok=True)
        self.repository = Repository()
        self.controller = Controller()
        config = RollmillConfig(
            run=RunSettings(on_generator_loss=policy),  # type: ignore[arg-type]
            generator=GeneratorSettings(engine="fake"),
            environment=EnvironmentSettings(tasks=(TaskMix(name="basic_arithmetic"),)),
        )
        self.watch = ReplicaWatch(
            config=config,
            layout=self.layout,
            clock=SystemClock(),
            losses=LossLog(self.layout),
            repository=self.repository,  # type: ignore[arg-type]
            reporter=self.controller,  # type: ignore[arg-type]
        )
        self.ended = 0
        self.watch.begin(self.controller, history_id="h002", on_none_left=self._none_left)  # type: ignore[arg-type]
        self.engine = FakeEngine(
            clock=SystemClock(),
            vocabulary_size=64,
            max_num_seqs=4,
            faults=faults,
            policy_version=served,
            digest=self.repository.manifest(served).digest,
        )
        self.body = subprocess.Popen(
            [sys.executable, "-c", "import sys; sys.stdin.read()", NAME],
            stdin=subprocess.PIPE,
            env={**os.environ, LIFE_VARIABLE: "1"},
        )

    def _none_left(self) -> None:
        self.ended += 1

    def lose(self, *, at_wall_s: float | None = None) -> LossRecord:
        """Write what the supervisor writes when it sees the process end."""
        at_wall_s = time.time() if at_wall_s is None else at_wall_s
        loss = LossRecord(
            process=NAME,
            life="1",
            pid=self.body.pid,
            incarnation=1,
            at_wall_s=at_wall_s,
            exit_status=-9,
            cause=record_of_exit(NAME, -9, at_wall_s=at_wall_s),
            decision="restart",
            restarts_left=2,
            pause_s=0.0,
            message="lost",
        )
        append_loss(self.layout.losses, loss)
        return loss

    @property
    def losses(self) -> list[tuple[str, str, AfterLoss]]:
        return [told for told in self.controller.told if isinstance(told, tuple)]

    @property
    def joined(self) -> list[ReplicaJoined]:
        return [told for told in self.controller.told if isinstance(told, ReplicaJoined)]


class OlderReplica:
    """A second replica in rotation, as its client shows it: it serves a version and loads what it is told."""

    def __init__(self, like: ReplicaStatus, *, policy_version: int) -> None:
        self._status = msgspec.structs.replace(like, policy_version=policy_version)
        self.loads: list[int] = []

    async def status(self) -> ReplicaStatus:
        return self._status

    async def load_weights(self, policy_version: int, *, deadline_s: float) -> LoadReport:
        self.loads.append(policy_version)
        self._status = msgspec.structs.replace(self._status, policy_version=policy_version)
        return LoadReport(
            policy_version=policy_version,
            digest="",
            nbytes=0,
            pull_s=0.0,
            pause_s=0.0,
            changed=True,
            canary_difference=None,
        )

    async def close(self) -> None:
        """Nothing to close."""


@contextlib.asynccontextmanager
async def setting(
    folder: Path, *, policy: str = "restart", faults: FakeFaults | None = None, served: int = 2
) -> AsyncIterator[Setting]:
    world, stop = Setting(folder, policy=policy, faults=faults or FakeFaults(), served=served), asyncio.Event()
    file = world.layout.address(NAME)
    try:
        async with asyncio.TaskGroup() as tasks:
            serving = tasks.create_task(
                serve(
                    engine=world.engine,
                    repository=world.repository,
                    kv_policy="keep",
                    address_file=file,
                    stop=stop,
                    load_deadline_s=5.0,
                )
            )
            while not file.exists():
                await asyncio.wait({serving}, timeout=0.01)
            record = json.loads(file.read_text())
            file.write_text(json.dumps({**record, "pid": world.body.pid}))
            try:
                yield world
            finally:
                await world.watch.close()
                stop.set()
    except* EngineDead:
        # A test may have killed the engine.
        pass
    finally:
        world.body.kill()
        world.body.communicate()


def generate(world: Setting) -> Any:
    return world.watch.replicas.generate(
        GenerateRequest(
            request_id="r",
            prompt_ids=np.array([1, 2], dtype=np.int32),
            sampling=SamplingParams(temperature=1.0, max_new_tokens=2, seed=1),
            deadline_s=5.0,
        )
    )


def test_a_replica_joins_when_its_address_appears_and_after_the_core_has_heard_of_its_version(tmp_path: Path) -> None:
    async def main() -> None:
        async with setting(tmp_path) as world:
            await world.watch.look()
            assert [event.policy_version for event in world.joined] == [2]
            assert world.controller.told.index("look") < world.controller.told.index(world.joined[0])
            assert isinstance(await generate(world), Turn)
            await world.watch.look()
            assert len(world.joined) == 1

    asyncio.run(main())


def test_a_replica_with_weights_of_an_abandoned_history_loads_the_newest_before_it_joins(tmp_path: Path) -> None:
    async def main() -> None:
        async with setting(tmp_path, served=1) as world:
            await world.watch.look()
            assert [event.policy_version for event in world.joined] == [2]
            assert world.engine.info().policy_version == 2

    asyncio.run(main())


def test_replicas_are_aligned_to_the_newest_version_that_one_of_them_serves(tmp_path: Path) -> None:
    async def main() -> None:
        async with setting(tmp_path) as world:
            await world.watch.look()
            assert await world.watch.align() == {2}
            (status,) = await world.watch.poll()
            older = OlderReplica(status, policy_version=1)
            world.watch.clients["generator-1"] = older  # type: ignore[assignment]
            assert await world.watch.align() == {2}
            assert older.loads == [2]
            assert [one.policy_version for one in await world.watch.poll()] == [2, 2]

    asyncio.run(main())


def test_a_replica_that_comes_back_during_an_evaluation_serves_the_version_that_is_asked(tmp_path: Path) -> None:
    async def main() -> None:
        async with setting(tmp_path, served=1) as world:
            with world.watch.evaluating(1):
                # A replica that starts now finds this, and nobody may retire the version.
                assert json.loads(world.layout.evaluating.read_text()) == {"policy_version": 1}
                assert (1, "evaluation") in world.repository.holds
                await world.watch.look()
            assert [event.policy_version for event in world.joined] == [1]
            assert not world.layout.evaluating.exists()
            assert (1, "evaluation") not in world.repository.holds

    asyncio.run(main())


def test_a_loss_that_the_supervisor_wrote_down_takes_the_replica_out_and_its_old_address_never_back(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        async with setting(tmp_path) as world:
            await world.watch.look()
            world.lose()
            await world.watch.look()
            await world.watch.look()
            assert [(name, then) for name, _, then in world.losses] == [(NAME, AfterLoss.AWAIT)]
            assert "SIGKILL" in world.losses[0][1]
            assert len(world.joined) == 1
            with pytest.raises(ProducersGone):
                await generate(world)

    asyncio.run(main())


def test_a_process_that_has_the_number_of_one_that_was_lost_before_it_joins_and_stays(tmp_path: Path) -> None:
    """In a container that is started again processes get the same numbers in the same order."""

    async def main() -> None:
        async with setting(tmp_path) as world:
            world.lose(at_wall_s=time.time() - 60.0)
            await world.watch.look()
            await world.watch.look()
            assert len(world.joined) == 1
            assert world.losses == []

    asyncio.run(main())


def test_a_broken_channel_alone_is_a_loss_told_before_the_caller_hears_of_it(tmp_path: Path) -> None:
    async def main() -> None:
        async with setting(tmp_path) as world:
            await world.watch.look()
            world.engine.kill(EngineDead("the worker ended"))
            with pytest.raises(EngineDead):
                await generate(world)
            assert len(world.losses) == 1
            # The supervisor's word of the same loss is no second one.
            world.lose()
            await world.watch.look()
            assert len(world.losses) == 1

    asyncio.run(main())


def test_a_replica_that_could_not_load_is_ended_with_the_reason_where_the_supervisor_looks(tmp_path: Path) -> None:
    async def main() -> None:
        async with setting(tmp_path, faults=FakeFaults(spoil_updates=frozenset({3}))) as world:
            await world.watch.look()
            world.repository.add(optimizer_step=4, history_id="h002")
            with pytest.raises(ReplicaLost):
                await world.watch.load(NAME, 3)
            assert len(world.losses) == 1
            assert world.body.wait(timeout=10) == -9
            record = read_record(world.layout.process_failure(NAME, life="1"))
            assert record is not None
            assert record.process == NAME
            # Whatever comes of a load that was under way elsewhere finds the replica gone.
            with pytest.raises(ReplicaLost):
                await world.watch.load(NAME, 2)
            assert len(world.losses) == 1

    asyncio.run(main())


@pytest.mark.parametrize("state", [None, *ReplicaState])
@pytest.mark.parametrize("failures", [1, 2])
def test_only_the_first_failure_of_a_replica_that_serves_on_is_forgiven(
    state: ReplicaState | None, failures: int
) -> None:
    assert loads_again(state, failures=failures) == (state is ReplicaState.SERVING and failures == 1)


@pytest.mark.parametrize("failures", [1, 2])
def test_a_load_that_left_the_old_version_serving_is_tried_once_more(tmp_path: Path, failures: int) -> None:
    async def main() -> None:
        async with setting(tmp_path) as world:
            await world.watch.look()
            world.repository.add(optimizer_step=4, history_id="h002")
            world.repository.loads_to_fail = failures
            if failures == 1:
                assert set(await world.watch.load(NAME, 3)) >= {"pull_s"}
                assert world.engine.info().policy_version == 3
                assert world.losses == []
            else:
                with pytest.raises(ReplicaLost, match="slow today"):
                    await world.watch.load(NAME, 3)
                assert world.engine.info().policy_version == 2
                assert len(world.losses) == 1
            assert world.controller.events.count("load_failed") == 1

    asyncio.run(main())


def test_a_failed_load_of_a_version_that_was_overtaken_is_not_tried_again_and_costs_no_replica(tmp_path: Path) -> None:
    """The newest versions alone are kept: the one that was asked for may be retired by now."""

    async def main() -> None:
        async with setting(tmp_path) as world:
            await world.watch.look()
            for step in (4, 5):
                world.repository.add(optimizer_step=step, history_id="h002")
            world.repository.loads_to_fail = 1
            with pytest.raises(Overtaken, match="version 3, and 4 is there"):
                await world.watch.load(NAME, 3)
            assert world.losses == []
            assert set(await world.watch.load(NAME, 4)) >= {"pull_s"}
            assert world.engine.info().policy_version == 4

    asyncio.run(main())


def test_without_anybody_to_come_back_who_waits_is_told(tmp_path: Path) -> None:
    async def main() -> None:
        async with setting(tmp_path, policy="degrade") as world:
            await world.watch.look()
            assert not world.watch.none_comes
            world.lose()
            await world.watch.look()
            assert world.losses[0][2] is AfterLoss.DEGRADE
            assert world.watch.none_comes
            assert world.ended == 1

    asyncio.run(main())


def test_a_start_does_not_wait_for_a_replica_that_the_run_goes_on_without(tmp_path: Path) -> None:
    async def main() -> None:
        async with setting(tmp_path, policy="degrade") as world:
            assert world.watch.still_coming(incarnation=1) == [NAME]
            # An earlier incarnation's loss says nothing of this one.
            world.lose()
            assert world.watch.still_coming(incarnation=2) == [NAME]
            with pytest.raises(ProducersGone):
                world.watch.still_coming(incarnation=1)
            assert [then for _, _, then in world.losses] == [AfterLoss.DEGRADE]

    asyncio.run(main())


def test_a_new_session_hears_who_serves_and_who_is_lost(tmp_path: Path) -> None:
    async def main() -> None:
        async with setting(tmp_path) as world:
            await world.watch.look()
            second = Controller()
            world.watch.begin(second, history_id="h002", on_none_left=lambda: None)  # type: ignore[arg-type]
            await world.watch.join_anew()
            assert [event.replica_id for event in second.told if isinstance(event, ReplicaJoined)] == [NAME]
            world.lose()
            await world.watch.look()
            third = Controller()
            world.watch.begin(third, history_id="h002", on_none_left=lambda: None)  # type: ignore[arg-type]
            await world.watch.join_anew()
            assert [told[0] for told in third.told] == [NAME]

    asyncio.run(main())
