"""Counter-based random numbers: one stream per request, no state.

A resumed or moved request goes on exactly where it was, and no request can disturb another's stream.
"""

from __future__ import annotations

import numpy as np

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


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
