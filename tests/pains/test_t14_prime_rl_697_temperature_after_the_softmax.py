"""T14: log-probs under the temperature that sampled, in engine and trainer alike.

Reported elsewhere: log-probs are divided by the temperature after the softmax (prime-rl 697); temperature 0.6 gives a
first-token importance ratio of 2 (TRL 4159); temperature 0 divides by zero in the trainer (slime 2197). Here the logits
are divided before the softmax on both sides, so the ratio under equal weights is 1. Temperature 0 is for evaluation;
its log-prob is that of temperature 1.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from generator_builders import SteppedEngine, all_ids, prompt_of, random_model, reference_logits, request
from rollmill.generator.engines.embedded.sampling import sample
from rollmill.trainer.head import head_logprobs
from rollmill.types import SamplingParams


def test_logits_2_and_0_at_temperature_one_half():
    # logits / 0.5 = [4, 0]; log(1 / (1 + e^-4)) = -0.0181, log(e^-4 / (1 + e^-4)) = -4.0181
    expected = {0: -0.0181, 1: -4.0181}
    draws = 400
    tokens, logprobs = sample(
        torch.tensor([[2.0, 0.0]]).repeat(draws, 1),
        params=[SamplingParams(temperature=0.5, seed=3)] * draws,
        counters=np.arange(draws),
    )
    assert set(tokens) == {0, 1}
    for token, logprob in zip(tokens, logprobs, strict=True):
        assert logprob == pytest.approx(expected[int(token)], abs=1e-4)


@pytest.mark.parametrize("temperature", [0.5, 0.6, 1.0, 1.5])
def test_the_trainers_ratio_to_the_engine_under_equal_weights_is_1_for_every_token(tmp_path, temperature):
    model = random_model(seed=1)
    engine = SteppedEngine(tmp_path, model)
    engine.submit(request("a", prompt_of(6), temperature=temperature, max_new_tokens=20))
    engine.finish()
    turn = engine.turn("a")
    with torch.no_grad():
        hidden = model.model(torch.from_numpy(all_ids(turn))[None]).last_hidden_state[0, 5:-1]
        proximal = head_logprobs(
            hidden,
            model.lm_head.weight,
            None,
            targets=torch.from_numpy(turn.output_ids.astype(np.int64)),
            temperature=torch.full((20,), temperature),
        ).numpy()
    np.testing.assert_allclose(np.exp(proximal - turn.behavior_logprobs), 1.0, atol=1e-4)


def test_temperature_0_takes_the_best_token_and_divides_by_nothing(tmp_path):
    model = random_model(seed=1)
    engine = SteppedEngine(tmp_path, model)
    engine.submit(request("a", prompt_of(6), temperature=0.0, max_new_tokens=20))
    engine.finish()
    turn = engine.turn("a")
    logprobs, best = reference_logits(model, all_ids(turn))[5:-1].log_softmax(-1).max(-1)
    assert turn.output_ids.tolist() == best.tolist()
    np.testing.assert_allclose(turn.behavior_logprobs, logprobs.numpy(), atol=1e-4)
