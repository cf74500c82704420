"""The trainer's loop over the real store, repository and checkpoints, and against the real engine, on a tiny Llama."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from rollmill.algorithms.grouping import close_group
from rollmill.buffer.protocol import Assignment, CommitPoint, Transition
from rollmill.buffer.sqlite import SqliteStore
from rollmill.clock import SystemClock
from rollmill.config.schema import RollmillConfig
from rollmill.generator.engines.embedded.engine import EmbeddedEngine
from rollmill.generator.engines.embedded.settings import EmbeddedSettings
from rollmill.trainer.checkpointing import CheckpointFolder
from rollmill.trainer.loop import TrainerLoop
from rollmill.trainer.model import load_policy
from rollmill.trainer.step import Trainer
from rollmill.types import GenerateRequest, Group, Rollout, SamplingParams, Turn
from rollmill.weights import LocalModelRepository, prepare, read_checkpoint
from unit.trainer.trainer_builders import config, random_groups, rollout, scored

pytestmark = pytest.mark.integration

STEPS = 4


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare("tiny-llama", cache_dir=tmp_path_factory.mktemp("models")).path


class OnDisk:
    """One incarnation of a trainer over a run directory."""

    def __init__(self, root: Path, model_path: Path, *, history_id: str) -> None:
        self.config: RollmillConfig = config(
            trainer={"learning_rate": 1e-3, "checkpoint_every_steps": 2}, generator={"dtype": "float32"}
        )
        self.checkpoints = root / "checkpoints"
        self.store = SqliteStore(root / "store.sqlite")
        self.repository = LocalModelRepository(root / "weights", transport="file", keep_versions=9)
        self.history_id = history_id
        self._model_path = model_path

    def run(
        self, trainer: Trainer, *, wait: Callable[[float], bool] = lambda _: False, commit: CommitPoint | None = None
    ) -> int:
        loop = TrainerLoop(
            config=self.config,
            trainer=trainer,
            store=self.store,
            repository=self.repository,
            clock=SystemClock(),
            wait=wait,
            ring=lambda: None,
            checkpoints=CheckpointFolder(self.checkpoints, model=self._model_path, keep=9),
            history_id=self.history_id,
            canary_token_ids=np.arange(1, 17, dtype=np.int32),
            should_stop=lambda: False,
            committed_step=None if commit is None else commit.optimizer_step,
            parent_version=None if commit is None else commit.policy_version,
        )
        return loop.run().optimizer_step

    def assign(self, step: int, *, put: bool = True) -> None:
        groups = [
            msgspec.structs.replace(group, group_id=f"s{step}-{group.group_id}", oldest_optimizer_step=0)
            for group in random_groups(seed=step)
        ]
        batch = Assignment(
            batch_id=100 * int(not put) + step, optimizer_step=step, group_ids=tuple(g.group_id for g in groups)
        )
        self.store.apply(Transition(puts=tuple(groups) if put else (), assignments=(batch,)))


def test_a_run_that_crashed_after_its_checkpoint_resumes_bit_for_bit(tmp_path: Path, model_path: Path) -> None:
    first = OnDisk(tmp_path, model_path, history_id="h001")
    first.config = first.config.model_copy(
        update={"schedule": first.config.schedule.model_copy(update={"max_staleness": STEPS})}
    )
    for step in range(STEPS):
        first.assign(step)
    first.store.set_note("phase", "finishing")
    assert first.run(Trainer(load_policy(model_path), config=first.config)) == STEPS
    digests = {m.optimizer_step: m.digest for m in first.repository.manifests()}
    first.store.close()

    # as if the process had died after step 2: the commit point is the checkpoint of step 2
    path = tmp_path / "checkpoints" / "step-000002"
    checkpoint = read_checkpoint(path)
    commit = msgspec.convert(checkpoint.commit, CommitPoint)
    second = OnDisk(tmp_path, model_path, history_id="h002")
    second.config = first.config
    reconciliation = second.store.reconcile(commit)
    assert sorted(reconciliation.trained_group_ids) == ["s0-g0", "s0-g1", "s1-g0", "s1-g1"]
    assert len(reconciliation.released_group_ids) == 4
    for step in range(2, STEPS):
        second.assign(step, put=False)
    trainer = Trainer(load_policy(path), config=second.config)
    trainer.load_state(
        model=checkpoint.model_tensors(),
        optimizer=checkpoint.optimizer_tensors(),
        state=checkpoint.trainer_state,
    )
    assert second.run(trainer, commit=commit) == STEPS
    resumed = {m.optimizer_step: m.digest for m in second.repository.manifests() if m.history_id == "h002"}
    assert resumed == {step: digests[step] for step in (2, 3, 4)}
    assert len(set(digests.values())) == STEPS + 1
    statistics = second.store.statistics()
    assert (statistics.trained_groups, statistics.buffered_groups) == (2 * STEPS, 0)
    second.store.close()


def test_the_checkpoint_is_the_published_model_and_loads_as_one(tmp_path: Path, model_path: Path) -> None:
    run = OnDisk(tmp_path, model_path, history_id="h001")
    run.assign(0)
    run.store.set_note("phase", "finishing")
    trainer = Trainer(load_policy(model_path), config=run.config)
    run.run(trainer)
    latest = run.repository.latest()
    assert latest is not None
    checkpoint = read_checkpoint(tmp_path / "checkpoints" / "step-000001")
    assert checkpoint.model_digest == latest.digest
    again = dict(load_policy(checkpoint.path).named_parameters())
    published = run.repository.load(latest.policy_version)
    assert again.keys() == published.keys()
    assert all(torch.equal(again[name], tensor) for name, tensor in published.items())
    run.store.close()


async def _sample(engine: EmbeddedEngine, prompt: np.ndarray, *, sibling: int, temperature: float) -> Turn:
    return await engine.generate(
        GenerateRequest(
            request_id=f"r{prompt[0]}-{sibling}",
            prompt_ids=prompt,
            group_key=f"p{prompt[0]}",
            sampling=SamplingParams(temperature=temperature, max_new_tokens=4 + sibling, seed=sibling),
        )
    )


def _groups(turns: list[list[Turn]], *, temperature: float, settings: RollmillConfig) -> list[Group]:
    def member(g: int, i: int, turn: Turn) -> Rollout:
        return rollout(f"g{g}", i, turn, outcome=scored(float(i % 2)), temperature=temperature)

    return [
        close_group(
            f"g{g}",
            g,
            [member(g, i, turn) for i, turn in enumerate(siblings)],
            settings=settings.algorithm,
            optimizer_step_of=lambda _: 0,
        )
        for g, siblings in enumerate(turns)
    ]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
async def test_the_engines_logprobs_are_the_trainers_under_equal_weights(model_path: Path, temperature: float) -> None:
    settings = config(generator={"dtype": "float32"})
    trainer = Trainer(load_policy(model_path), config=settings)
    engine = EmbeddedEngine(
        model_path,
        settings=EmbeddedSettings(dtype="float32", max_num_seqs=8, max_model_len=64),
        tensors=trainer.named_tensors(),
        policy_version=1,
        digest="d",
        clock=SystemClock(),
    )
    try:
        prompts = [np.arange(first, first + 9, dtype=np.int32) for first in (3, 40)]
        turns = [
            await asyncio.gather(*[_sample(engine, p, sibling=i, temperature=temperature) for i in range(4)])
            for p in prompts
        ]
        canary = trainer.canary(np.arange(1, 17, dtype=np.int32))
        scores = await engine.score(canary.token_ids)
    finally:
        await engine.close()
    np.testing.assert_allclose(scores, canary.logprobs, atol=1e-5)
    metrics = trainer.train_step(
        _groups([list(siblings) for siblings in turns], temperature=temperature, settings=settings),
        optimizer_step_of=lambda _: 0,
    )
    assert metrics.mismatch_fresh.tokens == 2 * (4 + 5 + 6 + 7)
    assert metrics.mismatch_fresh.absolute_max < 1e-5
    assert metrics.statistics.summary()["correction_weight_mean"] == pytest.approx(1.0, abs=1e-5)
