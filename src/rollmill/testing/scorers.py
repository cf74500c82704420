"""Scorers for tests of the pipeline, where the policy is too small to solve anything.

Use them by import path: `environment.scorer = "rollmill.testing.scorers:coin"`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any


def coin(text: str, reference: Mapping[str, Any]) -> float:
    """Return 0 or 1 by a hash of the text: a random policy gets mixed groups, hence signal.

    Example:
        >>> sorted({coin(text, {}) for text in "abcdefgh"})
        [0.0, 1.0]
    """
    return float(hashlib.sha256(text.encode()).digest()[0] & 1)
