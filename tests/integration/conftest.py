"""Ends what a test of a real run leaves behind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tiny_runs import end_what_was_started


@pytest.fixture(autouse=True)
def nothing_is_left_running() -> Iterator[None]:
    yield
    end_what_was_started()
