"""The optimizer step: independence of the split, faults that change nothing, resume bit for bit."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from trainer_builders import closed, config, padded_logprobs, random_groups, rollout, scored, tiny_model, turn

from rollmill.errors import CheckpointError, ConfigError, InvariantViolation, NumericalFault
from rollmill.trainer.step import Trainer, warmed_up
from rollmill.types import Group, VersionSpan


def trainer(kind: str = "llama", *, seed: int = 0, **sections: dict[str, object]) -> Trainer:
    return Trainer(tiny_model(kind, seed=seed), config=config(**sections))


def weights(one: Trainer) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in one.named_tensors().items()}


def same(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def at(optimizer_step: int) -> Callable[[int], int]:
    return lambda _: optimizer_step


def on_policy(one: Trainer, groups: list[Group]) -> list[Group]:
    """The groups with behaviour log-probs as the trainer's present weights give them."""
    result = []
    for group in groups:
        members = []
        for member in group.rollouts:
            (only,) = member.turns
            model = tiny_model()
            model.load_state_dict(one.model.state_dict())
            with torch.no_grad():
                logprobs = padded_logprobs(model, member).tolist()
            again = turn(only.prompt_ids.tolist(), only.output_ids.tolist(), logprobs=logprobs)
            members.append(rollout(group.group_id, member.sibling, again))
        result.append(closed(group.group_id, members))
    return result


@pytest.mark.parametrize("normalisation", ["token", "sequence", "constant"])
@pytest.mark.parametrize("loss", ["ppo", "gspo"])
def test_the_update_does_not_depend_on_the_micro_batch_split(normalisation: str, loss: str) -> None:
    groups = random_groups(groups=3, siblings=4)
    results = []
    for budget in (4096, 24, 16):
        one = trainer(algorithm={"normalisation": normalisation, "loss": loss}, trainer={"micro_batch_tokens": budget})
        results.append(one.train_step(groups, optimizer_step_of=at(0)))
    assert results[0].micro_batches == 1
    assert results[2].micro_batches > results[1].micro_batches > 1
    for other in results[1:]:
        assert other.loss == pytest.approx(results[0].loss, rel=1e-5)
        assert other.grad_norm == pytest.approx(results[0].grad_norm, rel=1e-5)


def test_the_first_gradient_is_the_policy_gradient_of_the_padded_forward() -> None:
    one = trainer(trainer={"max_grad_norm": 1e9})
    groups = on_policy(one, random_groups(groups=2, siblings=4))
    plain = tiny_model()
    total = sum(member.output_tokens for group in groups for member in group.rollouts)
    loss = torch.zeros(())
    for group in groups:
        for member, advantage in zip(group.rollouts, group.advantages, strict=True):
            loss = loss - float(advantage) * padded_logprobs(plain, member).sum() / total
    loss.backward()
    expected = torch.cat([p.grad.flatten() for p in plain.parameters() if p.grad is not None]).norm()
    metrics = one.train_step(groups, optimizer_step_of=at(0))
    assert metrics.grad_norm == pytest.approx(float(expected), rel=1e-4)
    assert metrics.statistics.summary()["correction_weight_mean"] == pytest.approx(1.0, abs=1e-4)


def test_training_raises_the_probability_of_rewarded_outputs() -> None:
    one = trainer(trainer={"learning_rate": 5e-3})
    groups = random_groups(groups=2, siblings=4)

    def gap() -> float:
        model = tiny_model()
        model.load_state_dict(one.model.state_dict())
        with torch.no_grad():
            means = [(float(padded_logprobs(model, m).mean()), m.sibling % 2) for g in groups for m in g.rollouts]
        return sum(value if good else -value for value, good in means) / len(means)

    before = gap()
    for step in range(8):
        one.train_step(groups, optimizer_step_of=at(step))
    assert gap() > before + 0.2


def test_behaviour_of_equal_weights_shows_as_numerics_and_older_ones_as_drift() -> None:
    one = trainer(trainer={"learning_rate": 1e-2})
    groups = on_policy(one, random_groups())
    fresh = one.train_step(groups, optimizer_step_of=at(0))
    assert fresh.mismatch_stale.tokens == 0
    assert fresh.mismatch_fresh.tokens == fresh.loss_tokens
    assert fresh.mismatch_fresh.absolute_max < 1e-4
    assert (fresh.staleness_mean, fresh.staleness_max) == (0.0, 0.0)
    stale = one.train_step(groups, optimizer_step_of=at(0))
    assert stale.mismatch_fresh.tokens == 0
    assert stale.mismatch_stale.absolute_max > 1e-3
    assert "mismatch_fresh_mean" not in stale.scalars()
    assert stale.scalars()["mismatch_stale_kl"] >= 0
    assert (stale.staleness_mean, stale.staleness_max) == (1.0, 1.0)


def test_a_rollout_that_crosses_a_weight_swap_says_nothing_about_numerics() -> None:
    # Its last token has the present version, but may have seen KV of the weights before.
    spans = (VersionSpan(0, 2, 1), VersionSpan(2, 3, 2))
    members = [rollout("g", i, turn([1, 2], [3, 4, 5 + i], spans=spans), outcome=scored(float(i))) for i in range(2)]
    one = trainer()
    one.optimizer_step = 1
    metrics = one.train_step([closed("g", members)], optimizer_step_of=lambda version: version - 1)
    assert (metrics.mismatch_stale.tokens, metrics.mismatch_fresh.tokens) == (6, 0)
    assert metrics.staleness_max == 1.0


def test_the_gradient_is_clipped_to_the_global_norm() -> None:
    groups = random_groups()
    free = trainer(trainer={"max_grad_norm": 1e9})
    norm = free.train_step(groups, optimizer_step_of=at(0)).grad_norm
    # with plain momentum statistics after one step exp_avg is (1 - beta1) g, so it shows the gradient that was used
    clipped = trainer(trainer={"max_grad_norm": norm / 4, "betas": (0.9, 0.99)})
    assert clipped.train_step(groups, optimizer_step_of=at(0)).grad_norm == pytest.approx(norm, rel=1e-6)
    used = torch.cat([t.flatten() for name, t in clipped.state().optimizer.items() if name.startswith("exp_avg.")])
    assert float(used.norm()) / 0.1 == pytest.approx(norm / 4, rel=1e-4)


class TestFaults:
    def poisoned(self, one: Trainer) -> None:
        """Make the embedding of token 7 infinite: only sequences that read it are hurt."""
        with torch.no_grad():
            one.model.get_input_embeddings().weight[7] = math.inf  # type: ignore[index]

    def groups(self) -> list[Group]:
        good = closed("good", [rollout("good", i, turn([1, 2], [3, 4, 5 + i])) for i in range(2)])
        bad = closed("bad", [rollout("bad", 0, turn([1, 3], [3, 7, 4])), rollout("bad", 1, turn([1, 3], [4, 4, 5]))])
        return [good, bad]

    def test_a_loss_that_is_not_finite_names_the_rollouts_and_changes_nothing(self) -> None:
        one = trainer("qwen2")
        self.poisoned(one)
        before = weights(one)
        with pytest.raises(NumericalFault, match=r"bad/0\.1") as caught:
            one.train_step(self.groups(), optimizer_step_of=at(0))
        assert caught.value.rollout_ids == ("bad/0.1",)
        assert same(weights(one), before)
        assert one.optimizer_step == 0
        assert one.state().optimizer == {}
        assert all(p.grad is None for p in one.model.parameters())

    def test_a_gradient_that_is_not_finite_changes_nothing(self) -> None:
        one = trainer()
        before = weights(one)
        # the forward pass is fine; the gradient of one weight is not
        handle = one.model.get_output_embeddings().weight.register_hook(lambda g: g * math.nan)  # type: ignore[union-attr]
        with pytest.raises(NumericalFault, match="gradient of step 1") as caught:
            one.train_step(random_groups(groups=1), optimizer_step_of=at(0))
        assert caught.value.rollout_ids == ("g0/0.1", "g0/1.1", "g0/2.1", "g0/3.1")
        assert same(weights(one), before)
        handle.remove()
        one.train_step(random_groups(groups=1), optimizer_step_of=at(0))
        assert not same(weights(one), before)

    def test_after_a_fault_the_next_step_is_as_if_nothing_had_been(self) -> None:
        groups = random_groups()
        broken = trainer()
        handle = broken.model.get_output_embeddings().weight.register_hook(lambda g: g * math.nan)  # type: ignore[union-attr]
        with pytest.raises(NumericalFault):
            broken.train_step(groups, optimizer_step_of=at(0))
        handle.remove()
        untouched = trainer()
        broken.train_step(groups, optimizer_step_of=at(0))
        untouched.train_step(groups, optimizer_step_of=at(0))
        assert same(weights(broken), weights(untouched))

    def test_a_batch_without_a_gradient_is_our_own_bug(self) -> None:
        equal = closed("g", [rollout("g", i, turn([1], [2]), outcome=scored(1.0)) for i in range(2)])
        with pytest.raises(InvariantViolation, match="non-zero advantage"):
            trainer().train_step([equal], optimizer_step_of=at(0))


class TestState:
    def test_a_restored_trainer_goes_on_bit_for_bit(self) -> None:
        first, second = random_groups(seed=1), random_groups(seed=2)
        straight = trainer(trainer={"warmup_steps": 3})
        straight.train_step(first, optimizer_step_of=at(0))
        state = straight.state()
        saved = (
            {name: t.clone() for name, t in state.model.items()},
            {name: t.clone() for name, t in state.optimizer.items()},
            dict(state.state),
        )
        straight.train_step(second, optimizer_step_of=at(0))
        resumed = trainer(seed=99, trainer={"warmup_steps": 3})
        resumed.load_state(model=saved[0], optimizer=saved[1], state=saved[2])
        assert resumed.optimizer_step == 1
        resumed.train_step(second, optimizer_step_of=at(0))
        assert same(weights(resumed), weights(straight))
        assert same(resumed.state().optimizer, straight.state().optimizer)

    def test_two_runs_are_bit_identical(self) -> None:
        results = []
        for _ in range(2):
            one = trainer()
            for step in range(2):
                one.train_step(random_groups(seed=step), optimizer_step_of=at(step))
            results.append(weights(one))
        assert same(*results)

    def test_tied_embeddings_are_published_once(self) -> None:
        tied, untied = trainer("llama").named_tensors(), trainer("qwen2").named_tensors()
        assert "lm_head.weight" not in tied
        assert "lm_head.weight" in untied
        assert len({t.data_ptr() for t in tied.values()}) == len(tied)

    def test_a_state_of_another_model_is_refused_and_changes_nothing(self) -> None:
        one, other = trainer("llama"), trainer("qwen2")
        before = weights(one)
        state = other.state()
        with pytest.raises(CheckpointError, match="another model"):
            one.load_state(model=state.model, optimizer=state.optimizer, state=state.state)
        assert same(weights(one), before)

    def test_a_state_before_the_first_update_has_no_moments(self) -> None:
        one = trainer()
        state = one.state()
        assert state.optimizer == {}
        other = trainer(seed=5)
        other.load_state(model=state.model, optimizer=state.optimizer, state=state.state)
        assert same(weights(other), weights(one))


class TestReference:
    def test_without_a_coefficient_no_reference_is_kept(self) -> None:
        assert trainer()._reference is None

    def test_kl_to_the_initial_policy_starts_at_zero_and_grows(self) -> None:
        one = trainer(algorithm={"kl_coefficient": 0.1}, trainer={"learning_rate": 1e-2})
        groups = random_groups()
        first = one.train_step(groups, optimizer_step_of=at(0)).scalars()["kl_reference"]
        second = one.train_step(groups, optimizer_step_of=at(0)).scalars()["kl_reference"]
        assert first == 0.0
        assert second > 1e-4

    def test_kl_holds_the_policy_nearer_to_where_it_began(self) -> None:
        groups = random_groups()

        def distance(coefficient: float) -> float:
            one = trainer(algorithm={"kl_coefficient": coefficient}, trainer={"learning_rate": 1e-2})
            for _ in range(6):
                metrics = one.train_step(groups, optimizer_step_of=at(0))
            return metrics.scalars()["kl_reference"]

        assert distance(5.0) < 0.5 * distance(1e-6)


def test_bfloat16_autocast_keeps_float32_master_weights_and_nearly_the_same_gradient() -> None:
    full, half = trainer(), trainer(trainer={"dtype": "bfloat16"})
    # Near the edge of the correction, rounding would decide which tokens are in the gradient at all.
    groups = on_policy(full, random_groups())
    one = full.train_step(groups, optimizer_step_of=at(0))
    two = half.train_step(groups, optimizer_step_of=at(0))
    assert half.training_dtype == "bfloat16"
    assert all(t.dtype == torch.float32 for t in half.named_tensors().values())
    assert two.grad_norm == pytest.approx(one.grad_norm, rel=0.05)
    assert two.loss == pytest.approx(one.loss, abs=0.02)


def test_the_canary_is_what_a_plain_forward_gives() -> None:
    one = trainer(generator={"dtype": "float32"})
    ids = np.arange(6, dtype=np.int32)
    canary = one.canary(ids)
    member = rollout("g", 0, turn([0], ids[1:].tolist()))
    expected = padded_logprobs(tiny_model(), member).detach().numpy()
    np.testing.assert_allclose(canary.logprobs, expected, atol=1e-5)
    assert canary.tolerance == 1e-3


def test_the_canary_has_the_wider_tolerance_where_either_side_computes_in_bfloat16() -> None:
    both = trainer(generator={"dtype": "bfloat16"}, trainer={"dtype": "bfloat16"})
    assert both.canary(np.arange(4)).tolerance == 0.5
    assert trainer(generator={"dtype": "bfloat16"}).canary(np.arange(4)).tolerance == 0.5


def test_the_heartbeat_is_called_before_every_micro_batch() -> None:
    beats: list[int] = []
    one = trainer(trainer={"micro_batch_tokens": 16})
    metrics = one.train_step(random_groups(), optimizer_step_of=at(0), heartbeat=lambda: beats.append(1))
    assert len(beats) == metrics.micro_batches > 1


def test_dapo_with_a_normalisation_that_is_not_its_own_is_refused() -> None:
    with pytest.raises(ConfigError, match="normalised over tokens"):
        trainer(algorithm={"loss": "dapo", "clip_high": 0.28, "normalisation": "sequence"})


@pytest.mark.parametrize("loss", ["ppo", "gspo", "dapo", "cispo"])
@pytest.mark.parametrize("correction", ["none", "truncated_is", "masked_is", "clipped_is"])
def test_every_loss_and_correction_trains_on_stale_samples(loss: str, correction: str) -> None:
    one = trainer(algorithm={"loss": loss, "correction": correction, "clip_high": 0.28})
    one.optimizer_step = 1
    metrics = one.train_step(random_groups(), optimizer_step_of=at(0))
    assert math.isfinite(metrics.loss)
    assert metrics.grad_norm > 0


def test_warm_up_is_linear_and_then_constant() -> None:
    assert [warmed_up(4.0, optimizer_step=step, warmup_steps=4) for step in range(6)] == [1, 2, 3, 4, 4, 4]
    assert warmed_up(4.0, optimizer_step=0, warmup_steps=0) == 4.0


def test_packing_is_reported_against_padded_rows() -> None:
    # 2 groups of 2: prompts of 3, completions of 4 -> 4 rows of 7 padded; packed 2 * (3 + 2 * 3)
    groups = [
        closed(name, [rollout(name, i, turn([k, 2, 3], [4, 5, 6, 7 + i])) for i in range(2)])
        for k, name in enumerate(("a", "b"))
    ]
    metrics = trainer().train_step(groups, optimizer_step_of=at(0))
    assert (metrics.padded_tokens, metrics.computed_tokens, metrics.loss_tokens) == (28, 18, 16)
    assert metrics.scalars()["packing_gain"] == pytest.approx(28 / 18)
