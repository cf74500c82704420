"""Options of the test suite."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("rollmill")
    group.addoption(
        "--kill-rounds",
        type=int,
        default=2,
        help="processes killed by each test of tests/integration/test_kill_rounds.py",
    )
    group.addoption("--kill-seed", type=int, default=1, help="first seed of those tests; a failure prints its own")
    group.addoption("--kill-result", default="", help="write what happened to this JSON file")
