"""Draws tokens and says under which probability each was drawn.

One uniform number per token from the request's own counter-based stream, then inversion of the cumulative
distribution: what a request draws does not depend on who shares its batch (beyond the rounding of the logits). The
distribution is shaped by temperature, then top-k, then top-p, and renormalised; the log-prob that is returned is of
exactly that distribution. Greedy rows (temperature 0, evaluation only) report the log-prob under temperature 1.

`sample` is `shaped` and then `draw`. Speculative decoding by a draft model needs whole distributions instead of one
draw from each: `weigh` gives them, just those that `draw` draws from, and `pick` draws from weights of any origin.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from rollmill.errors import EngineError
from rollmill.generator.engines.embedded.native import Kernels
from rollmill.generator.engines.streams import uniforms
from rollmill.types import SamplingParams

_Draw = Callable[[torch.Tensor, Sequence[SamplingParams], np.ndarray], tuple[np.ndarray, np.ndarray]]

_BLOCK = 256
"""Width of the blocks of the two-level search: one pass of sums instead of a slow cumulative sum."""
_ROUNDING = 1e-6
"""A nucleus that misses top-p by no more than this has reached it: probabilities come from float32 logits."""
_NUCLEUS_GUESS = 512
"""Candidates sorted first for top-p; the whole vocabulary is sorted only where they do not reach it."""


def sample(
    logits: torch.Tensor,
    *,
    params: Sequence[SamplingParams],
    counters: np.ndarray,
    kernels: Kernels | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Draw one token per row.

    Args:
        logits: float [rows, vocabulary]; may be overwritten if float32.
        params: sampling parameters of each row.
        counters: int64 [rows], index of the token in its request's output.
        kernels: weigh what no filter cuts, in one pass over the logits, where they have that function.

    Returns:
        int64 [rows] tokens and float32 [rows] behaviour log-probs.

    Raises:
        EngineError: if a row holds no finite maximum (weights or KV are NaN or infinite).
    """
    uniform = stream(params, counters)
    if kernels is None or not kernels.fuses:
        return draw(shaped(logits, params=params), params=params, uniform=uniform)
    whole = np.array([p.temperature > 0 and not _is_filtered(p) for p in params])
    tokens, logprobs = np.zeros(len(params), dtype=np.int64), np.zeros(len(params), dtype=np.float32)
    for rows, uncut in ((np.flatnonzero(whole), True), (np.flatnonzero(~whole), False)):
        if not len(rows):
            continue
        picked = logits if len(rows) == len(params) else logits[torch.from_numpy(rows)]
        own = [params[row] for row in rows.tolist()]
        if uncut:
            tokens[rows], logprobs[rows] = _draw_whole(picked, own, uniform[rows], kernels=kernels)
        else:
            tokens[rows], logprobs[rows] = draw(shaped(picked, params=own), params=own, uniform=uniform[rows])
    refuse_infinite(logprobs)
    return tokens, logprobs


def stream(params: Sequence[SamplingParams], counters: np.ndarray) -> np.ndarray:
    """Return float64 [rows] in [0, 1): number `counters[i]` of the stream of each row's request."""
    return uniforms(np.array([p.seed for p in params], dtype=np.uint64), counters)


def shaped(logits: torch.Tensor, *, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Return float32 logits divided by the temperature, with the greatest of each row at 0.

    Args:
        logits: float [rows, vocabulary]; overwritten if float32.
        params: of each row.
    """
    logits = logits.float()
    temperatures = _temperatures(params)
    if bool((temperatures != 1.0).any()):
        logits.div_(temperatures[:, None])
    return logits.sub_(logits.amax(-1, keepdim=True))


def _temperatures(params: Sequence[SamplingParams]) -> torch.Tensor:
    return torch.tensor([p.temperature if p.temperature > 0 else 1.0 for p in params], dtype=torch.float32)


def _is_filtered(params: SamplingParams) -> bool:
    return params.top_k > 0 or params.top_p < 1.0


def draw(
    logits: torch.Tensor, *, params: Sequence[SamplingParams], uniform: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Draw one token per row of `shaped` logits.

    Args:
        logits: float32 [rows, vocabulary].
        params: of each row.
        uniform: float64 [rows] in [0, 1).

    Returns:
        int64 [rows] tokens and float32 [rows] log-probs.

    Raises:
        EngineError: if a row is not finite.
    """
    tokens = np.zeros(len(params), dtype=np.int64)
    logprobs = np.zeros(len(params), dtype=np.float32)
    for rows, draw in _by_kind(params):
        picked = logits if len(rows) == len(params) else logits[torch.from_numpy(rows)]
        tokens[rows], logprobs[rows] = draw(picked, [params[row] for row in rows], uniform[rows])
    refuse_infinite(logprobs)
    return tokens, logprobs


def refuse_infinite(numbers: np.ndarray) -> None:
    """Refuse rows whose log-prob, or mass, is not finite.

    Raises:
        EngineError: saying how many.
    """
    if not np.isfinite(numbers).all():
        raise EngineError(
            f"logits of {int((~np.isfinite(numbers)).sum())} of {len(numbers)} sequences are not finite: the weights "
            "being served (or KV made with them) hold NaN or infinity; publish sound weights"
        )


def _by_kind(params: Sequence[SamplingParams]) -> list[tuple[np.ndarray, _Draw]]:
    """Return the rows of each kind with the function that draws for them."""
    kinds: dict[_Draw, list[int]] = {}
    for row, p in enumerate(params):
        if p.temperature <= 0:
            kind = _greedy
        elif _is_filtered(p):
            kind = _filtered
        else:
            kind = _plain
        kinds.setdefault(kind, []).append(row)
    return [(np.array(rows), draw) for draw, rows in kinds.items()]


def _greedy(
    logits: torch.Tensor, params: Sequence[SamplingParams], uniform: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    tokens = logits.argmax(-1)
    return tokens.numpy(), (-logits.exp().sum(-1).log()).numpy()


def _plain(
    logits: torch.Tensor, params: Sequence[SamplingParams], uniform: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    tokens, totals = pick(_weights_of_all(logits), uniform)
    logprobs = logits.numpy()[np.arange(len(tokens)), tokens] - np.log(totals)
    return tokens, logprobs.astype(np.float32)


def pick(weights: torch.Tensor, uniform: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Draw one token per row in proportion to its weight, by inversion.

    Args:
        weights: float32 [rows, width], not negative; a width as `weigh` gives it.
        uniform: float64 [rows] in [0, 1).

    Returns:
        int64 [rows] tokens and float64 [rows], the sum of each row's weights.
    """
    rows = len(weights)
    weights = weights.view(rows, -1, _BLOCK)
    block, rest, total = _pick_block(weights.sum(-1), uniform)
    inner_cdf = weights[torch.arange(rows), torch.from_numpy(block)].double().cumsum(-1).numpy()
    inner, _ = _invert(inner_cdf, rest)
    return block * _BLOCK + inner, total


def _pick_block(sums: torch.Tensor, uniform: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return of each row the block drawn, what of the draw is left inside it, and the sum of all."""
    cdf = sums.double().cumsum(-1).numpy()
    total = cdf[:, -1]
    return (*_invert(cdf, uniform * total), total)


def _draw_whole(
    logits: torch.Tensor, params: Sequence[SamplingParams], uniform: np.ndarray, *, kernels: Kernels
) -> tuple[np.ndarray, np.ndarray]:
    """Draw as `_plain` does, of logits that are not shaped; only the block that is drawn is looked at again."""
    vocabulary, temperatures = logits.shape[1], _temperatures(params)
    greatest, sums = kernels.block_sums(logits.contiguous(), temperatures, block=_BLOCK)
    block, rest, total = _pick_block(sums, uniform)
    places = torch.from_numpy(block)[:, None] * _BLOCK + torch.arange(_BLOCK)
    inside = logits.gather(1, places.clamp(max=vocabulary - 1)).float()
    inside = inside.div_(temperatures[:, None]).sub_(greatest[:, None]).masked_fill_(places >= vocabulary, -torch.inf)
    inner, _ = _invert(inside.double().exp().cumsum(-1).numpy(), rest)
    logprobs = inside.numpy()[np.arange(len(inner)), inner] - np.log(total)
    return block * _BLOCK + inner, logprobs.astype(np.float32)


def weigh(logits: torch.Tensor, *, params: Sequence[SamplingParams]) -> tuple[torch.Tensor, np.ndarray]:
    """Return the whole distribution of each row of `shaped` logits: what `draw` draws from.

    Args:
        logits: float32 [rows, vocabulary].
        params: of each row; a greedy one counts as temperature 1.

    Returns:
        float32 [rows, width] weights, the vocabulary and zeros behind it up to whole blocks, and float64 [rows], their
        sums. What the filters leave out weighs nothing.
    """
    weights = _weights_of_all(logits)
    totals = weights.view(len(weights), -1, _BLOCK).sum(-1).double().cumsum(-1)[:, -1].numpy()
    filtered = [row for row, p in enumerate(params) if p.temperature > 0 and _is_filtered(p)]
    if filtered:
        rows = torch.tensor(filtered)
        _, candidates, kept = _kept(logits[rows], [params[row] for row in filtered])
        weights[rows] = torch.zeros_like(weights[rows]).scatter_(1, candidates, torch.from_numpy(kept).float())
        totals[filtered] = kept.cumsum(-1)[:, -1]
    return weights, totals


def _weights_of_all(logits: torch.Tensor) -> torch.Tensor:
    """Return float32 [rows, width]: the exponentials, and zeros up to whole blocks."""
    rows, vocabulary = logits.shape
    weights = logits.new_empty(rows, -(-vocabulary // _BLOCK) * _BLOCK)
    torch.exp(logits, out=weights[:, :vocabulary])
    weights[:, vocabulary:] = 0.0
    return weights


def _filtered(
    logits: torch.Tensor, params: Sequence[SamplingParams], uniform: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    values, candidates, weights = _kept(logits, params)
    cdf = weights.cumsum(-1)
    chosen, _ = _invert(cdf, uniform * cdf[:, -1])
    index = np.arange(len(params))
    logprobs = values.double().numpy()[index, chosen] - np.log(cdf[:, -1])
    return candidates.numpy()[index, chosen], logprobs.astype(np.float32)


def _kept(logits: torch.Tensor, params: Sequence[SamplingParams]) -> tuple[torch.Tensor, torch.Tensor, np.ndarray]:
    """Return the greatest logits of each row, which tokens they are, and their weights after the filters."""
    vocabulary = logits.shape[1]
    widest = max(p.top_k for p in params)
    if any(p.top_k == 0 for p in params):
        widest = max(widest, _NUCLEUS_GUESS)
    normaliser = logits.exp().sum(-1).double().numpy()
    values, candidates = logits.topk(min(widest, vocabulary), dim=-1)
    if not _reaches(values, params, normaliser):
        values, candidates = logits.sort(dim=-1, descending=True)
    weights = values.double().exp().numpy()
    for row, p in enumerate(params):
        _cut(weights[row], p, normaliser=normaliser[row])
    return values, candidates, weights


def _reaches(values: torch.Tensor, params: Sequence[SamplingParams], normaliser: np.ndarray) -> bool:
    mass = values.double().exp().sum(-1).numpy() / normaliser
    return all(p.top_k > 0 or mass[row] >= p.top_p for row, p in enumerate(params))


def _cut(weights: np.ndarray, params: SamplingParams, *, normaliser: float) -> None:
    """Zero the weights (descending) that top-k and then top-p leave out."""
    if params.top_k:
        weights[params.top_k :] = 0.0
        normaliser = weights.sum()
    if params.top_p < 1.0:
        before = weights.cumsum() - weights
        weights[before >= (params.top_p - _ROUNDING) * normaliser] = 0.0


def _invert(cdf: np.ndarray, at: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the first index of each row whose cumulated weight exceeds `at`, and what is left inside it.

    The end of a row is approached from below, so rounding never picks an index without weight.
    """
    at = np.minimum(at, np.nextafter(cdf[:, -1], 0.0))
    index = (cdf <= at[:, None]).sum(-1)
    index = np.minimum(index, cdf.shape[1] - 1)
    rows = np.arange(len(cdf))
    below = np.where(index > 0, cdf[rows, np.maximum(index - 1, 0)], 0.0)
    return index, at - below
