"""Counter-based random numbers: one stream per request, no state.

A resumed or moved request goes on exactly where it was, and no request can disturb another's stream.
"""

from __future__ import annotations

import numpy as np

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)

DRAFT_LANE = 1 << 40
"""Added to the index of a token: the number that a draft model draws its guess of that token with."""
ACCEPT_LANE = 2 << 40
"""Added to the index of a token: the number that decides whether a guess of that token counts."""


def mix(state: np.ndarray) -> np.ndarray:
    """Return uint64 of the same shape, every bit depending on every bit of the input."""
    state = (state ^ (state >> np.uint64(30))) * _MIX_1
    state = (state ^ (state >> np.uint64(27))) * _MIX_2
    return state ^ (state >> np.uint64(31))


def uniforms(seeds: np.ndarray, counters: np.ndarray) -> np.ndarray:
    """Return float64 [n] in [0, 1): number `counters[i]` of the stream of `seeds[i]`.

    A counter-based stream needs no state, so a resumed or moved request goes on exactly where it was.

    Args:
        seeds: uint64 [n].
        counters: uint64 [n], index of the token in its output.

    Reference:
        Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014 (SplitMix64).
    """
    with np.errstate(over="ignore"):
        state = mix(seeds.astype(np.uint64) + _GOLDEN)
        bits = mix(state + (counters.astype(np.uint64) + np.uint64(1)) * _GOLDEN)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def advanced_seed(seed: int, count: int) -> int:
    """Return the seed whose stream begins where that of `seed` is after `count` numbers.

    So a request that is moved with the tokens it has draws on elsewhere what it would have drawn here.

    Example:
        >>> one, moved = np.array([7]), np.array([advanced_seed(7, 3)])
        >>> bool(uniforms(one, np.array([5]))[0] == uniforms(moved, np.array([2]))[0])
        True
    """
    golden = int(_GOLDEN)
    state = _mix_int((seed + golden) % 2**64)
    return (_unmix_int((state + count * golden) % 2**64) - golden) % 2**64


def _mix_int(state: int) -> int:
    state = ((state ^ (state >> 30)) * int(_MIX_1)) % 2**64
    state = ((state ^ (state >> 27)) * int(_MIX_2)) % 2**64
    return state ^ (state >> 31)


def _unmix_int(state: int) -> int:
    """Undo `mix`: each of its steps is a bijection of 64 bits."""
    state = (_unshift(state, 31) * pow(int(_MIX_2), -1, 2**64)) % 2**64
    state = (_unshift(state, 27) * pow(int(_MIX_1), -1, 2**64)) % 2**64
    return _unshift(state, 30)


def _unshift(state: int, bits: int) -> int:
    """Undo `state ^ (state >> bits)`: the high bits are as they were, and give the next ones."""
    found = state
    for _ in range(64 // bits):
        found = state ^ (found >> bits)
    return found
