"""How code waits with a deadline."""

from __future__ import annotations

import ast
from pathlib import Path

SOURCES = Path(__file__).parents[2] / "src" / "rollmill"


def test_nothing_waits_in_a_way_that_may_swallow_its_own_cancellation() -> None:
    # Before Python 3.12 `asyncio.wait_for` returns, and forgets that it was cancelled, where what it waits for ends in
    # the same step; whoever cancelled it then waits for ever. `asyncio.timeout` does not.
    found = [
        f"{path.relative_to(SOURCES)}:{node.lineno}"
        for path in SOURCES.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "asyncio.wait_for"
    ]
    assert found == []
