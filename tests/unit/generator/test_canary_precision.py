"""The canary where an engine rounds: a tolerance of its own for each precision, and old weights told from new ones."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from generator_builders import (
    MAX_LEN,
    VOCABULARY,
    MemoryRepository,
    embedded,
    llama,
    random_model,
    reference_logits,
    tensors_of,
)
from replica_builders import started, why_refused
from rollmill.clock import SystemClock
from rollmill.errors import WeightMismatch
from rollmill.generator.engines.embedded.native import KernelsUnavailable, load_kernels
from rollmill.generator.engines.fake import FakeCanary, FakeEngine, FakeFaults
from rollmill.generator.engines.protocol import EngineInfo
from rollmill.generator.loading import Replica
from rollmill.generator.proof import FLOORS, MARGIN, History, Proof, check_canary, mean_tolerance, movement_since
from rollmill.generator.state import ReplicaState
from rollmill.types import Canary, WeightManifest

IDS = (np.arange(1, 65) * 7919 % VOCABULARY).astype(np.int32)
MIXED = 0.5
"""`weights.canary_tolerance_mixed` as it is by default: the only bound that there is without calibration."""


# -- the law, on numbers alone


def canary(logprobs: np.ndarray, *, tolerance: float = MIXED) -> Canary:
    return Canary(token_ids=IDS, logprobs=logprobs.astype(np.float32), tolerance=tolerance)


def manifest(
    version: int, logprobs: np.ndarray, *, training_dtype: str = "float32", tolerance: float = MIXED
) -> WeightManifest:
    return WeightManifest(
        policy_version=version,
        optimizer_step=version,
        parent=None,
        history_id="h",
        training_dtype=training_dtype,
        serving_dtype="bfloat16",
        tensors={},
        digest=f"digest-{version}",
        transport="shm",
        location="memory",
        published_at_s=0.0,
        canary=canary(logprobs, tolerance=tolerance),
    )


def info(version: int, *, dtype: str = "bfloat16") -> EngineInfo:
    return EngineInfo(
        kind="fake",
        model="fake",
        dtype=dtype,
        vocabulary_size=VOCABULARY,
        max_model_len=MAX_LEN,
        max_num_seqs=1,
        kv_bytes=0,
        capabilities=("canary",),
        policy_version=version,
        digest=f"digest-{version}",
    )


class Run:
    """Log-probs of a trainer that takes steps, and of an engine that rounds."""

    def __init__(
        self,
        seed: int,
        *,
        noise: float = 0.03,
        step: float = 0.01,
        dtype: str = "bfloat16",
        tolerance: float = MIXED,
    ) -> None:
        self._tolerance = tolerance
        self._rng = np.random.default_rng(seed)
        self._noise, self._step, self._dtype = noise, step, dtype
        self.trainer = -self._rng.exponential(3.0, len(IDS) - 1)
        self._scale = np.abs(self.trainer) / 3.0  # unlikely tokens move most, and are rounded worst
        self.version = 0
        self.history = History()

    def next(self, *, missing: float = 0.0, training_dtype: str = "float32", trainer_noise: float = 0.0) -> Proof:
        """Publish a step and prove it on an engine whose log-probs miss a share of what it moved."""
        moved = self._rng.normal(0.0, self._step, len(self.trainer)) if self.version else np.zeros(len(self.trainer))
        scale = self._scale
        self.trainer = self.trainer + moved * scale
        self.version += 1
        scored = self.trainer - missing * moved * scale + self._rng.normal(0.0, self._noise, len(moved)) * scale
        published = self.trainer + self._rng.normal(0.0, trainer_noise, len(moved)) if trainer_noise else self.trainer
        proof = check_canary(
            manifest(self.version, published, training_dtype=training_dtype, tolerance=self._tolerance),
            scored=scored.astype(np.float32),
            info=info(self.version, dtype=self._dtype),
            history=self.history,
        )
        assert proof is not None
        self.history = self.history.then(proof)
        return proof


def test_the_mean_difference_may_be_four_times_that_of_earlier_versions_between_floor_and_tolerance():
    proof = Run(1).next()
    new = canary(np.zeros(63))

    def accepted(first: float, last: float, *, dtype: str = "bfloat16") -> float:
        proofs = [msgspec.structs.replace(proof, mean=mean) for mean in (first, last)]
        return mean_tolerance(new, dtype=dtype, history=History(first=proofs[0], last=proofs[1]))

    assert accepted(0.01, 0.005) == pytest.approx(0.04)
    assert accepted(0.01, 0.02) == pytest.approx(0.08)  # it grows with the weights, a little at a time
    assert accepted(0.001, 0.001) == FLOORS["bfloat16"]
    assert accepted(0.2, 0.2) == MIXED
    assert accepted(0.01, 0.01, dtype="int8") == MIXED  # another precision has its own
    assert mean_tolerance(new, dtype="bfloat16", history=History()) == MIXED


def test_where_an_engine_rounds_an_eighth_of_the_log_probs_may_be_far_off_and_no_more():
    trainer = -np.linspace(1.0, 15.0, 63)
    few, many = trainer.copy(), trainer.copy()
    few[-7:] += 0.8
    many[-9:] += 0.8
    proof = check_canary(manifest(1, trainer), scored=few.astype(np.float32), info=info(1))
    assert proof is not None
    assert (proof.largest, proof.judged) == (pytest.approx(0.8), pytest.approx(0.0, abs=1e-6))
    with pytest.raises(WeightMismatch, match=r"by 0\.8 nats, tolerance 0\.5"):
        check_canary(manifest(1, trainer), scored=many.astype(np.float32), info=info(1))
    with pytest.raises(WeightMismatch, match=r"by 0\.8 nats, tolerance 0\.5"):  # float32 on both sides rounds nothing
        check_canary(manifest(1, trainer), scored=few.astype(np.float32), info=info(1, dtype="float32"))
    few[3] = np.nan
    with pytest.raises(WeightMismatch, match="by nan nats"):
        check_canary(manifest(1, trainer), scored=few.astype(np.float32), info=info(1))


@pytest.mark.parametrize(("dtype", "noise"), [("bfloat16", 0.02), ("int8", 0.05)])
def test_each_precision_is_calibrated_by_its_first_version_and_other_weights_pass_no_more(dtype, noise):
    run = Run(3, noise=noise, dtype=dtype)
    first = run.next()
    assert first.mean_tolerance == MIXED
    second = run.next()
    assert second.mean_tolerance == pytest.approx(MARGIN * first.mean)
    # Weights that are 0.3 nats off pass what was the only bound before.
    off = run.trainer + np.where(np.arange(63) % 2, 0.3, -0.3)
    with pytest.raises(WeightMismatch, match=rf"0\.3 nats on average, tolerance .*version 1 had .* in {dtype}"):
        check_canary(
            manifest(3, run.trainer), scored=off.astype(np.float32), info=info(3, dtype=dtype), history=run.history
        )


@pytest.mark.parametrize(("noise", "step"), [(0.03, 0.001), (0.03, 0.02), (0.06, 0.1), (0.02, 0.4)])
def test_five_hundred_honest_versions_raise_no_alarm(noise, step):
    for seed in range(5):
        run = Run(seed, noise=noise, step=step, tolerance=9.0)  # so that nothing but the movement is judged
        for _ in range(100):
            run.next()


def test_nor_do_those_of_a_trainer_that_rounds_itself():
    for seed in range(5):
        run = Run(seed, noise=0.03, step=0.005, tolerance=9.0)
        for _ in range(60):
            run.next(training_dtype="bfloat16", trainer_noise=0.03)


def test_an_engine_that_stays_where_it_was_is_found_however_small_the_step_was():
    run = Run(4)
    first = run.next()
    moved = run.trainer + 2e-4
    with pytest.raises(WeightMismatch, match=r"0\.0002 nats on average, and the engine's not at all"):
        check_canary(manifest(2, moved), scored=first.scored, info=info(2), history=run.history)


def test_half_of_a_movement_that_is_missing_is_found_once_it_stands_out_of_the_noise():
    caught = []
    for step in (0.002, 0.3):
        run = Run(5, noise=0.02, step=step)
        run.next()
        try:
            run.next(missing=0.6)
        except WeightMismatch:
            caught.append(step)
    assert caught == [0.3]  # the smaller one is hidden by the rounding, and is let pass


def test_a_head_that_is_never_refreshed_is_found_when_its_steps_have_added_up():
    """The first version is what it is compared with: a step of 0.01 is a third of the noise, thirty of them are not."""
    rng = np.random.default_rng(7)
    start = -rng.exponential(3.0, 63)
    direction = rng.normal(0.0, 0.01, 63)
    history, found_at = History(), None
    for version in range(1, 80):
        trainer = start + (version - 1) * direction
        scored = trainer - 0.6 * (trainer - start) + rng.normal(0.0, 0.03, 63)
        try:
            proof = check_canary(
                manifest(version, trainer), scored=scored.astype(np.float32), info=info(version), history=history
            )
        except WeightMismatch as error:
            found_at = version
            assert "since version 1 the trainer's" in str(error)  # noqa: PT017 - which version it is, is the test
            break
        history = history.then(proof)
    assert found_at is not None
    assert 3 < found_at < 40


def test_a_report_says_how_far_the_engine_followed_and_nothing_where_rounding_hides_it():
    clear = Run(8, noise=0.01, step=0.3)
    clear.next()
    assert clear.next().followed == pytest.approx(1.0, abs=0.1)
    hidden = Run(8, noise=0.05, step=0.001)
    hidden.next()
    assert hidden.next().followed is None


def test_the_slope_and_its_error_are_those_of_least_squares():
    first = Run(9).next()
    theirs = np.tile([1.0, -1.0, 2.0], 21)
    ours = theirs + np.tile([0.1, 0.1, 0.0], 21)
    movement = movement_since(
        first,
        canary(first.canary.logprobs + theirs),
        scored=(first.scored + ours).astype(np.float32),
        noise=None,
    )
    # slope = sum(ours * theirs) / sum(theirs^2) = (1.1 + 0.9 + 4) / 6; residuals 0.1, 0.1, 0 on 1, -1, 2;
    # plain error = sqrt(0.02 * 21 / 62 / 126); robust: sqrt(0.02 * 21) / 126 with leverages of 1/126, a little more.
    assert movement.slope == pytest.approx(1.0, abs=1e-5)
    assert movement.error == pytest.approx(max(np.sqrt(0.42 / 62 / 126), np.sqrt(0.42) / 126), rel=0.02)
    assert movement.moved == pytest.approx(4 / 3, abs=1e-5)
    assert not movement.lags(exact=False)


def test_one_token_that_moves_almost_alone_proves_nothing():
    first = Run(10).next()
    theirs = np.full(63, 1e-3)
    theirs[5] = 0.3
    noise = np.random.default_rng(0).normal(0.0, 0.02, 63)
    movement = movement_since(
        first, canary(first.canary.logprobs + theirs), scored=(first.scored + noise).astype(np.float32), noise=None
    )
    assert movement.slope < 0.3
    assert not movement.lags(exact=False)


# -- replicas: the fake, and the embedded engine with an old head under new weights


def steps(count: int, *, size: float) -> list[np.ndarray]:
    """A trainer's log-probs after each of its steps, which go one way."""
    rng = np.random.default_rng(11)
    start, direction = -rng.exponential(3.0, len(IDS) - 1), rng.normal(0.0, size, len(IDS) - 1)
    return [start + number * direction for number in range(count)]


def fake_rig(
    published: list[np.ndarray], *, dtype: str, noise: float, faults: FakeFaults | None = None
) -> tuple[FakeEngine, MemoryRepository]:
    repository, model = MemoryRepository(), random_model(seed=1)
    for logprobs in published:
        repository.put(model, canary=canary(logprobs))
    engine = FakeEngine(
        clock=SystemClock(),
        digest=repository.manifest(1).digest,
        faults=faults,
        canary=FakeCanary(logprobs=lambda version: published[version - 1], dtype=dtype, noise=noise),
    )
    return engine, repository


@pytest.mark.parametrize(("dtype", "noise"), [("bfloat16", 0.02), ("int8", 0.05)])
async def test_the_fake_with_an_old_head_is_found_out_and_dirty_and_without_one_it_serves(dtype, noise):
    published = steps(3, size=0.2)
    engine, repository = fake_rig(published, dtype=dtype, noise=noise, faults=FakeFaults(old_heads={3: 2}))
    replica = await started(engine, repository)
    report = await replica.load(2)
    assert report.canary_followed == pytest.approx(1.0, abs=0.2)
    assert report.canary_mean_tolerance == pytest.approx(MARGIN * 0.8 * noise, rel=0.4)  # mean of |normal|: 0.8 sigma
    with pytest.raises(WeightMismatch, match=r"and the engine's 0\.[2-7]\d times as far"):
        await replica.load(3)
    assert replica.standing.state is ReplicaState.DIRTY
    await engine.close()


async def test_a_fake_whose_head_is_never_refreshed_is_found_before_it_has_served_twenty_small_steps():
    published = steps(40, size=0.02)  # each as large as its rounding
    faults = FakeFaults(old_heads={version: 1 for version in range(2, 41)})
    engine, repository = fake_rig(published, dtype="bfloat16", noise=0.02, faults=faults)
    replica = await started(engine, repository)
    found: list[str] = []
    for version in range(2, 21):
        try:
            await replica.load(version)
        except WeightMismatch as error:
            found.append(f"{version}: {error}")
            break
    assert engine.info().policy_version > 2  # the first ones are hidden
    assert "since version 1 the trainer's" in found[0]
    await engine.close()


CONFIG = llama(tie_word_embeddings=False, hidden_size=64, head_dim=16, initializer_range=0.2)


def trainers_canary(model: Any) -> Canary:
    logprobs = reference_logits(model, IDS.astype(np.int64)).log_softmax(-1)[:-1]
    return canary(logprobs.gather(1, torch.from_numpy(IDS[1:].astype(np.int64))[:, None])[:, 0].numpy())


def after_a_step(model: Any, *, by: float, seed: int) -> Any:
    """The model after a step that moves the head most, as a step on a head that is tied to the embedding does."""
    moved, numbers = copy.deepcopy(model), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in moved.named_parameters():
            size = by if name == "lm_head.weight" else by / 30
            parameter.add_(size * torch.randn(parameter.shape, generator=numbers))
    return moved


class OldHead:
    """Gives an engine each version's weights under the output head of the first one."""

    def __init__(self, engine: Any, head: torch.Tensor) -> None:
        self._engine, self._head = engine, head

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def stage(self, tensors: Any, *, policy_version: int) -> None:
        """Nothing is made ready: what is swapped is other than what was published."""

    async def update(self, tensors: Any, **how: Any) -> Any:
        return await self._engine.update({**tensors, "lm_head.weight": self._head}, **how)


def precision(kind: str) -> dict[str, Any]:
    if kind == "bfloat16":
        return {"dtype": "bfloat16"}
    try:
        load_kernels()
    except KernelsUnavailable as error:
        pytest.skip(str(error))
    return {"quantization": "int8"}


async def embedded_rig(folder: Path, models: list[Any], *, kind: str, old_head: bool) -> tuple[Replica, Any]:
    repository = MemoryRepository()
    for model in models:
        repository.put(model, canary=trainers_canary(model))
    engine = embedded(folder, models[0], digest=repository.manifest(1).digest, **precision(kind))
    served: Any = OldHead(engine, tensors_of(models[0])["lm_head.weight"]) if old_head else engine
    return await started(served, repository), engine


@pytest.mark.parametrize("kind", ["bfloat16", "int8"])
async def test_an_embedded_engine_with_an_old_head_is_found_out_where_the_tolerance_alone_lets_it_pass(tmp_path, kind):
    old = random_model(CONFIG, seed=1)
    new = after_a_step(old, by=0.015, seed=2)
    replica, engine = await embedded_rig(tmp_path / "honest", [old, new], kind=kind, old_head=False)
    try:
        report = await replica.load(2)
        assert report.canary_followed == pytest.approx(1.0, abs=0.15)
    finally:
        await engine.close()
    replica, engine = await embedded_rig(tmp_path / "old", [old, new], kind=kind, old_head=True)
    try:
        with pytest.raises(WeightMismatch, match=r"times as far .*still those of older weights, in whole or in part"):
            await replica.load(2)
        assert replica.standing.state is ReplicaState.DIRTY
        scored = await engine.score(IDS)
        assert np.abs(scored - trainers_canary(new).logprobs).max() < MIXED  # which was all that was asked before
    finally:
        await engine.close()


@pytest.mark.parametrize("kind", ["bfloat16", "int8"])
async def test_twenty_honest_steps_of_an_embedded_engine_are_served(tmp_path, kind):
    models = [random_model(CONFIG, seed=1)]
    for seed in range(20):
        models.append(after_a_step(models[-1], by=0.003, seed=seed + 50))
    replica, engine = await embedded_rig(tmp_path, models, kind=kind, old_head=False)
    try:
        for version in range(2, len(models) + 1):
            report = await replica.load(version)
            assert report.canary_mean is not None
        assert why_refused(replica) is None
    finally:
        await engine.close()
