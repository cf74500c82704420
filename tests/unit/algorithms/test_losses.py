"""Losses, corrections and KL against numbers computed by hand."""

from __future__ import annotations

import math

import pytest
import torch

from rollmill.algorithms.corrections import correction_weights
from rollmill.algorithms.kl import k3
from rollmill.algorithms.losses import (
    LossKind,
    LossSettings,
    LossStatistics,
    TokenBatch,
    cispo_loss,
    clipped_loss,
    loss_denominator,
    policy_loss,
    sequence_log_ratio,
    token_weights,
)
from rollmill.errors import InvariantViolation


def logs(*ratios: float) -> torch.Tensor:
    return torch.tensor([math.log(ratio) for ratio in ratios])


def batch(
    ratios: torch.Tensor,
    advantages: list[float],
    *,
    behaviour: torch.Tensor | None = None,
    mask: list[bool] | None = None,
    index: list[int] | None = None,
    reference: torch.Tensor | None = None,
) -> TokenBatch:
    """Tokens whose log-ratio to the proximal policy (0 everywhere) is given."""
    n = len(advantages)
    return TokenBatch(
        logprobs=ratios.clone().requires_grad_(),
        proximal=torch.zeros(n),
        behaviour=torch.zeros(n) if behaviour is None else behaviour,
        advantages=torch.tensor(advantages),
        mask=torch.ones(n, dtype=torch.bool) if mask is None else torch.tensor(mask),
        sequence_index=torch.zeros(n, dtype=torch.int64) if index is None else torch.tensor(index),
        reference=reference,
    )


class TestClipping:
    def test_ppo_takes_the_worse_of_plain_and_clipped(self) -> None:
        # r = 1.5, A = 1: min(1.5, 1.2) = 1.2, clipped.   r = 1.5, A = -1: min(-1.5, -1.2) = -1.5, not.
        # r = 0.5, A = 1: min(0.5, 0.8) = 0.5, not.        r = 0.5, A = -1: min(-0.5, -0.8) = -0.8, clipped.
        ratio = torch.tensor([1.5, 1.5, 0.5, 0.5])
        advantages = torch.tensor([1.0, -1.0, 1.0, -1.0])
        loss, clipped = clipped_loss(ratio, advantages, clip_low=0.2, clip_high=0.2)
        torch.testing.assert_close(loss, torch.tensor([-1.2, 1.5, -0.5, 0.8]))
        assert clipped.tolist() == [True, False, False, True]

    def test_dapo_clips_higher_above_than_below(self) -> None:
        # r = 1.25 is inside [0.8, 1.28]; r = 1.5 is clipped to 1.28
        loss, clipped = clipped_loss(torch.tensor([1.25, 1.5]), torch.ones(2), clip_low=0.2, clip_high=0.28)
        torch.testing.assert_close(loss, torch.tensor([-1.25, -1.28]))
        assert clipped.tolist() == [False, True]

    def test_a_clipped_token_has_no_gradient(self) -> None:
        tokens = batch(logs(1.5, 1.1), [1.0, 1.0])
        policy_loss(tokens, settings=LossSettings(), denominator=2.0).loss.backward()
        # d(-r A / 2)/d log r = -r A / 2 = -0.55 where it is not clipped
        torch.testing.assert_close(tokens.logprobs.grad, torch.tensor([0.0, -0.55]))

    @pytest.mark.parametrize("kind", ["ppo", "gspo", "cispo"])
    @pytest.mark.parametrize("advantage", [1.0, -1.0])
    @pytest.mark.parametrize("log_ratio", [500.0, -500.0])
    def test_a_ratio_that_would_overflow_keeps_loss_and_gradient_finite(
        self, kind: LossKind, advantage: float, log_ratio: float
    ) -> None:
        tokens = batch(torch.tensor([log_ratio]), [advantage])
        output = policy_loss(tokens, settings=LossSettings(loss=kind), denominator=1.0)
        (gradient,) = torch.autograd.grad(output.loss, tokens.logprobs)
        assert torch.isfinite(output.loss.detach())
        assert torch.isfinite(gradient).all()

    def test_cispo_clips_the_weight_and_keeps_every_gradient(self) -> None:
        # weights clip(1.5) = 1.2 and clip(0.5) = 0.8, detached; loss -w A log p
        logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
        ratio = torch.tensor([1.5, 0.5], requires_grad=True)
        loss, clipped = cispo_loss(logprobs, ratio, torch.tensor([1.0, -1.0]), clip_low=0.2, clip_high=0.2)
        torch.testing.assert_close(loss, torch.tensor([1.2, -1.6]))
        loss.sum().backward()
        torch.testing.assert_close(logprobs.grad, torch.tensor([-1.2, 0.8]))
        assert ratio.grad is None
        assert clipped.tolist() == [True, True]

    def test_gspo_has_one_ratio_per_sequence(self) -> None:
        # sequence 0: (ln 2 + ln 0.5 + ln 4) / 3 = ln(4) / 3, ratio 4 ** (1/3) = 1.587401; sequence 1: ln 3
        log_ratio = logs(2.0, 0.5, 4.0, 3.0)
        index = torch.tensor([0, 0, 0, 1])
        result = sequence_log_ratio(log_ratio, mask=torch.ones(4, dtype=torch.bool), sequence_index=index)
        torch.testing.assert_close(result.exp(), torch.tensor([1.587401, 1.587401, 1.587401, 3.0]))

    def test_gspo_leaves_masked_tokens_out_of_the_mean(self) -> None:
        result = sequence_log_ratio(
            logs(2.0, 8.0), mask=torch.tensor([True, False]), sequence_index=torch.tensor([0, 0])
        )
        torch.testing.assert_close(result.exp(), torch.tensor([2.0, 2.0]))

    def test_gspo_with_sequence_normalisation_is_its_paper_objective(self) -> None:
        # sequence 0, A = 1: ratio sqrt(1.21 * 1) = 1.1, inside the clip: -1.1
        # sequence 1, A = -1: ratio 0.5, clipped to 0.8: +0.8;   mean over 2 sequences: (-1.1 + 0.8) / 2 = -0.15
        tokens = batch(logs(1.21, 1.0, 0.5), [1.0, 1.0, -1.0], index=[0, 0, 1])
        settings = LossSettings(loss="gspo", normalisation="sequence")
        torch.testing.assert_close(
            policy_loss(tokens, settings=settings, denominator=2.0).loss.detach(), torch.tensor(-0.15)
        )


class TestCorrection:
    def test_truncated_weights_are_capped(self) -> None:
        # proximal / behaviour = 4, 1.5, 0.1 with cap 2
        weights = correction_weights(
            "truncated_is",
            proximal=torch.zeros(3),
            behaviour=-logs(4.0, 1.5, 0.1),
            advantages=torch.ones(3),
            mask=torch.ones(3, dtype=torch.bool),
            cap=2.0,
        )
        torch.testing.assert_close(weights, torch.tensor([2.0, 1.5, 0.1]))

    def test_masked_weights_are_zero_outside_the_interval(self) -> None:
        weights = correction_weights(
            "masked_is",
            proximal=torch.zeros(4),
            behaviour=-logs(4.0, 1.5, 0.6, 0.1),
            advantages=torch.ones(4),
            mask=torch.ones(4, dtype=torch.bool),
            cap=2.0,
        )
        torch.testing.assert_close(weights, torch.tensor([0.0, 1.5, 0.6, 0.0]))

    def test_a_masked_token_has_weight_zero_even_if_its_logprob_is_not_a_number(self) -> None:
        weights = correction_weights(
            "truncated_is",
            proximal=torch.zeros(2),
            behaviour=torch.tensor([0.0, math.nan]),
            advantages=torch.ones(2),
            mask=torch.tensor([True, False]),
            cap=2.0,
        )
        assert weights.tolist() == [1.0, 0.0]

    def test_clipped_weights_are_zero_only_where_the_advantage_leads_further_away(self) -> None:
        # proximal / behaviour = 4, 4, 1.5, 0.1, 0.1 with cap 2: up and far, down from far, near, down and far, up again
        weights = correction_weights(
            "clipped_is",
            proximal=torch.zeros(5),
            behaviour=-logs(4.0, 4.0, 1.5, 0.1, 0.1),
            advantages=torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0]),
            mask=torch.ones(5, dtype=torch.bool),
            cap=2.0,
        )
        torch.testing.assert_close(weights, torch.tensor([0.0, 2.0, 1.5, 0.0, 0.1]))

    def test_clipped_weights_of_fresh_samples_are_one(self) -> None:
        weights = correction_weights(
            "clipped_is",
            proximal=torch.tensor([-1.0, -7.0]),
            behaviour=torch.tensor([-1.0, -7.0]),
            advantages=torch.tensor([3.0, -3.0]),
            mask=torch.ones(2, dtype=torch.bool),
            cap=1.01,
        )
        assert weights.tolist() == [1.0, 1.0]

    def test_gspo_gives_up_whole_sequences_and_cispo_no_token(self) -> None:
        # one sequence with ratios 8 and 0.5 (geometric mean 2), one with 8 and 1 (mean 2.8), cap 2.5, A = 1
        def weights(loss: LossKind) -> list[float]:
            tokens = batch(torch.zeros(4), [1.0] * 4, behaviour=-logs(8.0, 0.5, 8.0, 1.0), index=[0, 0, 1, 1])
            settings = LossSettings(loss=loss, correction_cap=2.5)
            policy_loss(tokens, settings=settings, denominator=1.0).loss.backward()
            return [-round(float(value), 4) for value in tokens.logprobs.grad]

        assert weights("ppo") == [0.0, 0.5, 0.0, 1.0]
        # the sequence ratio passes each token's gradient through the mean: half of the sequence's summed weights each
        assert weights("gspo") == [1.5, 1.5, 0.0, 0.0]
        assert weights("cispo") == [2.5, 0.5, 2.5, 1.0]

    def test_decoupled_ppo_weighs_by_the_correction_and_clips_against_the_proximal_policy(self) -> None:
        # policy / proximal = 1.5, clipped to 1.2 with A = 1; proximal / behaviour = 3, capped to 2: loss -2.4
        tokens = batch(logs(1.5), [1.0], behaviour=-logs(3.0))
        output = policy_loss(tokens, settings=LossSettings(correction="truncated_is"), denominator=1.0)
        torch.testing.assert_close(output.loss.detach(), torch.tensor(-2.4))

    def test_without_correction_the_clip_acts_on_policy_over_behaviour(self) -> None:
        # policy / behaviour = 1.0 * 3 = 3, clipped to 1.2
        tokens = batch(logs(1.0), [1.0], behaviour=-logs(3.0))
        output = policy_loss(tokens, settings=LossSettings(correction="none"), denominator=1.0)
        torch.testing.assert_close(output.loss.detach(), torch.tensor(-1.2))
        assert output.statistics.clipped == 1

    def test_with_one_update_per_batch_the_gradient_is_the_corrected_policy_gradient(self) -> None:
        # ratio to the proximal policy is 1, so d loss / d log p = -w A / n with w = min(3, 2) and 0.5
        tokens = batch(torch.zeros(2), [1.0, -2.0], behaviour=-logs(3.0, 0.5))
        policy_loss(tokens, settings=LossSettings(correction="truncated_is"), denominator=2.0).loss.backward()
        torch.testing.assert_close(tokens.logprobs.grad, torch.tensor([-1.0, 0.5]))


class TestKl:
    def test_k3_by_hand(self) -> None:
        # q/p = 2: 2 - ln 2 - 1 = 0.3068528;  q/p = 0.5: 0.5 + ln 2 - 1 = 0.1931472
        result = k3(torch.zeros(2), logs(2.0, 0.5))
        torch.testing.assert_close(result, torch.tensor([0.3068528, 0.1931472]))

    def test_k3_keeps_its_digits_where_policies_are_close(self) -> None:
        # d = 1e-4: d^2 / 2 = 5e-9; exp(d) - 1 - d in float32 would be 0 or 6e-8
        assert float(k3(torch.zeros(1), torch.tensor([1e-4]))) == pytest.approx(5e-9, rel=0.02)

    def test_a_policy_that_ran_far_away_keeps_the_kl_finite(self) -> None:
        logprobs = torch.tensor([-500.0], requires_grad=True)
        value = k3(logprobs, torch.zeros(1))
        (gradient,) = torch.autograd.grad(value.sum(), logprobs)
        assert torch.isfinite(value.detach()).all()
        assert torch.isfinite(gradient).all()

    def test_the_kl_term_pulls_even_where_the_advantage_is_zero(self) -> None:
        # d/dlogp of beta * (q/p - log(q/p) - 1) = beta * (1 - q/p) = 0.1 * (1 - 2)
        tokens = batch(torch.zeros(1), [0.0], reference=logs(2.0))
        output = policy_loss(tokens, settings=LossSettings(kl_coefficient=0.1), denominator=1.0)
        output.loss.backward()
        torch.testing.assert_close(output.loss.detach(), torch.tensor(0.03068528))
        torch.testing.assert_close(tokens.logprobs.grad, torch.tensor([-0.1]))
        assert output.statistics.kl_sum == pytest.approx(0.3068528)


class TestNormalisation:
    def test_denominators_by_hand(self) -> None:
        lengths = [2, 6, 4]
        assert loss_denominator("token", sequence_tokens=lengths, batch_rollouts=4, max_new_tokens=10) == 12
        assert loss_denominator("sequence", sequence_tokens=lengths, batch_rollouts=4, max_new_tokens=10) == 3
        # How many of them are in the loss changes nothing.
        for counted in (lengths, [2, 6, 4, 9], [0, 6]):
            found = loss_denominator("constant", sequence_tokens=counted, batch_rollouts=4, max_new_tokens=10)
            assert found == 40

    def test_token_weights_by_hand(self) -> None:
        mask = torch.tensor([True, True, True, False])
        index = torch.tensor([0, 0, 1, 1])
        for mode, denominator, expected in (
            ("token", 8.0, [1 / 8, 1 / 8, 1 / 8, 0]),
            # sequence 0 has 2 tokens, sequence 1 has 1 that is not masked; 4 sequences in the step
            ("sequence", 4.0, [1 / 8, 1 / 8, 1 / 4, 0]),
            ("constant", 40.0, [1 / 40, 1 / 40, 1 / 40, 0]),
        ):
            weights = token_weights(mode, mask=mask, sequence_index=index, denominator=denominator)  # type: ignore[arg-type]
            torch.testing.assert_close(weights, torch.tensor(expected, dtype=torch.float32))

    def test_masked_tokens_are_in_neither_side_even_if_they_are_not_numbers(self) -> None:
        tokens = batch(torch.tensor([0.0, math.nan]), [1.0, math.inf], mask=[True, False])
        for kind in ("ppo", "gspo", "cispo"):
            output = policy_loss(tokens, settings=LossSettings(loss=kind), denominator=1.0)
            assert math.isfinite(output.loss.item())
            (gradient,) = torch.autograd.grad(output.loss, tokens.logprobs)
            assert gradient.tolist() == [-1.0, 0.0]
            assert output.statistics.tokens == 1

    def test_a_shape_that_would_broadcast_is_refused(self) -> None:
        with pytest.raises(InvariantViolation, match=r"advantages \[1\]"):
            TokenBatch(
                logprobs=torch.zeros(3),
                proximal=torch.zeros(3),
                behaviour=torch.zeros(3),
                advantages=torch.zeros(1),
                mask=torch.ones(3, dtype=torch.bool),
                sequence_index=torch.zeros(3, dtype=torch.int64),
            )


class TestStatistics:
    def test_by_hand_and_additive_over_micro_batches(self) -> None:
        # ratios 1.5 (clipped) and 1.0; correction weights 2 (capped from 3) and 0.5
        settings = LossSettings(correction="truncated_is")
        one = policy_loss(batch(logs(1.5), [1.0], behaviour=-logs(3.0)), settings=settings, denominator=2.0)
        two = policy_loss(batch(logs(1.0), [1.0], behaviour=-logs(0.5)), settings=settings, denominator=2.0)
        summary = (one.statistics + two.statistics).summary()
        assert summary["clip_fraction"] == 0.5
        assert summary["ratio_mean"] == pytest.approx(1.25)
        assert summary["ratio_max"] == pytest.approx(1.5)
        assert summary["correction_weight_mean"] == pytest.approx(1.25)
        assert summary["correction_masked_fraction"] == 0.0

    def test_the_share_of_tokens_that_the_correction_masks_is_reported(self) -> None:
        tokens = batch(logs(1.0, 1.0), [1.0, 1.0], behaviour=-logs(3.0, 1.0))
        output = policy_loss(tokens, settings=LossSettings(correction="masked_is"), denominator=2.0)
        assert output.statistics.summary()["correction_masked_fraction"] == 0.5

    def test_no_tokens_give_zeros(self) -> None:
        assert LossStatistics().summary()["clip_fraction"] == 0.0
