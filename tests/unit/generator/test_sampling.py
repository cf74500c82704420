"""Sampling: the right distribution, the right log-prob, one stream per request."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from rollmill.errors import EngineError
from rollmill.generator.engines.embedded.native import Kernels, KernelsUnavailable, load_kernels
from rollmill.generator.engines.embedded.sampling import sample
from rollmill.generator.engines.streams import uniforms
from rollmill.types import SamplingParams

LOGITS = torch.log(torch.tensor([0.5, 0.3, 0.15, 0.05]))


@pytest.fixture(params=["torch", "compiled"])
def kernels(request: pytest.FixtureRequest) -> Kernels | None:
    if request.param == "torch":
        return None
    try:
        kernels = load_kernels()
    except KernelsUnavailable as error:
        pytest.skip(str(error))
    return kernels if kernels.fuses else pytest.skip(f"{kernels.variant} does not weigh")


def draw(
    count: int, logits: torch.Tensor = LOGITS, *, kernels: Kernels | None = None, **params
) -> tuple[np.ndarray, np.ndarray]:
    """Draw tokens 0..count-1 of one request's stream."""
    return sample(
        logits.repeat(count, 1),
        params=[SamplingParams(**{"seed": 5, **params})] * count,
        counters=np.arange(count),
        kernels=kernels,
    )


@pytest.mark.parametrize(
    ("params", "distribution"),
    [
        ({}, [0.5, 0.3, 0.15, 0.05]),
        # squares 0.25, 0.09, 0.0225, 0.0025 over their sum 0.365
        ({"temperature": 0.5}, [0.6849, 0.2466, 0.0616, 0.0068]),
        ({"top_k": 2}, [0.625, 0.375, 0, 0]),
        ({"top_p": 0.8}, [0.625, 0.375, 0, 0]),
        ({"top_p": 0.81}, [0.5263, 0.3158, 0.1579, 0]),
        # top-k first: 0.5263, 0.3158, 0.1579; then top-p 0.8 of those: 0.5263 + 0.3158 = 0.842
        ({"top_k": 3, "top_p": 0.8}, [0.625, 0.375, 0, 0]),
        ({"temperature": 0.5, "top_p": 0.7}, [0.7353, 0.2647, 0, 0]),
    ],
    ids=str,
)
def test_tokens_come_as_often_as_their_log_prob_says(params, distribution, kernels):
    tokens, logprobs = draw(4000, kernels=kernels, **params)
    frequency = np.bincount(tokens, minlength=4) / 4000
    # four standard deviations of a frequency near 1/2: 4 * sqrt(0.25 / 4000) = 0.032
    np.testing.assert_allclose(frequency, distribution, atol=0.032)
    for token in np.unique(tokens):
        assert np.exp(logprobs[tokens == token]) == pytest.approx(distribution[token], abs=1e-4)
    assert logprobs.dtype == np.float32


@pytest.mark.parametrize("vocabulary", [1, 3, 255, 256, 257, 1000])
def test_any_size_of_vocabulary_is_inverted_without_picking_what_has_no_weight(vocabulary, kernels):
    logits = torch.full((vocabulary,), -torch.inf)
    logits[:: max(1, vocabulary // 3)] = 0.0
    tokens, logprobs = draw(500, logits, kernels=kernels)
    kept = np.flatnonzero(logits.numpy() == 0)
    assert set(np.unique(tokens)) == set(kept)
    np.testing.assert_allclose(logprobs, -math.log(len(kept)), atol=1e-6)


def test_a_flat_nucleus_wider_than_the_first_guess_is_sorted_whole():
    logits = torch.zeros(2000)
    tokens, logprobs = draw(50, logits, top_p=0.9)
    np.testing.assert_allclose(logprobs, -math.log(1800), atol=1e-4)
    assert len(np.unique(tokens)) > 40


def test_greedy_takes_the_best_and_reports_its_log_prob_under_temperature_one():
    tokens, logprobs = draw(3, temperature=0.0)
    assert tokens.tolist() == [0, 0, 0]
    np.testing.assert_allclose(np.exp(logprobs), 0.5, atol=1e-6)


def test_a_mixed_batch_gives_each_row_what_it_would_get_alone(kernels):
    params = [
        SamplingParams(seed=1),
        SamplingParams(seed=2, top_p=0.7),
        SamplingParams(seed=3, temperature=0.0),
        SamplingParams(seed=4, temperature=0.7, top_k=3),
        SamplingParams(seed=5, temperature=1.7),
    ]
    counters = np.arange(5)
    logits = torch.randn(5, 300, generator=torch.Generator().manual_seed(0)) * 3
    tokens, logprobs = sample(logits.clone(), params=params, counters=counters, kernels=kernels)
    for row in range(5):
        alone = sample(
            logits[row : row + 1].clone(), params=[params[row]], counters=counters[row : row + 1], kernels=kernels
        )
        assert alone[0][0] == tokens[row]
        assert alone[1][0] == pytest.approx(logprobs[row], abs=1e-6)


def test_bfloat16_logits_are_sampled_in_float32(kernels):
    logits = torch.randn(1, 500, generator=torch.Generator().manual_seed(1)).bfloat16()
    tokens, logprobs = sample(logits, params=[SamplingParams()], counters=np.zeros(1), kernels=kernels)
    exact = logits[0].double().log_softmax(-1)[tokens[0]]
    assert logprobs[0] == pytest.approx(float(exact), abs=1e-5)


def test_both_ways_to_weigh_draw_the_same_tokens(kernels):
    # the last block of 300 is not whole; rows of a temperature of their own
    logits = torch.randn(200, 300, generator=torch.Generator().manual_seed(2)) * 4
    params = [SamplingParams(seed=row, temperature=0.5 + row / 100) for row in range(200)]
    tokens, logprobs = sample(logits.clone(), params=params, counters=np.arange(200), kernels=kernels)
    expected, exact = sample(logits.clone(), params=params, counters=np.arange(200))
    np.testing.assert_array_equal(tokens, expected)
    np.testing.assert_allclose(logprobs, exact, atol=2e-6)


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
@pytest.mark.parametrize("params", [{}, {"temperature": 0.0}, {"top_p": 0.9}], ids=str)
def test_logits_that_are_not_finite_are_an_engine_error(poison, params, kernels):
    logits = LOGITS.clone()
    logits[2] = poison
    with pytest.raises(EngineError, match="not finite"):
        draw(2, logits, kernels=kernels, **params)


def test_a_stream_depends_on_seed_and_counter_alone_and_is_uniform():
    n = 20_000
    numbers = uniforms(np.full(n, 7), np.arange(n))
    assert uniforms(np.array([7]), np.array([123]))[0] == numbers[123]
    assert numbers.min() >= 0
    assert numbers.max() < 1
    # mean of n uniforms: 0.5 with standard deviation sqrt(1 / 12 / n) = 0.002
    assert numbers.mean() == pytest.approx(0.5, abs=0.008)
    assert numbers.var() == pytest.approx(1 / 12, abs=0.002)
    assert np.corrcoef(numbers[:-1], numbers[1:])[0, 1] == pytest.approx(0, abs=0.03)
    neighbours = uniforms(np.arange(n), np.zeros(n))
    assert neighbours.mean() == pytest.approx(0.5, abs=0.008)
    assert np.corrcoef(neighbours[:-1], neighbours[1:])[0, 1] == pytest.approx(0, abs=0.03)
