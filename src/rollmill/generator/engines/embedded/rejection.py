"""Which guesses of a draft model count, so that what comes out is distributed as if nobody had guessed.

A guess `x`, drawn from the draft's distribution `q`, counts with probability `min(1, p(x) / q(x))`, where `p` is the
distribution that the engine would have drawn from: after temperature, top-k and top-p. In place of the first guess that
does not count a token is drawn in proportion to `max(0, p - q)`; behind the last guess, if all count, one is drawn from
`p` as ever. Both together are `p`, whatever `q` is: a bad draft costs time and changes nothing. Greedy sequences keep a
guess where it is the most probable token.

Each token takes its numbers from three places of its request's own stream: the draft's draw, the decision, and the draw
in place of a guess or without one. A guess behind one that did not count was decided by numbers that nothing else has
seen, so they are used again. Computes over numbers that it is given; knows nothing of models and of KV.

Reference:
    Leviathan, Kalman, Matias, "Fast inference from transformers via speculative decoding", ICML 2023.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from rollmill.generator.engines.embedded.native import Kernels
from rollmill.generator.engines.embedded.sampling import draw, pick, refuse_infinite, sample, shaped, stream, weigh
from rollmill.generator.engines.embedded.speculation import Guess
from rollmill.generator.engines.streams import ACCEPT_LANE
from rollmill.types import SamplingParams


@dataclass(frozen=True, slots=True)
class Draft(Guess):
    """Tokens that a draft model drew, one behind the other, and what it drew them from.

    Attributes:
        chances: probability of each token under the draft.
        weights: of each token, float32 [width]: the draft's distribution as `sampling.weigh` gives it.
        totals: sums of those.
        start: position of the token in front of them.
        blocks: where the draft's KV of their sequence lies.
    """

    chances: tuple[float, ...] = ()
    weights: tuple[torch.Tensor, ...] = ()
    totals: tuple[float, ...] = ()
    start: int = 0
    blocks: tuple[int, ...] = ()


def counts(uniform: np.ndarray, *, target: np.ndarray, draft: np.ndarray) -> np.ndarray:
    """Return bool [n], whether each guess counts: with probability `min(1, target / draft)`.

    Args:
        uniform: float64 [n] in [0, 1).
        target: probability of each guessed token under the model.
        draft: probability under the draft, above 0.

    Example:
        >>> counts(np.array([0.59, 0.6, 0.99]), target=np.array([0.3, 0.3, 0.5]), draft=np.array([0.5, 0.5, 0.4]))
        array([ True, False,  True])
    """
    return uniform * draft < target


def instead(target: torch.Tensor, draft: torch.Tensor) -> torch.Tensor:
    """Return the weights from which a token is drawn in place of a guess that does not count.

    Args:
        target: float [rows, width], the model's distributions.
        draft: float [rows, width], the draft's.

    Example:
        >>> instead(torch.tensor([[0.5, 0.25, 0.25]]), torch.tensor([[0.25, 0.5, 0.25]])).tolist()
        [[0.25, 0.0, 0.0]]
    """
    rest = (target - draft).clamp_(min=0.0)
    # Equal distributions refuse nothing, except by rounding; then either is as good.
    return torch.where(rest.sum(-1, keepdim=True) > 0.0, rest, target)


def verify(
    logits: torch.Tensor,
    *,
    params: Sequence[SamplingParams],
    counters: np.ndarray,
    guesses: Sequence[Guess],
    kernels: Kernels | None = None,
) -> list[list[tuple[int, float]]]:
    """Return the tokens that each sequence gets, with their log-probs under the model.

    Args:
        logits: float [rows, vocabulary]; for each sequence a row for its newest token and one for each guess. May be
            overwritten if float32.
        params: of each row.
        counters: int64 [rows], index of the token that each row gives.
        guesses: of each sequence, empty ones included.
        kernels: as for `sample`.

    Returns:
        for each sequence the guesses that count and the token behind them; for a greedy one a token for each row,
        which counts as long as those before were guessed.

    Raises:
        EngineError: if logits are not finite.
    """
    starts = np.cumsum([0, *(1 + len(guess.tokens) for guess in guesses)])
    judged = [
        (number, int(start), guess)
        for number, (start, guess) in enumerate(zip(starts[:-1], guesses, strict=True))
        if isinstance(guess, Draft) and guess.tokens and params[start].temperature > 0
    ]
    ends = starts[1:].copy()
    if judged:
        logits = shaped(logits, params=params)
        rows = np.concatenate([np.arange(start, start + len(guess.tokens)) for _, start, guess in judged])
        judgement = _judge(logits, rows=rows, params=params, counters=counters, drafts=[one for _, _, one in judged])
        tokens, logprobs = _draw_others(logits, rows=rows, params=params, counters=counters)
        tokens[rows], logprobs[rows] = judgement.tokens, judgement.logprobs
        for (number, start, _), right in zip(judged, judgement.right, strict=True):
            ends[number] = start + right + 1
    else:
        tokens, logprobs = sample(logits, params=params, counters=counters, kernels=kernels)
    return [
        list(zip(tokens[start:end].tolist(), logprobs[start:end].tolist(), strict=True))
        for start, end in zip(starts[:-1], ends, strict=True)
    ]


def _draw_others(
    logits: torch.Tensor, *, rows: np.ndarray, params: Sequence[SamplingParams], counters: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return tokens and log-probs of all rows but these, whose places are left open."""
    tokens, logprobs = np.zeros(len(params), dtype=np.int64), np.zeros(len(params), dtype=np.float32)
    others = np.setdiff1d(np.arange(len(params)), rows)
    own = [params[row] for row in others]
    tokens[others], logprobs[others] = draw(
        logits[torch.from_numpy(others)], params=own, uniform=stream(own, counters[others])
    )
    return tokens, logprobs


@dataclass(frozen=True, slots=True)
class _Judgement:
    tokens: np.ndarray
    logprobs: np.ndarray
    right: list[int]


def _judge(
    logits: torch.Tensor,
    *,
    rows: np.ndarray,
    params: Sequence[SamplingParams],
    counters: np.ndarray,
    drafts: Sequence[Draft],
) -> _Judgement:
    """Return for the rows that guesses are judged by the token and log-prob of each, and how many count."""
    mine, own = logits[torch.from_numpy(rows)], [params[row] for row in rows]
    weights, totals = weigh(mine, params=own)
    refuse_infinite(totals)
    tokens = np.array([token for draft in drafts for token in draft.tokens], dtype=np.int64)
    chances = weights.numpy()[np.arange(len(rows)), tokens] / totals
    count = counts(
        stream(own, counters[rows] + ACCEPT_LANE),
        target=chances,
        draft=np.array([chance for draft in drafts for chance in draft.chances]),
    )
    right, refused, first = [], [], 0
    for draft in drafts:
        wrong = np.flatnonzero(~count[first : first + len(draft.tokens)])
        right.append(int(wrong[0]) if len(wrong) else len(draft.tokens))
        if len(wrong):
            refused.append((first + right[-1], draft.weights[right[-1]], draft.totals[right[-1]]))
        first += len(draft.tokens)
    if refused:
        at = np.array([row for row, _, _ in refused])
        target = weights[torch.from_numpy(at)] / torch.from_numpy(totals[at]).float()[:, None]
        drawn_from = torch.stack([one for _, one, _ in refused])
        drawn_from = drawn_from / torch.tensor([total for _, _, total in refused])[:, None]
        instead_of = stream([own[row] for row in at], counters[rows[at]])
        tokens[at], _ = pick(instead(target, drawn_from).contiguous(), instead_of)
    logprobs = mine.numpy()[np.arange(len(rows)), tokens] - np.log(totals)
    return _Judgement(tokens, logprobs.astype(np.float32), right)
