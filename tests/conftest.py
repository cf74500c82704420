"""Options of the test suite."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("rollmill")
    group.addoption(
        "--kill-rounds",
        type=int,
        default=2,
        help="processes killed by each test of tests/integration/test_kill_rounds.py",
    )
    group.addoption(
        "--sandbox-rounds",
        type=int,
        default=10,
        help="kills of each test of tests/integration/test_sandbox_kill_rounds.py, and half as many under gVisor",
    )
    group.addoption("--kill-seed", type=int, default=1, help="first seed of those tests; a failure prints its own")
    group.addoption("--kill-result", default="", help="write what happened to this JSON file")


@pytest.fixture(autouse=True)
def signal_mask() -> Iterator[None]:
    """A test that leaves signals blocked would hang the later ones, in an order that differs each time."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    yield
    after = signal.pthread_sigmask(signal.SIG_SETMASK, before)
    assert after == before, f"this test left signals blocked: {sorted(after - before)}"
