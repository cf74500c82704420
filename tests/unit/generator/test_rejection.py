"""Which guesses of a draft count: by hand, by sums over all cases, and by counting."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollmill.errors import EngineError
from rollmill.generator.engines.embedded.rejection import Draft, counts, instead, verify
from rollmill.generator.engines.embedded.sampling import pick, sample, shaped, stream, weigh
from rollmill.generator.engines.embedded.speculation import Guess
from rollmill.generator.engines.streams import DRAFT_LANE
from rollmill.types import SamplingParams

TARGET = torch.log(torch.tensor([0.5, 0.3, 0.15, 0.05]))
DRAFT = torch.log(torch.tensor([0.1, 0.2, 0.3, 0.4]))


def drafted(logits: torch.Tensor, *, params: list[SamplingParams], counters: np.ndarray) -> list[Draft]:
    """One guess per row, as the engine's drafter makes it."""
    weights, totals = weigh(shaped(logits.clone(), params=params), params=params)
    tokens, _ = pick(weights, stream(params, counters + DRAFT_LANE))
    chances = weights.numpy()[np.arange(len(tokens)), tokens] / totals
    return [
        Draft((int(token),), 0, (float(chance),), (weights[row],), (float(totals[row]),))
        for row, (token, chance) in enumerate(zip(tokens, chances, strict=True))
    ]


def behind_each_other(drafts: list[Draft]) -> Draft:
    """Several guesses of one token each as one of several tokens."""
    return Draft(
        tokens=tuple(token for draft in drafts for token in draft.tokens),
        chances=tuple(chance for draft in drafts for chance in draft.chances),
        weights=tuple(row for draft in drafts for row in draft.weights),
        totals=tuple(total for draft in drafts for total in draft.totals),
    )


def first_tokens(count: int, **sampling) -> tuple[np.ndarray, np.ndarray, int]:
    """The token behind which one was guessed, `count` times; log-probs; how many guesses counted."""
    params = [SamplingParams(**{"seed": seed, **sampling}) for seed in range(count)]
    drafts = drafted(DRAFT.repeat(count, 1), params=params, counters=np.zeros(count, dtype=int))
    turns = verify(
        TARGET.repeat(2 * count, 1),
        params=[p for p in params for _ in range(2)],
        counters=np.tile([0, 1], count),
        guesses=drafts,
    )
    assert {len(turn) for turn in turns} <= {1, 2}
    right = sum(len(turn) == 2 for turn in turns)
    return np.array([turn[0][0] for turn in turns]), np.array([turn[0][1] for turn in turns]), right


def test_a_guess_counts_as_often_as_the_model_has_it_more_than_the_draft():
    # p / q = 0.3 / 0.5 = 0.6: the uniform number decides; p > q counts always; p = 0 never.
    found = counts(
        np.array([0.0, 0.59, 0.61, 0.999, 0.0]),
        target=np.array([0.3, 0.3, 0.3, 0.5, 0.0]),
        draft=np.array([0.5, 0.5, 0.5, 0.4, 0.2]),
    )
    assert found.tolist() == [True, True, False, True, False]


def test_in_its_place_comes_what_the_model_has_more_than_the_draft():
    target = torch.tensor([[0.5, 0.3, 0.2], [0.2, 0.5, 0.3]])
    draft = torch.tensor([[0.2, 0.5, 0.3], [0.1, 0.1, 0.8]])
    torch.testing.assert_close(instead(target, draft), torch.tensor([[0.3, 0.0, 0.0], [0.1, 0.4, 0.0]]))
    # Equal distributions leave nothing; only rounding refuses a guess then.
    torch.testing.assert_close(instead(target, target), target)


WEIGHTS = st.lists(st.integers(0, 20), min_size=2, max_size=9).filter(any)


@settings(deadline=None)
@given(WEIGHTS, WEIGHTS)
def test_both_together_are_the_model_whatever_the_draft(ours, theirs):
    """Sum over every guess of its chance, whether it counts, and what comes in its place: exactly the model's."""
    size = max(len(ours), len(theirs))
    p, q = (torch.tensor([*w, *[0] * (size - len(w))], dtype=torch.float64) / sum(w) for w in (ours, theirs))
    out = torch.zeros(size, dtype=torch.float64)
    rest = instead(p[None], q[None])[0]
    for token in np.flatnonzero(q.numpy()):
        # `counts` over a fine grid of uniform numbers is the probability of counting.
        grid = (np.arange(2000) + 0.5) / 2000
        kept = counts(grid, target=np.full(2000, float(p[token])), draft=np.full(2000, float(q[token]))).mean()
        exact = min(1.0, float(p[token] / q[token]))
        assert kept == pytest.approx(exact, abs=1 / 2000)
        out[token] += q[token] * exact
        out += q[token] * (1 - exact) * rest / rest.sum()
    torch.testing.assert_close(out, p, atol=1e-12, rtol=0.0)
    assert not (rest[p == 0] > 0).any()


@pytest.mark.parametrize(
    ("sampling", "distribution", "overlap"),
    [
        # The overlap is the sum of the smaller probabilities, and as often does a guess count.
        ({}, [0.5, 0.3, 0.15, 0.05], 0.1 + 0.2 + 0.15 + 0.05),
        # top-k 2: the model has 0.625, 0.375; the draft 3/7 and 4/7 of the last two
        ({"top_k": 2}, [0.625, 0.375, 0.0, 0.0], 0.0),
        # top-k 3: the model 0.5263, 0.3158, 0.1579; the draft 0, 0.2222, 0.3333, 0.4444
        ({"top_k": 3}, [0.5263, 0.3158, 0.1579, 0.0], 0.2222 + 0.1579),
        # top-p 0.85: the model 0.5, 0.3, 0.15 over 0.95; the draft 0.4, 0.3, 0.2 over 0.9
        ({"top_p": 0.85}, [0.5263, 0.3158, 0.1579, 0.0], 0.2222 + 0.1579),
        # squares: the model 0.25, 0.09, 0.0225, 0.0025 over 0.365; the draft 0.01, 0.04, 0.09, 0.16 over 0.3
        ({"temperature": 0.5}, [0.6849, 0.2466, 0.0616, 0.0068], 0.0333 + 0.1333 + 0.0616 + 0.0068),
    ],
    ids=str,
)
def test_tokens_come_as_often_as_their_log_prob_says_and_guesses_count_as_often_as_both_agree(
    sampling, distribution, overlap
):
    tokens, logprobs, right = first_tokens(4000, **sampling)
    frequency = np.bincount(tokens, minlength=4) / 4000
    # four standard deviations of a frequency near 1/2: 4 * sqrt(0.25 / 4000) = 0.032
    np.testing.assert_allclose(frequency, distribution, atol=0.032)
    assert right / 4000 == pytest.approx(overlap, abs=0.032)
    for token in np.unique(tokens):
        assert np.exp(logprobs[tokens == token]) == pytest.approx(distribution[token], abs=1e-4)


def test_a_guess_that_the_models_filters_leave_out_never_counts():
    tokens, _, right = first_tokens(500, top_k=1)
    assert set(tokens) == {0}
    assert right == 0


def test_without_guesses_it_is_plain_sampling_bit_by_bit():
    logits = torch.randn(6, 300, generator=torch.Generator().manual_seed(0)) * 3
    params = [
        SamplingParams(seed=n, temperature=t, top_k=k, top_p=p)
        for n, (t, k, p) in enumerate([(1, 0, 1), (0, 0, 1), (0.7, 5, 1), (1, 0, 0.8), (1.3, 9, 0.9), (1, 0, 1)])
    ]
    tokens, logprobs = sample(logits.clone(), params=params, counters=np.arange(6))
    turns = verify(logits.clone(), params=params, counters=np.arange(6), guesses=[Guess()] * 6)
    assert turns == [[(token, logprob)] for token, logprob in zip(tokens.tolist(), logprobs.tolist(), strict=True)]


def test_sequences_with_and_without_guesses_and_greedy_ones_share_a_pass():
    logits = torch.randn(8, 40, generator=torch.Generator().manual_seed(4)) * 2
    plain, greedy, guessing = SamplingParams(seed=1), SamplingParams(seed=2, temperature=0.0), SamplingParams(seed=3)
    best = logits.argmax(-1).tolist()
    copied = Guess((best[1], 39), 2)  # of the kind that looks up what was said: judged by what is drawn
    # A draft that is sure of what the model takes for likely: the model's own distribution, twice.
    mine = drafted(logits[5:7], params=[guessing] * 2, counters=np.array([7, 8]))
    both = behind_each_other(mine)
    params = [plain, *[greedy] * 4, *[guessing] * 3]
    counters = np.array([4, 0, 1, 2, 3, 7, 8, 9])
    expected, chances = sample(logits.clone(), params=params, counters=counters)
    turns = verify(logits.clone(), params=params, counters=counters, guesses=[Guess(), copied, Guess(), both])
    assert turns[0] == [(expected[0], chances[0])]
    assert [token for token, _ in turns[1]] == best[1:4]
    assert [token for token, _ in turns[2]] == best[4:5]
    # Both guesses count, for both distributions are equal, and the last token is the one drawn without a guess.
    assert [token for token, _ in turns[3]] == [*both.tokens, expected[7]]
    exact = logits.log_softmax(-1)
    for row, (token, logprob) in enumerate(turns[3], start=5):
        assert logprob == pytest.approx(float(exact[row, token]), abs=1e-5)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 5), st.integers(0, 2**63))
def test_a_pass_gives_each_sequence_its_counting_guesses_and_one_token_more(seed, length, request_seed):
    numbers = torch.Generator().manual_seed(seed)
    logits, small = torch.randn(length + 1, 17, generator=numbers), torch.randn(length, 17, generator=numbers)
    own = SamplingParams(seed=request_seed)
    ones = drafted(small, params=[own] * length, counters=np.arange(length))
    draft = behind_each_other(ones)
    (turn,) = verify(logits, params=[own] * (length + 1), counters=np.arange(length + 1), guesses=[draft])
    said = [token for token, _ in turn]
    right = len(said) - 1
    assert said[:right] == list(draft.tokens[:right])
    if right < length:
        assert said[right] != draft.tokens[right]
    assert all(logprob <= 0.0 for _, logprob in turn)


def test_logits_that_are_not_finite_are_an_engine_error_also_behind_a_guess():
    own = SamplingParams(seed=1)
    draft = drafted(DRAFT[None], params=[own], counters=np.array([0]))
    logits = TARGET.repeat(2, 1)
    logits[0, 2] = torch.nan
    with pytest.raises(EngineError, match="not finite"):
        verify(logits, params=[own] * 2, counters=np.arange(2), guesses=draft)
